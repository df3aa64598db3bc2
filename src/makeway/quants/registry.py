"""Which quantised types makeway knows, and decoding of whole rows by type.

Owns the one mapping from type number to class; never reads files.
Hazard: a type the mapping lacks must be refused when a file is loaded, with the tensor's name, not at the
first token.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from makeway.errors import UserError
from makeway.gguf.types import GGMLType
from makeway.quants.base import QuantType
from makeway.quants.codebook4 import IQ4_NL, IQ4_XS, MXFP4, NVFP4
from makeway.quants.iq import IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS
from makeway.quants.k_quants import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
from makeway.quants.legacy import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
from makeway.quants.plain import BF16, F16, F32
from makeway.quants.ternary import TQ1_0, TQ2_0

_ALL: tuple[QuantType, ...] = (
    F32(),
    F16(),
    BF16(),
    Q4_0(),
    Q4_1(),
    Q5_0(),
    Q5_1(),
    Q8_0(),
    Q2_K(),
    Q3_K(),
    Q4_K(),
    Q5_K(),
    Q6_K(),
    IQ1_S(),
    IQ1_M(),
    IQ2_XXS(),
    IQ2_XS(),
    IQ2_S(),
    IQ3_XXS(),
    IQ3_S(),
    IQ4_NL(),
    IQ4_XS(),
    MXFP4(),
    NVFP4(),
    TQ1_0(),
    TQ2_0(),
)

QUANT_TYPES: Mapping[GGMLType, QuantType] = MappingProxyType({q.ggml: q for q in _ALL})
"""Every supported type by its number."""


def quant_type(ggml_type: GGMLType, *, tensor: str) -> QuantType:
    """The class instance of a type; raises UserError that names `tensor` when makeway cannot decode it."""
    try:
        return QUANT_TYPES[ggml_type]
    except KeyError:
        known = ", ".join(sorted(q.ggml.name for q in _ALL))
        raise UserError(
            f"tensor {tensor!r} has type {ggml_type.name}, which is not supported; convert the file to one of {known}"
        ) from None


def decode_rows(raw: Tensor, ggml_type: GGMLType) -> Tensor:
    """Weights of rows of one type: u8 [..., row_bytes] -> f32 [..., n], on the device of `raw`.

    Any strides and offsets; the input is never written to, and only for F32 may the result share its memory.
    Raises ValueError when rows are not u8 or no whole number of blocks, UserError for an unsupported type.
    """
    quant = quant_type(ggml_type, tensor="(rows)")
    if raw.dtype != torch.uint8:
        raise ValueError(f"rows must be uint8, not {raw.dtype}")
    n_blocks, rest = divmod(raw.shape[-1], quant.block_bytes)
    if rest:
        raise ValueError(f"{raw.shape[-1]} bytes are no multiple of the {ggml_type.name} block {quant.block_bytes}")
    weights = quant.decode(raw.reshape(-1, quant.block_bytes))
    return weights.reshape(*raw.shape[:-1], n_blocks * quant.block_elements)
