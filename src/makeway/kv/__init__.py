"""What sequences remember: KV blocks, indexer keys, recurrent state."""

from makeway.kv.batch import Batch, Segment
from makeway.kv.blocks import BLOCK_TOKENS, BlockPool, BlockTable
from makeway.kv.cache import RAW_RING, KVCache, KVShape
from makeway.kv.sequence import SequenceSnapshot, SequenceState
from makeway.kv.state import RecurrentState, StateShape

__all__ = [
    "BLOCK_TOKENS",
    "RAW_RING",
    "Batch",
    "BlockPool",
    "BlockTable",
    "KVCache",
    "KVShape",
    "RecurrentState",
    "Segment",
    "SequenceSnapshot",
    "SequenceState",
    "StateShape",
]
