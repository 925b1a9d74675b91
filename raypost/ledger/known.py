"""Known: what a ledger knows of the groups of a run: those that live, one by one, and those that ended, as totals.

Owns the counts, what can be asked, and its form as plain data. How it changes is the Ledger's (ledger.py).

Invariant: memory is bounded by the groups that have not ended.
"""

from __future__ import annotations

import base64
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from raypost.errors import CheckpointError
from raypost.ledger.events import LedgerEvent
from raypost.ledger.facts import RECORD, GroupPlace, GroupStats, LiveGroup, Names, group_of, record_of
from raypost.ledger.ordinals import OrdinalSet
from raypost.types import GroupCounts, GroupKey


def nearest_of(known: list[int], number: int) -> list[int]:
    """Return the nearest of these numbers below `number`, and the nearest from it on, where there are such."""
    below, above = [one for one in known if one < number], [one for one in known if one >= number]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]


class Known:
    """The account of all groups, which a subclass keeps."""

    def __init__(self) -> None:
        """Know no group yet."""
        self._names = Names()
        self._live: dict[GroupKey, LiveGroup] = {}
        self._leases: dict[int, list[GroupKey]] = {}
        self._ended: dict[str, OrdinalSet] = {}
        self._totals: Counter[LedgerEvent] = Counter()
        self.stats: dict[str, dict[str, GroupStats]] = {}
        """By task and kind: an end (ENDS), or REGENERATED beside them."""
        self.events: Counter[str] = Counter()
        """How often production as a whole was paused, resumed, restored and the like."""
        self.left_out: Counter[str] = Counter()
        """Groups of each task that were leased, and left out by the trainer."""
        self.allotted: dict[int, dict[str, int]] = {}
        """Groups of each task in the batch of a step that is not trained."""
        self.trained_step = 0
        """Last step whose batch is trained."""
        self.last_note: tuple[LedgerEvent, dict[str, Any]] = (LedgerEvent.STARTED, {})
        """What production as a whole did last, as far as it says whether it goes on, and with which version."""

    # ---------------------------------------------------------------- what can be read

    def knows(self, key: GroupKey) -> bool:
        """Return whether the group was sampled."""
        return key in self._live or self._has_ended(key)

    def _has_ended(self, key: GroupKey) -> bool:
        task, group_id = key
        return task in self._ended and group_id in self._ended[task]

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

    def sampled_of(self, task: str) -> int:
        """Return how many groups of a task were sampled."""
        return len(self._ended.get(task, ())) + sum(name == task for name, _ in self._live)

    def live(self) -> Iterator[tuple[GroupKey, GroupPlace]]:
        """Yield every group that has not ended, and where it is."""
        return ((key, entry.place) for key, entry in self._live.items())

    def lives(self, key: GroupKey) -> bool:
        """Return whether the group was sampled and has not ended."""
        return key in self._live

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

    def leased_keys(self, step: int) -> list[GroupKey]:
        """Return the groups of the batch of a step that is not acknowledged."""
        return list(self._leases.get(step, ()))

    def consumed(self, task: str) -> int:
        """Return how many groups of a task were taken: leased now, trained, or left out by the trainer."""
        leased = sum(key[0] == task for keys in self._leases.values() for key in keys)
        trained = self.stats.get(task, {}).get(LedgerEvent.TRAINED, GroupStats()).groups
        return leased + trained + self.left_out[task]

    def _stats(self, key: GroupKey, kind: str) -> GroupStats:
        return self.stats.setdefault(key[0], {}).setdefault(kind, GroupStats())

    # ---------------------------------------------------------------- as plain data

    def known(self) -> dict[str, Any]:
        """Return all of it as plain data, which `load_snapshot` reads."""
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
            "left_out": dict(self.left_out),
            "allotted": [[step, shares] for step, shares in self.allotted.items()],
            "trained_step": self.trained_step,
            "last_note": list(self.last_note),
            "names": list(self._names.texts),
        }

    def load_snapshot(self, state: dict[str, Any]) -> None:
        """Become what `known` described. Raises CheckpointError; then nothing has changed."""
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
            allotted = {int(step): dict(shares) for step, shares in state.get("allotted", ())}
            trained_step = int(state.get("trained_step", 0))
            note, facts = state.get("last_note", (LedgerEvent.STARTED, {}))
            last_note = (LedgerEvent(note), dict(facts))
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
        self.allotted, self.last_note = allotted, last_note
        self.trained_step = trained_step
        for key, group in live.items():
            if group.place is GroupPlace.LEASED:
                self._leases.setdefault(group.step, []).append(key)
        self.left_out = Counter(state.get("left_out", {}))

    def reopen_leases(self) -> None:
        """Take back all leases, as a restore does: the groups are buffered."""
        for key in (key for keys in self._leases.values() for key in keys):
            self._live[key].place = GroupPlace.BUFFERED
        self._leases = {}
