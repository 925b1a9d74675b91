"""Account: where every group is, counted anew from the lines of the ledger's journal and the records of ended groups.

Owns a second, plainer book than the ledger's, and shares none of its counting: a line that the ledger would never have
written is a contradiction here, and is applied nevertheless, so that what follows is counted as the journal says it.

Invariant: memory is bounded by the number of groups, a few words for each that ended.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raypost.audit.findings import Check, Findings
from raypost.ledger.events import DROPPED, ENDS, LedgerEvent
from raypost.ledger.facts import WHERE
from raypost.types import GroupKey

Fields = Mapping[str, Any]
FLIGHT, STORED, LEASED = "in flight", "stored", "leased"
_NOT_KNOWN = -(2**31)


@dataclass(slots=True)
class Life:
    """A group that has not ended."""

    place: str = FLIGHT
    step: int = 0
    """Of its last lease."""
    staleness: int = 0
    """Of its last lease."""
    members: int = 0
    tokens: int = 0
    oldest: int | None = None
    """Version of its oldest token that a policy produced."""
    newest: int = -1


@dataclass(slots=True)
class StepSum:
    """The groups that were trained at one step."""

    groups: int = 0
    members: int = 0
    tokens: int = 0
    staleness: Counter[int] = field(default_factory=Counter)


class Account:
    """All groups of a run."""

    def __init__(self, thresholds: Mapping[str, int], findings: Findings) -> None:
        """`thresholds`: the staleness, by task, from which nothing is trained; a task without one is not checked."""
        self.thresholds = thresholds
        self.findings = findings
        self.live: dict[GroupKey, Life] = {}
        self.ended: dict[GroupKey, int] = {}
        """Step of each group that was trained; 0: it was dropped, -1: how it ended is not known."""
        self.totals: Counter[str] = Counter()
        self.steps: defaultdict[int, StepSum] = defaultdict(StepSum)
        self.moments: set[tuple[int, ...]] = set()
        """All (sampled, *totals) that the journal went through, from its snapshot or from nothing on."""
        self.version = -1
        """That production was resumed with last."""
        self.last = ""
        """The last event of production as a whole."""
        self.twice = 0
        self.staleness_max = 0

    # ---------------------------------------------------------------- figures

    @property
    def sampled(self) -> int:
        """Groups that left the dataset."""
        return len(self.live) + len(self.ended)

    @property
    def moment(self) -> tuple[int, ...]:
        """Return (sampled, trained, filtered, failed, expired)."""
        return (self.sampled, *(self.totals[end] for end in ENDS))

    def places(self) -> Counter[str]:
        """Return how many groups live where."""
        return Counter(life.place for life in self.live.values())

    def missing(self) -> Iterator[GroupKey]:
        """Yield the numbers that a task left out: its sampler counts without holes."""
        last: dict[str, int] = {}
        for task, number in (*self.live, *self.ended):
            last[task] = max(last.get(task, -1), number)
        for task, number in last.items():
            yield from (
                (task, one)
                for one in range(number)
                if (task, one) not in self.live and (task, one) not in self.ended
            )

    # ---------------------------------------------------------------- a snapshot and the records before it

    def begin(self, live: NDArray[Any], ended: NDArray[Any], names: list[str]) -> None:
        """Begin with the records of the groups that lived and of those that had ended."""
        for row in live:
            life = Life(_PLACES.get(WHERE[row["where"]], FLIGHT), int(row["step"]), 0, int(row["members"]))
            life.tokens = int(row["tokens"])
            if life.members:
                life.oldest, life.newest = int(row["oldest"]), int(row["newest"])
            if row["staleness"] != _NOT_KNOWN:
                life.staleness = int(row["staleness"])
            self.live[names[row["task"]], int(row["group"])] = life
        self._begin_ended(ended, names)

    def _begin_ended(self, rows: NDArray[Any], names: list[str]) -> None:
        trained = rows["where"] == WHERE.index(LedgerEvent.TRAINED)
        steps = np.where(trained, rows["step"], 0).tolist()
        tasks = [names[code] for code in rows["task"].tolist()]
        for key, step in zip(zip(tasks, rows["group"].tolist(), strict=True), steps, strict=True):
            if key in self.ended or key in self.live:
                self._again(key, step, self.ended.get(key, 0))
            self.ended[key] = step
        for code, count in zip(*np.unique(rows["where"], return_counts=True), strict=True):
            self.totals[WHERE[code]] += int(count)
        for task, number, step, staleness, members, tokens in zip(
            tasks,
            *(rows[name].tolist() for name in ("group", "step", "staleness", "members", "tokens")),
            strict=True,
        ):
            if step and self.ended[task, number] == step:
                life = Life(LEASED, step, staleness, members, tokens)
                self._count_trained((task, number), life)

    # ---------------------------------------------------------------- lines

    def play(self, line: Fields) -> None:
        """Apply one line of the journal."""
        event = line["event"]
        if "group" in line:
            self._move((line["task"], int(line["group"])), event, line)
            return
        if event in _NOTES:
            self.last = event
        if event == LedgerEvent.RESUMED:
            self._resumed(line)
        elif event in (LedgerEvent.SAVED, LedgerEvent.RESTORED):
            self._compare(line)
        if event == LedgerEvent.RESTORED:
            for life in self.live.values():
                life.place = STORED if life.place == LEASED else life.place

    def _resumed(self, line: Fields) -> None:
        version = int(line.get("version", self.version))
        self.findings.unless(
            version >= self.version,
            Check.VERSIONS,
            f"production was resumed with version {version} after version {self.version}",
        )
        self.version = version

    def _compare(self, line: Fields) -> None:
        told = line.get("sampled"), line.get("live")
        self.findings.unless(
            told == (self.sampled, len(self.live)),
            Check.CHECKPOINT,
            f"the journal says that {told[0]} groups were sampled and {told[1]} live when it was {line['event']}; its "
            f"lines come to {self.sampled} and {len(self.live)}",
        )

    def _move(self, key: GroupKey, event: str, line: Fields) -> None:
        self.findings.compared[Check.MOVES] += 1
        if event == LedgerEvent.SAMPLED:
            if key in self.live or key in self.ended:
                self.findings.add(Check.MOVES, f"group {_name(key)} was sampled twice")
            else:
                self.live[key] = Life()
        elif event in _BEFORE:
            self._change(key, event, line)
        if event == LedgerEvent.SAMPLED or event in ENDS:
            self.moments.add(self.moment)

    def _change(self, key: GroupKey, event: str, line: Fields) -> None:
        life = self.live.get(key)
        if life is None:
            if key not in self.ended:
                self.findings.add(Check.MOVES, f"group {_name(key)} was {event}, and never sampled")
            elif event == LedgerEvent.TRAINED:
                self._again(key, int(line["step"]), self.ended[key])
            else:
                self.findings.add(Check.MOVES, f"group {_name(key)} was {event} after it had ended")
            return
        if life.place not in _BEFORE[event]:
            self.findings.add(Check.MOVES, f"group {_name(key)} was {event} while it was {life.place}")
        if event == LedgerEvent.CONTINUED:
            life.place = FLIGHT
        elif event == LedgerEvent.STORED:
            life.place = STORED
            _learn(life, line)
        elif event == LedgerEvent.LEASED:
            self._lease(key, life, line)
        else:
            self._end(key, life, event, line)

    def _lease(self, key: GroupKey, life: Life, line: Fields) -> None:
        step, staleness = int(line["step"]), int(line["staleness"])
        if life.place == LEASED and life.step != step:
            self.findings.add(Check.MOVES, f"group {_name(key)} is leased for steps {life.step} and {step}")
        life.place, life.step, life.staleness = LEASED, step, staleness
        if life.oldest is None:
            return
        self.findings.unless(
            staleness == step - 1 - life.oldest,
            Check.STALENESS,
            f"group {_name(key)} is booked with staleness {staleness} at step {step}; its oldest token is of version "
            f"{life.oldest}, which is {step - 1 - life.oldest}",
        )
        self.findings.unless(
            life.newest < step,
            Check.VERSIONS,
            f"group {_name(key)} of step {step} has tokens of version {life.newest}, which that step's training makes",
        )

    def _end(self, key: GroupKey, life: Life, event: str, line: Fields) -> None:
        del self.live[key]
        self.totals[event] += 1
        self.ended[key] = 0
        if event == LedgerEvent.TRAINED:
            step = int(line["step"])
            if life.step != step:
                self.findings.add(
                    Check.MOVES,
                    f"group {_name(key)} was leased for step {life.step} and trained at step {step}",
                )
            life.step = self.ended[key] = step
            self._count_trained(key, life)

    def _count_trained(self, key: GroupKey, life: Life) -> None:
        one = self.steps[life.step]
        one.groups += 1
        one.members += life.members
        one.tokens += life.tokens
        one.staleness[life.staleness] += 1
        self.staleness_max = max(self.staleness_max, life.staleness)
        threshold = self.thresholds.get(key[0])
        if threshold is not None:
            self.findings.unless(
                life.staleness < threshold,
                Check.STALENESS,
                f"group {_name(key)} was trained at step {life.step} with staleness {life.staleness}; its task's "
                f"threshold is {threshold}",
            )

    def _again(self, key: GroupKey, step: int, before: int) -> None:
        """Take down that a group which ended is trained, or has a second record of its end."""
        if step > 0:
            self.twice += 1
            first = f"was trained at step {before}" if before > 0 else "had been dropped"
            self.findings.add(Check.TWICE, f"group {_name(key)} {first}, and is trained at step {step}")
        else:
            self.findings.add(Check.MOVES, f"group {_name(key)} ended twice")


def _learn(life: Life, line: Fields) -> None:
    """Take over the figures of a line; what it does not have stays."""
    if tokens := line.get("tokens"):
        life.members, life.tokens = len(tokens), sum(tokens)
        versions = [int(one) for one in line.get("versions", ()) if int(one) >= 0]
        life.oldest, life.newest = (min(versions), max(versions)) if versions else (None, -1)


def _name(key: GroupKey) -> str:
    return f"{key[0]}/{key[1]}"


_BEFORE: dict[str, tuple[str, ...]] = {
    LedgerEvent.CONTINUED: (STORED,),
    LedgerEvent.STORED: (FLIGHT, STORED),
    LedgerEvent.LEASED: (STORED, LEASED),
    LedgerEvent.TRAINED: (LEASED,),
    # What the trainer left out is dropped from its lease.
    **dict.fromkeys(DROPPED, (FLIGHT, STORED, LEASED)),
}
"""Where a group may be before a line about it."""
_PLACES = {"in_flight": FLIGHT, "buffered": STORED, "leased": LEASED}
_NOTES = (LedgerEvent.PAUSING, LedgerEvent.PAUSED, LedgerEvent.RESUMED, LedgerEvent.RESTORED)
