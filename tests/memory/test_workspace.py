import pytest
import torch

from makeway.memory.workspace import Room, padded_bytes

CPU = torch.device("cpu")


def test_items_start_aligned_and_never_overlap():
    room = torch.zeros(1 << 14, dtype=torch.uint8)
    n_bytes = 3 * padded_bytes((5, 7)) + 2 * 4 * padded_bytes((64,)) + 640
    space = Room(n_bytes, device=CPU, room=room)
    a, b = space.take_items((3,), (5, 7)), space.take_items((2, 4), (64,))
    c = space.take((10, 16), torch.float16, n_bytes=640)
    assert (a.shape, b.shape, c.shape) == ((3, 5, 7), (2, 4, 64), (10, 16))
    assert space.full
    for n, t in enumerate((a, b, c), start=1):
        t.fill_(n)
    assert [t.float().unique().tolist() for t in (a, b, c)] == [[1.0], [2.0], [3.0]]
    assert all((item.data_ptr() - room.data_ptr()) % 256 == 0 for item in (*a, *b.flatten(0, 1)))
    assert not room[n_bytes:].any(), "nothing behind its own bytes is touched"


def test_a_room_that_is_too_small_or_used_up_says_so():
    with pytest.raises(AssertionError, match="100 bytes of room for 101"):
        Room(101, device=CPU, room=torch.zeros(100, dtype=torch.uint8))
    space = Room(512, device=CPU)
    space.take_items((1,), (3,))
    assert not space.full
    with pytest.raises(AssertionError, match="used up"):
        space.take_items((2,), (3,))
