"""Checkpoints on disk: a directory appears whole or not at all, and is believed only if it is undamaged.

    begin(step) -> step-N.tmp, filled by the roles -> commit(step): digests, fsync, rename -> step-N
    await_score(step) ... record_score(step, score) -> scores.json      latest -> step-N, best -> step-M

Owns names, atomicity, retention, the proof that a checkpoint is complete and of this run, and a format for
plain state. What a role stores is the role's business.

Invariants: `step-N` exists only with a manifest that lists every file in it; a reader never sees a partial
checkpoint; the newest `keep` checkpoints survive, and so does one whose score is awaited and, if asked for, the one
with the best score. State is data: reading it never runs code from the file.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from raypost.checkpoint.files import (
    contents,
    files_of,
    fsync,
    fsync_below,
    read_manifest,
    replace_file,
    verify_files,
    write_manifest,
)
from raypost.checkpoint.state import load_state, save_state
from raypost.errors import CheckpointError

log = logging.getLogger(__name__)

SCORES = "scores.json"
CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints."""
LATEST, BEST = "latest", "best"
"""Links to a checkpoint, for people: nothing is read through them."""
_STEP = re.compile(r"step-(\d+)")
DAMAGED = ".damaged"
"""What the name of a checkpoint ends with that is left out for its damage."""
LEAST_PACE = 20
"""Least time between two checkpoints by time, in units of what the last one took."""


class ListedCheckpoint(NamedTuple):
    """One checkpoint, as it is found."""

    path: Path
    score: float | None
    """Held-out score, if it has one."""
    links: tuple[str, ...]
    """Which of `latest` and `best` it is."""
    damage: str
    """What is wrong with it; empty: nothing."""

    @property
    def holds(self) -> str:
        """What is in it."""
        return contents(self.path)

    @property
    def num_bytes(self) -> int:
        """Size of all its files."""
        return sum(file.stat().st_size for file in files_of(self.path))


class ForeignCheckpointError(CheckpointError):
    """A checkpoint is of another run."""


