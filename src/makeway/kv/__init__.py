"""What sequences remember: KV blocks, indexer keys, recurrent state."""

from makeway.kv.batch import Batch, Segment
from makeway.kv.blocks import BLOCK_TOKENS, BlockPool, BlockTable, Places, blocks_for
from makeway.kv.cache import KV_TYPES, KVCache, KVRoom, KVShape
from makeway.kv.sequence import SequenceSnapshot, SequenceState
from makeway.kv.state import RecurrentState, StatePool, StateShape, StateShapes

__all__ = [
    "BLOCK_TOKENS",
    "KV_TYPES",
    "Batch",
    "BlockPool",
    "BlockTable",
    "KVCache",
    "KVRoom",
    "KVShape",
    "Places",
    "RecurrentState",
    "Segment",
    "SequenceSnapshot",
    "SequenceState",
    "StatePool",
    "StateShape",
    "StateShapes",
    "blocks_for",
]
