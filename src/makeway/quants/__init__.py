"""Quantised tensor types: one class per GGML type with its block layout as data and its reference decode.

Owns what the bytes of a tensor mean; never decides when or where they are decoded.
Hazard: decode is the specification that kernels are tested against: its bits must not change.
"""

from makeway.quants.base import Field, QuantType
from makeway.quants.encode import ENCODERS, encode_rows
from makeway.quants.registry import QUANT_TYPES, decode_rows, quant_type

__all__ = ["ENCODERS", "QUANT_TYPES", "Field", "QuantType", "decode_rows", "encode_rows", "quant_type"]
