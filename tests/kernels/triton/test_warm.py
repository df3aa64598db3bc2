"""What an engine compiles when it opens is all that prompts need. Kernels do nothing here: for each launch is written
down on what Triton would specialise it, as on a Hopper GPU, and for CUDA C++ its name."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from makeway import Engine, EngineConfig, SamplingParams
from makeway.bench.gguf_writer import write_gguf
from makeway.bench.shapes import SHAPES
from makeway.bench.topics import vocabulary
from makeway.device import CpuDevice

pytest.importorskip("triton")
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import jit
from triton.runtime.interpreter import InterpretedFunction

from makeway.engine.backend import TritonBackend
from makeway.experts import triton_pieces
from makeway.kernels.cuda.linear import Linears
from makeway.kernels.triton import attend_chunk, chunk_linear, gemm
from makeway.kernels.triton.ops import CHUNK_ROWS, triton_ops

FEW_LENGTHS = ([5], [63, 17], [257], [1030])
LENGTHS = ([1], [2], [3], [7], [8], [9], [16], [63], [64, 65], [100, 5], [257], [300], [511, 3], [514], [1030], [3000])


@cache
def varying(kernel):
    """By argument that is no constant: whether Triton specialises on its value, and on its alignment."""
    of_value, of_alignment = (kernel.kwargs[f"do_not_specialize{what}"] or () for what in ("", "_on_alignment"))
    constants = [name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)]
    names = [name for name in kernel.arg_names if name not in constants]
    return {name: (name not in of_value, name not in of_alignment) for name in names}


class Asked(set):
    """The kernels that were asked for."""

    def launch(self, kernel, arguments, options):
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        key = [kernel.fn.__module__, kernel.fn.__name__]
        for name, value in given.items():
            specialised = varying(kernel).get(name)
            if specialised:
                value = jit.native_specialize_impl(CUDABackend, value, False, *specialised)
            key.append((name, getattr(value, "__name__", value)))
        self.add(tuple(key))
        if kernel.fn.__name__ in ("choice_kernel", "route_kernel"):
            ids, n_experts = given["ids"], given["EXPERTS"]
            chosen = np.random.default_rng(len(ids)).random((len(ids), n_experts)).argsort(axis=1)
            ids.copy_(torch.from_numpy(chosen[:, : ids.shape[1]]))

    def kernel(self, source, name, parameters):
        return SimpleNamespace(launch=lambda *_, **__: self.add((source.name, name)))

    def ahead(self):
        return nullcontext()


@pytest.fixture
def asked(device, monkeypatch):
    if device.type != "cpu":
        pytest.skip("launches are looked at where kernels are interpreted")
    asked = Asked()

    def sorted_pairs(ids, pairs):
        sort(ids, pairs)
        pairs.offsets.copy_(torch.bincount(ids[ids >= 0] + 1, minlength=pairs.n_experts + 1).cumsum(0))

    sort = triton_pieces.sort_pairs
    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda self, _: lambda *a, **b: asked.launch(self, a, b))
    monkeypatch.setattr(triton_pieces, "sort_pairs", sorted_pairs)
    for module in (gemm, chunk_linear):
        monkeypatch.setattr(module, "tiles_of", lambda _: gemm.HOPPER)
    monkeypatch.setattr(attend_chunk, "chunk_tiling", lambda d, half, _: attend_chunk.HOPPER[d > 128])
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    return asked


def open_engine(asked, shape, path, context):
    place = CpuDevice()
    backend = TritonBackend(place)
    backend._programs = asked
    backend.ops = triton_ops(place.torch_device, Linears(place.torch_device, asked))
    backend.compiling, backend.chunk_rows = nullcontext, CHUNK_ROWS  # nothing runs anyhow
    tensors = {name: (spec.type, spec.shape, None) for name, spec in shape.tensors().items()}
    write_gguf(path, shape.metadata() | vocabulary(shape.n_vocab, shape.pre), tensors, sparse=True)
    config = EngineConfig(
        device="cpu", context=context, parallel=2, slots=8, chunk=1024, sweep_tokens=3000, guesses=False
    )
    return Engine(path, config, device=place, backend=backend)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("tiny-flash-next", FEW_LENGTHS),
        pytest.param("tiny-flash-next", LENGTHS, marks=pytest.mark.slow),
        pytest.param("tiny-qwen3", LENGTHS, marks=pytest.mark.slow),
    ],
)
def test_no_prompt_needs_a_kernel_that_was_not_compiled_when_the_engine_opened(name, lengths, asked, tmp_path):
    sampling, context = SamplingParams(max_tokens=1, ignore_eos=True), 64 + max(map(sum, lengths))
    with open_engine(
        asked, replace(SHAPES[name], n_vocab=512, n_experts=60, top_k=5), tmp_path / "model.gguf", context
    ) as engine:
        compiled = set(asked)
        assert len(compiled) > 30
        for together in lengths:
            for n in together:
                engine.add(np.random.default_rng(n).integers(0, 500, n), sampling)
            while engine.busy:
                assert not [event.text for event in engine.step() if event.kind == "error"]
            assert asked == compiled, (together, asked - compiled)
