"""The chunked gated delta rule against its token recurrence."""

import pytest
import torch

from makeway.kernels import reference
from makeway.kernels.reference import delta_rule, l2_norm
from makeway.kernels.triton.chunk_delta import CHUNK, DeltaScratch, chunk_gates, delta_rule_chunks

HEADS, K_HEADS, D_K, D_V = 2, 1, 16, 16


def inputs(n, *, repeated=False):
    """q, k, v in bf16, decay, beta; `repeated`: one key all the time, never forgotten, always overwritten."""
    generator = torch.Generator().manual_seed(n)
    q, k = (torch.randn((n, K_HEADS, D_K), generator=generator) for _ in range(2))
    decay = torch.exp(-0.2 * torch.rand((n, HEADS), generator=generator))
    beta = torch.rand((n, HEADS), generator=generator)
    if repeated:
        k[:] = k[0]
        decay[:] = 1.0
        beta[:] = 1.0
    v = torch.randn((n, HEADS, D_V), generator=generator)
    state = torch.randn((HEADS, D_K, D_V), generator=generator)
    q, k = l2_norm(q) * D_K**-0.5, l2_norm(k)
    return state, q.bfloat16(), k.bfloat16(), v.bfloat16(), decay, beta


def expand(x, tiled):
    group = HEADS // K_HEADS
    return x.float().repeat(1, group, 1) if tiled else x.float().repeat_interleave(group, dim=1)


def run(device, state, q, k, v, decay, beta, *, tiled=False, capacity=CHUNK):
    n_bytes = DeltaScratch.nbytes(capacity, HEADS, d_k=D_K, d_v=D_V)
    room = torch.full((n_bytes,), 255, dtype=torch.uint8, device=device)
    scratch = DeltaScratch.of(room, HEADS, d_k=D_K, d_v=D_V)
    assert scratch.change.shape[0] == capacity
    out = torch.full((q.shape[0], HEADS, D_V), torch.nan, device=device)
    state = state.to(device, copy=True)
    q, k, v, decay, beta = (t.to(device) for t in (q, k, v, decay, beta))
    delta_rule_chunks(state, q, k, v=v, decay=decay, beta=beta, out=out, scratch=scratch, tiled=tiled)
    return out.cpu(), state.cpu()


def distance(x, y):
    return float((x - y).norm() / y.norm())


@pytest.mark.parametrize("n", [150, 64, 1])
def test_agrees_with_the_token_recurrence(n, device):
    state, q, k, v, decay, beta = inputs(n)
    out, new = run(device, state, q, k, v, decay, beta)
    expected, expected_state = delta_rule(
        state, expand(q, False), expand(k, False), v=v.float(), decay=decay, beta=beta
    )
    assert distance(out, expected) < 0.02
    assert distance(new, expected_state) < 0.02


def test_value_heads_find_their_key_heads(device, monkeypatch):
    monkeypatch.setattr(f"{__name__}.HEADS", 4)
    monkeypatch.setattr(f"{__name__}.K_HEADS", 2)
    state, q, k, v, decay, beta = inputs(3)
    for tiled in (True, False):
        out, _ = run(device, state, q, k, v, decay, beta, tiled=tiled)
        expected, _ = delta_rule(state, expand(q, tiled), expand(k, tiled), v=v.float(), decay=decay, beta=beta)
        assert distance(out, expected) < 0.02


def test_repeated_keys_and_a_complete_loss_of_memory(device):
    state, q, k, v, decay, beta = inputs(80, repeated=True)
    decay[30] = 0.0
    out, new = run(device, state, q, k, v, decay, beta)
    expected, expected_state = delta_rule(
        state, expand(q, False), expand(k, False), v=v.float(), decay=decay, beta=beta
    )
    assert distance(out, expected) < 0.02
    assert distance(new, expected_state) < 0.02


def test_cuts_at_whole_chunks_and_scratch_do_not_change_bits(device):
    state, q, k, v, decay, beta = inputs(150)
    out, new = run(device, state, q, k, v, decay, beta, capacity=3 * CHUNK)
    small, small_state = run(device, state, q, k, v, decay, beta, capacity=CHUNK)
    assert torch.equal(out, small)
    assert torch.equal(new, small_state)
    first, middle = run(device, state, q[:128], k[:128], v[:128], decay[:128], beta[:128])
    second, last = run(device, middle, q[128:], k[128:], v[128:], decay[128:], beta[128:])
    assert torch.equal(out, torch.cat((first, second)))
    assert torch.equal(new, last)


def test_rows_may_be_strided(device):
    state, q, k, v, decay, beta = inputs(70)
    n = q.shape[0]
    mixed = torch.cat((q.view(n, -1), k.view(n, -1), v.view(n, -1)), dim=1)
    width = K_HEADS * D_K
    parts = mixed[:, :width], mixed[:, width : 2 * width], mixed[:, 2 * width :]
    strided = [part.unflatten(1, (-1, d)) for part, d in zip(parts, (D_K, D_K, D_V), strict=True)]
    out, new = run(device, state, *strided, decay, beta)
    expected, expected_state = run(device, state, q, k, v, decay, beta)
    assert torch.equal(out, expected)
    assert torch.equal(new, expected_state)


def test_gates_of_a_chunk(device):
    generator = torch.Generator().manual_seed(1)
    both = torch.randn((45, 13), generator=generator) * 8
    alpha, beta = both[:, :6], both[:, 6:12]  # rows may be strided
    a, dt_bias = -torch.rand(6, generator=generator), torch.randn(6, generator=generator)
    there = both.to(device)
    found = chunk_gates(there[:, :6], there[:, 6:12], a=a.to(device), dt_bias=dt_bias.to(device))
    expected = torch.exp(a * reference.softplus(alpha + dt_bias)), reference.sigmoid(beta)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-6)
