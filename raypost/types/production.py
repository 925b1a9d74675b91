"""What production says of itself: how a take ended, and what was produced for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, cast


class ProduceBatchStatus(StrEnum):
    """How a round of production, or a take, ended."""

    NORMAL = "normal"
    UPDATE_WEIGHT_AND_ABORT = "update_weight_and_abort"
    """Production stopped because a weight sync is due."""
    EXPIRED_BATCH = "expired_batch"
    """Production is as far ahead as its staleness bound allows; it continues once newer weights arrive."""


@dataclass(slots=True, kw_only=True, frozen=True)
class GroupCounts:
    """Number of groups in each place.

    sampled = trained + filtered + failed + expired + buffered + in_flight + lost.
    """

    sampled: int = 0
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    expired: int = 0
    buffered: int = 0
    """In the replay buffer, leased groups that are not acknowledged yet included."""
    in_flight: int = 0

    @property
    def lost(self) -> int:
        """Groups that are in none of the places above. Must be 0."""
        rest = self.trained + self.filtered + self.failed + self.expired + self.buffered + self.in_flight
        return self.sampled - rest

    def as_dict(self) -> dict[str, int]:
        """Return all counts, `lost` included, under the names used in reports."""
        names = ("sampled", "trained", "filtered", "failed", "expired", "buffered", "in_flight", "lost")
        return {name: cast(int, getattr(self, name)) for name in names}


class Rebuilt(NamedTuple):
    """What a producer did with the groups that were in flight when the one before it died."""

    continued: int = 0
    """Generated further from what was stored of them."""
    from_prompt: int = 0
    """Generated anew, since nothing was."""
    incarnation: int = 0
    """How many producers of this run had died by then."""
    cut: str = ""
    """What was lost of the buffer's journal, and so brought the producer to its end; "" if nothing was."""


@dataclass(slots=True, kw_only=True)
class TaskMetrics:
    """What became of the groups of one task that ended; rewards and samples, not groups."""

    raw_rewards_sum: float = 0.0
    """Before any filter, or the reward curve would lie."""
    raw_rewards_count: int = 0
    produced_samples: int = 0
    filtered_samples: int = 0
    group_s: list[float] = field(default_factory=list)
    """Seconds each finished group took, judging included, since it was last started."""

    def count(self, rewards: Sequence[float | None], filtered: bool, seconds: float) -> None:
        """Count a finished group: the rewards of its members, whether a filter took it, and how long it took."""
        self.produced_samples += len(rewards)
        self.filtered_samples += len(rewards) * filtered
        self.group_s.append(seconds)
        self.raw_rewards_sum += sum(reward or 0.0 for reward in rewards)
        self.raw_rewards_count += len(rewards)


@dataclass(slots=True, kw_only=True)
class ProductionMetrics:
    """What production did since it was last read; read once and zeroed."""

    tasks: dict[str, TaskMetrics] = field(default_factory=dict)
    """Of the tasks of which a group ended."""
    produced_tokens: int = 0
    """New tokens only: a continuation does not count its prefix again."""
    failed_samples: int = 0
    """Lost for good."""
    failures: dict[str, dict[str, int]] = field(default_factory=dict)
    """Failures of trajectories by task and boundary, those included that were played again."""
    retries: dict[str, int] = field(default_factory=dict)
    """Trajectories that are played again, by task."""
    expired_groups: int = 0
    expired_tokens_mean: float = 0.0
    pause_s: float = 0.0

    def count_failures(self, task: str, by_boundary: Mapping[str, int], retried: int) -> None:
        """Count the trajectories of a group that failed, and those of them that are played again."""
        counted = self.failures.setdefault(task, {}) if by_boundary else {}
        for boundary, number in by_boundary.items():
            counted[boundary] = counted.get(boundary, 0) + number
        if retried:
            self.retries[task] = self.retries.get(task, 0) + retried

    def of_task(self, task: str) -> TaskMetrics:
        """Return the counters of a task, to add to."""
        return self.tasks.setdefault(task, TaskMetrics())

    @property
    def raw_rewards_sum(self) -> float:
        """Over all tasks."""
        return sum(task.raw_rewards_sum for task in self.tasks.values())

    @property
    def raw_rewards_count(self) -> int:
        """Over all tasks."""
        return sum(task.raw_rewards_count for task in self.tasks.values())

    @property
    def produced_samples(self) -> int:
        """Over all tasks."""
        return sum(task.produced_samples for task in self.tasks.values())

    @property
    def filtered_samples(self) -> int:
        """Over all tasks."""
        return sum(task.filtered_samples for task in self.tasks.values())

    @property
    def group_s(self) -> list[float]:
        """Of all tasks."""
        return [seconds for task in self.tasks.values() for seconds in task.group_s]


@dataclass(slots=True, kw_only=True)
class BatchMetrics:
    """What a batch has of one task."""

    staleness: list[int] = field(default_factory=list)
    """Of each of its groups."""
    num_samples: int = 0
    response_tokens: int = 0
    """Observations included."""
    rewards_sum: float = 0.0
    rewards_count: int = 0


@dataclass(slots=True, kw_only=True, frozen=True)
class TakeStatus:
    """The small half of `take_batch`: what the driver reads."""

    status: ProduceBatchStatus
    step: int
    num_groups: int
    """0 when no batch was delivered: sync and ask again for the same step."""
    num_samples: int = 0
    staleness: tuple[int, ...] = ()
    """Per group at `step`."""
    wait_s: float = 0.0
    """How long the consumer waited for the batch."""
    buffered: int = 0
    """COMPLETED groups left in the buffer."""
    metrics: ProductionMetrics = field(default_factory=ProductionMetrics)
    tasks: dict[str, BatchMetrics] = field(default_factory=dict)
    """What the batch has of each task."""
