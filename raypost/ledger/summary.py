"""Summary of all groups of a run, length bias included, made from its ledger's journal, also while the run goes on.

The journal is replayed through a Ledger (replay.py), so that what is counted obeys the rules under which it was
written; moves that break them are listed as problems.

Invariant: memory is bounded by the groups that have not ended, never by the length of the journal.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypost.errors import RaypostError
from raypost.ledger.events import LedgerEvent
from raypost.ledger.facts import GroupPlace, GroupStats
from raypost.ledger.journal import JournalReader
from raypost.ledger.ledger import LEDGER_FILE, REGENERATED, Ledger
from raypost.ledger.replay import Replay, ledger_before
from raypost.types import GroupCounts

Fields = dict[str, Any]


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
    replay = Replay(ledger_before(reader))
    for fields, _ in reader.lines():
        replay.play(fields)
    problems = replay.problems
    if reader.num_damaged:
        problems = [*problems, f"{reader.num_damaged} damaged lines of {LEDGER_FILE} were skipped"]
    return LedgerSummary(
        run_dir=run_dir,
        tasks=_tasks(replay.ledger),
        counts=replay.ledger.believed(),
        events=dict(replay.ledger.events),
        problems=problems,
    )


def sampled_before(run_dir: Path) -> int:
    """Return how many groups a run has sampled by its journal, 0 where that cannot be read."""
    try:
        return ledger_summary(run_dir).counts.sampled
    except (OSError, RaypostError):
        return 0


def _tasks(ledger: Ledger) -> dict[str, dict[str, GroupStats]]:
    """Return the statistics by task and kind, of the living too."""
    found = {task: dict(kinds) for task, kinds in ledger.stats.items()}
    for key, group in ledger.living():
        kind = GroupPlace.IN_FLIGHT if group.place is GroupPlace.IN_FLIGHT else GroupPlace.BUFFERED
        found.setdefault(key[0], {}).setdefault(kind, GroupStats()).add(group)
    return dict(sorted(found.items()))
