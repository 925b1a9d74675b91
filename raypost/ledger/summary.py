"""Summary of all groups of a run, length bias included, made from its ledger's journal, also while the run goes on.

The journal is replayed through a Ledger, so that what is counted obeys the rules under which it was written; moves
that break them are listed as problems.

Invariant: memory is bounded by the groups that have not ended, never by the length of the journal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypost.errors import LedgerError
from raypost.ledger.events import DROPPED, LedgerEvent
from raypost.ledger.journal import JournalReader
from raypost.ledger.ledger import LEDGER_FILE, GroupPlace, Ledger
from raypost.types import GroupCounts, GroupKey, Status

REGENERATED = "regenerated"
"""Kind of groups that grew too old and stayed, to be generated again; such a group ends elsewhere later."""
MAX_PROBLEMS = 10

Fields = dict[str, Any]


@dataclass(slots=True)
class GroupStats:
    """Groups of one kind; means are over those of which the journal has the figure, None without any."""

    groups: int = 0
    tokens_sum: float = 0.0
    tokens_groups: int = 0
    staleness_sum: float = 0.0
    staleness_groups: int = 0

    def add(self, tokens: float | None, staleness: float | None) -> None:
        """Count one group with the mean response length of its members, and its staleness."""
        self.groups += 1
        if tokens is not None:
            self.tokens_sum += tokens
            self.tokens_groups += 1
        if staleness is not None:
            self.staleness_sum += staleness
            self.staleness_groups += 1

    @property
    def tokens_mean(self) -> float | None:
        """Mean response length."""
        return self.tokens_sum / self.tokens_groups if self.tokens_groups else None

    @property
    def staleness_mean(self) -> float | None:
        """Mean staleness."""
        return self.staleness_sum / self.staleness_groups if self.staleness_groups else None

    def as_dict(self) -> Fields:
        """Return plain data."""
        return {"groups": self.groups, "tokens_mean": self.tokens_mean, "staleness_mean": self.staleness_mean}

    def __iadd__(self, other: GroupStats) -> GroupStats:
        """Add the groups of another kind."""
        for name in GroupStats.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


@dataclass(slots=True, kw_only=True, frozen=True)
class LengthBias:
    """Response lengths of groups lost to age, against those that were trained.

    `ratio` compares within each task: above 1, long answers are lost more often, and training is biased towards
    short ones.
    """

    trained: GroupStats
    dropped: GroupStats
    regenerated: GroupStats
    ratio: float | None

    @property
    def num_expired(self) -> int:
        """Groups that grew too old, whether dropped or generated again."""
        return self.dropped.groups + self.regenerated.groups

    @property
    def share(self) -> float:
        """Of all groups that were trained or grew too old, the fraction that grew too old."""
        total = self.trained.groups + self.num_expired
        return self.num_expired / total if total else 0.0

    def as_dict(self) -> Fields:
        """Return plain data."""
        parts = {"trained": self.trained, "dropped": self.dropped, "regenerated": self.regenerated}
        found: Fields = {
            name: {"groups": one.groups, "tokens_mean": one.tokens_mean} for name, one in parts.items()
        }
        return {**found, "ratio": self.ratio, "share": self.share}


def length_bias(tasks: dict[str, dict[str, GroupStats]]) -> LengthBias:
    """Return the length bias of these tasks together. A task without trained groups does not enter the ratio."""
    total = {name: GroupStats() for name in (LedgerEvent.TRAINED, LedgerEvent.EXPIRED, REGENERATED)}
    lost, expected, nothing = 0.0, 0.0, GroupStats()
    for kinds in tasks.values():
        trained_mean = kinds.get(LedgerEvent.TRAINED, nothing).tokens_mean
        for name, sum_of in total.items():
            stats = kinds.get(name, nothing)
            sum_of += stats
            if trained_mean and name != LedgerEvent.TRAINED:
                lost += stats.tokens_sum
                expected += stats.tokens_groups * trained_mean
    return LengthBias(
        trained=total[LedgerEvent.TRAINED],
        dropped=total[LedgerEvent.EXPIRED],
        regenerated=total[REGENERATED],
        ratio=lost / expected if expected else None,
    )


@dataclass(slots=True, kw_only=True)
class LedgerSummary:
    """Where all groups of a run are. `counts` is the journal's, whose last moments may not be written yet."""

    run_dir: Path
    tasks: dict[str, dict[str, GroupStats]]
    """By task and kind: an end (ENDS), `buffered`, `in_flight`, or REGENERATED beside them."""
    counts: GroupCounts
    events: dict[str, int]
    """How often production as a whole was paused, resumed, restored and the like."""
    problems: list[str]
    """What does not add up; empty is what a run should have."""

    @property
    def length_bias(self) -> LengthBias:
        """Length bias of all tasks together."""
        return length_bias(self.tasks)

    def as_dict(self) -> Fields:
        """Return plain data."""
        return {
            "run": str(self.run_dir),
            "groups": self.counts.as_dict(),
            "tasks": {
                task: {kind: stats.as_dict() for kind, stats in kinds.items()}
                for task, kinds in self.tasks.items()
            },
            "length_bias": self.length_bias.as_dict(),
            "events": self.events,
            "problems": self.problems,
        }


