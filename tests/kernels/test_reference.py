"""The reference is the specification: right against float64 formulas, and blind to how rows are grouped."""

import pytest
import torch

from makeway.gguf.types import GGMLType
from makeway.kernels import Weight, reference, reference_attention


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight(n_rows, n_cols, seed=1):
    values = rows(n_rows, n_cols, seed=seed)
    return Weight(values.view(torch.uint8).view(n_rows, -1), GGMLType.F32, n_cols), values


@pytest.mark.parametrize(("n_rows", "n_cols"), [(1, 64), (4, 256), (12, 64), (320, 64), (96, 256), (1000, 100)])
def test_linear_is_right_and_blind_to_the_place_of_a_row(n_rows, n_cols):
    w, values = weight(n_rows, n_cols)
    x = rows(37, n_cols)
    whole = reference.linear(x, w)
    assert torch.allclose(whole.double(), x.double() @ values.double().t(), atol=1e-4)
    for n in (1, 7, 16, 17):
        parts = torch.cat([reference.linear(x[i : i + n], w) for i in range(0, 37, n)])
        assert torch.equal(parts, whole)
    order = torch.randperm(37, generator=torch.Generator().manual_seed(2))
    assert torch.equal(reference.linear(x[order], w), whole[order])


@pytest.mark.slow
@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize(
    ("n_rows", "n_cols"), [(10240, 2560), (2560, 6144), (320, 10240), (4, 10240), (2560, 640), (1, 2560), (48, 2560)]
)
def test_linear_of_the_real_shapes_on_several_threads(n_rows, n_cols, n_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        w, _ = weight(n_rows, n_cols)
        x = rows(37, n_cols)
        whole = reference.linear(x, w)
        for n in (1, 5):
            assert torch.equal(torch.cat([reference.linear(x[i : i + n], w) for i in range(0, 37, n)]), whole)
        one = torch.cat([reference.rms_norm(x[i : i + 1], x[0], 1e-6) for i in range(37)])
        assert torch.equal(one, reference.rms_norm(x, x[0], 1e-6))
    finally:
        torch.set_num_threads(before)


def test_linear_decodes_piece_by_piece(monkeypatch):
    w, _ = weight(64, 32)
    x = rows(3, 32)
    whole, asked = reference.linear(x, w), []
    monkeypatch.setattr(reference, "DECODE_ELEMENTS", 32 * 10)
    decode = Weight.decode
    monkeypatch.setattr(Weight, "decode", lambda self, a, b: asked.append(b - a) or decode(self, a, b))
    assert torch.allclose(reference.linear(x, w), whole, atol=1e-5)
    assert max(asked) == 10


@pytest.mark.parametrize(
    ("name", "oracle"),
    [
        ("sigmoid", torch.sigmoid),
        ("silu", torch.nn.functional.silu),
        ("softplus", torch.nn.functional.softplus),
    ],
)
def test_activations_are_right_and_blind_to_the_place_of_an_element(name, oracle):
    x = torch.cat((rows(997) * 6, torch.tensor([-100.0, -30.0, 0.0, 19.9, 20.1, 80.0])))
    f = getattr(reference, name)
    whole = f(x)
    assert torch.allclose(whole.double(), oracle(x.double()), rtol=1e-6, atol=1e-7)
    assert torch.equal(torch.cat([f(x[i : i + 1].clone()) for i in range(len(x))]), whole)


def test_norms_and_rope_are_blind_to_the_number_of_rows():
    x, gamma = rows(33, 4, 96), rows(96, seed=3)
    positions = torch.arange(33) + 1000
    for f in (
        lambda t, p: reference.rms_norm(t, gamma, 1e-6),
        lambda t, p: reference.l2_norm(t),
        lambda t, p: reference.rope(t, p, n_rot=32, theta=1e7),
    ):
        whole = f(x, positions)
        parts = torch.cat([f(x[i : i + 1].clone(), positions[i : i + 1].clone()) for i in range(33)])
        assert torch.equal(parts, whole)


def test_route_breaks_ties_downwards_and_renormalises():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    ids, weights = reference.route(logits, 2)
    assert ids.tolist() == [[1, 2], [0, 1]]
    assert torch.allclose(weights, torch.full((2, 2), 0.5))


def test_delta_rule_in_one_call_or_many():
    n, h, dk, dv = 9, 3, 8, 5
    q, k, v = rows(n, h, dk), rows(n, h, dk, seed=1), rows(n, h, dv, seed=2)
    decay, beta = torch.rand(n, h), torch.rand(n, h)
    state = torch.zeros(h, dk, dv)
    whole, end = reference.delta_rule(state, q, k, v=v, decay=decay, beta=beta)
    out = []
    for t in range(n):
        one = slice(t, t + 1)
        o, state = reference.delta_rule(state, q[one], k[one], v=v[one], decay=decay[one], beta=beta[one])
        out.append(o)
    assert torch.equal(torch.cat(out), whole)
    assert torch.equal(state, end)
    # Against the matrix form S' = decay (S - beta k k^T S) + beta k v^T in float64.
    s = torch.zeros(h, dk, dv, dtype=torch.float64)
    for t in range(n):
        kt = k[t].double()[:, :, None]
        s = decay[t].double()[:, None, None] * s
        s = s + beta[t].double()[:, None, None] * kt @ (v[t].double()[:, None] - kt.transpose(1, 2) @ s)
        assert torch.allclose((q[t].double()[:, None] @ s)[:, 0], whole[t].double(), atol=1e-3, rtol=1e-3)


def paged(values, tile):
    """[n, ...] as zero-padded tiles by number."""
    n = -(-values.shape[0] // tile) * tile
    padded = values.new_zeros((n, *values.shape[1:]))
    padded[: values.shape[0]] = values
    return lambda j: padded[j * tile : (j + 1) * tile]


@pytest.mark.parametrize("sparse", [False, True])
def test_attention_is_right_and_blind_to_chunks(sparse):
    n, heads, kv, d = 150, 4, 2, 16
    q, k, v = rows(n, heads, d) * d**-0.5, rows(n, kv, d, seed=1), rows(n, kv, d, seed=2)
    positions = torch.arange(n)
    causal = positions[None] <= positions[:, None]
    allowed = causal & (torch.rand(n, n, generator=torch.Generator().manual_seed(5)) < 0.3) if sparse else None
    if allowed is not None:
        allowed |= torch.eye(n, dtype=torch.bool)
    tiles = paged(torch.stack((k, v), 1), 64)

    def run(first, last):
        return reference_attention.attention(
            q[first:last],
            positions[first:last],
            n_keys=last,
            key_tile=lambda j: (tiles(j)[:, 0], tiles(j)[:, 1]),
            allowed=None if allowed is None else allowed[first:last, :last],
        )

    whole = run(0, n)
    mask = causal if allowed is None else allowed
    kk, vv = k.double().repeat_interleave(2, 1), v.double().repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), kk).masked_fill(~mask[None], -torch.inf)
    exact = torch.einsum("hqk,khd->qhd", scores.softmax(-1), vv)
    assert torch.allclose(whole.double(), exact, atol=1e-5)
    for step in (1, 7, 64):
        assert torch.equal(torch.cat([run(i, min(i + step, n)) for i in range(0, n, step)]), whole)


