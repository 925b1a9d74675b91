"""Plain state in files: what a role saves, as JSON beside its arrays. Reading it never runs code from the file."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raypost.checkpoint.files import fsync, naming
from raypost.errors import CheckpointError


class EncodedState(NamedTuple):
    """A state as it is written: it changes no more, but for its arrays."""

    name: str
    plain: Any
    arrays: list[np.ndarray]

    def write(self, path: Path) -> None:
        """Write it below `path`, durably. Raises OSError naming the file."""
        with naming(path / f"{self.name}.npy") as file, file.open("wb") as handle:
            for array in self.arrays:
                np.save(handle, array, allow_pickle=False)
        with naming(path / f"{self.name}.json") as file:
            file.write_text(json.dumps(self.plain))
        for suffix in ("npy", "json"):
            fsync(path / f"{self.name}.{suffix}")


def encode_state(name: str, state: Any) -> EncodedState:
    """Return a state, ready to be written as `name`.json, with its arrays one after the other in `name`.npy.

    `state` is None, bool, int, float, str, bytes, lists, tuples, dicts (any plain keys), NumPy arrays
    and scalars, and raypost's own dataclasses and enums, nested at will. Raises CheckpointError naming
    the place of anything else.
    """
    arrays: list[np.ndarray] = []
    return EncodedState(name, _encode(state, arrays, name), arrays)


def save_state(path: Path, name: str, state: Any) -> None:
    """Write a state below `path`, durably. Raises as `encode_state` and `EncodedState.write` do."""
    encode_state(name, state).write(path)


def load_state(path: Path, name: str) -> Any:
    """Return what `save_state` wrote, with the same types; NumPy scalars come back as Python numbers.

    Raises CheckpointError.
    """
    if (path / f"{name}.npz").exists():
        raise CheckpointError(
            f"state {name!r} in {path} is of an earlier format, with its arrays in {name}.npz: continue the "
            "run with the version that saved it, or begin another one"
        )
    try:
        encoded = json.loads((path / f"{name}.json").read_text())
        arrays = []
        with (path / f"{name}.npy").open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(0)
            while file.tell() < end:
                arrays.append(np.load(file, allow_pickle=False))
        return _decode(encoded, arrays)
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ImportError,
        RecursionError,
    ) as error:
        raise CheckpointError(f"state {name!r} in {path} cannot be read: {error!r}") from error


def _encode(value: Any, arrays: list[np.ndarray], where: str) -> Any:
    if isinstance(value, Enum):
        return {"$enum": _class_name(type(value), where), "value": value.value}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (np.ndarray, bytes)):
        array = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value
        if array.dtype.hasobject:
            raise CheckpointError(f"{where} is an array of Python objects: give it a NumPy dtype")
        arrays.append(array)
        return {"$bytes" if isinstance(value, bytes) else "$array": len(arrays) - 1}
    if isinstance(value, list):
        return [_encode(item, arrays, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [_encode(item, arrays, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, arrays, f"{where}.{key}") for key, item in value.items()}
        pairs = [[_encode(key, arrays, where), _encode(item, arrays, f"{where}[{key!r}]")]
                 for key, item in value.items()]  # fmt: skip
        return {"$dict": pairs}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        encoded = {name: _encode(item, arrays, f"{where}.{name}") for name, item in fields.items()}
        return {"$class": _class_name(type(value), where), "fields": encoded}
    raise CheckpointError(f"{where} is a {type(value).__name__}: only plain data and arrays can be saved")


def _class_name(cls: type, where: str) -> str:
    if cls.__module__.partition(".")[0] != "raypost" or "." in cls.__qualname__:
        raise CheckpointError(f"{where} is a {cls.__module__}.{cls.__qualname__}, which is not raypost's own")
    return f"{cls.__module__}:{cls.__name__}"


def _class_of(name: str) -> type:
    module, _, attribute = name.partition(":")
    if module.partition(".")[0] != "raypost":
        raise ValueError(f"{name!r} is not raypost's own")
    cls = getattr(importlib.import_module(module), attribute)
    if not isinstance(cls, type) or not (dataclasses.is_dataclass(cls) or issubclass(cls, Enum)):
        raise ValueError(f"{name!r} is no record")
    return cls


def _decode(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if "$array" in value:
        return arrays[value["$array"]]
    if "$bytes" in value:
        return arrays[value["$bytes"]].tobytes()
    if "$tuple" in value:
        return tuple(_decode(item, arrays) for item in value["$tuple"])
    if "$dict" in value:
        return {_decode(key, arrays): _decode(item, arrays) for key, item in value["$dict"]}
    if "$enum" in value:
        return _class_of(value["$enum"])(value["value"])
    if "$class" in value:
        fields = {name: _decode(item, arrays) for name, item in value["fields"].items()}
        return _class_of(value["$class"])(**fields)
    return {key: _decode(item, arrays) for key, item in value.items()}
