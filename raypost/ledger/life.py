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
from raypost.ledger.events import ENDS, LedgerEvent
from raypost.ledger.journal import JournalReader
from raypost.ledger.ledger import LEDGER_FILE
from raypost.types import GroupKey

Fields = dict[str, Any]


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
    for fields, void in reader.lines(lambda raw: number in raw or b'"group"' not in raw, void=True):
        if "group" not in fields:
            if not void and fields["event"] not in (LedgerEvent.STARTED, LedgerEvent.SAVED):
                for life in lives.values():
                    if life.lines and life.end is None:
                        life.lines.append(fields)
            continue
        name = fields.get("task")
        if fields["group"] != group_id or not isinstance(name, str) or task not in (None, name):
            continue
        if name not in lives:
            lives[name] = GroupLife(
                run_dir=run_dir, key=(name, group_id), started_s=reader.first_s, last_s=reader.last_s
            )
        (lives[name].void if void else lives[name].lines).append(fields)
    if not lives:
        raise ConfigError(_unknown_group(reader, group, task, group_id))
    if len(lives) > 1:
        named = ", ".join(f"{name}/{group_id}" for name in sorted(lives))
        raise ConfigError(f"several tasks have a group {group_id}: give one of {named}")
    (life,) = lives.values()
    return life


def _parse_group(group: str) -> tuple[str | None, int]:
    found = re.fullmatch(r"(?:(.+)/)?(\d{1,18})", group)
    if found is None:
        raise ConfigError(
            f"group {group!r} must read TASK/NUMBER, such as sums/7, or NUMBER where there is one task"
        )
    return found[1], int(found[2])


def _unknown_group(reader: JournalReader, group: str, task: str | None, group_id: int) -> str:
    """Say why there is no such group, with the tasks and the nearest groups that exist."""
    nearest: dict[str, list[int | None]] = {}
    sampled = f'"{LedgerEvent.SAMPLED}"'.encode()
    for fields, _ in reader.lines(lambda raw: sampled in raw):
        if fields["event"] != LedgerEvent.SAMPLED:
            continue
        known = nearest.setdefault(fields["task"], [None, None])
        at: int = fields["group"]
        if at < group_id:
            known[0] = at if known[0] is None else max(known[0], at)
        else:
            known[1] = at if known[1] is None else min(known[1], at)
    if not nearest:
        return f"no group {group!r}: no group was sampled yet"
    if task is not None and task not in nearest:
        near = difflib.get_close_matches(task, nearest, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"no task {task!r} in this run, it has {', '.join(sorted(nearest))}{hint}"
    parts = []
    for name in [task] if task is not None else sorted(nearest):
        parts += [f"{name}/{one}" for one in nearest[name] if one is not None]
    return f"no group {group!r} was sampled yet; the nearest are {' and '.join(parts)}"
