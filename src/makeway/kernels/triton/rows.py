"""Single rows of a table, decoded to float32: embeddings and n-grams of a step's tokens.

Owns no memory. Never rounds: the values are those of `quants/`, bit by bit up to the sign of zeros.
Hazard: compiled without fused multiply-adds, for the order of float32 operations is part of a quantised format.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.triton.launch import begin, overlap
from makeway.kernels.triton.linear import can_multiply
from makeway.kernels.triton.quick import quick
from makeway.kernels.triton.unpack import code_table, plane_values, planes_for
from makeway.kernels.weight import Weight

ROWS = 8  # of a program


@quick
@triton.jit(do_not_specialize=["n_rows"])
def rows_kernel(
    raw,
    out,
    table,
    row_bytes,
    n_rows,
    n_cols,
    UNPACK: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    PLANE_ORDER: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """STEP values of ROWS rows."""
    begin(PDL)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    step = tl.program_id(1)
    planes = UNPACK(raw + tl.minimum(row, n_rows - 1) * row_bytes, step, table)
    target = out + row * n_cols + step * STEP + tl.arange(0, WIDTH)[None, :]
    for p in tl.static_range(STEP // WIDTH):
        values = plane_values(planes[p], BIAS, HAS_SCALE, HAS_SHIFT, PLANE_ORDER)
        tl.store(target + p * WIDTH, values, mask=row < n_rows)


def decode(rows: Weight) -> Tensor:
    """All rows of a small matrix on the device: f32 [n_rows, n_cols]; of a type and width that `linear` has."""
    assert can_multiply(rows)
    assert rows.raw.is_contiguous()
    assert rows.raw.data_ptr() % 16 == 0
    out = torch.empty((rows.n_rows, rows.n_cols), dtype=torch.float32, device=rows.raw.device)
    if out.numel() == 0:
        return out
    planes = planes_for(rows.type, rows.n_cols)
    arguments = planes.arguments()
    del arguments["GROUP"], arguments["PARTS"]
    rows_kernel[(triton.cdiv(rows.n_rows, ROWS), rows.n_cols // planes.step)](
        rows.raw,
        out,
        code_table(out.device),
        rows.raw.shape[1],
        rows.n_rows,
        rows.n_cols,
        **arguments,
        ROWS=ROWS,
        num_warps=1,
        enable_fp_fusion=False,
        **overlap(out.device),
    )
    return out
