"""What earlier requests have read, kept in host RAM so that a prompt that begins the same reads only the rest.

Owns copies of KV blocks (shared between entries that begin alike) and snapshots of recurrent state, within a budget of
bytes; the entry that was not used for the longest time goes first. Never hands out its own tensors to be written.
Hazard: an entry is valid only for exactly its tokens, so every lookup compares tokens, not hashes alone.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from makeway.kv.blocks import BLOCK_TOKENS
from makeway.kv.cache import KVCache
from makeway.kv.sequence import SequenceState
from makeway.kv.state import RecurrentState


@dataclass(frozen=True)
class Prefix:
    """`tokens` (a whole number of blocks), the keys of their blocks, and the recurrent state behind the last one."""

    tokens: tuple[int, ...]
    keys: tuple[bytes, ...]
    state: RecurrentState


@dataclass
class _Block:
    content: Tensor
    tokens: tuple[int, ...]
    n_users: int = 0


class PrefixCache:
    """`put` after tokens were read, `find` before they are, `load` into a fresh sequence."""

    def __init__(self, cache: KVCache, *, budget_bytes: int, needs_state: bool) -> None:
        """`needs_state`: False for models whose KV alone is enough to go on from any block."""
        self.budget_bytes = budget_bytes
        self.nbytes = 0
        self.n_hits = 0
        self.n_hit_tokens = 0
        self._cache = cache
        self._needs_state = needs_state
        self._blocks: dict[bytes, _Block] = {}
        self._entries: OrderedDict[bytes, Prefix] = OrderedDict()  # by the key of the last block, oldest use first

    def find(self, tokens: Sequence[int]) -> Prefix | None:
        """The longest entry that `tokens` begins with, leaving at least one of them to read."""
        keys = block_keys(tokens[: len(tokens) - 1])
        if not self._needs_state:
            return self._find_blocks(tokens, keys)
        for n in range(len(keys), 0, -1):
            entry = self._entries.get(keys[n - 1])
            if entry is not None and entry.tokens == tuple(tokens[: n * BLOCK_TOKENS]):
                self._entries.move_to_end(keys[n - 1])
                return entry
        return None

    def _find_blocks(self, tokens: Sequence[int], keys: Sequence[bytes]) -> Prefix | None:
        """As many blocks from the start as are kept, whatever entries they came with."""
        n = 0
        for i, key in enumerate(keys):
            block = self._blocks.get(key)
            if block is None or block.tokens != tuple(tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]):
                break
            n += 1
            if key in self._entries:
                self._entries.move_to_end(key)
        return Prefix(tuple(tokens[: n * BLOCK_TOKENS]), tuple(keys[:n]), RecurrentState({})) if n else None

    def load(self, entry: Prefix, sequence: SequenceState) -> None:
        """A fresh sequence continues behind the entry's tokens; KV room for them must be reserved."""
        assert sequence.length == 0
        for block, key in zip(sequence.table.blocks, entry.keys, strict=False):
            self._cache.write_block(block, self._blocks[key].content)
        if self._needs_state:
            sequence.state.restore(entry.state)
        sequence.advance(len(entry.tokens))
        self.n_hits += 1
        self.n_hit_tokens += len(entry.tokens)

    def put(self, tokens: Sequence[int], blocks: Sequence[int], state: RecurrentState) -> None:
        """Keep `tokens` (a whole number of blocks, all of them read into `blocks`) and the host copy `state`.

        An entry that is there already is only used anew; one that is larger than the budget is not kept.
        """
        assert tokens
        assert len(tokens) % BLOCK_TOKENS == 0
        keys = block_keys(tokens)
        if keys[-1] in self._entries:
            self._entries.move_to_end(keys[-1])
            return
        new = [key for key in keys if key not in self._blocks]
        n_bytes = len(new) * self._cache.block_bytes + state.nbytes
        if len(keys) * self._cache.block_bytes + state.nbytes > self.budget_bytes:
            return
        for i, (key, block) in enumerate(zip(keys, blocks, strict=False)):
            if key not in self._blocks:
                own = tuple(tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS])
                self._blocks[key] = _Block(self._cache.read_block(block), own)
            self._blocks[key].n_users += 1
        self._entries[keys[-1]] = Prefix(tuple(tokens), tuple(keys), state)
        self.nbytes += n_bytes
        while self.nbytes > self.budget_bytes:
            self._drop_oldest()

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        self._entries.clear()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def _drop_oldest(self) -> None:
        _, entry = self._entries.popitem(last=False)
        self.nbytes -= entry.state.nbytes
        for key in entry.keys:
            block = self._blocks[key]
            block.n_users -= 1
            if block.n_users == 0:
                del self._blocks[key]
                self.nbytes -= self._cache.block_bytes


def block_keys(tokens: Sequence[int]) -> list[bytes]:
    """A key for each whole block, which depends on all tokens up to its end."""
    keys: list[bytes] = []
    before = b""
    for i in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = array("q", tokens[i : i + BLOCK_TOKENS]).tobytes()
        before = hashlib.blake2b(before + block, digest_size=16).digest()
        keys.append(before)
    return keys
