"""Routed experts: where their bytes are, and how they are run."""
