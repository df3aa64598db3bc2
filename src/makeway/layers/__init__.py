"""Stateless layers, shared by the models."""
