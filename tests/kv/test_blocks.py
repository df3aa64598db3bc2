"""Integers only: blocks and places are never shared and never lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makeway.errors import UserError
from makeway.kv import BLOCK_TOKENS, BlockPool, BlockTable, Places


@settings(max_examples=100, deadline=None)
@given(actions=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 300)), max_size=30))
def test_blocks_are_never_shared_or_lost(actions):
    pool = BlockPool(8)
    tables = [BlockTable(pool) for _ in range(3)]
    for which, n_tokens in actions:
        table, before = tables[which], list(tables[which].blocks)
        wanted = -(-n_tokens // BLOCK_TOKENS)
        if wanted >= len(before):
            if wanted - len(before) <= pool.n_free:
                table.reserve(n_tokens)
                assert table.blocks[: len(before)] == before
            else:
                with pytest.raises(UserError, match="KV cache is full"):
                    table.reserve(n_tokens)
                assert table.blocks == before
        else:
            table.shrink(n_tokens)
            assert table.blocks == before[:wanted]
        used = [b for t in tables for b in t.blocks]
        assert len(set(used)) == len(used)
        assert len(used) + pool.n_free == pool.n_blocks


def test_places_are_given_once_and_come_back():
    places = Places(3)
    taken = [places.take() for _ in range(3)]
    assert sorted(taken) == [0, 1, 2]
    with pytest.raises(UserError, match="--parallel"):
        places.take()
    places.give_back(taken[1])
    assert places.n_free == 1
    with pytest.raises(AssertionError, match="not in use"):
        places.give_back(taken[1])
    assert places.take() == taken[1]
