"""Batches of several sequences over scattered blocks, as the kernels' tables tell them."""

from dataclasses import dataclass, replace

import torch

from makeway.kernels import DeviceRows, KVLayer, Rows, Span


@dataclass(frozen=True)
class Paged:
    """Rows for the reference (with spans) and the same for kernels, with unused segments and padding rows behind."""

    rows: Rows
    fixed: Rows
    n_rows: int


def batch(sizes, device, *, block_tokens, places=None, replays=None, padding=0, max_keys=None, keep=False):
    """sizes: (position, n) of each sequence; blocks are dealt in turn, so that none lie side by side."""
    n_seq = len(sizes)
    spans, positions, first = [], [], 0
    for i, (position, n) in enumerate(sizes):
        blocks = tuple(i + n_seq * j for j in range(-(-(position + n) // block_tokens)))
        place = places[i] if places else n_seq - 1 - i
        spans.append(Span(first, n, position, blocks[::-1], place, replays[i] if replays else 0))
        positions += range(position, position + n)
        first += n
    most = max_keys or max(s.position + s.n for s in spans)
    rows = Rows(torch.tensor(positions), tuple(spans), max_keys=most, keep=keep)
    told = rows.on_device
    stale = torch.tensor([spans[0].place] * 2, dtype=torch.int32)

    def behind(values, more):
        return torch.cat((values, more)).to(device)

    none = torch.zeros(2, dtype=torch.int32)
    fixed = DeviceRows(
        positions=behind(told.positions, torch.zeros(padding, dtype=torch.int64)),
        row_segment=behind(told.row_segment, torch.full((padding,), -1, dtype=torch.int32)),
        first_row=behind(told.first_row, none),
        n_rows=behind(told.n_rows, none),
        places=behind(told.places, stale),
        n_replay=behind(told.n_replay, none),
        block_tables=behind(told.block_tables, torch.zeros((2, told.block_tables.shape[1]), dtype=torch.int32)),
    )
    on_device = replace(rows, positions=fixed.positions, fixed=fixed)
    return Paged(rows, on_device, first)


def pools(sizes, *, block_tokens, n_kv, d, dtype, index_dim=0, ratio=4, n_ring=16):
    """Random pools with room for all blocks of `batch`."""
    generator = torch.Generator().manual_seed(len(sizes))
    n_blocks = len(sizes) * max(-(-(p + n) // block_tokens) for p, n in sizes)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    return KVLayer(
        random(n_blocks, block_tokens, n_kv, d).to(dtype),
        random(n_blocks, block_tokens, n_kv, d).to(dtype),
        random(n_blocks, block_tokens // ratio, index_dim).to(dtype) if index_dim else None,
        apart(random(len(sizes), n_ring, index_dim)) if index_dim else None,
    )


def apart(t, n_dims=1):
    """The same values with gaps behind each place (each kept row, with n_dims 2), as pools have them."""
    shape, n = t.shape[n_dims:], t[(0,) * n_dims].numel()
    wide = torch.full((*t.shape[:n_dims], n + 3), torch.nan, dtype=t.dtype, device=t.device)
    view = wide[..., :n].unflatten(-1, shape)
    return view.copy_(t)


def copied(kv, device):
    """The layer's pools, copied to a device."""
    pools = [None if t is None else t.to(device, copy=True) for t in (kv.keys, kv.values, kv.pooled, kv.ring)]
    return KVLayer(*pools[:3], None if pools[3] is None else apart(pools[3]))


def padded(x, n, value=0.0):
    """x with n more rows of `value`."""
    return torch.cat((x, torch.full((n, *x.shape[1:]), value, dtype=x.dtype)))
