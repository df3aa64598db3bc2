"""Kernels run on the GPU where there is one, else through Triton's interpreter (set before triton is imported)."""

import os
import warnings

import numpy as np
import pytest
import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"

    import triton.language as tl
    from triton.runtime import interpreter

    _convert = interpreter._convert_float

    def _convert_float(data, source, target, rounding):
        """The interpreter's own conversions of bf16 get subnormal numbers wrong; torch's do not."""
        if (source, target) == (tl.bfloat16, tl.float32):
            return (data.astype(np.uint32) << 16).view(np.float32)
        if (source, target) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(data).view(np.float32)).bfloat16()
            return rounded.view(torch.int16).numpy().view(np.uint16)
        return _convert(data, source, target, rounding)

    def _numbers(handle):
        """The interpreter keeps bf16 as bit patterns, and computes with the patterns: widen them to f32 first."""
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        return _convert_float(handle.data, tl.bfloat16, tl.float32, None)

    def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        product = np.matmul(_numbers(a), _numbers(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    _binary_op = interpreter.InterpreterBuilder.binary_op

    def _binary(self, lhs, rhs, op):
        if lhs.dtype.scalar != tl.bfloat16:
            return _binary_op(self, lhs, rhs, op)
        exact = interpreter.TensorHandle(op(_numbers(lhs), _numbers(rhs)), tl.float32)
        return self.create_fp_trunc(exact, tl.bfloat16)

    interpreter._convert_float = _convert_float
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpreterBuilder.binary_op = _binary


@pytest.fixture(autouse=True)
def _floats_as_on_a_gpu():
    """What a kernel computes and drops (a column that is no row, exp of a large number, a row that is padding and holds
    what was in memory before) warns on no GPU."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice encountered", RuntimeWarning)
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")
