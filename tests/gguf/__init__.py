"""Tests of `makeway.gguf`."""
