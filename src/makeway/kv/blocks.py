"""Which blocks of the KV cache and which place of the state pool belong to which sequence: integers only.

Owns the free lists and every block table. Never touches the bytes of a block or a place.
Hazard: a block that is freed twice would be shared by two sequences, so both directions are asserted.
"""

from makeway.errors import UserError

BLOCK_TOKENS = 64  # tokens of a block; one key tile, and the grid of prefix reuse


def blocks_for(n_tokens: int) -> int:
    """Blocks that hold `n_tokens` tokens."""
    return -(-n_tokens // BLOCK_TOKENS)


class BlockPool:
    """`n_blocks` blocks of `BLOCK_TOKENS` tokens."""

    def __init__(self, n_blocks: int) -> None:
        assert n_blocks >= 1
        self.n_blocks = n_blocks
        self._free = list(range(n_blocks - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self, n_blocks: int) -> list[int]:
        """`n_blocks` free blocks, all or none; raises UserError when the cache is full."""
        if n_blocks > len(self._free):
            raise UserError(
                f"the KV cache is full: {n_blocks} blocks of {BLOCK_TOKENS} tokens wanted, {len(self._free)} of "
                f"{self.n_blocks} free; use a larger --context or fewer sequences at once"
            )
        taken = [self._free.pop() for _ in range(n_blocks)]
        self._used.update(taken)
        return taken

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            assert block in self._used, f"block {block} is not in use"
            self._used.remove(block)
            self._free.append(block)


class BlockTable:
    """The blocks of one sequence, in order; grows block by block and shrinks from its end."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.blocks: list[int] = []

    def fits(self, n_tokens: int) -> bool:
        """Whether `reserve` would succeed."""
        return blocks_for(n_tokens) - len(self.blocks) <= self._pool.n_free

    def reserve(self, n_tokens: int) -> None:
        """Room for `n_tokens` tokens in all; raises UserError when the pool is exhausted."""
        missing = blocks_for(n_tokens) - len(self.blocks)
        if missing > 0:
            self.blocks += self._pool.take(missing)

    def shrink(self, n_tokens: int) -> None:
        """Gives back the blocks that the first `n_tokens` tokens do not need."""
        keep = blocks_for(n_tokens)
        self._pool.give_back(self.blocks[keep:])
        del self.blocks[keep:]


class Places:
    """`n_places` places for sequences."""

    def __init__(self, n_places: int) -> None:
        assert n_places >= 1
        self.n_places = n_places
        self._free = list(range(n_places - 1, -1, -1))

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free place; raises UserError when every place is taken."""
        if not self._free:
            raise UserError(f"all {self.n_places} sequences are open; use a larger --parallel or close one")
        return self._free.pop()

    def give_back(self, place: int) -> None:
        assert 0 <= place < self.n_places
        assert place not in self._free, f"place {place} is not in use"
        self._free.append(place)
