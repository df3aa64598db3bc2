"""The metadata of a model: a read-only mapping with typed getters for the code that builds a model from it.

Owns the checks of kind and presence; never knows what a key means and never has defaults of its own.
Hazard: `metadata[key]` gives whatever the file holds; code that needs a certain kind uses a getter, so that
a wrong file is the user's error with a key in it and not a crash far away.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, overload

import numpy as np

from makeway.errors import UserError
from makeway.gguf.cursor import MAX_ITEMS
from makeway.gguf.faults import fault, show
from makeway.gguf.values import Value

T = TypeVar("T")
D = TypeVar("D")
_REQUIRED: Any = object()
_RECONVERT = "convert the model again with a current converter, or use another file of it"


class Metadata(Mapping[str, Value]):
    """Key -> value of one GGUF file, in file order.

    Getters: without `default` a missing key is a UserError; a value of another kind always is. The plural
    getters take arrays; with `length` the array must have that many entries and a single value stands for
    `length` equal ones (the way per-layer values are stored when all layers agree).
    """

    def __init__(self, values: dict[str, Value], path: str) -> None:
        self._values = values
        self._path = path

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Metadata({len(self)} keys of {show(self._path, 4096)})"

    @overload
    def get_int(self, key: str) -> int: ...
    @overload
    def get_int(self, key: str, default: D) -> int | D: ...
    def get_int(self, key: str, default: Any = _REQUIRED) -> Any:
        """An integer (never a bool or a float)."""
        return self._one(key, default, _as_int, "an integer")

    @overload
    def get_float(self, key: str) -> float: ...
    @overload
    def get_float(self, key: str, default: D) -> float | D: ...
    def get_float(self, key: str, default: Any = _REQUIRED) -> Any:
        """A finite float; an integer in the file is taken as one."""
        return self._one(key, default, _as_float, "a finite number")

    @overload
    def get_bool(self, key: str) -> bool: ...
    @overload
    def get_bool(self, key: str, default: D) -> bool | D: ...
    def get_bool(self, key: str, default: Any = _REQUIRED) -> Any:
        """A bool (never an integer)."""
        return self._one(key, default, _as_bool, "a bool")

    @overload
    def get_str(self, key: str) -> str: ...
    @overload
    def get_str(self, key: str, default: D) -> str | D: ...
    def get_str(self, key: str, default: Any = _REQUIRED) -> Any:
        """A string."""
        return self._one(key, default, _as_str, "a string")

    @overload
    def get_ints(self, key: str, *, length: int | None = None) -> tuple[int, ...]: ...
    @overload
    def get_ints(self, key: str, default: D, *, length: int | None = None) -> tuple[int, ...] | D: ...
    def get_ints(self, key: str, default: Any = _REQUIRED, *, length: int | None = None) -> Any:
        """Integers, exact whatever their width."""
        return self._many(key, default, _as_int, "integers", length)

    @overload
    def get_floats(self, key: str, *, length: int | None = None) -> tuple[float, ...]: ...
    @overload
    def get_floats(self, key: str, default: D, *, length: int | None = None) -> tuple[float, ...] | D: ...
    def get_floats(self, key: str, default: Any = _REQUIRED, *, length: int | None = None) -> Any:
        """Finite floats."""
        return self._many(key, default, _as_float, "finite numbers", length)

    @overload
    def get_bools(self, key: str, *, length: int | None = None) -> tuple[bool, ...]: ...
    @overload
    def get_bools(self, key: str, default: D, *, length: int | None = None) -> tuple[bool, ...] | D: ...
    def get_bools(self, key: str, default: Any = _REQUIRED, *, length: int | None = None) -> Any:
        """Bools."""
        return self._many(key, default, _as_bool, "bools", length)

    @overload
    def get_strs(self, key: str, *, length: int | None = None) -> tuple[str, ...]: ...
    @overload
    def get_strs(self, key: str, default: D, *, length: int | None = None) -> tuple[str, ...] | D: ...
    def get_strs(self, key: str, default: Any = _REQUIRED, *, length: int | None = None) -> Any:
        """Strings."""
        return self._many(key, default, _as_str, "strings", length)

    def _one(self, key: str, default: Any, convert: Callable[[object], T], wanted: str) -> Any:
        if key not in self._values:
            return self._default(key, default, wanted)
        try:
            return convert(self._values[key])
        except TypeError:
            raise self._wrong(key, wanted) from None

    def _many(self, key: str, default: Any, convert: Callable[[object], T], wanted: str, length: int | None) -> Any:
        if key not in self._values:
            return self._default(key, default, f"an array of {wanted}")
        value = self._values[key]
        wanted = f"an array of {wanted}" if length is None else f"an array of {length} {wanted}"
        entries: list[Any]
        if isinstance(value, np.ndarray):
            entries = value.tolist()
        elif isinstance(value, list):
            entries = value
        elif length is not None and length <= MAX_ITEMS:  # the length may come from the file, too
            entries = [value] * length
        else:
            raise self._wrong(key, wanted)
        if length is not None and len(entries) != length:
            raise self._wrong(key, wanted)
        try:
            return tuple([convert(v) for v in entries])
        except TypeError:
            raise self._wrong(key, wanted) from None

    def _default(self, key: str, default: Any, wanted: str) -> Any:
        if default is _REQUIRED:
            raise fault(self._path, f"key '{show(key)}' is missing (it should hold {wanted})", do=_RECONVERT)
        return default

    def _wrong(self, key: str, wanted: str) -> UserError:
        found = describe(self._values[key])
        return fault(self._path, f"key '{show(key)}' should hold {wanted}, but is {found}", do=_RECONVERT)


def describe(value: Value) -> str:
    """What a value is, short enough for an error message: `the integer 3`, `an array of 48 uint64`."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.size} {value.dtype.name}"
    if isinstance(value, list):
        return f"an array of {len(value)} {'strings' if value and isinstance(value[0], str) else 'entries'}"
    if isinstance(value, str):
        return f"the string '{show(value, 40)}'"
    kind = "bool" if isinstance(value, bool) else "integer" if isinstance(value, int) else "float"
    return f"the {kind} {value}"


def _as_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value


def _as_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError
    return float(value)


def _as_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _as_str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value