class SavePace:
    """Says when a checkpoint is due by time: `every_s` after the last, and LEAST_PACE times what that one took."""

    def __init__(self, every_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to count now. None: none is ever due."""
        self._every_s = every_s
        self._clock = clock
        self._next_s = math.inf if every_s is None else clock() + every_s

    def due(self) -> bool:
        """Return whether the time has come."""
        return self._clock() >= self._next_s

    def saved(self, took_s: float) -> None:
        """Take note that a checkpoint was written just now, in `took_s` seconds."""
        if self._every_s is not None:
            self._next_s = self._clock() + max(self._every_s, LEAST_PACE * took_s)


class CheckpointDir:
    """The checkpoints of one run below `root`.

    `fingerprint` says whose they are (for instance a hash of the configuration, and the seed): plain JSON
    values. A checkpoint with another one is foreign.
    """

    def __init__(
        self, root: Path, keep: int, fingerprint: Mapping[str, str | int], *, keep_best: bool = False
    ) -> None:
        """Read the scores that an earlier session recorded. Raises CheckpointError if they cannot be read.

        `keep_best`: of the checkpoints with a score, the best survives too.
        """
        if keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}")
        self._root = root
        self._keep = keep
        self._fingerprint = dict(fingerprint)
        self._keep_best = keep_best
        self._scores = self._read_scores()
        self._stored_scores = dict(self._scores)
        self._awaited: set[int] = set()
        self._retaining = threading.RLock()
        """Held by who decides what is kept: a commit may run in a thread of its own."""

    def listed(self) -> Iterator[ListedCheckpoint]:
        """Yield what is there, oldest first, each verified byte by byte, of whatever run; then what was put aside."""
        newest, best = self.steps()[-1:], self.best()
        for step in self.steps():
            path = self._root / f"step-{step}"
            links = [LATEST] * ([step] == newest) + [BEST] * (best is not None and best[0] == step)
            try:
                verify_files(path)
                damage = ""
            except CheckpointError as error:
                damage = str(error)
            yield ListedCheckpoint(path, self._scores.get(step), tuple(links), damage)
        for path in sorted(self._root.glob(f"*{DAMAGED}")):
            yield ListedCheckpoint(path, None, (), "damaged, and put aside")

    def begin(self, step: int) -> Path:
        """Return an empty folder for the checkpoint of `step`, and remove what a crash left half done."""
        if step < 0:
            raise ValueError(f"step must be >= 0, got {step}")
        self._root.mkdir(parents=True, exist_ok=True)
        path = self._temporary(step)
        for leftover in (*self._root.glob("step-*.tmp"), *self._root.glob("step-*.old")):
            # A role that is given up may still write into another one.
            shutil.rmtree(leftover, ignore_errors=leftover != path)
        path.mkdir()
        return path

    def commit(self, step: int) -> Path:
        """Make the folder that `begin` gave a checkpoint, durably; returns its path. Removes old ones.

        Repeated, also after an error, it goes on. Takes as long as reading all of it: scores may be recorded meanwhile.
        Raises CheckpointError if there is nothing to commit, OSError naming what cannot be written.
        """
        source, target = self._temporary(step), self._root / f"step-{step}"
        if not source.is_dir():
            if target.is_dir():
                return target
            raise CheckpointError(f"{source} does not exist: begin({step}) comes before commit({step})")
        write_manifest(source, step, self._fingerprint)
        fsync_below(source)
        with self._retaining:
            before = _aside(target) if target.exists() else None
            source.rename(target)
            fsync(self._root)
            if before is not None:
                shutil.rmtree(before)
            self._retain()
        return target

    def await_score(self, step: int) -> None:
        """Keep the checkpoint of `step`, however old it gets, until `record_score`: its evaluation is under way."""
        with self._retaining:
            self._awaited.add(step)

    def record_score(self, step: int, score: float | None) -> None:
        """Record the score of `step` durably; higher is better. None (or not finite): there is none.

        It may come before or long after the commit, or for a step without checkpoint. Then removes the checkpoints
        that are no longer kept.
        """
        with self._retaining:
            self._awaited.discard(step)
            if score is not None and math.isfinite(score):
                self._scores[step] = float(score)
            self._retain()

    def best(self) -> tuple[int, float] | None:
        """Return step and score of the best checkpoint, the newest of equal ones; None if none has a score."""
        scored = [(self._scores[step], step) for step in self.steps() if step in self._scores]
        score, step = max(scored, default=(0.0, None))
        return None if step is None else (step, score)

    def _read_scores(self) -> dict[int, float]:
        """Return the scores of the checkpoints that exist: the step of a removed one may be saved again."""
        file = self._root / SCORES
        if not file.exists():
            return {}
        try:
            known = {int(step): float(score) for step, score in json.loads(file.read_text()).items()}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{file} cannot be read ({error!r}): remove it, and no checkpoint counts as the best one"
            ) from error
        return {step: known[step] for step in self.steps() if step in known and math.isfinite(known[step])}

    def _retain(self) -> None:
        """Write the scores and the links, then remove the checkpoints that nothing keeps."""
        steps, best = self.steps(), self.best() if self._keep_best else None
        if not steps:
            return
        kept = {*steps[-self._keep :], *self._awaited, *([best[0]] if best else [])}
        scores = {step: self._scores[step] for step in steps if step in kept and step in self._scores}
        if scores != self._stored_scores:
            replace_file(
                self._root / SCORES, json.dumps({str(s): score for s, score in scores.items()}, indent=1)
            )
            self._stored_scores = scores
        self._link(LATEST, steps[-1])
        self._link(BEST, best[0] if best else None)
        for step in steps:
            if step not in kept:
                shutil.rmtree(_aside(self._root / f"step-{step}"))

    def _link(self, name: str, step: int | None) -> None:
        link, temporary = self._root / name, self._root / f"{name}.tmp"
        try:
            if step is None:
                return link.unlink(missing_ok=True)
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(f"step-{step}", target_is_directory=True)
            temporary.replace(link)
        except OSError as error:
            # Some file systems have no links; nothing depends on them.
            log.warning("%s could not be moved to step %s: %s", link, step, error)

    def steps(self) -> list[int]:
        """Return the steps of all committed checkpoints, ascending."""
        if not self._root.is_dir():
            return []
        matches = (_STEP.fullmatch(path.name) for path in self._root.iterdir() if path.is_dir())
        return sorted(int(match.group(1)) for match in matches if match)

    @property
    def durable(self) -> int:
        """Step up to which nothing can be lost: that of the newest checkpoint that is committed; 0 if there is none.

        A checkpoint that is being written does not count before the last of its files has reached the disk.
        """
        return max(self.steps(), default=0)

    def latest(self, *, fallback: bool = False, verify: bool = True) -> tuple[int, Path] | None:
        """Return step and folder of the newest checkpoint, verified byte by byte; None if there is none.

        `fallback`: what is damaged is put aside as `step-N.damaged`, and the one before is taken. `verify` False: it
        was verified just now. Raises CheckpointError naming the file that is missing, damaged or unknown, or the fact
        that differs, and if with `fallback` no undamaged one is left.
        """
        steps = self.steps()
        for step in reversed(steps):
            path = self._root / f"step-{step}"
            try:
                if verify:
                    self.verify(path)
                return step, path
            except CheckpointError as error:
                if not fallback or isinstance(error, ForeignCheckpointError):
                    raise
                log.warning("%s; it is put aside, and the checkpoint before it is taken", error)
                path.rename(path.with_name(f"{path.name}{DAMAGED}"))
        if steps:
            raise CheckpointError(f"no undamaged checkpoint is left in {self._root}: start a new run")
        return None

    def verify(self, path: Path) -> None:
        """Raise CheckpointError unless `path` is a complete, undamaged checkpoint of this run."""
        fingerprint = read_manifest(path)["fingerprint"]
        for name in sorted({*fingerprint, *self._fingerprint}):
            theirs, ours = fingerprint.get(name), self._fingerprint.get(name)
            if theirs != ours:
                raise ForeignCheckpointError(
                    f"{path} belongs to another run: its {name} is {theirs!r}, this run's is {ours!r}; "
                    "use another run name, or the configuration it was saved with"
                )
        verify_files(path)

    save_state = staticmethod(save_state)
    load_state = staticmethod(load_state)

    def _temporary(self, step: int) -> Path:
        return self._root / f"step-{step}.tmp"


def _aside(path: Path) -> Path:
    """Rename a checkpoint, so that a crash while it is removed leaves no partial folder under its name."""
    old = path.with_name(path.name + ".old")
    if old.exists():
        shutil.rmtree(old)
    return path.rename(old)
