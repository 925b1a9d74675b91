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

import dataclasses
import hashlib
import importlib
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from raypost.errors import CheckpointError
from raypost.version import __version__

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
SCORES = "scores.json"
CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints."""
HF, HF_AVERAGE = "hf", "hf-ema"
"""In a checkpoint: the model, and the moving average of its weights, as Hugging Face folders."""
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
    def num_bytes(self) -> int:
        """Size of all its files."""
        return sum(file.stat().st_size for file in _files(self.path))


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
        for leftover in (*self._root.glob("step-*.tmp"), *self._root.glob("step-*.old")):
            shutil.rmtree(leftover)
        path = self._temporary(step)
        path.mkdir()
        return path

    def commit(self, step: int) -> Path:
        """Make the folder that `begin` gave a checkpoint, durably; returns its path. Removes old ones.

        Repeated after it succeeded, it does nothing. Raises CheckpointError if there is nothing to commit.
        """
        source, target = self._temporary(step), self._root / f"step-{step}"
        if not source.is_dir():
            if target.is_dir():
                return target
            raise CheckpointError(f"{source} does not exist: begin({step}) comes before commit({step})")
        manifest = {
            "raypost": __version__,
            "step": step,
            "fingerprint": self._fingerprint,
            "files": {str(path.relative_to(source)): _describe(path) for path in _files(source)},
        }
        (source / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in (*_files(source), *(p for p in source.rglob("*") if p.is_dir()), source):
            _fsync(path)
        before = _aside(target) if target.exists() else None
        source.rename(target)
        _fsync(self._root)
        if before is not None:
            shutil.rmtree(before)
        self._retain()
        return target

    def await_score(self, step: int) -> None:
        """Keep the checkpoint of `step`, however old it gets, until `record_score`: its evaluation is under way."""
        self._awaited.add(step)

    def record_score(self, step: int, score: float | None) -> None:
        """Record the score of `step` durably; higher is better. None (or not finite): there is none.

        It may come before or long after the commit, or for a step without checkpoint. Then removes the checkpoints
        that are no longer kept.
        """
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
            _replace(
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
        fingerprint = _manifest(path)["fingerprint"]
        for name in sorted({*fingerprint, *self._fingerprint}):
            theirs, ours = fingerprint.get(name), self._fingerprint.get(name)
            if theirs != ours:
                raise ForeignCheckpointError(
                    f"{path} belongs to another run: its {name} is {theirs!r}, this run's is {ours!r}; "
                    "use another run name, or the configuration it was saved with"
                )
        verify_files(path)

    @staticmethod
    def save_state(path: Path, name: str, state: Any) -> None:
        """Write `name`.json, and its arrays one after the other into `name`.npy, below `path`.

        `state` is None, bool, int, float, str, bytes, lists, tuples, dicts (any plain keys), NumPy arrays
        and scalars, and raypost's own dataclasses and enums, nested at will. Raises CheckpointError naming
        the place of anything else.
        """
        arrays: list[np.ndarray] = []
        encoded = _encode(state, arrays, name)
        with (path / f"{name}.npy").open("wb") as file:
            for array in arrays:
                np.save(file, array, allow_pickle=False)
        (path / f"{name}.json").write_text(json.dumps(encoded))

    @staticmethod
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
        ) as error:
            raise CheckpointError(f"state {name!r} in {path} cannot be read: {error!r}") from error

    def _temporary(self, step: int) -> Path:
        return self._root / f"step-{step}.tmp"


_REMOVE = "the checkpoint is damaged; checkpoint.fallback=true continues from the one before it"


def verify_files(path: Path) -> int:
    """Return the step of the checkpoint `path`, of any run.

    Raises CheckpointError naming the file that is missing, damaged or unknown.
    """
    manifest = _manifest(path)
    for name, described in manifest["files"].items():
        found = _describe(path / name) if (path / name).is_file() else None
        if found != described:
            state = "is missing" if found is None else f"is {found}, saved as {described}"
            raise CheckpointError(f"{path / name} {state}: {_REMOVE}")
    unknown = {str(file.relative_to(path)) for file in _files(path)} - {*manifest["files"], MANIFEST}
    if unknown:
        raise CheckpointError(f"{path} has files it was not saved with: {', '.join(sorted(unknown))}")
    step: int = manifest["step"]
    return step


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        wanted = {name: dict(manifest[name]) for name in ("files", "fingerprint")} | {
            "step": int(manifest["step"])
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read ({error!r}): {_REMOVE}") from error
    return wanted


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(path: Path, text: str) -> None:
    """Write a file durably, as a whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    _fsync(temporary)
    temporary.replace(path)
    _fsync(path.parent)


def _aside(path: Path) -> Path:
    """Rename a checkpoint, so that a crash while it is removed leaves no partial folder under its name."""
    old = path.with_name(path.name + ".old")
    if old.exists():
        shutil.rmtree(old)
    return path.rename(old)


# ---------------------------------------------------------------- state: plain data and NumPy arrays


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


def share_weights(folder: Path) -> None:
    """Let whoever reads the config.json of a Hugging Face folder read its weights; safetensors lets the owner alone."""
    for file in folder.glob("*.safetensors"):
        file.chmod((folder / "config.json").stat().st_mode)
