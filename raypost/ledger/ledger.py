"""Ledger: where every group is, from the moment its prompt left the dataset until its end.

Owns the life of each group, checks every transition, and writes each into a journal (journal.py) that can be
read while the run goes on. A journal that has become long is replaced by a snapshot of the ledger, and what it said of
the groups that ended stays as a record each (facts.py, closed.py). Owns no group: that `counts` compares its own record
with what the buffer and the pending set really hold is what makes `lost` a measurement.

    sampled -> in flight <-> buffered -> leased -> trained
                   |             |
                   +-------------+-> filtered | failed | expired         (or failed, if the trainer left it out)

Invariants: an ended group never moves again; memory is bounded by the groups that have not ended, since
ended ones are remembered as ranges of ordinals and as totals; a refused transition changes nothing; a snapshot counts
what its lines counted; a ledger whose process died is its journal's lines replayed (replay.py), byte for byte.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raypost.errors import CheckpointError, LedgerError
from raypost.files.disk import Fsync, Patience
from raypost.ledger.closed import CLOSED_FILE, Closed, ClosedGroups
from raypost.ledger.events import DROPPED, NOTES, PHASES, LedgerEvent
from raypost.ledger.facts import GroupPlace, LiveGroup, record_of
from raypost.ledger.journal import Journal
from raypost.ledger.known import Known
from raypost.ledger.ordinals import OrdinalSet
from raypost.types import Group, GroupKey, Status

log = logging.getLogger(__name__)

LEDGER_FILE = "ledger.jsonl"
"""Name of the journal in the run folder."""
MAX_WHY = 500
"""Characters of a reason that the journal keeps."""
REGENERATED = "regenerated"
"""Kind of groups that grew too old and stayed, to be generated again; such a group ends elsewhere later."""
FORMAT = 3
"""Of the state in a checkpoint."""

_DROP_EVENTS = {Status(event.value): event for event in DROPPED}
_BUFFERED, _UNTRAINED = (GroupPlace.BUFFERED,), (GroupPlace.IN_FLIGHT, GroupPlace.BUFFERED)


def group_facts(group: Group) -> dict[str, Any]:
    """Return what the journal keeps of a group beside its moves, as plain data without empty fields.

    tokens: response length of every member, of a session that of all its trajectories. versions: response tokens by
    policy version (-1: no policy's). engines: rollout workers of the members' last segments. rewards: of every member.
    finish: members by finish reason. aborts: interruptions by a pause, of all members.
    """
    states, members = group.states, group.members
    # Versions begin at -1.
    counts = np.bincount(np.concatenate([state.policy_versions for state in states]) + 1)
    rewards = [member[-1].reward for member in members]
    facts = {
        "tokens": [sum(len(state.response_ids) for state in member) for member in members],
        "versions": {str(at - 1): int(counts[at]) for at in np.flatnonzero(counts)},
        "engines": sorted({state.worker for state in states if state.worker}),
        # JSON has no number that is not finite.
        "rewards": [one if one is not None and math.isfinite(one) else None for one in rewards],
        "finish": dict(Counter(one[-1].finish_reason for one in members if one[-1].finish_reason)),
        "aborts": sum(member[-1].num_aborts for member in members),
    }
    if not any(reward is not None for reward in rewards):
        del facts["rewards"]
    return {name: fact for name, fact in facts.items() if fact}


class Ledger(Known):
    """The record of all groups of a run."""

    def __init__(
        self,
        journal: Path | None = None,
        clock: Callable[[], float] = time.time,
        *,
        attempt: str = "",
        begin: bool = True,
        patience_s: float = 0.0,
        fsync: Fsync = "off",
    ) -> None:
        """`journal` None keeps none. `clock` gives the time written into it, seconds since the epoch.

        `attempt` names this start of the run. `begin`: whether production begins anew with it, and what the journal has
        counts no more. `patience_s`: how long its lines wait for a disk that refuses them. `fsync`: when
        they go to the disk itself.
        """
        super().__init__()
        self._journal = None if journal is None else Journal(journal, patience_s, fsync)
        self._patience = Patience(patience_s)
        self._closed = None if journal is None else ClosedGroups(journal.with_name(CLOSED_FILE))
        self._clock = clock
        self.replayed_s: float | None = None
        """While a journal is replayed, the time of its line: nothing is written then."""
        self.attempt = attempt
        """Start of the run that its last lines are of."""
        self._idle = False
        """Whether the last line says that another history begins: a start that fails before it did more voids none."""
        if begin:
            self._write(LedgerEvent.STARTED, None, self._mark)

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
        """Note that a group ended untrained: FILTERED, FAILED or EXPIRED. With a `step`, its trainer left it out."""
        if reason not in _DROP_EVENTS:
            raise LedgerError(
                f"group {key} cannot be dropped as {reason}: a reason is one of {', '.join(_DROP_EVENTS)}"
            )
        entry = self._entry(key, (GroupPlace.LEASED,) if "step" in facts else _UNTRAINED, reason)
        if entry.place is GroupPlace.LEASED:
            self._leases[entry.step].remove(key)
            if not self._leases[entry.step]:
                del self._leases[entry.step]
            self.left_out[key[0]] += 1
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

    def trained(self, step: int, left_out: Mapping[GroupKey, str] | None = None) -> list[GroupKey]:
        """End all groups leased up to `step` as trained, at one time; returns them, none when repeated.

        `left_out`: groups of these that the trainer did not train, and why; they end as FAILED.
        """
        for key, why in (left_out or {}).items():
            if key in self._live:
                self.dropped(key, Status.FAILED, step=self._live[key].step, why=why)
        trained, now_s = [], self._now_s()
        for leased in sorted(one for one in self._leases if one <= step):
            for key in self._leases.pop(leased):
                self._end(key, LedgerEvent.TRAINED, {"step": leased}, now_s)
                trained.append(key)
        self.allotted = {later: shares for later, shares in self.allotted.items() if later > step}
        return trained

    def allot(self, step: int, shares: Callable[[], Mapping[str, int]]) -> dict[str, int]:
        """Return the groups of each task in the batch of `step`: `shares()`, noted the first time it is asked for."""
        if step not in self.allotted:
            self.allotted[step] = dict(shares())
            self._write(LedgerEvent.ALLOTTED, None, {"step": step, "shares": self.allotted[step]})
        return self.allotted[step]

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

    def _end(
        self, key: GroupKey, how: LedgerEvent, facts: dict[str, Any], now_s: float | None = None
    ) -> None:
        group, (task, group_id) = self._live.pop(key), key
        group.learn(facts)
        self.trained_step = max(self.trained_step, facts.get("step", 0))
        self._ended.setdefault(task, OrdinalSet()).add(group_id)
        self._totals[how] += 1
        self._stats(key, how).add(group)
        ended_s = self._write(how, key, facts, now_s)
        if self._closed is not None:
            self._closed.add(record_of(key, group, self._names, how, ended_s, facts.get("why", "")))

    # ---------------------------------------------------------------- journal

    @property
    def _mark(self) -> dict[str, Any]:
        return {"attempt": self.attempt} if self.attempt else {}

    def _now_s(self) -> float:
        """Return the time of a line, as it is read again: what a replay makes of it is the same."""
        return round(self._clock(), 3) if self.replayed_s is None else self.replayed_s

    def _write(
        self, event: LedgerEvent, key: GroupKey | None, facts: dict[str, Any], now_s: float | None = None
    ) -> float:
        """Write a line; returns its time, which is `now_s` if that is given."""
        if key is None and event is not LedgerEvent.ALLOTTED:
            self.events[event] += 1
            if event in PHASES:
                self.last_note = (event, facts)
        if self.replayed_s is not None:
            return self.replayed_s
        if self._journal is None:
            return 0.0
        now_s = self._now_s() if now_s is None else now_s
        line: dict[str, Any] = {"time": now_s, "event": event}
        if key is not None:
            line["task"], line["group"] = key
        line.update(facts)
        self._journal.append(line, now_s)
        self._idle = event is LedgerEvent.STARTED
        return now_s

    def flush(self) -> None:
        """Write what happened since the last flush, or a snapshot when the journal has become long. Raises OSError.

        The journal does so itself while lines come fast; call this before waiting for something.
        """
        if self._journal is not None and not self._idle:
            self._journal.flush()
            if self._journal.is_long():
                try:
                    self._put_snapshot()
                except OSError as error:
                    if not self._patience.is_left(error, self._journal.path):
                        raise

    def _put_snapshot(self, base: int = 0) -> None:
        assert self._journal is not None
        # What it refers to is on the disk before it is.
        self._journal.put_snapshot(self._now_s(), self.snapshot(), base)

    def snapshot(self) -> dict[str, Any]:
        """Return all that the ledger knows, as plain data; the records of ended groups are on the disk then."""
        closed = Closed() if self._closed is None else self._closed.write()
        return {**self.known(), "attempt": self.attempt, "closed": list(closed)}

    def continue_closed(self, closed: Closed) -> bool:
        """Go on behind these records of groups that ended. Returns whether they are there."""
        found = self._closed is None or self._closed.go_back(closed)
        if not found:
            log.warning("%s is not the one of this journal: the records of its groups are lost", CLOSED_FILE)
        return found

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
        if self._journal is not None:
            found = self.continue_closed(Closed(*state["closed"]))
            if not found or not self._journal.base <= offset <= self._journal.end:
                # The lines of then, or what they refer to, are gone: a snapshot says what they came to.
                self._put_snapshot(offset)
                offset = self._journal.base
        facts = {"offset": offset, "sampled": self._sampled, "live": len(self._live), **self._mark}
        self._write(LedgerEvent.RESTORED, None, facts)
