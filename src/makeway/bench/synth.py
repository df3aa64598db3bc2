"""Models of full shape without training: random weights that keep activations sane, and routing that can be set.

Owns which bytes each tensor has; never runs a model. `write_model` makes a GGUF file that any program loads,
`in_memory` an open GGUFFile with nothing on disk; both give the same bytes.
Hazard: large tensors are windows into a bank of random blocks that repeats, so two tensors may share bytes; memory
that is to be measured (an expert store) must hold its own copy of each.
"""

import itertools
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from makeway.bench.blocks import RANDOM_TYPES, random_blocks
from makeway.bench.gguf_writer import Encoder
from makeway.bench.specs import Fill, Normal, Router, Shape, TensorSpec, TokenRows, Uniform
from makeway.bench.topics import Knobs, rng_of, token_rows, vocabulary
from makeway.errors import UserError
from makeway.gguf import BLOCK_SIZES, GGMLType, GGUFFile, Metadata, TensorInfo, row_bytes
from makeway.gguf.header import Header
from makeway.gguf.shards import Shard
from makeway.quants.encode import encode_rows

ALIGNMENT = 32
_PAGE = 4096
_BANK_BYTES = 32 << 20
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class Source:
    """A tensor: byte i is `bank[(phase + i) mod len(bank)]`; `bank` is u8 [n], shape in torch order."""

    type: GGMLType
    shape: tuple[int, ...]
    bank: NDArray[np.uint8]
    phase: int = 0

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * row_bytes(self.type, self.shape[-1])


@dataclass(frozen=True)
class Synthetic:
    """Metadata and tensors of a model, in file order."""

    metadata: dict[str, Any]
    tensors: dict[str, Source]

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.n_bytes for t in self.tensors.values())


