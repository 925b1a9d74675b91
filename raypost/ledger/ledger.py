"""Ledger: where every group is, from the moment its prompt left the dataset until its end.

Owns the life of each group, checks every transition, and writes each into a journal (journal.py) that can be
read while the run goes on. A journal that has become long is replaced by a snapshot of the ledger, and what it said of
the groups that ended stays as a record each (facts.py, closed.py). Owns no group: that `counts` compares its own record
with what the buffer and the pending set really hold is what makes `lost` a measurement.

    sampled -> in flight <-> buffered -> leased -> trained
                   |             |
                   +-------------+-> filtered | failed | expired

Invariants: an ended group never moves again; memory is bounded by the groups that have not ended, since
ended ones are remembered as ranges of ordinals and as totals; a refused transition changes nothing; a snapshot counts
what its lines counted.
"""

from __future__ import annotations

import base64
import logging
import math
import struct
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from raypost.errors import CheckpointError, LedgerError
from raypost.ledger.closed import CLOSED_FILE, Closed, ClosedGroups
from raypost.ledger.events import DROPPED, NOTES, LedgerEvent
from raypost.ledger.facts import RECORD, GroupPlace, GroupStats, LiveGroup, Names, group_of, record_of
from raypost.ledger.journal import Journal
from raypost.types import Group, GroupCounts, GroupKey, Status

log = logging.getLogger(__name__)

LEDGER_FILE = "ledger.jsonl"
"""Name of the journal in the run folder."""
MAX_WHY = 500
"""Characters of a reason that the journal keeps."""
REGENERATED = "regenerated"
"""Kind of groups that grew too old and stayed, to be generated again; such a group ends elsewhere later."""
FORMAT = 2
"""Of the state in a checkpoint."""


class OrdinalSet:
    """A set of ordinals as disjoint ranges: as small as the number of gaps in it."""

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        """`ranges` as `ranges()` gave them: (first, last + 1), ascending."""
        pairs = [(int(start), int(end)) for start, end in ranges]
        self._starts = [start for start, _ in pairs]
        self._ends = [end for _, end in pairs]

    def __contains__(self, ordinal: int) -> bool:
        """Return whether the ordinal was added."""
        at = bisect_right(self._starts, ordinal) - 1
        return at >= 0 and ordinal < self._ends[at]

    def __len__(self) -> int:
        """Return the number of ordinals."""
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
        """Return (first, last + 1) of every range, ascending."""
        return [[start, end] for start, end in zip(self._starts, self._ends, strict=True)]


_DROP_EVENTS = {Status(event.value): event for event in DROPPED}
_BUFFERED, _UNTRAINED = (GroupPlace.BUFFERED,), (GroupPlace.IN_FLIGHT, GroupPlace.BUFFERED)


def nearest_of(known: list[int], number: int) -> list[int]:
    """Return the nearest of these numbers below `number`, and the nearest from it on, where there are such."""
    below, above = [one for one in known if one < number], [one for one in known if one >= number]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]


def group_facts(group: Group) -> dict[str, Any]:
    """Return what the journal keeps of a group beside its moves, as plain data without empty fields.

    tokens: response length of every member. versions: response tokens by policy version (-1: no policy's).
    engines: rollout workers of the members' last segments. rewards: of every member. finish: members by
    finish reason. aborts: interruptions by a pause, of all members.
    """
    states = group.states
    # Versions begin at -1.
    counts = np.bincount(np.concatenate([state.policy_versions for state in states]) + 1)
    rewards = [state.reward for state in states]
    facts = {
        "tokens": [len(state.response_ids) for state in states],
        "versions": {str(at - 1): int(counts[at]) for at in np.flatnonzero(counts)},
        "engines": sorted({state.worker for state in states if state.worker}),
        # JSON has no number that is not finite.
        "rewards": [one if one is not None and math.isfinite(one) else None for one in rewards],
        "finish": dict(Counter(state.finish_reason for state in states if state.finish_reason)),
        "aborts": sum(state.num_aborts for state in states),
    }
    if not any(reward is not None for reward in rewards):
        del facts["rewards"]
    return {name: fact for name, fact in facts.items() if fact}


