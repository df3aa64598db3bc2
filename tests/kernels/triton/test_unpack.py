import pytest
import torch
import triton
import triton.language as tl

from makeway.gguf.types import BLOCK_SIZES, GGMLType
from makeway.kernels.triton.unpack import PLANES, code_table, plane_order, plane_values, planes_for, weight_order
from makeway.quants import decode_rows
from tests.quants.blocks import assert_same_bits, random_blocks


@triton.jit
def _decode(
    raw,
    out,
    table,
    row_bytes,
    cols,
    UNPACK: tl.constexpr,
    R: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    PLANE_ORDER: tl.constexpr,
):
    row = tl.arange(0, R)[:, None]
    step = tl.program_id(0)
    planes = UNPACK(raw + row * row_bytes, step, table)
    for p in tl.static_range(STEP // WIDTH):
        values = plane_values(planes[p], BIAS, HAS_SCALE, HAS_SHIFT, PLANE_ORDER)
        tl.store(out + row * cols + step * STEP + p * WIDTH + tl.arange(0, WIDTH)[None, :], values)


@triton.jit
def _round_trip(x, out, R: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.arange(0, R)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(out + at, weight_order(plane_order(tl.load(x + at))))


def _rows(kind, n_blocks, device):
    """16 rows of random bytes whose scales are finite (a code times inf would be compared as NaN)."""
    blocks = random_blocks(kind, 16 * n_blocks)
    finite = decode_rows(blocks, kind).isfinite().all(1)
    blocks = blocks[finite]
    chosen = blocks[torch.arange(16 * n_blocks) % blocks.shape[0]]
    return chosen.reshape(16, -1).contiguous().to(device)


def _run(raw, kind, planes):
    cols = raw.shape[1] // BLOCK_SIZES[kind].n_bytes * BLOCK_SIZES[kind].elements
    out = torch.full((raw.shape[0], cols), torch.nan, device=raw.device)
    _decode[(cols // planes.step,)](
        raw,
        out,
        code_table(raw.device),
        raw.shape[1],
        cols,
        UNPACK=planes.unpack,
        R=raw.shape[0],
        STEP=planes.step,
        WIDTH=planes.width,
        BIAS=planes.bias,
        HAS_SCALE=planes.has_scale,
        HAS_SHIFT=planes.has_shift,
        PLANE_ORDER=planes.plane_order,
        enable_fp_fusion=False,
    )
    return out


def _check(kind, planes, n_blocks, device):
    raw = _rows(kind, n_blocks, device)
    # adding 0 drops the sign of zeros: E2M1 has a negative zero, and Triton 3.6 negates by subtracting from 0
    assert_same_bits(_run(raw, kind, planes) + 0.0, decode_rows(raw, kind) + 0.0)


@pytest.mark.parametrize("kind", PLANES, ids=lambda k: k.name)
def test_every_type_decodes_to_the_bits_of_the_reference(kind, device):
    _check(kind, PLANES[kind], 64 if BLOCK_SIZES[kind].elements == 1 else 3 if PLANES[kind].step == 32 else 1, device)


WIDE = [kind for kind in PLANES if planes_for(kind, 1024) is not PLANES[kind]]


@pytest.mark.parametrize("kind", WIDE, ids=lambda k: k.name)
def test_blocks_taken_by_twos_and_fours_decode_alike(kind, device):
    wide = planes_for(kind, 1024)
    n_blocks = max(2, wide.step // BLOCK_SIZES[kind].elements)
    assert n_blocks * BLOCK_SIZES[kind].n_bytes % 4 == 0
    _check(kind, wide, n_blocks, device)


def test_odd_numbers_of_blocks_are_not_taken_by_twos():
    assert planes_for(GGMLType.Q6_K, 768) is PLANES[GGMLType.Q6_K]
    assert planes_for(GGMLType.Q6_K, 2560) is not PLANES[GGMLType.Q6_K]
    assert planes_for(GGMLType.Q4_K, 2560) is PLANES[GGMLType.Q4_K]


def test_plane_order_and_weight_order_are_inverse(device):
    x = torch.arange(16 * 32, dtype=torch.float32, device=device).view(16, 32)
    out = torch.empty_like(x)
    _round_trip[(1,)](x, out, R=16, WIDTH=32)
    assert torch.equal(out, x)


def test_the_table_says_how_many_planes_a_function_returns(device):
    for kind, planes in PLANES.items():
        block = BLOCK_SIZES[kind]
        assert planes.step % block.elements == 0 or block.elements % planes.step == 0, kind
        assert planes.step % planes.width == 0, kind
        assert planes.align == 4 or block.n_bytes % 4, kind