def test_best_blocks_breaks_ties_downwards_and_counts_complete_blocks_only():
    scores = torch.tensor([[1.0, 5.0, 5.0, 5.0, 9.0]])
    at = torch.tensor([18])  # blocks 0 to 3 are complete
    chosen = reference_attention.best_blocks(scores, at, ratio=4, n_select=2)
    assert chosen.dtype == torch.int32
    assert chosen.tolist() == [[1, 2]]
    allowed = reference_attention.allowed_keys(chosen, at, n_keys=19, ratio=4)
    assert torch.nonzero(allowed[0])[:, 0].tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18]
    # With few complete blocks everything is allowed.
    early = torch.tensor([6])
    chosen = reference_attention.best_blocks(scores, early, ratio=4, n_select=2)
    assert chosen.tolist() == [[0, -1]]
    assert reference_attention.allowed_keys(chosen, early, n_keys=7, ratio=4).all()


def test_block_scores_are_right_and_blind_to_chunks():
    n, heads, d, n_blocks = 21, 3, 16, 37
    q, keys = rows(n, heads, d), rows(n_blocks, d, seed=1)
    tile = paged(keys, 16)

    def run(part):
        return reference_attention.block_scores(part, n_blocks=n_blocks, pooled_tile=tile, blocks_per_tile=16)

    whole = run(q)
    exact = torch.einsum("qhd,bd->qhb", q.double(), keys.double()).clamp(min=0).sum(1) * d**-0.5
    assert torch.allclose(whole.double(), exact, atol=1e-5)
    assert torch.equal(torch.cat([run(q[i : i + 5]) for i in range(0, n, 5)]), whole)
