"""Loading keeps weights quantised and mapped; faulty files are refused by name."""

import pytest

from makeway import UserError
from makeway.gguf import open_gguf
from makeway.kernels import REFERENCE, Weight, reference
from makeway.models import load_model, weights
from tests.conftest import golden_path
from tests.models.runner import CPU, Runner

MODEL = "qwen4exp-k96-UD-Q4_K_XL.gguf"


def test_a_forward_decodes_piece_by_piece_and_only_routed_experts(monkeypatch):
    decode, sizes = Weight.decode, []
    monkeypatch.setattr(
        Weight,
        "decode",
        lambda w, a=0, b=None: sizes.append((w.raw.data_ptr(), (out := decode(w, a, b)).numel())) or out,
    )
    monkeypatch.setattr(reference, "DECODE_ELEMENTS", 4096)
    runner = Runner(golden_path(MODEL))
    runner.logits([5])
    assert 0 < max(n for _, n in sizes) <= 4096
    for layer, experts in enumerate(runner.model.store.layers):
        starts = [experts.gate.raw[e].data_ptr() for e in range(experts.n_experts)]
        decoded = {e for e, start in enumerate(starts) if any(p == start for p, _ in sizes)}
        assert decoded == set(runner.routed(layer)[0].tolist())
        assert len(decoded) < experts.n_experts


def test_weights_are_views_of_the_mapped_file():
    runner = Runner(golden_path(MODEL))
    start = runner.file.bytes_of("blk.0.ffn_down_exps.weight").ctypes.data
    assert runner.model.store.layers[0].down.raw.data_ptr() == start


@pytest.mark.parametrize("file", [MODEL, "qwen3moe-base-bf16.gguf", "qwen3next-base-bf16.gguf"])
def test_every_tensor_of_a_golden_file_is_used(file):
    with open_gguf(golden_path(file)) as f:
        seen = set()

        class Reader(weights.WeightReader):
            def _info(self, name, shape):
                seen.add(name)
                return super()._info(name, shape)

        patched = pytest.MonkeyPatch()
        try:
            for module in ("qwen3moe", "qwen3next", "qwen4exp"):
                patched.setattr(f"makeway.models.{module}.WeightReader", Reader)
            load_model(f, REFERENCE, device=CPU)
        finally:
            patched.undo()
        assert set(f.tensors) == seen


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"blk.0.ffn_gate_inp.weight", b"blk.0.ffn_gate_xxx.weight", "blk.0.ffn_gate_inp.weight.*missing"),
        (b"qwen4exp.expert_count", b"qwen4exp.expert_cxxnt", "expert_count"),
    ],
)
def test_a_missing_tensor_or_key_is_named(tmp_path, old, new, message):
    data = golden_path(MODEL).read_bytes()
    path = tmp_path / "broken.gguf"
    path.write_bytes(data.replace(old, new))
    with open_gguf(path) as f, pytest.raises(UserError, match=message):
        load_model(f, REFERENCE, device=CPU)


def test_a_shape_that_disagrees_with_the_metadata_is_named(tmp_path):
    data = golden_path(MODEL).read_bytes()
    key = b"qwen4exp.expert_feed_forward_length"
    at = data.index(key) + len(key) + 4
    path = tmp_path / "broken.gguf"
    path.write_bytes(data[:at] + (128).to_bytes(4, "little") + data[at + 4 :])
    with open_gguf(path) as f, pytest.raises(UserError, match=r"ffn_\w+_exps.weight' has shape"):
        load_model(f, REFERENCE, device=CPU)
