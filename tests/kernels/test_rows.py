"""What kernels on a device are told of a batch is what the reference is told, and leads to the same memory."""

import torch

from makeway.kernels import DeviceRows, KVLayer, Rows, Span, reference_attention

SPANS = (Span(0, 3, 62, [4, 1], 2, n_replay=2), Span(3, 1, 0, [3], 0), Span(4, 2, 130, [0, 5, 2], 1))


def rows():
    positions = torch.tensor([62, 63, 64, 0, 130, 131])
    return Rows(positions, SPANS, max_keys=132)


def test_the_tables_say_what_the_spans_say():
    t = rows().on_device
    assert t.row_segment.tolist() == [0, 0, 0, 1, 2, 2]
    assert t.first_row.tolist() == [0, 3, 4]
    assert t.n_rows.tolist() == [3, 1, 2]
    assert t.places.tolist() == [2, 0, 1]
    assert t.n_replay.tolist() == [2, 0, 0]
    assert t.block_tables.tolist() == [[4, 1, 0], [3, 0, 0], [0, 5, 2]]
    others = (t.row_segment, t.first_row, t.n_rows, t.places, t.n_replay, t.block_tables)
    assert all(x.dtype == torch.int32 for x in others)
    assert t.positions.dtype == torch.int64


def test_tables_made_elsewhere_are_taken_as_they_are():
    t = rows().on_device
    assert Rows(t.positions, (), max_keys=256, fixed=t).on_device is t
    assert isinstance(t, DeviceRows)


def test_keys_written_and_read_through_the_tables_alone():
    g = torch.Generator().manual_seed(0)
    keys, values, q = (torch.randn((6, n, 8), generator=g) for n in (2, 2, 4))
    pools = [torch.randn((6, 64, 2, 8), generator=g) for _ in range(2)]
    kv, r = KVLayer(pools[0].clone(), pools[1].clone()), rows()
    reference_attention.write_kv(keys, values, kv=kv, rows=r)
    got = reference_attention.attend(q, kv, rows=r)
    t = r.on_device
    for i in range(6):
        segment, position = int(t.row_segment[i]), int(t.positions[i])
        block = int(t.block_tables[segment, position // 64])
        pools[0][block, position % 64] = keys[i]
        pools[1][block, position % 64] = values[i]
    assert torch.equal(kv.keys, pools[0])
    assert torch.equal(kv.values, pools[1])
    for i in range(6):
        segment, n = int(t.row_segment[i]), int(t.positions[i]) + 1
        seen = [pool[t.block_tables[segment].long()].flatten(0, 1)[:n].double() for pool in pools]
        k, v = (x.repeat_interleave(2, dim=1) for x in seen)
        weights = torch.einsum("hd,khd->hk", q[i].double(), k).softmax(-1)
        assert torch.allclose(got[i].double(), torch.einsum("hk,khd->hd", weights, v), atol=1e-5)
