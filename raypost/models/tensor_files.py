"""What the weight files of a Hugging Face folder hold, from their headers alone: names and shapes, no weights.

Invariant: a file whose header promises other bytes than it has is refused.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from raypost.errors import ConfigError

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""Longest header that the safetensors library reads."""

_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
"""Bytes of an element, by the names of safetensors."""
_LFS = b"version https://git-lfs"

Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by name."""


def read_shapes(folder: Path) -> Shapes | None:
    """Return the shape of every tensor of a model; None where its weights are in PyTorch's own format.

    Raises ConfigError naming the file that is missing, truncated or no weights at all.
    """
    if (folder / INDEX).is_file():
        return _of_index(folder)
    if (folder / WHOLE).is_file():
        return _of_file(folder / WHOLE)
    if others := sorted(folder.glob("pytorch_model*.bin")):
        for path in others:
            _refuse_stub(path, path.open("rb").read(len(_LFS)))
        return None
    raise ConfigError(
        f"model folder {folder} has no weights: neither {WHOLE} nor {INDEX}; save them with "
        "model.save_pretrained(folder), or copy the files that are missing"
    )


def _of_index(folder: Path) -> Shapes:
    file = folder / INDEX
    try:
        places = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is no index of weights ({error}): copy it again") from error
    shapes: Shapes = {}
    for name in names:
        path = folder / str(name)
        if not path.is_file():
            raise ConfigError(
                f"{path} is missing, which {INDEX} names: copy it, of {len(names)} files of weights"
            )
        shapes |= _of_file(path)
    if lost := sorted(set(places) - set(shapes)):
        raise ConfigError(
            f"{file} names {lost[0]!r} and {len(lost) - 1} more tensors that its files do not have: copy the files of "
            "one model"
        )
    return shapes


def _of_file(path: Path) -> Shapes:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        _refuse_stub(path, start + file.read(len(_LFS) - 8))
        length = int.from_bytes(start, "little")
        if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise ConfigError(f"{path} ({size} bytes) is no safetensors file, or truncated: copy it again")
        file.seek(8)
        header = file.read(length)
    try:
        entries = {name: one for name, one in json.loads(header).items() if name != "__metadata__"}
        shapes = {name: tuple(map(int, one["shape"])) for name, one in entries.items()}
        ends = [_end(name, one) for name, one in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} has a header that is no safetensors header ({error}): copy it again"
        ) from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        what = "truncated" if size < expected else "longer than its header says"
        raise ConfigError(f"{path} is {what}: {size} bytes of {expected}; copy it again")
    return shapes


def _end(name: str, entry: dict[str, Any]) -> int:
    begin, end = map(int, entry["data_offsets"])
    width = _BYTES.get(entry["dtype"])
    if width is not None and end - begin != width * math.prod(entry["shape"]):
        raise ValueError(f"{name} has {end - begin} bytes for {entry['dtype']} {entry['shape']}")
    return end


def _refuse_stub(path: Path, beginning: bytes) -> None:
    if not beginning:
        raise ConfigError(f"{path} is empty: copy the weights again")
    if beginning.startswith(_LFS):
        raise ConfigError(f"{path} is a git-lfs pointer and no weights: run `git lfs pull` in its repository")
