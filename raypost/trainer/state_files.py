"""Trainer state on disk: every rank writes the parts of weights that it keeps, and any ranks read what they need.

    trainer.json                      facts: format, kind of model, shapes of its weights, step
    state-R-of-N.safetensors          KIND/NAME@START, of rank R: elements of a weight from START on, flat, float32

KIND is `master` (the optimizer's weight), `exp_avg`, `exp_avg_sq` or `average`. A part says where it belongs, so
that neither the number of ranks nor the ZeRO stage matters to who reads it. It is data: reading it runs no code.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from raypost.checkpoint import FACTS, fsync
from raypost.errors import CheckpointError

FORMAT = 2
MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")
AVERAGE = "average"
_KEY = re.compile(r"(\w+)/(.+)@(\d+)")
_UPDATES = "updates"


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank keeps of one weight."""

    name: str
    start: int
    """Where its first element is in the flat weight."""
    updates: int
    """Optimizer steps that its moments have seen."""
    values: Mapping[str, Tensor]
    """By kind, flat and equally long."""

    @property
    def num_bytes(self) -> int:
        """Size of its values."""
        return sum(value.numel() * value.element_size() for value in self.values.values())

    def copied(self) -> Part:
        """Return it with values of its own, in main memory."""
        values = {kind: value.detach().to("cpu", copy=True) for kind, value in self.values.items()}
        return replace(self, values=values)


def write_parts(folder: Path, parts: Iterable[Part], rank: int, num_ranks: int) -> None:
    """Write the parts of one rank, durably. Raises OSError naming the file."""
    tensors: dict[str, Tensor] = {}
    updates: dict[str, int] = {}
    for part in parts:
        updates[part.name] = part.updates
        for kind, value in part.values.items():
            tensors[f"{kind}/{part.name}@{part.start}"] = value.detach().contiguous()
    file = folder / f"state-{rank}-of-{num_ranks}.safetensors"
    try:
        save_file(tensors, file, {_UPDATES: json.dumps(updates)})
    except SafetensorError as error:
        raise OSError(f"{file} cannot be written: {error}") from error
    fsync(file)


def write_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write what is true of the state as a whole, durably."""
    file = folder / FACTS
    file.write_text(json.dumps({"format": FORMAT, **facts}))
    fsync(file)


def read_facts(folder: Path) -> dict[str, Any]:
    """Return what `write_facts` was given. Raises CheckpointError, also for a state of another format."""
    file = folder / FACTS
    try:
        facts = json.loads(file.read_text())
        found = facts.get("format", 1)
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if found != FORMAT:
        raise CheckpointError(
            f"{file} is of format {found}, this version reads format {FORMAT}: continue the run with the version "
            "that saved it, or begin another one"
        )
    return dict(facts)


class StoredState:
    """The parts that all ranks wrote, read piece by piece."""

    def __init__(self, folder: Path) -> None:
        """Read what there is, not the values. Raises CheckpointError if the files are no state, or not all there."""
        self._folder = folder
        facts = read_facts(folder)
        self.facts = facts
        try:
            self.shapes = {str(name): tuple(map(int, shape)) for name, shape in facts["weights"].items()}
            num_files = int(facts["num_workers"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{folder / FACTS} is damaged: {error!r}") from error
        self._parts: dict[tuple[str, str], list[tuple[int, int, Any]]] = defaultdict(list)
        self._updates: dict[str, int] = {}
        for rank in range(num_files):
            self._open(folder / f"state-{rank}-of-{num_files}.safetensors")
        for parts in self._parts.values():
            parts.sort(key=lambda part: part[0])
        for name in self.shapes:
            self._check_whole(MASTER, name)
        for kind, name in list(self._parts):
            self._check_whole(kind, name)

    def _open(self, file: Path) -> None:
        try:
            opened: Any = safe_open(str(file), "pt")
            for name, updates in json.loads((opened.metadata() or {})[_UPDATES]).items():
                self._updates[str(name)] = int(updates)
            for key in opened.keys():  # noqa: SIM118  # it is no mapping
                if (match := _KEY.fullmatch(key)) is None:
                    raise CheckpointError(f"{file} has {key!r}, which is no part of a weight")
                kind, name, start = match.groups()
                piece = opened.get_slice(key)
                if piece.get_dtype() != "F32" or len(piece.get_shape()) != 1:
                    raise CheckpointError(f"{file}: {key} is not flat and float32")
                self._parts[kind, name].append((int(start), piece.get_shape()[0], piece))
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} is damaged: {error}") from error

    def _check_whole(self, kind: str, name: str) -> None:
        parts = self._parts.get((kind, name), ())
        ends = [start + numel for start, numel, _ in parts]
        wanted = math.prod(self.shapes.get(name, (0,)))
        if [start for start, _, _ in parts] != [0, *ends[:-1]][: len(parts)] or sum(ends[-1:]) != wanted:
            raise CheckpointError(f"{self._folder}: its parts of {kind}/{name} do not make {wanted} elements")

    def check_shapes(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise CheckpointError naming the first weight that differs in shape, or that is not in both models."""
        for name in sorted({*shapes, *self.shapes}):
            mine = tuple(shapes[name]) if name in shapes else None
            theirs = self.shapes.get(name)
            if mine != theirs:
                raise CheckpointError(
                    f"{self._folder} is of another model: its {name} has shape {theirs}, this run's {mine}"
                )

    def has(self, kind: str) -> bool:
        """Whether anything of this kind is stored."""
        return any(stored == kind for stored, _ in self._parts)

    def updates(self, name: str) -> int:
        """Return how many optimizer steps the moments of a weight have seen."""
        return self._updates.get(name, 0)

    @torch.no_grad()
    def fill(self, kind: str, name: str, start: int, into: Tensor) -> None:
        """Give `into` the elements of a weight from `start` on; zeros where nothing of this kind is stored."""
        end = start + into.numel()
        into.zero_()
        for place, numel, piece in self._parts.get((kind, name), ()):
            low, high = max(start, place), min(end, place + numel)
            if low < high:
                into[low - start : high - start].copy_(piece[low - place : high - place])
