"""Kernels in Triton: what runs on a GPU, and in CI through Triton's interpreter.

Owns nothing here; each module imports `triton`, which is an optional dependency (extra `gpu`), so this package imports
without it. Never chooses itself: `engine/backend.py` does.
Hazard: a kernel's bits depend on its tile configuration, so configurations are fixed tables by type and shape.
"""
