"""What stands in front of attention against the reference's operations one after the other."""

import pytest
import torch

from makeway.kernels import reference_blocks as blocks
from makeway.kernels.triton.attend_input import attend_input
from tests.kernels.triton.paged import batch, copied, padded, pools

SIZES = [(7, 3), (30, 4)]


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("dtype", "n_heads", "n_kv", "n_rot", "gated"),
    [(torch.float16, 6, 2, 16, False), (torch.float32, 3, 1, 6, True)],
    ids=str,
)
def test_queries_keys_and_values(dtype, n_heads, n_kv, n_rot, gated, device):
    """Gated: a head's gate lies behind its query, as the matrix gives them. Padding writes nothing."""
    d = 16
    kv = pools(SIZES, block_tokens=8, n_kv=n_kv, d=d, dtype=dtype)
    rows = batch(SIZES, device, block_tokens=8, padding=1)
    q = randn(7, n_heads, 2 * d if gated else d)
    k, v = randn(7, n_kv, d, seed=1), randn(7, n_kv, d, seed=2)
    norms = {"q_norm": randn(d, seed=3), "k_norm": randn(d, seed=4)}
    options = {"eps": 1e-6, "n_rot": n_rot, "theta": 1e6}
    ours = copied(kv, device)
    out = attend_input(
        padded(q, 1, torch.nan).to(device)[..., :d],
        padded(k, 1, torch.nan).to(device),
        v=padded(v, 1, torch.nan).to(device),
        **{name: t.to(device) for name, t in norms.items()},
        **options,
        kv=ours,
        rows=rows.fixed,
    )
    expected = blocks.attend_input(q[..., :d], k, v=v, **norms, **options, kv=kv, rows=rows.rows)
    torch.testing.assert_close(out[:7].cpu(), expected, rtol=1e-5, atol=1e-6)
    limit = 1e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(ours.keys.cpu(), kv.keys, rtol=limit, atol=limit)
    assert torch.equal(ours.values.cpu(), kv.values)


def test_a_row_has_the_same_bits_alone(device):
    kv = pools([(9, 1), (20, 1)], block_tokens=8, n_kv=1, d=16, dtype=torch.float32)
    rows = batch([(9, 1), (20, 1)], device, block_tokens=8)
    q, k, v = randn(2, 2, 16), randn(2, 1, 16, seed=1), randn(2, 1, 16, seed=2)
    options = {"q_norm": randn(16, seed=3), "k_norm": randn(16, seed=4), "eps": 1e-6, "n_rot": 16, "theta": 1e6}
    options = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    both = attend_input(q.to(device), k.to(device), v=v.to(device), kv=copied(kv, device), rows=rows.fixed, **options)
    first = batch([(9, 1)], device, block_tokens=8)
    alone = attend_input(
        q[:1].to(device), k[:1].to(device), v=v[:1].to(device), kv=copied(kv, device), rows=first.fixed, **options
    )
    assert torch.equal(both[:1], alone)