def synthesize(shape: Shape, knobs: Knobs | None = None) -> Synthetic:
    """The model of a shape; equal arguments give equal bytes. Seconds and a few hundred MiB, however big the model."""
    knobs = knobs or Knobs()
    specs = shape.tensors()
    largest: dict[tuple[GGMLType, float], int] = {}
    for spec in specs.values():
        key = _bank_key(spec)
        if key:
            largest[key] = max(largest.get(key, 0), _spec_bytes(spec))
    banks = {k: _bank(*k, largest=n, seed=knobs.seed * 1000 + i) for i, (k, n) in enumerate(largest.items())}
    tensors = {}
    rng = rng_of(knobs.seed, 4)
    for i, (name, spec) in enumerate(specs.items()):
        key = _bank_key(spec)
        if key is None:
            tensors[name] = Source(spec.type, spec.shape, _own_bytes(spec, i, knobs))
            continue
        unit = math.lcm(BLOCK_SIZES[spec.type].n_bytes, ALIGNMENT)
        phase = int(rng.integers(banks[key].size // unit)) * unit
        tensors[name] = Source(spec.type, spec.shape, banks[key], phase)
    return Synthetic(shape.metadata() | vocabulary(shape.n_vocab, shape.pre), tensors)


def _bank_key(spec: TensorSpec) -> tuple[GGMLType, float] | None:
    """Tensors of one key share a bank; None: a tensor with values of its own."""
    if spec.type in RANDOM_TYPES and isinstance(spec.fill, Normal):
        return spec.type, spec.fill.std
    return None


def _spec_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape[:-1]) * row_bytes(spec.type, spec.shape[-1])


def _bank(ggml_type: GGMLType, std: float, *, largest: int, seed: int) -> NDArray[np.uint8]:
    """Blocks for tensors of up to `largest` bytes. Their number is prime: experts of equal size then start at
    different blocks until as many experts as blocks have gone by."""
    n = min(2 * largest, _BANK_BYTES) // BLOCK_SIZES[ggml_type].n_bytes
    prime = next(p for p in range(n + 1, 1, -1) if all(p % d for d in range(2, math.isqrt(p) + 1)))
    return random_blocks(ggml_type, prime, std=std, seed=seed).reshape(-1)


def _own_bytes(spec: TensorSpec, index: int, knobs: Knobs) -> NDArray[np.uint8]:
    """Bytes of a tensor that has its own values; rows of tokens: one period."""
    if isinstance(spec.fill, TokenRows):
        n_vocab, hidden = spec.shape
        rows = token_rows(spec.type, n_vocab, hidden=hidden, knobs=knobs, is_head=spec.fill.is_head)
        return rows.reshape(-1)
    values = _values(spec.fill, spec.shape, rng_of(knobs.seed, 5, index), knobs.skew)
    return encode_rows(torch.from_numpy(values), spec.type).numpy().reshape(-1)


def _values(fill: Fill, shape: tuple[int, ...], rng: np.random.Generator, skew: float) -> NDArray[np.float32]:
    if isinstance(fill, Uniform):
        return rng.uniform(fill.low, fill.high, shape).astype(np.float32)
    normal = rng.standard_normal(shape, dtype=np.float32)
    if isinstance(fill, Normal):
        return normal * np.float32(fill.std) + np.float32(fill.mean)
    assert isinstance(fill, Router)
    scale = np.arange(1, shape[0] + 1) ** -skew
    scale *= (shape[1] * np.square(scale).mean()) ** -0.5  # logits with a standard deviation of 1 over all experts
    return normal * scale[rng.permutation(shape[0]), None].astype(np.float32)


def _pieces(source: Source, start: int, stop: int) -> Iterator[NDArray[np.uint8]]:
    """Bytes start..stop-1 of a tensor as views of its bank."""
    n = source.bank.size
    while start < stop:
        at = (source.phase + start) % n
        piece = source.bank[at : min(n, at + stop - start)]
        yield piece
        start += piece.size


def _write_all(fd: int, placed: Mapping[int, Source], n_threads: int | None) -> None:
    """Writes each source at its offset of an open file, many parts at once. Raises OSError."""

    def write(job: tuple[int, Source, int]) -> None:
        offset, source, start = job
        at = offset + start
        for piece in _pieces(source, start, min(start + _PIECE_BYTES, source.n_bytes)):
            view = memoryview(piece.data)
            while view:
                n = os.pwrite(fd, view, at)
                view, at = view[n:], at + n

    jobs = [(offset, source, i) for offset, source in placed.items() for i in range(0, source.n_bytes, _PIECE_BYTES)]
    with ThreadPoolExecutor(n_threads or len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(write, jobs):
            pass


def write_model(model: Synthetic, path: Path, *, n_threads: int | None = None) -> int:
    """Writes a GGUF file, several parts at once; returns its size in bytes. Raises UserError when it cannot."""
    encoder = Encoder()
    entries, offsets, end = [], [], 0
    for name, source in model.tensors.items():
        entries.append(encoder.tensor(name, source.shape[::-1], source.type, end))
        offsets.append(end)
        end += _aligned(source.n_bytes, ALIGNMENT)
    header = encoder.header([encoder.key(k, v) for k, v in model.metadata.items()], entries)
    header += bytes(-len(header) % ALIGNMENT)
    try:
        with open(path, "wb", buffering=0) as file:
            file.truncate(len(header) + end)
            placed = {len(header) + o: s for o, s in zip(offsets, model.tensors.values(), strict=True)}
            _write_all(file.fileno(), {0: _source_of(header), **placed}, n_threads)
    except OSError as fault:
        raise UserError(f"{path}: cannot be written: {fault.strerror}; choose another place or free space") from fault
    return len(header) + end


@contextmanager
def in_memory(model: Synthetic, *, n_threads: int | None = None) -> Iterator[GGUFFile]:
    """The model as an open GGUFFile with nothing on disk; closed at the end.

    Each bank is laid out once, as long as its longest tensor needs, so tensors overlap: memory is about the largest
    tensor of each type and spread, not the model. The bytes lie in an anonymous file, whose path
    (`file.tensors[name].path`) can be read like any other while the file is open.
    """
    needed: dict[int, Source] = {}
    for t in model.tensors.values():
        n = max(t.phase + t.n_bytes, needed[id(t.bank)].n_bytes if id(t.bank) in needed else 0)
        needed[id(t.bank)] = Source(GGMLType.I8, (n,), t.bank)
    ends = list(itertools.accumulate(_aligned(s.n_bytes, _PAGE) for s in needed.values()))
    bases = dict(zip(needed, [0, *ends], strict=False))
    fd = os.memfd_create("makeway-synthetic")
    try:
        os.ftruncate(fd, ends[-1])
        _write_all(fd, {bases[key]: source for key, source in needed.items()}, n_threads)
        path = Path(f"/proc/self/fd/{fd}")
        tensors = {
            name: TensorInfo(name, t.shape, t.type, path, bases[id(t.bank)] + t.phase, t.n_bytes)
            for name, t in model.tensors.items()
        }
        buffer = mmap.mmap(fd, ends[-1], access=mmap.ACCESS_READ)
        header = Header(3, ALIGNMENT, model.metadata, tensors)
        with GGUFFile([Shard(path, buffer, header, Metadata(model.metadata, "synthetic model"))]) as file:
            yield file
    finally:
        os.close(fd)


def _aligned(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _source_of(data: bytes) -> Source:
    return Source(GGMLType.I8, (len(data),), np.frombuffer(data, np.uint8))