def ledger_summary(run_dir: Path) -> LedgerSummary:
    """Count all groups of a run. Raises OSError if it has no journal."""
    reader = JournalReader(run_dir / LEDGER_FILE)
    replay = _Replay()
    for fields, _ in reader.lines():
        replay.play(fields)
    problems = replay.problems
    if reader.num_damaged:
        problems = [*problems, f"{reader.num_damaged} damaged lines of {LEDGER_FILE} were skipped"]
    return LedgerSummary(
        run_dir=run_dir,
        tasks=replay.tasks(),
        counts=replay.ledger.believed(),
        events=replay.events,
        problems=problems,
    )


@dataclass(slots=True)
class _Known:
    """What the journal last said of a group that lives."""

    tokens: float | None = None
    staleness: float | None = None
    expired: bool = False
    continued: bool = False


class _Replay:
    """Replays a journal, line by line, through a ledger."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.events: dict[str, int] = {}
        self._ended: dict[str, dict[str, GroupStats]] = {}
        self._known: dict[GroupKey, _Known] = {}
        self._problems: list[str] = []
        self._num_problems = 0
        self._moves: dict[str, Callable[[GroupKey, Fields], None]] = {
            LedgerEvent.SAMPLED: self._sampled,
            LedgerEvent.CONTINUED: self._continued,
            LedgerEvent.STORED: self._stored,
            LedgerEvent.LEASED: self._leased,
            LedgerEvent.TRAINED: self._trained,
            **dict.fromkeys(DROPPED, self._dropped),
        }

    def play(self, fields: Fields) -> None:
        """Apply one line; a move that the ledger refuses is a problem of the journal, and changes nothing."""
        event = fields["event"]
        try:
            if event in self._moves:
                self._moves[event]((fields["task"], fields["group"]), fields)
                return
            self.events[event] = self.events.get(event, 0) + 1
            if event == LedgerEvent.RESTORED:
                self._restored(fields)
        except (LedgerError, KeyError, TypeError, ValueError) as error:
            self._problem(f"{event}: {error}" if isinstance(error, LedgerError) else f"{event}: {error!r}")

    @property
    def problems(self) -> list[str]:
        """The first of them, and how many there were more."""
        more = self._num_problems - len(self._problems)
        return [*self._problems, *([f"and {more} more"] if more else [])]

    def tasks(self) -> dict[str, dict[str, GroupStats]]:
        """Statistics by task and kind, of the living too."""
        found = {task: dict(kinds) for task, kinds in self._ended.items()}
        for key, place in self.ledger.live():
            kind = GroupPlace.IN_FLIGHT if place is GroupPlace.IN_FLIGHT else GroupPlace.BUFFERED
            known = self._known.get(key) or _Known()
            found.setdefault(key[0], {}).setdefault(kind, GroupStats()).add(known.tokens, known.staleness)
        return dict(sorted(found.items()))

    def _problem(self, text: str) -> None:
        self._num_problems += 1
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(text)

    def _sampled(self, key: GroupKey, fields: Fields) -> None:
        self.ledger.sampled(key)
        self._known[key] = _Known()

    def _continued(self, key: GroupKey, fields: Fields) -> None:
        self.ledger.continued(key)
        self._known[key].continued = True

    def _stored(self, key: GroupKey, fields: Fields) -> None:
        status = Status(fields["status"])
        self.ledger.stored(key, status)
        known = self._known[key]
        again = known.continued and not fields.get("put_back")
        _learn(known, fields)
        if status is not Status.EXPIRED:
            known.expired &= not again
        elif fields.get("too_old", True):
            # A group that was put back as it was, or is aged again, did not expire a second time.
            if again or not known.expired:
                self._stats(key, REGENERATED).add(known.tokens, known.staleness)
            known.expired = True
        known.continued = False

    def _leased(self, key: GroupKey, fields: Fields) -> None:
        self.ledger.leased([key], fields["step"], [fields["staleness"]])
        _learn(self._known[key], fields)

    def _trained(self, key: GroupKey, fields: Fields) -> None:
        # Ends all of the step at once: its other lines change nothing, and may not be written yet.
        for one in self.ledger.trained(fields["step"]):
            known = self._known.pop(one)
            self._stats(one, LedgerEvent.TRAINED).add(known.tokens, known.staleness)

    def _dropped(self, key: GroupKey, fields: Fields) -> None:
        self.ledger.dropped(key, Status(fields["event"]))
        known = self._known.pop(key)
        _learn(known, fields)
        self._stats(key, fields["event"]).add(known.tokens, known.staleness)

    def _restored(self, fields: Fields) -> None:
        """Leases that were open when the checkpoint was saved are back in the buffer."""
        again = Ledger()
        again.load_state_dict(self.ledger.state_dict())
        self.ledger = again
        played, saved = again.believed().sampled, fields["sampled"]
        if played != saved:
            self._problem(
                f"restored: the checkpoint had {saved} groups, the journal before it {played}: "
                "it is not the journal of that checkpoint"
            )

    def _stats(self, key: GroupKey, kind: str) -> GroupStats:
        return self._ended.setdefault(key[0], {}).setdefault(kind, GroupStats())


def _learn(known: _Known, fields: Fields) -> None:
    """Update a group's figures from a line."""
    tokens = fields.get("tokens")
    if isinstance(tokens, list) and tokens:
        known.tokens = sum(tokens) / len(tokens)
    known.staleness = fields.get("staleness", known.staleness)
