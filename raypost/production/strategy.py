"""The rules by which groups are scheduled: how many to start, from where, and how far ahead.

Owns the rules as functions of plain numbers. Owns no state, buffer or sampler: scheduler.py asks, context.py
carries out the answer. `SyncProduceStrategy` is `AsyncProduceStrategy` with a bound of zero and nothing started
ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raypost.config import StrategyConfig
from raypost.config.imports import load_function
from raypost.types import Group, Status, TaskLimits
from raypost.types.staleness import NEVER, production_expired, stale_threshold

IsValid = Callable[[Group], bool]
ShouldContinue = Callable[[int, int], bool]
"""(completed, target) groups of a round -> whether it goes on."""


def oversample_budget(over_sample_threshold: float, task_batch_size: int) -> int:
    """Return the groups started beyond the target: a fixed fraction of one task batch, rounded up."""
    return math.ceil(over_sample_threshold * task_batch_size - 1e-9)


def desired_pending(target: int, available: int, budget: int) -> int:
    """Return how many groups should be in flight; `available` are consumed or COMPLETED. 0 once the target is met."""
    return 0 if available >= target else target + budget - available


@dataclass(slots=True, frozen=True)
class SpawnPlan:
    """What to start now: how many groups, and which buffered ones before new prompts."""

    num_groups: int
    sources: tuple[Status, ...]


def groups_owed(
    unfinished: Mapping[int, int], completed: Mapping[int, int], step: int, share: Callable[[int], int]
) -> int:
    """Return how many unfinished groups the batch of `step` must still wait for, or some would grow too old.

    `unfinished` and `completed`: groups by the last step that may train them; `share(step)`: groups in a batch, which
    takes those first that must be trained first. What is to be trained by a step `last` has to fit into the batches up
    to it, as in earliest-deadline-first scheduling; where it does not, more of it has to be in this one.
    """
    unfinished = {last: groups for last, groups in unfinished.items() if step <= last < NEVER}
    taken, most = share(step), sum(unfinished.values()) + sum(completed.values())
    owed, room, reached = 0, 0, step
    for last in sorted(unfinished):
        while reached < last and room < most:
            reached += 1
            room += share(reached)
        still = sum(groups for one, groups in unfinished.items() if one <= last)
        done = sum(groups for one, groups in completed.items() if one <= last)
        too_many = still + max(0, done - taken) - room
        owed = max(owed, min(too_many, taken - done))
    return owed


class AsyncProduceStrategy:
    """Continuous production with bounded staleness, oversampling and retry of expired groups.

    Steps are worked for in order, all of them at once that the bound allows and the engines have room for (capacity as
    in AReaL, arXiv:2505.24298, section 4.1, by the hard bound).
    """

    def __init__(
        self,
        config: StrategyConfig,
        sync_weights_interval: int,
        is_valid: IsValid | None = None,
        should_continue: ShouldContinue | None = None,
        *,
        ages: bool = True,
    ) -> None:
        """Use the functions that the configuration names, unless others are given. `ages`: whether groups grow too old.

        Raises ConfigError if one of them cannot be imported.
        """
        if is_valid is None and config.is_valid is not None:
            is_valid = load_function(config.is_valid, "strategy.is_valid")
        if should_continue is None and config.should_continue is not None:
            should_continue = load_function(config.should_continue, "strategy.should_continue")
        self._config = config
        self._is_valid = is_valid
        self._should_continue = should_continue
        token_bound = config.max_token_staleness
        self.limits = TaskLimits(
            stale_threshold=config.stale_threshold(sync_weights_interval) if ages else None,
            token_stale_threshold=(
                None if token_bound is None else stale_threshold(token_bound, sync_weights_interval)
            ),
            retry=config.tail_batch_trigger_size >= 0,
            max_tries=config.tail_batch_max_tries,
        )
        """How the buffer ages this task's groups."""
        bounds = (self.limits.stale_threshold, self.limits.token_stale_threshold)
        self.horizon = min((bound for bound in bounds if bound is not None), default=NEVER)
        """How many steps beyond the served version may be worked for: as many as the nearest bound allows."""

    @property
    def max_retries(self) -> int:
        """How often a trajectory that the world failed is played again."""
        return self._config.max_retries

    @property
    def fewest_members(self) -> float:
        """Members that a group must be left with to go on without those that failed; infinite: it never does."""
        if self._config.on_failed_member == "drop_group":
            return math.inf
        return self._config.min_group_size or 1

    @property
    def may_end_early(self) -> bool:
        """Whether a round may end before its target is met: its batch is then what is there."""
        return self._should_continue is not None

    def is_valid(self, group: Group) -> bool:
        """Return whether a judged group is trained."""
        if self._config.drop_uniform_rewards and len({state.reward for state in group.states}) == 1:
            return False
        return self._is_valid is None or self._is_valid(group)

    def should_continue(self, completed: int, target: int) -> bool:
        """Return whether a round that has `completed` of `target` groups goes on."""
        if self._should_continue is not None and not self._should_continue(completed, target):
            return False
        return completed < target

    def last_step(self, version: int) -> int:
        """Return the last step that may train all of a group whose oldest token is of `version`."""
        return min(version + self.horizon, NEVER)

    def is_production_expired(self, future_step: int, version: int) -> bool:
        """Return whether groups made now would be too old for `future_step`: only newer weights help."""
        return production_expired(future_step, version, self.horizon)

    def waits_for_consumer(self, future_step: int, next_consumer_step: int) -> bool:
        """Return whether `future_step` may be produced only once the consumer has come to it."""
        return False

    def starts_tail_batch(self, num_expired: int) -> bool:
        """Return whether a round that begins now is a tail batch: expired groups first, without oversampling.

        Asked once a round.
        """
        return 0 < self._config.tail_batch_trigger_size <= num_expired

    def plan(
        self,
        *,
        target: int,
        available: int,
        pending: int,
        task_batch_size: int,
        tail_batch: bool,
        room: int | None = None,
    ) -> SpawnPlan:
        """Return what to start; all counts are groups of this task, `room` those that the engines can take, if known.

        `target` counts all batches up to that of the step that is worked for.
        """
        budget = oversample_budget(self._config.over_sample_threshold, task_batch_size)
        desired = desired_pending(target, available, 0 if tail_batch else budget)
        if self._config.max_pending:
            desired = min(desired, self._config.max_pending)
        missing = max(0, desired - pending)
        retry_first = tail_batch or self._config.tail_batch_trigger_size == 0
        sources = (Status.EXPIRED, Status.ABORTED) if retry_first else (Status.ABORTED,)
        return SpawnPlan(missing if room is None else min(missing, room), sources)


class SyncProduceStrategy(AsyncProduceStrategy):
    """Nothing ahead of the consumer, nothing beyond the batch, no data older than one sync period."""

    def __init__(self, config: StrategyConfig, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of AsyncProduceStrategy."""
        on_policy = {"max_staleness": 0, "over_sample_threshold": 0.0}
        super().__init__(config.model_copy(update=on_policy), *args, **kwargs)

    def waits_for_consumer(self, future_step: int, next_consumer_step: int) -> bool:
        """Return whether the batch before is not taken yet."""
        return future_step > next_consumer_step


def build_strategy(
    config: StrategyConfig,
    sync_weights_interval: int,
    is_valid: IsValid | None = None,
    should_continue: ShouldContinue | None = None,
) -> AsyncProduceStrategy:
    """Return the strategy that the configuration names; the other arguments are those of AsyncProduceStrategy."""
    kinds = {"async": AsyncProduceStrategy, "sync": SyncProduceStrategy}
    return kinds[config.kind](config, sync_weights_interval, is_valid, should_continue)
