import mmap
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from makeway.errors import UserError
from makeway.gguf.types import GGMLType
from makeway.quants import QUANT_TYPES, decode_rows, quant_type
from tests.quants.blocks import ALL_TYPES, assert_same_bits, gguf_values, golden, random_blocks

EACH_TYPE = pytest.mark.parametrize("ggml_type", ALL_TYPES, ids=lambda t: t.name)
QUANTISED = [t for t in ALL_TYPES if t != GGMLType.F32]


def test_every_promised_type_is_there():
    promised = """F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S
        IQ3_XXS IQ3_S IQ4_NL IQ4_XS MXFP4 NVFP4 TQ1_0 TQ2_0"""
    assert {t.name for t in QUANT_TYPES} == set(promised.split())


@pytest.mark.parametrize("ggml_type", QUANTISED, ids=lambda t: t.name)
def test_golden_blocks_bit_for_bit(ggml_type):
    data = golden()
    kinds = [""] if ggml_type in (GGMLType.F16, GGMLType.BF16) else ["", "_rand"]
    for kind in kinds:
        raw = torch.from_numpy(data[f"{ggml_type.name}{kind}_raw"])
        expected = torch.from_numpy(data[f"{ggml_type.name}{kind}_val"])
        assert_same_bits(quant_type(ggml_type, tensor="t").decode(raw), expected)


@EACH_TYPE
def test_random_bytes_like_the_gguf_package(ggml_type):
    blocks = random_blocks(ggml_type, 300)
    assert_same_bits(QUANT_TYPES[ggml_type].decode(blocks), gguf_values(blocks, ggml_type))


@pytest.mark.parametrize("ggml_type", [GGMLType.MXFP4, GGMLType.NVFP4], ids=lambda t: t.name)
def test_every_scale_byte_like_the_gguf_package(ggml_type):
    blocks = random_blocks(ggml_type, 256)
    blocks[:, : QUANT_TYPES[ggml_type].FIELDS[0].n_bytes] = torch.arange(256, dtype=torch.uint8)[:, None]
    assert_same_bits(QUANT_TYPES[ggml_type].decode(blocks), gguf_values(blocks, ggml_type))


@EACH_TYPE
@pytest.mark.parametrize("offset", [1, 2, 3, 5])
def test_odd_offsets(ggml_type, offset):
    quant = QUANT_TYPES[ggml_type]
    for n in (1, 4):
        blocks = random_blocks(ggml_type, n)
        room = torch.zeros(offset + blocks.numel(), dtype=torch.uint8)
        room[offset:] = blocks.flatten()
        moved = room[offset:].view(n, quant.block_bytes)
        assert_same_bits(quant.decode(moved), quant.decode(blocks))
        assert_same_bits(decode_rows(room[offset:], ggml_type), quant.decode(blocks).flatten())


@EACH_TYPE
def test_misaligned_memory_behind_an_aligned_tensor(ggml_type):
    blocks = random_blocks(ggml_type, 3)
    room = np.zeros(blocks.numel() + 1, dtype=np.uint8)
    room[1:] = blocks.flatten().numpy()
    moved = torch.from_numpy(room[1:]).view(blocks.shape)  # storage offset 0, odd address
    quant = QUANT_TYPES[ggml_type]
    assert_same_bits(quant.decode(moved), quant.decode(blocks))


@EACH_TYPE
def test_strided_rows_and_blocks(ggml_type):
    quant = QUANT_TYPES[ggml_type]
    n_bytes = quant.block_bytes
    blocks = random_blocks(ggml_type, 24)
    whole = quant.decode(blocks)
    assert_same_bits(quant.decode(blocks[::3]), whole[::3])
    assert_same_bits(quant.decode(blocks.t().contiguous().t()), whole)  # bytes of a block lie apart
    rows = blocks.view(6, 4 * n_bytes)[::2, n_bytes : 3 * n_bytes]
    expected = whole.view(6, 4 * quant.block_elements)[::2, quant.block_elements : 3 * quant.block_elements]
    assert_same_bits(decode_rows(rows, ggml_type), expected)
    expanded = blocks[:1].expand(5, n_bytes)
    assert_same_bits(quant.decode(expanded), whole[:1].expand(5, quant.block_elements))


