"""Ledger: where every group is, from the moment its prompt left the dataset until its end.

Owns the life of each group, checks every transition, and writes an append-only journal (JSON lines) that can
be read while the run goes on. Owns no group: that `counts` compares its own record with what the buffer and
the pending set really hold is what makes `lost` a measurement.

    sampled -> in flight <-> buffered -> leased -> trained
                   |             |
                   +-------------+-> filtered | failed | expired

Invariants: an ended group never moves again; memory is bounded by the groups that have not ended, since
ended ones are remembered as ranges of ordinals and as totals.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from raypost.errors import CheckpointError, LedgerError
from raypost.types import GroupCounts, GroupKey, Status

FLUSH_LINES = 4096
"""Journal lines kept in memory at most; normally the producer flushes once a step."""


class OrdinalSet:
    """A set of ordinals as disjoint ranges: as small as the number of gaps in it."""

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        """`ranges` as `ranges()` gave them: (first, last + 1), ascending."""
        pairs = [(int(start), int(end)) for start, end in ranges]
        self._starts = [start for start, _ in pairs]
        self._ends = [end for _, end in pairs]

    def __contains__(self, ordinal: int) -> bool:
        at = bisect_right(self._starts, ordinal) - 1
        return at >= 0 and ordinal < self._ends[at]

    def __len__(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def add(self, ordinal: int) -> None:
        """Add one ordinal; adding it again changes nothing."""
        at = bisect_right(self._starts, ordinal) - 1
        if at >= 0 and ordinal < self._ends[at]:
            return
        follows = at >= 0 and self._ends[at] == ordinal
        precedes = at + 1 < len(self._starts) and self._starts[at + 1] == ordinal + 1
        if follows and precedes:
            self._ends[at] = self._ends.pop(at + 1)
            del self._starts[at + 1]
        elif follows:
            self._ends[at] = ordinal + 1
        elif precedes:
            self._starts[at + 1] = ordinal
        else:
            self._starts.insert(at + 1, ordinal)
            self._ends.insert(at + 1, ordinal + 1)

    def ranges(self) -> list[list[int]]:
        """(first, last + 1) of every range, ascending."""
        return [[start, end] for start, end in zip(self._starts, self._ends, strict=True)]


class Place(StrEnum):
    """Where a group that has not ended is."""

    IN_FLIGHT = "in_flight"
    BUFFERED = "buffered"
    LEASED = "leased"


@dataclass(slots=True)
class _Entry:
    place: Place
    step: int = 0
    """Step it is leased for."""


_DROPPED = (Status.FILTERED, Status.FAILED, Status.EXPIRED)


class Ledger:
    """The record of all groups of a run."""

    def __init__(self, journal: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """`journal` None keeps none. `clock` gives the time written into it, seconds since the epoch."""
        self._journal, self._clock = journal, clock
        self._lines: list[str] = []
        self._live: dict[GroupKey, _Entry] = {}
        self._ended: dict[str, OrdinalSet] = {}
        self._sampled = 0
        self._totals: Counter[str] = Counter()

    # ---------------------------------------------------------------- transitions

    def sampled(self, key: GroupKey) -> None:
        """A prompt left the dataset; its group is in flight. Raises LedgerError if it ever did before."""
        if key in self._live or self._has_ended(key):
            raise LedgerError(f"group {key} was sampled twice: the sampler's position went back")
        self._live[key] = _Entry(Place.IN_FLIGHT)
        self._sampled += 1
        self._write("sampled", key)

    def continued(self, key: GroupKey) -> None:
        """A buffered group is in flight again."""
        self._move(key, (Place.BUFFERED,), Place.IN_FLIGHT, "continued")

    def stored(self, key: GroupKey, status: Status, **facts: Any) -> None:
        """A group is in the buffer with `status`: it came from flight, or it changed its status there."""
        self._move(
            key, (Place.IN_FLIGHT, Place.BUFFERED), Place.BUFFERED, "stored", status=str(status), **facts
        )

    def dropped(self, key: GroupKey, reason: Status, **facts: Any) -> None:
        """A group ended untrained: FILTERED, FAILED or EXPIRED."""
        if reason not in _DROPPED:
            raise LedgerError(f"group {key} cannot be dropped as {reason}: a reason is one of {_DROPPED}")
        self._entry(key, (Place.IN_FLIGHT, Place.BUFFERED), str(reason))
        self._end(key, str(reason), **facts)

    def leased(self, keys: Sequence[GroupKey], step: int, staleness: Sequence[int]) -> None:
        """These groups are the batch of `step`. Repeated for the same step, nothing changes."""
        for key, age in zip(keys, staleness, strict=True):
            entry = self._entry(key, (Place.BUFFERED, Place.LEASED), f"leased for step {step}")
            if entry.place is Place.LEASED and entry.step == step:
                continue
            if entry.place is Place.LEASED:
                raise LedgerError(
                    f"group {key} is leased for step {entry.step} and for {step}: it would train twice"
                )
            entry.place, entry.step = Place.LEASED, step
            self._write("leased", key, step=step, staleness=age)

    def trained(self, step: int) -> list[GroupKey]:
        """End all groups leased up to `step` as trained; returns them, none when repeated."""
        keys = [
            key for key, entry in self._live.items() if entry.place is Place.LEASED and entry.step <= step
        ]
        for key in keys:
            self._end(key, "trained", step=self._live[key].step)
        return keys

    def _entry(self, key: GroupKey, places: tuple[Place, ...], to: str) -> _Entry:
        entry = self._live.get(key)
        if entry is None:
            past = "has ended already" if self._has_ended(key) else "was never sampled"
            raise LedgerError(f"group {key} {past} and cannot become {to}")
        if entry.place not in places:
            raise LedgerError(
                f"group {key} is {entry.place} and cannot become {to}: it must be {' or '.join(places)}"
            )
        return entry

    def _move(self, key: GroupKey, places: tuple[Place, ...], to: Place, event: str, **facts: Any) -> None:
        self._entry(key, places, to).place = to
        self._write(event, key, **facts)

    def _end(self, key: GroupKey, how: str, **facts: Any) -> None:
        del self._live[key]
        task, group_id = key
        self._ended.setdefault(task, OrdinalSet()).add(group_id)
        self._totals[how] += 1
        self._write(how, key, **facts)

    def _has_ended(self, key: GroupKey) -> bool:
        task, group_id = key
        return task in self._ended and group_id in self._ended[task]

    # ---------------------------------------------------------------- what can be read

    def counts(self, buffered: int, in_flight: int) -> GroupCounts:
        """All counts, with what the buffer and the pending set really hold; `lost` is the difference."""
        return GroupCounts(
            sampled=self._sampled,
            trained=self._totals["trained"],
            filtered=self._totals["filtered"],
            failed=self._totals["failed"],
            expired=self._totals["expired"],
            buffered=buffered,
            in_flight=in_flight,
        )

    def num_live(self, place: Place) -> int:
        """Groups that the ledger believes to be there."""
        return sum(entry.place is place for entry in self._live.values())

    def open_leases(self) -> dict[int, Counter[str]]:
        """Groups a task for every step whose lease is not acknowledged."""
        leases: dict[int, Counter[str]] = {}
        for (task, _), entry in self._live.items():
            if entry.place is Place.LEASED:
                leases.setdefault(entry.step, Counter())[task] += 1
        return leases

    # ---------------------------------------------------------------- journal

    def _write(self, event: str, key: GroupKey | None = None, **facts: Any) -> None:
        if self._journal is None:
            return
        line: dict[str, Any] = {"time": round(self._clock(), 3), "event": event}
        if key is not None:
            line["task"], line["group"] = key
        self._lines.append(json.dumps({**line, **facts}))
        if len(self._lines) >= FLUSH_LINES:
            self.flush()

    def flush(self) -> None:
        """Append what happened since the last flush to the journal."""
        if self._journal is None or not self._lines:
            return
        self._journal.parent.mkdir(parents=True, exist_ok=True)
        with self._journal.open("a") as file:
            file.write("\n".join(self._lines) + "\n")
        self._lines.clear()

    # ---------------------------------------------------------------- checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Totals, ended groups as ranges, live ones by name. Refused while groups are in flight."""
        in_flight = [key for key, entry in self._live.items() if entry.place is Place.IN_FLIGHT]
        if in_flight:
            raise LedgerError(
                f"{len(in_flight)} groups are in flight, for instance {in_flight[0]}: pause before saving"
            )
        return {
            "sampled": self._sampled,
            "totals": dict(self._totals),
            "ended": {task: ordinals.ranges() for task, ordinals in self._ended.items()},
            "live": [[task, group_id] for task, group_id in self._live],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore into an empty ledger. Groups that were leased are buffered again: their step is not part of
        the model that was saved with this state. Raises CheckpointError."""
        if self._sampled:
            raise CheckpointError(
                f"a ledger with {self._sampled} groups cannot be restored over: start with a new one"
            )
        try:
            sampled = int(state["sampled"])
            totals = Counter({str(name): int(total) for name, total in state["totals"].items()})
            ended = {str(task): OrdinalSet(ranges) for task, ranges in state["ended"].items()}
            live = {(str(task), int(group_id)): _Entry(Place.BUFFERED) for task, group_id in state["live"]}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"damaged ledger state: {error!r}") from error
        num_ended = sum(map(len, ended.values()))
        if sampled != num_ended + len(live) or num_ended != totals.total():
            raise CheckpointError(
                f"ledger state does not add up: {sampled} sampled, {num_ended} ended ({dict(totals)}), "
                f"{len(live)} live"
            )
        self._sampled, self._totals, self._ended, self._live = sampled, totals, ended, live
        self._write("restored", sampled=sampled, live=len(live))
