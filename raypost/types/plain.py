"""Plain data, such as a prompt's metadata, as bytes: numbers, texts, dates, lists, dicts and NumPy arrays.

    length of the JSON | JSON | the bytes of all arrays and byte strings, one after the other

What JSON has is JSON as it is. Anything else is `{"$": kind, "v": what it is made of}`.

Invariants: `from_bytes(to_bytes(value))` equals `value`; bytes of any origin make plain data, or are refused, and run
no code: there is no name of a class in them, only the kinds below.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from raypost.types.rollout import Status

_SCALARS, _TEXT = frozenset({str, int, float, bool, type(None)}), frozenset({str})
_LENGTH_BYTES = 4
_KINDS = "biufcmMSU"
"""Of NumPy's types: those that hold plain data."""


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__qualname__} is no plain data")


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_number).encode


def to_bytes(value: Any, *known: Any) -> bytes:
    """Return plain data as bytes. Raises TypeError for anything else.

    `known` are JSON values that stand beside it, and come back as JSON has them: a tuple as a list, NumPy's numbers as
    Python's.
    """
    blobs: list[bytes] = []
    try:
        text = _encode([0, value, *known]) if _is_json(value) else ""
        if not text or '"$' in text:
            text = _encode([1, _tagged(value, blobs), *known])
    except RecursionError as error:
        raise TypeError("metadata must be plain data, and is nested too deeply") from error
    data = text.encode("utf-8", "surrogatepass")
    return b"".join((len(data).to_bytes(_LENGTH_BYTES, "little"), data, *blobs))


def from_bytes(data: bytes | memoryview) -> list[Any]:
    """Return [value, *known] of what `to_bytes` encoded. Raises ValueError for any other bytes."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        is_tagged, value, *known = json.loads(bytes(data[_LENGTH_BYTES:end]))
        return [_Reader(data, end).value(value) if is_tagged else value, *known]
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"these bytes are no plain data: {error!r:.200}") from error


def _is_json(value: Any) -> bool:
    """Return whether JSON gives the same value back, types included."""
    kind = type(value)
    if kind is dict:
        if not _TEXT.issuperset(map(type, value)):
            return False
        value = value.values()
    elif kind is not list:
        return kind in _SCALARS
    return _SCALARS.issuperset(map(type, value)) or all(map(_is_json, value))


# ---------------------------------------------------------------- what JSON does not have


def _tagged(value: Any, blobs: list[bytes]) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is list:
        return [_tagged(one, blobs) for one in value]
    if kind is dict and all(type(key) is str and key[:1] != "$" for key in value):
        return {key: _tagged(one, blobs) for key, one in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in _KINDS:
            raise TypeError(f"metadata holds an array of {value.dtype}: it must be plain data")
        blobs.append(value.tobytes())
        shape = list(value.shape) if kind is np.ndarray else None
        return {"$": "array", "v": [value.dtype.str, shape, len(blobs[-1])]}
    if kind in (bytes, bytearray):
        blobs.append(bytes(value))
        return {"$": kind.__name__, "v": len(value)}
    if kind not in _WRITERS:
        raise TypeError(
            f"metadata holds a {kind.__module__}.{kind.__qualname__}: it must be plain data, that is numbers, texts, "
            "dates, lists, dicts and NumPy arrays"
        )
    if kind is datetime and type(value.tzinfo) not in (timezone, type(None)):
        raise TypeError(
            f"metadata holds a datetime of time zone {value.tzinfo!r}: it must be plain data, in UTC"
        )
    return {"$": kind.__name__, "v": _tagged(_WRITERS[kind](value), blobs)}


_WRITERS: dict[type, Callable[[Any], Any]] = {
    dict: lambda value: [list(pair) for pair in value.items()],
    OrderedDict: lambda value: [list(pair) for pair in value.items()],
    tuple: list,
    set: list,
    frozenset: list,
    complex: lambda value: [value.real, value.imag],
    date: date.isoformat,
    datetime: datetime.isoformat,
    time: time.isoformat,
    timedelta: lambda value: [value.days, value.seconds, value.microseconds],
    Decimal: str,
    Fraction: lambda value: [value.numerator, value.denominator],
    UUID: lambda value: value.hex,
    Status: lambda value: value.value,
}
_READERS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "complex": lambda parts: complex(*parts),
    "date": date.fromisoformat,
    "datetime": datetime.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": lambda parts: timedelta(*parts),
    "Decimal": Decimal,
    "Fraction": lambda parts: Fraction(*parts),
    "UUID": UUID,
    "Status": Status,
}


class _Reader:
    """Reads tagged values in the order in which they were written: so their bytes stand."""

    def __init__(self, data: bytes | memoryview, at: int) -> None:
        """Take the bytes of arrays and byte strings from `at` on."""
        self._data, self._at = memoryview(data), at

    def value(self, value: Any) -> Any:
        """Return what a value stands for."""
        if type(value) is list:
            return [self.value(one) for one in value]
        if type(value) is not dict:
            return value
        if "$" not in value:
            return {key: self.value(one) for key, one in value.items()}
        kind, made_of = value["$"], value["v"]
        if kind == "array":
            return self._array(*made_of)
        if kind in ("bytes", "bytearray"):
            taken = self._take(made_of)
            return bytes(taken) if kind == "bytes" else bytearray(taken)
        return _READERS[kind](self.value(made_of))

    def _array(self, name: str, shape: Sequence[int] | None, nbytes: int) -> NDArray[Any] | np.generic:
        dtype = np.dtype(name)
        if dtype.kind not in _KINDS or dtype.itemsize * math.prod(shape or ()) != nbytes:
            raise ValueError(f"{nbytes} bytes are no {dtype} of shape {shape}")
        taken = np.frombuffer(self._take(nbytes), dtype) if nbytes else np.empty(0, dtype)
        array = taken.reshape(shape if shape is not None else 1).copy()
        return array if shape is not None else array[0]

    def _take(self, nbytes: int) -> memoryview:
        if not 0 <= nbytes <= len(self._data) - self._at:
            raise ValueError(f"{nbytes} bytes are not there")
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]
