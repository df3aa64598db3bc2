"""The training model against the golden qwen4exp files, and its parts against plain loops."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.demo_model import layers as L  # noqa: E402
from tools.demo_model.gguf_io import read_gguf  # noqa: E402
from tools.demo_model.model import Model, Side  # noqa: E402
from tools.demo_model.shape import Shape, first_values, tensor_shapes, with_hashes  # noqa: E402

NO_POSITIONS = torch.empty(0, dtype=torch.int64)
TINY = with_hashes(
    Shape(n_vocab=64, n_layers=4, hidden=32, n_heads=2, n_kv=1, head_dim=16, n_rot=8, n_experts=4, top_k=2,
          expert_ff=16, shared_ff=16, v_heads=4, delta_dim=8, low_rank=8, index_heads=2, index_dim=16, budget=16,
          row=8, eos=60),
    base=30,
)  # fmt: skip


def golden(name: str) -> Path:
    for folder in (ROOT / "tests" / "data", ROOT.parent / "shared" / "golden"):
        if (folder / name).exists():
            return folder / name
    pytest.skip(f"{name} is not there")


def test_reproduces_the_golden_logits():
    shape, tensors = read_gguf(golden("qwen4exp-base-bf16.gguf"))
    ref = np.load(golden("qwen4exp-base.npz"))
    model, side = Model(shape, tensors), Side()
    tokens = torch.from_numpy(ref["tokens"].astype(np.int64))[None]
    with torch.no_grad():
        h = model.trunk(tokens, side, NO_POSITIONS)
        logits = model.logits(h)[0].numpy()
        draft = model.logits(model.mtp(tokens, h, side, NO_POSITIONS), mtp=True)[0].numpy()
    assert np.abs(logits - ref["logits"]).max() < 1e-3
    expected = ref["mtp_logits_zero_first_tail"]
    assert np.abs(draft[-len(expected) :] - expected).max() < 1e-3


def test_names_and_shapes_are_those_of_the_golden_file():
    shape, tensors = read_gguf(golden("qwen4exp-base-bf16.gguf"))
    ours = tensor_shapes(shape)
    assert set(ours) == set(tensors)
    assert all(tensors[name].numel() == np.prod(ours[name]) for name in ours)


def test_delta_rule_in_chunks_equals_the_recurrence():
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 37, 3, 8, generator=g) for _ in range(3))
    decay, beta = -torch.rand(2, 37, 3, generator=g), torch.rand(2, 37, 3, generator=g)
    out = L.delta_rule(q, k, v, decay, beta, chunk=16)
    qn = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) * 8**-0.5
    kn = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
    state = torch.zeros(2, 3, 8, 8)
    for t in range(37):
        state = state * decay[:, t].exp()[..., None, None]
        new = (v[:, t] - (state * kn[:, t, :, :, None]).sum(-2)) * beta[:, t, :, None]
        state = state + kn[:, t, :, :, None] * new[:, :, None]
        assert torch.allclose(out[:, t], (state * qn[:, t, :, :, None]).sum(-2), atol=1e-5)


def test_every_parameter_learns_and_the_indexer_only_from_its_own_loss():
    model, side = Model(TINY, first_values(TINY)), Side()
    tokens = torch.randint(0, 60, (2, 96), generator=torch.Generator().manual_seed(2))
    h = model.trunk(tokens, side, torch.arange(3, 96, 8))
    wide = model.mtp(tokens, h, side, torch.arange(3, 96, 8))
    loss = model._head_loss(model.head_weights(), h, tokens)[0]
    loss = loss + model._head_loss(model.head_weights(mtp=True), wide, tokens)[0]
    loss.backward(retain_graph=True)
    asleep = {name for name, p in model.p.items() if p.grad is None or not p.grad.abs().sum()}
    assert asleep == {name for name in model.p if "indexer" in name}
    torch.stack(side.indexer).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() for p in model.p.values())


def test_a_query_sees_its_budget_and_the_tail():
    model = Model(TINY, first_values(TINY))
    x = torch.randn(1, 96, 32, generator=torch.Generator().manual_seed(3))
    seen = L.selection(model.group("blk.3."), x, TINY)[0]
    pos = torch.arange(96)
    assert not (seen & (pos > pos[:, None])).any()
    expected = torch.where(pos < TINY.budget, pos + 1, TINY.budget + (pos + 1) % TINY.ratio)
    assert (seen.sum(-1) == expected).all()


def test_tensors_survive_a_round_trip():
    values = first_values(TINY)
    again = Model(TINY, values).tensors()
    assert all(torch.allclose(values[name], again[name], rtol=1e-5) for name in values)


def test_export_has_the_keys_and_tensors_of_the_golden_file(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    export = pytest.importorskip("tools.demo_model.export")
    monkeypatch.setattr(export, "add_tokenizer", lambda *_: None)
    monkeypatch.setattr(export, "Tokenizer", SimpleNamespace(from_file=lambda _: None))
    path = tmp_path / "x.gguf"
    values = {name: v.bfloat16().float() for name, v in first_values(TINY).items()}
    export.write(path, TINY, {name: v.numpy() for name, v in values.items()}, f16=True)
    shape, tensors = read_gguf(path)
    assert shape == TINY or abs(shape.eps - TINY.eps) < 1e-9
    assert all(torch.allclose(values[n], tensors[n].view_as(values[n]), atol=1e-3) for n in values)
    theirs = gguf.GGUFReader(golden("qwen4exp-base-bf16.gguf")).fields
    ours = gguf.GGUFReader(path).fields
    assert {k for k in theirs if not k.startswith("tokenizer")} <= set(ours)
    assert all(ours[k].types == theirs[k].types for k in theirs if k.startswith("qwen4exp."))


def test_the_shipped_file_knows_the_held_out_text():
    from gguf import GGUFReader
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from tools.demo_model.tokens import PATTERN

    path = golden("heldout.txt").parent.parent.parent / "src" / "makeway" / "data" / "demo.gguf"
    assert path.stat().st_size < 20_000_000
    fields = GGUFReader(path).fields
    names = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    text = golden("heldout.txt").read_text()
    tokens = torch.tensor(tokenizer.encode(text).ids[:400])[None]
    shape, tensors = read_gguf(path)
    assert (shape.n_layers, shape.n_experts, shape.budget, shape.context) == (8, 32, 512, 4096)
    model, side = Model(shape, tensors), Side()
    with torch.no_grad():
        h = model.trunk(tokens, side, NO_POSITIONS)
        logits = model.logits(h)[0]
        draft = model.logits(model.mtp(tokens, h, side, NO_POSITIONS), mtp=True)[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:])
    assert loss.exp() < 40
    assert (draft.argmax(-1) == logits.argmax(-1))[8:].float().mean() > 0.55
