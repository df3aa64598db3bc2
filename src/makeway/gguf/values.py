"""Metadata values: the thirteen value types of GGUF and how each becomes a Python value.

Owns the decoding of one value; knows nothing of keys' meanings.
Hazard: numbers stay exact. An array keeps the dtype it has in the file (u64 hash constants do not fit a
float or an int64), and a float32 scalar becomes the Python float of exactly that value.
"""

import struct
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from makeway.gguf.cursor import ARRAY, Cursor
from makeway.gguf.faults import DAMAGED, fault

MAX_DEPTH = 8
"""Most levels of arrays in arrays."""

Value: TypeAlias = int | float | bool | str | NDArray[Any] | list[str] | list["Value"]
"""A metadata value: scalar, string, 1-D read-only array of numbers or bools, list of strings, or a list of
arrays."""


class ValueType(IntEnum):
    """Number of a value type as stored in a GGUF file."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


NUMBER_CODES: dict[ValueType, str] = {
    ValueType.U8: "B",
    ValueType.I8: "b",
    ValueType.U16: "H",
    ValueType.I16: "h",
    ValueType.U32: "I",
    ValueType.I32: "i",
    ValueType.F32: "f",
    ValueType.BOOL: "B",
    ValueType.U64: "Q",
    ValueType.I64: "q",
    ValueType.F64: "d",
}
"""`struct` and numpy code of each number type (numpy reads the same letters, with "<" before them)."""


def read_value_type(cursor: Cursor, what: str) -> ValueType:
    """The next value type number; UserError when there is no such type."""
    at = cursor.pos
    number = cursor.u32(f"the value type of {what}")
    try:
        return ValueType(number)
    except ValueError:
        raise fault(
            cursor.path,
            f"{what} has the unknown value type {number}",
            at=at,
            do=f"{DAMAGED}, or update makeway if it is newer than this version",
        ) from None


def read_value(cursor: Cursor, kind: ValueType, what: str, *, depth: int = 0) -> Value:
    """The next value of type `kind`; `what` names it in errors (for example `key 'general.name'`)."""
    if kind is ValueType.STRING:
        return cursor.string(what)
    if kind is ValueType.ARRAY:
        return _read_array(cursor, what, depth)
    at = cursor.pos
    code = struct.Struct("<" + NUMBER_CODES[kind])
    number: int | float = code.unpack(cursor.take(code.size, what))[0]
    if kind is ValueType.BOOL:
        if number not in (0, 1):
            raise fault(cursor.path, f"{what} is a bool but holds {number}", at=at)
        return bool(number)
    return number


def _read_array(cursor: Cursor, what: str, depth: int) -> Value:
    if depth >= MAX_DEPTH:
        raise fault(cursor.path, f"{what} nests arrays more than {MAX_DEPTH} deep", at=cursor.pos)
    kind = read_value_type(cursor, f"the entries of {what}")
    count = cursor.u64(f"the length of {what}")
    if kind is ValueType.STRING:
        return cursor.strings(count, what)
    if kind is ValueType.ARRAY:
        cursor.claim(count, 12, what, weight=ARRAY)  # type and length of each inner array
        return [_read_array(cursor, what, depth + 1) for _ in range(count)]
    at = cursor.pos
    dtype = np.dtype("<" + NUMBER_CODES[kind])
    cursor.claim(count, dtype.itemsize, what, weight=0)
    array: NDArray[Any] = np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype)  # read-only
    if kind is ValueType.BOOL:
        if array.size and array.max() > 1:
            raise fault(cursor.path, f"{what} has bools that are not 0 or 1", at=at)
        array = array.view(np.bool_)
    return array
