"""The life of one group, read from its run's ledger journal, also while the run goes on.

Owns finding the run and the group. All groups together are summary.py's, text is report.explain_terminal's.

Invariant: memory is bounded by the life that is explained, never by the length of the journal.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raypost.errors import ConfigError
from raypost.ledger.closed import CLOSED_FILE, Closed, find_records
from raypost.ledger.events import ENDS, LedgerEvent
from raypost.ledger.facts import Names, lines_of, record_of
from raypost.ledger.journal import JournalReader
from raypost.ledger.known import nearest_of
from raypost.ledger.ledger import LEDGER_FILE, Ledger
from raypost.ledger.replay import ledger_before
from raypost.types import GroupKey

Fields = dict[str, Any]
_NOT_OF_GROUPS = (LedgerEvent.STARTED, LedgerEvent.SAVED, LedgerEvent.ALLOTTED)
"""Lines of production as a whole that no life of a group shows."""


def find_run(run: str, runs_dir: Path = Path("runs")) -> Path:
    """Return the folder of a run given by its path, or by its name below `runs_dir`. Raises ConfigError."""
    candidates = [Path(run).expanduser(), runs_dir / run]
    for folder in candidates:
        if (folder / LEDGER_FILE).is_file():
            return folder
    for folder in candidates:
        if folder.is_dir():
            raise ConfigError(f"{folder} holds no {LEDGER_FILE}: no run sampled a group there yet")
    known = sorted(path.parent.name for path in runs_dir.glob(f"*/{LEDGER_FILE}"))
    near = difflib.get_close_matches(run, known, n=3, cutoff=0.4) or known[-3:]
    there = f"{runs_dir} holds {', '.join(near)}" if near else f"{runs_dir} holds none"
    raise ConfigError(f"no run {run!r}: give a run's folder, or its name below {runs_dir}; {there}")


# ---------------------------------------------------------------- one group


@dataclass(slots=True, kw_only=True)
class GroupLife:
    """The life of one group."""

    run_dir: Path
    key: GroupKey
    started_s: float
    """First line of the journal, seconds since the epoch."""
    last_s: float
    """Last line of the journal."""
    lines: list[Fields] = field(default_factory=list)
    """Its own lines, and those of production as a whole (pauses, restores) while it lived; in order."""
    void: list[Fields] = field(default_factory=list)
    """Its own lines that a restore undid."""

    @property
    def end(self) -> str | None:
        """How it ended, one of ENDS; None while it lives, or if only lines that were undone know it."""
        last = self.lines[-1]["event"] if self.lines else None
        return last if last in ENDS else None

    @property
    def step(self) -> int | None:
        """The train step that it was leased for last."""
        return next(
            (line["step"] for line in reversed(self.lines) if line["event"] == LedgerEvent.LEASED), None
        )

    def as_dict(self) -> Fields:
        """Return plain data."""
        task, group_id = self.key
        return {
            "run": str(self.run_dir),
            "task": task,
            "group": group_id,
            "started_s": self.started_s,
            "end": self.end,
            "lines": self.lines,
            "void": self.void,
        }


def group_life(run_dir: Path, group: str) -> GroupLife:
    """Return the life of the group named `task/7`, or `7` where only one task has such a group.

    Raises ConfigError, naming the nearest ones, if the journal knows no such group.
    """
    task, group_id = _parse_group(group)
    reader = JournalReader(run_dir / LEDGER_FILE)
    number = b'"group": %d' % group_id
    lives: dict[str, GroupLife] = {}
    for fields in _lines_before(reader, run_dir, group_id):
        if task in (None, fields["task"]):
            life = _life_of(lives, run_dir, reader, (fields["task"], group_id))
            (life.void if reader.is_snapshot_void else life.lines).append(fields)
    for fields, void in reader.lines(lambda raw: number in raw or b'"group"' not in raw, void=True):
        if "group" not in fields:
            if not void and fields["event"] not in _NOT_OF_GROUPS:
                for life in lives.values():
                    if life.lines and life.end is None:
                        life.lines.append(fields)
            continue
        name = fields.get("task")
        if fields["group"] != group_id or not isinstance(name, str) or task not in (None, name):
            continue
        life = _life_of(lives, run_dir, reader, (name, group_id))
        (life.void if void else life.lines).append(fields)
    if not lives:
        raise ConfigError(_unknown_group(reader, group, task, group_id))
    if len(lives) > 1:
        named = ", ".join(f"{name}/{group_id}" for name in sorted(lives))
        raise ConfigError(f"several tasks have a group {group_id}: give one of {named}")
    (life,) = lives.values()
    return life


def _life_of(lives: dict[str, GroupLife], run_dir: Path, reader: JournalReader, key: GroupKey) -> GroupLife:
    """Return the life of the group, a new one if there is none yet."""
    if key[0] not in lives:
        lives[key[0]] = GroupLife(run_dir=run_dir, key=key, started_s=reader.first_s, last_s=reader.last_s)
    return lives[key[0]]


def _lines_before(reader: JournalReader, run_dir: Path, group_id: int) -> list[Fields]:
    """Return what the journal's snapshot, and the records it refers to, have of the groups with this number."""
    if reader.snapshot is None:
        return []
    names, ledger = Names(reader.snapshot["names"]), Ledger()
    ledger.load_snapshot(reader.snapshot)
    live = [record_of(key, group, names) for key, group in ledger.living() if key[1] == group_id]
    try:
        ended = find_records(run_dir / CLOSED_FILE, Closed(*reader.snapshot["closed"]), group_id)
    except (OSError, ValueError) as error:
        if not reader.is_snapshot_void and not live:
            raise ConfigError(f"the groups that ended cannot be read: {error}") from error
        ended = []
    return [line for record in (*ended, *live) for line in lines_of(record, names)]


def _parse_group(group: str) -> tuple[str | None, int]:
    found = re.fullmatch(r"(?:(.+)/)?(\d{1,18})", group)
    if found is None:
        raise ConfigError(
            f"group {group!r} must read TASK/NUMBER, such as sums/7, or NUMBER where there is one task"
        )
    return found[1], int(found[2])


def _unknown_group(reader: JournalReader, group: str, task: str | None, group_id: int) -> str:
    """Say why there is no such group, with the tasks and the nearest groups that exist."""
    ledger = ledger_before(reader)
    nearest = {name: ledger.nearest(name, group_id) for name in ledger.tasks}
    sampled = f'"{LedgerEvent.SAMPLED}"'.encode()
    for fields, _ in reader.lines(lambda raw: sampled in raw):
        if fields["event"] == LedgerEvent.SAMPLED:
            near = nearest.setdefault(fields["task"], [])
            near[:] = nearest_of([*near, fields["group"]], group_id)
    if not nearest:
        return f"no group {group!r}: no group was sampled yet"
    if task is not None and task not in nearest:
        alike = difflib.get_close_matches(task, nearest, n=1)
        hint = f"; did you mean {alike[0]}?" if alike else ""
        return f"no task {task!r} in this run, it has {', '.join(sorted(nearest))}{hint}"
    named = [task] if task is not None else sorted(nearest)
    if any(ledger.knows((name, group_id)) for name in named):
        return f"group {group!r} has ended; what became of it is not in {CLOSED_FILE}, which is of another history"
    parts = []
    for name in named:
        parts += [f"{name}/{one}" for one in nearest[name]]
    return f"no group {group!r} was sampled yet; the nearest are {' and '.join(parts)}"
