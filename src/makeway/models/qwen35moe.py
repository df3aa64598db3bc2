"""qwen35moe: as qwen3next, with V heads in tiled order, separate alpha and beta, and an MTP block.

Owns nothing of its own. Never differs from qwen3next elsewhere. Hazard: see `tiled` in layers/delta_net.py.
"""

from makeway.models.qwen3next import Qwen3Next


class Qwen35Moe(Qwen3Next):
    """V head j uses K head j mod n_k."""

    tiled = True
