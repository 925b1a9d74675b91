"""Snapshot: the state of one rank at one step, written while the rank goes on.

Owns what it copied until it is written. Where main memory is short it copies nothing, and must be written before the
next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from raypost.checkpoint import fsync_below
from raypost.trainer.random_state import random_state, save_random_state
from raypost.trainer.state_files import Part, write_facts, write_parts

Export = Callable[[Path], object]
"""Writes a folder that is made beside the state."""


class Snapshot:
    """What a rank writes into a checkpoint."""

    def __init__(self, rank: int, num_ranks: int, facts: dict[str, Any], parts: Iterable[Part]) -> None:
        """Copy the parts if twice the memory that all ranks need is available; else keep views of them."""
        self._rank = rank
        self._num_ranks = num_ranks
        self._facts = facts
        self._parts = list(parts)
        self._random_state = random_state()
        self.exports: dict[str, Export] = {}
        """Folders to be made, by name."""
        needed = num_ranks * sum(part.num_bytes for part in self._parts)
        self.is_copy = 2 * needed < psutil.virtual_memory().available
        """Whether the rank may go on before it is written."""
        if self.is_copy:
            self._parts = [part.copied() for part in self._parts]

    def write(self, folder: Path) -> None:
        """Write all of it below `folder`, durably. May be repeated. Raises OSError naming the file."""
        folder.mkdir(parents=True, exist_ok=True)
        write_parts(folder, self._parts, self._rank, self._num_ranks)
        save_random_state(folder, self._rank, self._random_state)
        if self._rank == 0:
            write_facts(folder, self._facts)
        for name, export in self.exports.items():
            export(folder / name)
            fsync_below(folder / name)