class Ledger:
    """The record of all groups of a run."""

    def __init__(self, journal: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """`journal` None keeps none. `clock` gives the time written into it, seconds since the epoch."""
        self._journal = None if journal is None else Journal(journal)
        self._closed = None if journal is None else ClosedGroups(journal.with_name(CLOSED_FILE))
        self._names = Names()
        self._clock = clock
        self._live: dict[GroupKey, LiveGroup] = {}
        self._leases: dict[int, list[GroupKey]] = {}
        self._ended: dict[str, OrdinalSet] = {}
        self._totals: Counter[LedgerEvent] = Counter()
        self.stats: dict[str, dict[str, GroupStats]] = {}
        """By task and kind: an end (ENDS), or REGENERATED beside them."""
        self.events: Counter[str] = Counter()
        """How often production as a whole was paused, resumed, restored and the like."""
        self._write(LedgerEvent.STARTED, None, {})

    # ---------------------------------------------------------------- transitions

    def sampled(self, key: GroupKey) -> None:
        """Note that a prompt left the dataset: its group is in flight. Raises LedgerError if it did before."""
        if self.knows(key):
            raise LedgerError(f"group {key} was sampled twice: the sampler's position went back")
        self._live[key] = LiveGroup(sampled_s=self._write(LedgerEvent.SAMPLED, key, {}))

    def continued(self, key: GroupKey) -> None:
        """Note that a buffered group is in flight again."""
        entry = self._entry(key, _BUFFERED, GroupPlace.IN_FLIGHT)
        entry.place, entry.is_continued = GroupPlace.IN_FLIGHT, True
        entry.continued += 1
        self._write(LedgerEvent.CONTINUED, key, {})

    def stored(self, key: GroupKey, status: Status, **facts: Any) -> None:
        """Note that a group is in the buffer with `status`, from flight or because its status changed there."""
        entry = self._entry(key, _UNTRAINED, GroupPlace.BUFFERED)
        entry.place, entry.status = GroupPlace.BUFFERED, status.value
        entry.learn(facts)
        again = entry.is_continued and not facts.get("put_back")
        if status is not Status.EXPIRED:
            entry.is_expired &= not again
        elif facts.get("too_old", True):
            # A group that was put back as it was, or is aged again, did not expire a second time.
            if again or not entry.is_expired:
                self._stats(key, REGENERATED).add(entry)
                entry.regenerated += 1
            entry.is_expired = True
        entry.is_continued = False
        entry.stored_s = self._write(LedgerEvent.STORED, key, {"status": status.value, **facts})

    def dropped(self, key: GroupKey, reason: Status, **facts: Any) -> None:
        """Note that a group ended untrained: FILTERED, FAILED or EXPIRED."""
        if reason not in _DROP_EVENTS:
            raise LedgerError(
                f"group {key} cannot be dropped as {reason}: a reason is one of {', '.join(_DROP_EVENTS)}"
            )
        self._entry(key, _UNTRAINED, reason)
        if "why" in facts:
            facts["why"] = str(facts["why"])[:MAX_WHY]
        self._end(key, _DROP_EVENTS[reason], facts)

    def leased(self, keys: Sequence[GroupKey], step: int, staleness: Sequence[int]) -> None:
        """Note that these groups are the batch of `step`. Repeated for the same step, nothing changes."""
        entries = [
            self._entry(key, (GroupPlace.BUFFERED, GroupPlace.LEASED), LedgerEvent.LEASED) for key in keys
        ]
        for key, entry, _ in zip(keys, entries, staleness, strict=True):
            if entry.place is GroupPlace.LEASED and entry.step != step:
                raise LedgerError(
                    f"group {key} is leased for step {entry.step} and for {step}: it would train twice"
                )
        for key, entry, age in zip(keys, entries, staleness, strict=True):
            if entry.place is GroupPlace.BUFFERED:
                entry.place, entry.step, entry.staleness = GroupPlace.LEASED, step, age
                self._leases.setdefault(step, []).append(key)
                entry.leased_s = self._write(LedgerEvent.LEASED, key, {"step": step, "staleness": age})

    def trained(self, step: int) -> list[GroupKey]:
        """End all groups leased up to `step` as trained; returns them, none when repeated."""
        trained = []
        for leased in sorted(one for one in self._leases if one <= step):
            for key in self._leases.pop(leased):
                self._end(key, LedgerEvent.TRAINED, {"step": leased})
                trained.append(key)
        return trained

    def note(self, event: LedgerEvent, **facts: Any) -> None:
        """Write what happened to production as a whole, such as a pause; counts nothing."""
        if event not in NOTES:
            raise LedgerError(
                f"{event} is for the ledger itself to write; a note is one of {', '.join(NOTES)}"
            )
        self._write(event, None, facts)

    def _entry(self, key: GroupKey, places: tuple[GroupPlace, ...], to: str) -> LiveGroup:
        entry = self._live.get(key)
        if entry is None:
            past = "has ended already" if self._has_ended(key) else "was never sampled"
            raise LedgerError(f"group {key} {past} and cannot become {to}")
        if entry.place not in places:
            raise LedgerError(
                f"group {key} is {entry.place} and cannot become {to}: it must be {' or '.join(places)}"
            )
        return entry

    def _end(self, key: GroupKey, how: LedgerEvent, facts: dict[str, Any]) -> None:
        group, (task, group_id) = self._live.pop(key), key
        group.learn(facts)
        self._ended.setdefault(task, OrdinalSet()).add(group_id)
        self._totals[how] += 1
        self._stats(key, how).add(group)
        ended_s = self._write(how, key, facts)
        if self._closed is not None:
            self._closed.add(record_of(key, group, self._names, how, ended_s, facts.get("why", "")))

    def _stats(self, key: GroupKey, kind: str) -> GroupStats:
        return self.stats.setdefault(key[0], {}).setdefault(kind, GroupStats())

    def knows(self, key: GroupKey) -> bool:
        """Return whether the group was sampled."""
        return key in self._live or self._has_ended(key)

    def _has_ended(self, key: GroupKey) -> bool:
        task, group_id = key
        return task in self._ended and group_id in self._ended[task]

    # ---------------------------------------------------------------- what can be read

    def counts(self, buffered: int, in_flight: int) -> GroupCounts:
        """Return all counts, with what the buffer and the pending set really hold; `lost` is the difference."""
        return GroupCounts(
            sampled=self._sampled,
            trained=self._totals[LedgerEvent.TRAINED],
            filtered=self._totals[LedgerEvent.FILTERED],
            failed=self._totals[LedgerEvent.FAILED],
            expired=self._totals[LedgerEvent.EXPIRED],
            buffered=buffered,
            in_flight=in_flight,
        )

    def believed(self) -> GroupCounts:
        """Return all counts as the ledger alone knows them: they always add up."""
        in_flight = self._num_in_flight()
        return self.counts(len(self._live) - in_flight, in_flight)

    def _num_in_flight(self) -> int:
        return sum(place is GroupPlace.IN_FLIGHT for _, place in self.live())

    @property
    def _sampled(self) -> int:
        return len(self._live) + self._totals.total()

    def live(self) -> Iterator[tuple[GroupKey, GroupPlace]]:
        """Yield every group that has not ended, and where it is."""
        return ((key, entry.place) for key, entry in self._live.items())

    def living(self) -> Iterator[tuple[GroupKey, LiveGroup]]:
        """Yield every group that has not ended, and what is known of it."""
        return iter(self._live.items())

    def living_group(self, key: GroupKey) -> LiveGroup:
        """Return what is known of a group that has not ended. Raises KeyError for others."""
        return self._live[key]

    def nearest(self, task: str, group_id: int) -> list[int]:
        """Return the nearest groups below and above, of those that were sampled."""
        ended = self._ended.get(task, OrdinalSet()).ranges()
        known = [one for start, end in ended for one in (start, end - 1, min(max(start, group_id), end - 1))]
        return nearest_of([*known, *(one for name, one in self._live if name == task)], group_id)

    @property
    def tasks(self) -> list[str]:
        """All tasks of which a group was sampled."""
        return sorted({*self._ended, *(task for task, _ in self._live)})

    def open_leases(self) -> dict[int, Counter[str]]:
        """Return the number of groups of each task, for every step whose lease is not acknowledged."""
        return {step: Counter(task for task, _ in keys) for step, keys in self._leases.items()}

    # ---------------------------------------------------------------- journal

    def _write(self, event: LedgerEvent, key: GroupKey | None, facts: dict[str, Any]) -> float:
        """Write a line; returns its time."""
        if key is None:
            self.events[event] += 1
        if self._journal is None:
            return 0.0
        now_s = self._clock()
        line: dict[str, Any] = {"time": round(now_s, 3), "event": event}
        if key is not None:
            line["task"], line["group"] = key
        line.update(facts)
        self._journal.append(line, now_s)
        return now_s

    def flush(self) -> None:
        """Write what happened since the last flush, or a snapshot when the journal has become long. Raises OSError.

        The journal does so itself while lines come fast; call this before waiting for something.
        """
        if self._journal is not None:
            self._journal.flush()
            if self._journal.is_long():
                self._put_snapshot()

    def _put_snapshot(self) -> None:
        assert self._journal is not None
        # What it refers to is on the disk before it is.
        self._journal.put_snapshot(round(self._clock(), 3), self.snapshot())

    def snapshot(self) -> dict[str, Any]:
        """Return all that the ledger knows, as plain data; the records of ended groups are on the disk then."""
        closed = Closed() if self._closed is None else self._closed.write()
        live = b"".join(record_of(key, group, self._names) for key, group in self.living())
        return {
            "sampled": self._sampled,
            "totals": {end.value: total for end, total in self._totals.items()},
            "ended": {task: ordinals.ranges() for task, ordinals in self._ended.items()},
            "live": base64.b64encode(live).decode(),
            "stats": {
                task: {kind: asdict(stats) for kind, stats in kinds.items()}
                for task, kinds in self.stats.items()
            },
            "events": dict(self.events),
            "names": list(self._names.texts),
            "closed": list(closed),
        }

    def load_snapshot(self, state: dict[str, Any]) -> None:
        """Become what `snapshot` described. Raises CheckpointError; then nothing has changed."""
        try:
            sampled, names = int(state["sampled"]), Names([str(text) for text in state["names"]])
            totals = Counter({LedgerEvent(name): int(total) for name, total in state["totals"].items()})
            ended = {str(task): OrdinalSet(ranges) for task, ranges in state["ended"].items()}
            records = base64.b64decode(state["live"], validate=True)
            live = dict(
                group_of(records[at : at + RECORD.size], names) for at in range(0, len(records), RECORD.size)
            )
            stats = {
                str(task): {str(kind): GroupStats(**one) for kind, one in kinds.items()}
                for task, kinds in state["stats"].items()
            }
            events = Counter({str(event): int(count) for event, count in state["events"].items()})
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, struct.error) as error:
            raise CheckpointError(f"damaged ledger state: {error!r}") from error
        num_ended = sum(map(len, ended.values()))
        if sampled != num_ended + len(live) or num_ended != totals.total():
            raise CheckpointError(
                f"ledger state does not add up: {sampled} sampled, {num_ended} ended ({dict(state['totals'])}), "
                f"{len(live)} live"
            )
        self._names, self._totals, self._ended, self._live = names, totals, ended, live
        self.stats, self.events, self._leases = stats, events, {}
        for key, group in live.items():
            if group.place is GroupPlace.LEASED:
                self._leases.setdefault(group.step, []).append(key)

    def reopen_leases(self) -> None:
        """Take back all leases, as a restore does: the groups are buffered."""
        for key in (key for keys in self._leases.values() for key in keys):
            self._live[key].place = GroupPlace.BUFFERED
        self._leases = {}

    # ---------------------------------------------------------------- checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return a snapshot, and the offset of the journal on disk.

        Raises LedgerError while groups are in flight.
        """
        if in_flight := self._num_in_flight():
            first = next(key for key, place in self.live() if place is GroupPlace.IN_FLIGHT)
            raise LedgerError(f"{in_flight} groups are in flight, for instance {first}: pause before saving")
        self._write(LedgerEvent.SAVED, None, {"sampled": self._sampled, "live": len(self._live)})
        journal_bytes = 0 if self._journal is None else self._journal.sync()
        return {"format": FORMAT, **self.snapshot(), "journal_bytes": journal_bytes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore into an empty ledger. Raises CheckpointError.

        Groups that were leased are buffered again: their step is not part of the model saved with this state.
        """
        if self._sampled:
            raise CheckpointError(
                f"a ledger with {self._sampled} groups cannot be restored over: start with a new one"
            )
        if state.get("format") != FORMAT:
            raise CheckpointError(
                f"the ledger was saved in format {state.get('format', 1)}, this version reads format {FORMAT}: "
                "continue the run with the version that saved it, or begin another one"
            )
        self.load_snapshot(state)
        self.reopen_leases()
        offset = int(state["journal_bytes"])
        if self._journal is not None and self._closed is not None:
            if not self._closed.go_back(Closed(*state["closed"])):
                log.warning(
                    "%s is not the one of this checkpoint: the records of its groups are lost", CLOSED_FILE
                )
            if self._journal.base > offset:
                # The lines of then are gone: a snapshot says what they came to.
                self._put_snapshot()
                offset = self._journal.base
        facts = {"offset": offset, "sampled": self._sampled, "live": len(self._live)}
        self._write(LedgerEvent.RESTORED, None, facts)
