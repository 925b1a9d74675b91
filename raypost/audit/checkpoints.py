"""The account of one checkpoint, read from its files and added up."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from raypost.audit.findings import Check, Findings
from raypost.checkpoint import load_state, verify_files
from raypost.errors import CheckpointError
from raypost.ledger.events import ENDS, LedgerEvent
from raypost.ledger.facts import RECORD_TYPE
from raypost.types import GroupKey

STATE = "producer"
"""Name of production's state in a checkpoint."""


@dataclass(slots=True)
class SavedAccount:
    """What a checkpoint says of all groups."""

    step: int
    moment: tuple[int, ...]
    """(sampled, trained, filtered, failed, expired)."""
    live: set[GroupKey] = field(default_factory=set)
    ended: set[GroupKey] = field(default_factory=set)
    held: set[GroupKey] = field(default_factory=set)
    """Groups in its buffer."""
    trained: set[GroupKey] = field(default_factory=set)
    """That its buffer saw trained."""
    consumed: int = 0
    """Groups that were taken for a step."""
    next_step: int = 0
    acknowledged: int = 0
    version: int = 0
    positions: dict[str, int] = field(default_factory=dict)
    """Groups that the sampler of each task handed out."""


def read_checkpoints(root: Path, findings: Findings) -> list[SavedAccount]:
    """Read each checkpoint below `root`, and check it against itself. Returns those that can be read."""
    read = []
    for path in sorted(root.glob("step-*"), key=lambda one: (len(one.name), one.name)):
        if not path.name.removeprefix("step-").isdecimal():
            continue
        try:
            saved = _read(verify_files(path), load_state(path, STATE))
        except CheckpointError as error:
            # Of a run that goes on, it may have been removed for a newer one just now.
            if path.exists():
                findings.add(Check.CHECKPOINT, str(error))
            continue
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            findings.add(Check.CHECKPOINT, f"{path} cannot be read: {error!r}")
            continue
        read.append(saved)
        _check(path.name, saved, findings)
    return read


def check_moments(saved: list[SavedAccount], moments: set[tuple[int, ...]], findings: Findings) -> None:
    """Check that the journal, which has all of its lines, went through the moment of each checkpoint."""
    for one in saved:
        findings.unless(
            one.moment in moments,
            Check.CHECKPOINT,
            f"step-{one.step} has {_counts(one.moment)}, which the journal never came to",
        )


def _read(step: int, state: dict[str, Any]) -> SavedAccount:
    ledger, buffer, progress = state["ledger"], state["buffer"], state["progress"]
    totals = ledger["totals"]
    saved = SavedAccount(step, (int(ledger["sampled"]), *(int(totals.get(end, 0)) for end in ENDS)))
    rows = np.frombuffer(base64.b64decode(ledger["live"]), RECORD_TYPE)
    saved.live = {(ledger["names"][row["task"]], int(row["group"])) for row in rows}
    saved.ended = _keys(ledger["ended"])
    saved.trained = _keys(buffer["trained"])
    if (groups := buffer["groups"]) is not None:
        tasks = [groups["tasks"][code] for code in groups["task_codes"].tolist()]
        saved.held = set(zip(tasks, groups["group_ids"].tolist(), strict=True))
    saved.consumed = sum(progress["consumed"].values())
    saved.next_step, saved.acknowledged = progress["next_consumer_step"], int(buffer["acknowledged"])
    saved.version = -1 if state["version"] is None else state["version"]
    saved.positions = {task: int(one["position"]) for task, one in state["samplers"].items()}
    return saved


def _keys(ranges: dict[str, Sequence[Sequence[int]]]) -> set[GroupKey]:
    return {
        (task, one) for task, pairs in ranges.items() for start, end in pairs for one in range(start, end)
    }


def _check(name: str, saved: SavedAccount, findings: Findings) -> None:
    sampled, *totals = saved.moment
    trained = totals[ENDS.index(LedgerEvent.TRAINED)]
    statements = [
        (sampled == len(saved.live) + len(saved.ended),
         f"{sampled} groups sampled, {len(saved.ended)} ended and {len(saved.live)} living"),
        (sum(totals) == len(saved.ended), f"{len(saved.ended)} groups ended, and by how they ended {sum(totals)}"),
        (not saved.live & saved.ended, f"groups that live and have ended: {named(saved.live & saved.ended)}"),
        (trained <= saved.consumed, f"{trained} groups trained, and only {saved.consumed} taken"),
        (saved.next_step == saved.step + 1, f"the model of step {saved.step}, and takes step {saved.next_step} next"),
        (saved.acknowledged <= saved.step,
         f"the model of step {saved.step}, and a buffer that saw step {saved.acknowledged} trained"),
        (saved.version <= saved.step, f"the model of step {saved.step}, and production of version {saved.version}"),
        (sampled == sum(saved.positions.values()),
         f"{sampled} groups sampled, and samplers that handed out {sum(saved.positions.values())}"),
    ]  # fmt: skip
    for agrees, text in statements:
        findings.unless(agrees, Check.CHECKPOINT, f"{name} has {text}")
    lost = saved.live - saved.held
    findings.unless(not lost, Check.LOST, f"{name}: its buffer lacks groups that live: {named(lost)}")
    foreign = saved.held - saved.live
    findings.unless(
        not foreign, Check.CHECKPOINT, f"{name}: its buffer holds groups that do not live: {named(foreign)}"
    )
    again = saved.held & saved.trained
    findings.unless(
        not again, Check.TWICE, f"{name}: its buffer holds groups that were trained: {named(again)}"
    )
    unknown = saved.trained - saved.ended
    findings.unless(
        not unknown,
        Check.TWICE,
        f"{name}: its buffer saw groups trained that its ledger has not: {named(unknown)}",
    )


def named(keys: Iterable[GroupKey]) -> str:
    """Return how many groups there are, and the first of them."""
    first = sorted(keys)
    more = f" and {len(first) - 4} more" if len(first) > 4 else ""
    return ", ".join(f"{task}/{number}" for task, number in first[:4]) + more


def _counts(moment: Sequence[int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in zip(("sampled", *ENDS), moment, strict=True))
