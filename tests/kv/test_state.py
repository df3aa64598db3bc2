"""Places of the state pool: never shared, zeroed when opened, written in place, copied by a snapshot."""

import pytest
import torch

from makeway.errors import UserError
from makeway.kv import KVCache, KVShape, SequenceState, StatePool, StateShape, StateShapes
from tests.conftest import golden_path
from tests.models.runner import CPU, Runner


def pool(n_places=2, **options):
    shapes = StateShapes.of(
        {0: StateShape(2, 3, 5, conv_channels=7, conv_taps=4, n_k_heads=1, tiled=False)},
        kv={1: KVShape(1, 8, 8, index_dim=4, ratio=4), 2: KVShape(1, 8, 8)},
        ple={1: (9, 11)},
    )
    return StatePool(shapes, n_places, device=CPU, **options)


def test_a_pool_takes_what_its_shapes_say_and_lies_in_its_room():
    states = pool(2)
    assert {key: tuple(t.shape) for key, t in states.tensors.items()} == {
        ("delta", 0): (2, 2, 3, 5),
        ("conv", 0): (2, 3, 7),
        ("ple_conv", 1): (2, 9, 11),
        ("raw", 1): (2, 16, 4),
    }
    assert states.nbytes == 2 * (256 + 256 + 512 + 256)
    room = torch.full((states.nbytes,), 0xFF, dtype=torch.uint8)
    inside = pool(2, room=room)
    for t in inside.tensors.values():
        assert room.data_ptr() <= t.data_ptr() < room.data_ptr() + room.numel()
        assert t[1].data_ptr() % 256 == room.data_ptr() % 256
    place, state = inside.open()
    assert all(not t.any() for t in state.tensors.values())
    others = [t[1 - place] for t in inside.tensors.values()]
    assert all(torch.isnan(t).all() for t in others), "only the opened place was cleared"
    with pytest.raises(AssertionError, match="bytes of room"):
        pool(2, room=room[:-1])


def test_a_closed_sequence_gives_its_place_and_blocks_back_once():
    states = pool(1)
    cache = KVCache({1: KVShape(1, 8, 8, index_dim=4, ratio=4)}, 4, device=CPU)
    sequence = SequenceState(cache, states)
    sequence.reserve(100)
    sequence.state.tensors["delta", 0].fill_(3.0)
    sequence.state.windows[1] = (5, 6)
    with pytest.raises(UserError):
        SequenceState(cache, states)
    for _ in range(2):
        sequence.close()
    assert cache.pool.n_free == 4
    assert states.places.n_free == 1
    again = SequenceState(cache, states)
    assert again.place == sequence.place
    assert not again.state.tensors["delta", 0].any()
    assert again.state.windows == {1: ()}


def test_passes_write_in_place_and_a_snapshot_is_a_copy():
    runner = Runner(golden_path("qwen4exp-k96-UD-Q4_K_XL.gguf"))
    sequence = runner.sequence()
    addresses = {key: t.data_ptr() for key, t in sequence.state.tensors.items()}
    runner.residual(sequence, [5, 6, 7])
    point = sequence.snapshot(CPU)
    kept = {key: t.clone() for key, t in point.state.tensors.items()}
    runner.residual(sequence, [8, 9])
    assert {key: t.data_ptr() for key, t in sequence.state.tensors.items()} == addresses
    for key, t in point.state.tensors.items():
        assert torch.equal(t, kept[key])
        assert not torch.equal(t, sequence.state.tensors[key]), key
    sequence.restore(point)
    assert {key: t.data_ptr() for key, t in sequence.state.tensors.items()} == addresses
    assert all(torch.equal(t, kept[key]) for key, t in sequence.state.tensors.items())
