"""Files that chance wrote: every one opens with sound tensors or ends in one good UserError (see checks.py)."""

import os
import random
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from makeway.bench.gguf_writer import Encoder, Typed, tensor_bytes, write_gguf
from makeway.gguf import BLOCK_SIZES, GGMLType, ValueType, open_gguf
from tests.conftest import golden_path
from tests.gguf.checks import try_open

E = Encoder()
GOLDEN = ["qwen4exp-k96-UD-Q4_K_XL.gguf", "qwen3moe-k256-Q4_K_M.gguf"]
PEAK_BYTES = 8 << 20
"""A mutated header may lie about text lengths only as far as the file goes; golden files have 1 to 2 MB."""


def examples(few: int, many: int):
    """The same property with few examples by default and with many in the slow suite."""
    return pytest.mark.parametrize(
        "n_examples", [pytest.param(few, id="few"), pytest.param(many, id="many", marks=pytest.mark.slow)]
    )


def run(property_, n_examples: int) -> None:
    """Runs a hypothesis property with that many examples; the few are the same on every run."""
    settings(
        max_examples=n_examples,
        deadline=None,
        database=None,
        derandomize=n_examples < 1000,
        suppress_health_check=list(HealthCheck),
    )(property_)()


class Mutant:
    """A file with the header and the size of a real one (its data are a hole), overwritten and put back."""

    def __init__(self, path, source) -> None:
        self.path = path
        self.size = source.stat().st_size
        with open_gguf(source) as file:
            header_bytes = min(t.offset for t in file.tensors.values())
        self.header = source.read_bytes()[:header_bytes]
        path.touch()
        self._write(self.header, self.size)

    def _write(self, header: bytes, size: int) -> None:
        with open(self.path, "r+b") as file:
            file.write(header)
            file.truncate(size)

    def open_with(self, header: bytes) -> str | None:
        """Opens the file with another header of the same length."""
        self._write(header, self.size)
        return try_open(self.path, peak_bytes=PEAK_BYTES)

    def cut(self, size: int) -> str | None:
        """Opens the file cut to `size` bytes."""
        self._write(self.header, size)
        return try_open(self.path, peak_bytes=PEAK_BYTES)


@pytest.fixture(params=GOLDEN)
def mutant(request, tmp_path):
    return Mutant(tmp_path / "mutant.gguf", golden_path(request.param))


@pytest.fixture
def tiny(tmp_path):
    """A header of a few hundred bytes in which every kind of field is near."""
    source = tmp_path / "tiny.gguf"
    metadata = {
        "general.alignment": 32,
        "s": "text",
        "a": np.array([1, 2], np.uint64),
        "b": np.array([True, False]),
        "t": ["one", "two", ""],
        "n": [[1], ["x"], [[2.5]]],
        "f": 1.5,
    }
    tensors = {
        "first": (GGMLType.F32, (2, 2), bytes(16)),
        "second": (GGMLType.Q4_K, (2, 1, 256), bytes(288)),
        "third": (GGMLType.I8, (), bytes(1)),
    }
    write_gguf(source, metadata, tensors)
    return Mutant(tmp_path / "mutant.gguf", source)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_bit_flip_of_a_tiny_header(tiny, step):
    header = tiny.header
    messages = set()
    for bit in range(0, 8 * len(header), step):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        messages.add(tiny.open_with(bytes(flipped)))
    assert len(messages) > 500 / step


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_every_byte_of_a_tiny_header_at_its_extremes(tiny, step):
    header = tiny.header
    for width in (4, 8):
        for start in range(0, len(header) - width, step):
            for fill in (b"\xff", b"\0"):
                tiny.open_with(header[:start] + fill * width + header[start + width :])