@EACH_TYPE
def test_the_input_is_never_written_to(ggml_type, tmp_path):
    blocks = random_blocks(ggml_type, 8)
    path = tmp_path / "blocks"
    path.write_bytes(b"x" + blocks.numpy().tobytes())
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # a write would kill the process
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        raw = torch.frombuffer(mapped, dtype=torch.uint8)
    for start in (0, 1):
        values = decode_rows(raw[start : start + blocks.numel()].view(8, -1), ggml_type)
        assert values.shape == (8, QUANT_TYPES[ggml_type].block_elements)
    before = blocks.clone()
    QUANT_TYPES[ggml_type].decode(blocks)
    assert torch.equal(blocks, before)


@EACH_TYPE
def test_empty_input(ggml_type):
    quant = QUANT_TYPES[ggml_type]
    empty = torch.zeros((0, quant.block_bytes), dtype=torch.uint8)
    assert quant.decode(empty).shape == (0, quant.block_elements)
    assert decode_rows(empty.view(0, quant.block_bytes), ggml_type).shape == (0, quant.block_elements)
    assert decode_rows(torch.zeros((3, 0), dtype=torch.uint8), ggml_type).shape == (3, 0)
    assert decode_rows(torch.zeros((2, 0, quant.block_bytes), dtype=torch.uint8), ggml_type).numel() == 0


@settings(deadline=None, max_examples=80)
@given(
    ggml_type=st.sampled_from(ALL_TYPES),
    shape=st.lists(st.integers(1, 4), max_size=3),
    n_blocks=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_rows_of_any_shape_are_their_blocks(ggml_type, shape, n_blocks, seed):
    quant = QUANT_TYPES[ggml_type]
    n = int(np.prod(shape, dtype=int)) * n_blocks
    blocks = random_blocks(ggml_type, n, seed)
    rows = decode_rows(blocks.view(*shape, n_blocks * quant.block_bytes), ggml_type)
    expected = gguf_values(blocks, ggml_type).view(*shape, n_blocks * quant.block_elements)
    assert_same_bits(rows, expected)


@EACH_TYPE
def test_a_block_decodes_the_same_alone_and_among_many(ggml_type):
    blocks = random_blocks(ggml_type, 600)
    whole = QUANT_TYPES[ggml_type].decode(blocks)
    for i in (0, 1, 299, 599):
        assert_same_bits(QUANT_TYPES[ggml_type].decode(blocks[i : i + 1]), whole[i : i + 1])


@pytest.mark.parametrize("ggml_type", [t for t in GGMLType if t not in QUANT_TYPES], ids=lambda t: t.name)
def test_an_unsupported_type_is_refused_with_the_tensor_and_the_type(ggml_type):
    with pytest.raises(UserError, match=rf"blk\.3\.ffn_up_exps\.weight.*{ggml_type.name}.*not supported.*Q4_K"):
        quant_type(ggml_type, tensor="blk.3.ffn_up_exps.weight")
    with pytest.raises(UserError, match=ggml_type.name):
        decode_rows(torch.zeros(64, dtype=torch.uint8), ggml_type)


def test_rows_that_are_no_blocks_are_refused():
    with pytest.raises(ValueError, match="145 bytes are no multiple of the Q4_K block 144"):
        decode_rows(torch.zeros((2, 145), dtype=torch.uint8), GGMLType.Q4_K)
    with pytest.raises(ValueError, match=r"uint8, not torch\.int8"):
        decode_rows(torch.zeros((2, 144), dtype=torch.int8), GGMLType.Q4_K)


def test_the_mapping_cannot_be_changed():
    with pytest.raises(TypeError):
        QUANT_TYPES[GGMLType.Q4_0] = QUANT_TYPES[GGMLType.Q8_0]  # type: ignore[index]