@pytest.mark.parametrize("n", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_bit_flips_of_real_headers(mutant, n):
    rng = random.Random(n)
    header = mutant.header
    for _ in range(n):
        flipped = bytearray(header)
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            flipped[rng.randrange(len(header))] ^= 1 << rng.randrange(8)
        mutant.open_with(bytes(flipped))


@pytest.mark.parametrize("n", [100, pytest.param(5_000, marks=pytest.mark.slow)])
def test_real_files_cut_short(mutant, n):
    rng = random.Random(n)
    for _ in range(n):
        size = rng.randrange(len(mutant.header) if rng.random() < 0.8 else mutant.size - 32)
        message = mutant.cut(size)
        assert message is not None
        assert "cut short" in message or "empty" in message


@pytest.mark.parametrize("n", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_spliced_real_headers(mutant, n):
    """Runs of bytes left out, doubled or moved: counts and lengths meet the wrong bytes."""
    rng = random.Random(n)
    header = mutant.header
    for _ in range(n):
        a, b = sorted(rng.randrange(len(header)) for _ in range(2))
        c = rng.randrange(len(header))
        spliced = rng.choice((header[:a] + header[b:], header[:b] + header[a:], header[:c] + header[a:b]))
        mutant.open_with((spliced + header)[: len(header)])


@examples(100, 20_000)
def test_random_bytes_after_a_good_start(tmp_path, n_examples):
    path = tmp_path / "m.gguf"

    @given(
        counts=st.tuples(*[st.one_of(st.integers(0, 3), st.integers(0, (1 << 64) - 1))] * 2),
        rest=st.binary(max_size=300),
    )
    def property_(counts, rest):
        path.write_bytes(E.header(n_tensors=counts[0], n_keys=counts[1]) + rest)
        try_open(path)

    run(property_, n_examples)


counts64 = st.one_of(
    st.integers(0, 6), st.sampled_from([1 << k for k in range(5, 64, 7)] + [(1 << 64) - 1, (1 << 63) - 1])
)
types32 = st.one_of(st.integers(0, 45), st.just(0xFFFFFFFF))
names = st.one_of(st.sampled_from([b"a", b"b", b"general.alignment", b"split.count"]), st.binary(max_size=6))


@st.composite
def odd_keys(draw):
    kind = draw(types32)
    if kind == ValueType.ARRAY:
        depth = draw(st.integers(0, 12))
        body = E.pack("IQ", ValueType.ARRAY, draw(st.integers(1, 2))) * depth
        body += E.pack("IQ", draw(types32), draw(counts64)) + draw(st.binary(max_size=24))
    elif kind == ValueType.STRING:
        body = E.pack("Q", draw(counts64)) + draw(st.binary(max_size=6))
    else:
        body = draw(st.binary(min_size=8, max_size=8))[: struct.calcsize("<Q")]
    return E.raw_key(draw(names), kind, body)


@st.composite
def odd_tensors(draw):
    dims = draw(st.lists(st.one_of(st.sampled_from([1, 32, 256]), counts64), max_size=5))
    offset = draw(st.one_of(st.integers(0, 8).map(lambda i: 32 * i), counts64))
    return E.tensor(draw(names), dims, draw(types32), offset)


@examples(100, 20_000)
def test_odd_headers(tmp_path, n_examples):
    path = tmp_path / "m.gguf"

    @given(keys=st.lists(odd_keys(), max_size=3), tensors=st.lists(odd_tensors(), max_size=4), size=counts64)
    def property_(keys, tensors, size):
        path.write_bytes(E.header(keys, tensors) + bytes(2048))
        os.truncate(path, max(path.stat().st_size, min(size, 1 << 36)))
        try_open(path)

    run(property_, n_examples)


text = st.text(st.characters(codec="utf-8"), max_size=12)
u64 = st.integers(0, (1 << 64) - 1)
arrays = st.one_of(
    st.lists(u64, max_size=5).map(lambda v: np.array(v, np.uint64)),
    st.lists(st.integers(-128, 127), max_size=5).map(lambda v: np.array(v, np.int8)),
    st.lists(st.booleans(), max_size=5).map(lambda v: np.array(v, np.bool_)),
    st.lists(st.floats(width=32, allow_nan=False), max_size=5).map(lambda v: np.array(v, np.float32)),
    st.lists(text, max_size=5),
)
values = st.one_of(
    u64,
    st.integers(-(1 << 63), -1),
    st.booleans(),
    st.floats(width=32, allow_nan=False),
    text,
    arrays,
    st.recursive(st.lists(arrays, min_size=1, max_size=3), lambda a: st.lists(a, min_size=1, max_size=3), max_leaves=6),
)


@st.composite
def tensors(draw):
    ggml_type = draw(st.sampled_from(GGMLType))
    outer = draw(st.lists(st.integers(1, 3), max_size=3))
    shape = (*outer, draw(st.integers(1, 2)) * BLOCK_SIZES[ggml_type].elements)
    fill = draw(st.integers(0, 255))
    return ggml_type, shape, bytes([fill]) * tensor_bytes(ggml_type, shape)


def same(ours, wanted) -> bool:
    if isinstance(wanted, np.ndarray):
        return ours.dtype == wanted.dtype and ours.tolist() == wanted.tolist()
    if isinstance(wanted, list):
        return len(ours) == len(wanted) and all(map(same, ours, wanted))
    return type(ours) is type(wanted) and ours == wanted


@examples(80, 5_000)
def test_what_is_written_is_read(tmp_path, n_examples):
    key = text.filter(lambda k: k and not k.startswith(("general.", "split.")))

    @given(
        metadata=st.dictionaries(key, values, max_size=5),
        given_tensors=st.dictionaries(text.filter(bool), tensors(), max_size=5),
        alignment=st.sampled_from([1, 8, 32, 256]),
        version=st.sampled_from([2, 3]),
        data=st.data(),
    )
    def property_(metadata, given_tensors, alignment, version, data):
        n = len(given_tensors)
        first = data.draw(st.integers(0, n))
        split = data.draw(st.sampled_from([None, (first, n - first)]))
        paths = write_gguf(
            tmp_path / "m.gguf", metadata, given_tensors, alignment=alignment, version=version, split=split
        )
        with open_gguf(paths[-1]) as file:
            assert all(same(file.metadata[k], v) for k, v in metadata.items())
            assert list(file.tensors) == list(given_tensors)
            for name, (ggml_type, shape, wanted) in given_tensors.items():
                assert (file.tensors[name].type, file.tensors[name].shape) == (ggml_type, shape)
                assert file.bytes_of(name).tobytes() == wanted

    run(property_, n_examples)


def test_the_checks_can_fail(tmp_path):
    """A bound that nothing can break would show nothing."""
    write_gguf(tmp_path / "m.gguf", {"k": Typed(ValueType.STRING, "x" * 3_000_000)}, {})
    with pytest.raises(AssertionError, match="it allocated"):
        try_open(tmp_path / "m.gguf", peak_bytes=1 << 20)
