"""How groups are scheduled: the strategies' numbers, and the set of groups that are being generated.

Owns the rules (how many groups to start, from where, how far ahead) as functions of plain numbers, and the
pending set with its gate. Owns neither buffer nor sampler: context.py carries out what is decided here.
`SyncProduceStrategy` is `AsyncProduceStrategy` with a bound of zero and nothing sampled ahead.

Invariants of the pending set: groups are started only under its lock while its gate is open, so nothing
starts after `close_gate` returned; a finished group is received exactly once, by whoever settles first, and
stays in the set until it was received, so no failure in between loses it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from raypost.config import StrategyConfig
from raypost.config.imports import load_function
from raypost.protocols import TaskLimits
from raypost.staleness import production_expired, stale_threshold
from raypost.types import Group, GroupKey, RolloutState, Status

log = logging.getLogger(__name__)

IsValid = Callable[[Group], bool]
ShouldContinue = Callable[[int, int], bool]
"""(completed, target) groups of a round -> whether it goes on."""


def oversample_budget(over_sample_threshold: float, task_batch_size: int) -> int:
    """Groups started beyond the target: a fixed fraction of one task batch, rounded up."""
    return math.ceil(over_sample_threshold * task_batch_size - 1e-9)


def desired_pending(target: int, available: int, budget: int) -> int:
    """Groups that should be in flight; `available` are consumed or COMPLETED. 0 once the target is met."""
    return 0 if available >= target else target + budget - available


def admission_capacity(target: int, accepted: int, running: int, max_pending: int) -> int:
    """Groups that may be started so that mean staleness keeps its bound (AReaL, arXiv:2505.24298, section 4.1).

    `target` counts all batches up to the last that may be worked for, `accepted` are consumed or COMPLETED
    groups, `running` those in flight. `max_pending` 0 is no limit. Below 0: as many are too many.
    """
    room = target - accepted - running
    return min(room, max_pending - running) if max_pending else room


def in_tail_batch(tail_batch_trigger_size: int, num_expired: int) -> bool:
    """Whether enough groups expired for a round that generates them first, without oversampling."""
    return tail_batch_trigger_size > 0 and num_expired >= tail_batch_trigger_size


@dataclass(slots=True, frozen=True)
class SpawnPlan:
    """What to start now: how many groups, and which buffered ones before new prompts."""

    num_groups: int
    sources: tuple[Status, ...]


class AsyncProduceStrategy:
    """Continuous production with bounded staleness, oversampling and retry of expired groups.

    With admission `horizon` one step at a time is worked for, and what grew too old is expired; with `capacity`
    all steps within the bound are worked for at once, and nothing need be dropped.
    """

    def __init__(
        self,
        config: StrategyConfig,
        sync_weights_interval: int,
        is_valid: IsValid | None = None,
        should_continue: ShouldContinue | None = None,
    ) -> None:
        """`is_valid` and `should_continue` are the functions that the configuration names."""
        self._config = config
        self._is_valid = is_valid
        self._should_continue = should_continue
        self.horizon = stale_threshold(config.max_staleness, sync_weights_interval)
        """How many steps beyond the served version may be worked for."""
        self.paces = config.admission == "capacity"
        """Whether admission is by capacity."""
        token_bound = config.max_token_staleness
        self.limits = TaskLimits(
            stale_threshold=config.stale_threshold(sync_weights_interval),
            token_stale_threshold=(
                None if token_bound is None else stale_threshold(token_bound, sync_weights_interval)
            ),
            retry=config.tail_batch_trigger_size >= 0,
            max_tries=config.tail_batch_max_tries,
        )
        """How the buffer ages this task's groups."""

    @property
    def may_end_early(self) -> bool:
        """Whether a round may end before its target is met: its batch is then what is there."""
        return self._should_continue is not None

    def is_valid(self, group: Group) -> bool:
        """Whether a judged group is trained."""
        if self._config.drop_uniform_rewards and len({state.reward for state in group.states}) == 1:
            return False
        return self._is_valid is None or self._is_valid(group)

    def should_continue(self, completed: int, target: int) -> bool:
        """Whether a round that has `completed` of `target` groups goes on."""
        if self._should_continue is not None and not self._should_continue(completed, target):
            return False
        return completed < target

    def is_production_expired(self, future_step: int, version: int) -> bool:
        """Whether groups made now would be too old for `future_step`: only newer weights help."""
        return production_expired(future_step, version, self.horizon)

    def waits_for_consumer(self, future_step: int, next_consumer_step: int) -> bool:
        """Whether `future_step` may be produced only once the consumer has come to it."""
        return False

    def starts_tail_batch(self, num_expired: int) -> bool:
        """Whether a round that begins now is a tail batch. Asked once a round."""
        return in_tail_batch(self._config.tail_batch_trigger_size, num_expired)

    def plan(
        self, *, target: int, available: int, pending: int, task_batch_size: int, tail_batch: bool
    ) -> SpawnPlan:
        """What to start, in groups; all counts are this task's."""
        budget = oversample_budget(self._config.over_sample_threshold, task_batch_size)
        aim = available + desired_pending(target, available, 0 if tail_batch else budget)
        wanted = admission_capacity(aim, available, pending, self._config.max_pending)
        retry_first = tail_batch or self._config.tail_batch_trigger_size == 0
        sources = (Status.EXPIRED, Status.ABORTED) if retry_first else (Status.ABORTED,)
        return SpawnPlan(max(0, wanted), sources)


class SyncProduceStrategy(AsyncProduceStrategy):
    """Nothing ahead of the consumer, nothing beyond the batch, no data older than one sync period."""

    def __init__(self, config: StrategyConfig, *args: Any, **kwargs: Any) -> None:
        on_policy = {"max_staleness": 0, "over_sample_threshold": 0.0, "admission": "horizon"}
        super().__init__(config.model_copy(update=on_policy), *args, **kwargs)

    def waits_for_consumer(self, future_step: int, next_consumer_step: int) -> bool:
        """A step is produced once the batch before it was taken."""
        return future_step > next_consumer_step


def build_strategy(
    config: StrategyConfig,
    sync_weights_interval: int,
    is_valid: IsValid | None = None,
    should_continue: ShouldContinue | None = None,
) -> AsyncProduceStrategy:
    """The strategy that the configuration names, with the functions it names unless others are given.

    Raises ConfigError if one of them cannot be imported.
    """
    if is_valid is None and config.is_valid is not None:
        is_valid = load_function(config.is_valid, "strategy.is_valid")
    if should_continue is None and config.should_continue is not None:
        should_continue = load_function(config.should_continue, "strategy.should_continue")
    kinds = {"async": AsyncProduceStrategy, "sync": SyncProduceStrategy}
    return kinds[config.kind](config, sync_weights_interval, is_valid, should_continue)


class Signal:
    """Says that something changed: a counter, and those who wait for it to move. Needs no lock.

    Read `count`, look at the state, and if there is nothing to do `await wait(count)`: a change in between is
    never missed.
    """

    def __init__(self) -> None:
        self.count = 0
        self._moved = asyncio.Event()

    def notify(self) -> None:
        """Something changed."""
        self.count += 1
        self._moved.set()
        self._moved = asyncio.Event()

    async def wait(self, seen: int) -> None:
        """Return as soon as `count` differs from `seen`."""
        if self.count == seen:
            await self._moved.wait()


@dataclass(slots=True, eq=False)
class PendingGroup:
    """A group in flight."""

    key: GroupKey
    last_known: list[RolloutState]
    """Its trajectories as they were when it started: what is put back if nothing better comes."""
    task: asyncio.Task[Group]
    started_s: float
    stored: bool = False
    """It came out of the buffer, which still knows it."""
    put_back: bool = False
    """A pause gave up on it and cancelled it."""
    num_tokens: int = field(init=False)
    """Response tokens it started with."""

    def __post_init__(self) -> None:
        self.num_tokens = sum(state.num_tokens for state in self.last_known)


class PendingSet:
    """The groups in flight, and the gate that lets new ones start."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        """Held by whoever moves a group from one place to another."""
        self.changed = Signal()
        """Moves when a group ends, and whenever else production or consumption may go on."""
        self._pending: dict[GroupKey, PendingGroup] = {}
        self._gate_open = False

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def gate_open(self) -> bool:
        """Whether groups may start."""
        return self._gate_open

    def num_of(self, task: str) -> int:
        """Groups of one task in flight."""
        return sum(key[0] == task for key in self._pending)

    def all(self) -> list[PendingGroup]:
        """Groups in flight, those included that ended and were not received yet."""
        return list(self._pending.values())

    def running(self) -> list[PendingGroup]:
        """Groups whose generation has not ended."""
        return [entry for entry in self._pending.values() if not entry.task.done()]

    async def open_gate(self) -> None:
        """Let groups start."""
        async with self.lock:
            self._gate_open = True
        self.changed.notify()

    async def close_gate(self) -> None:
        """Let none start any more: when this returns, none is half way through starting either."""
        async with self.lock:
            self._gate_open = False
        self.changed.notify()

    def spawn(
        self, group: Group, work: Coroutine[Any, Any, Group], now_s: float, *, stored: bool = False
    ) -> PendingGroup:
        """Start a group. The caller holds the lock, and has held it since it saw the gate open."""
        assert self.lock.locked() and self._gate_open, "a group is started under the lock with the gate open"
        assert group.key not in self._pending, f"group {group.key} is in flight already"
        last_known = [replace(state) for state in group.states]
        task = asyncio.get_running_loop().create_task(work, name=f"group {group.task}/{group.group_id}")
        task.add_done_callback(lambda _: self.changed.notify())
        entry = PendingGroup(group.key, last_known, task, now_s, stored)
        self._pending[group.key] = entry
        return entry

    async def settle(self, receive: Callable[[list[PendingGroup]], Awaitable[None]]) -> int:
        """Hand all finished groups to `receive`, then forget them. The caller holds the lock. How many.

        If `receive` raises they stay, to be received by the next who settles.
        """
        assert self.lock.locked(), "finished groups are claimed under the lock"
        finished = [entry for entry in self._pending.values() if entry.task.done()]
        if finished:
            await receive(finished)
        for entry in finished:
            del self._pending[entry.key]
        return len(finished)

    def forget(self, entry: PendingGroup) -> None:
        """Drop a group that does not end even when cancelled; the caller holds the lock and put it back."""
        self._pending.pop(entry.key, None)


async def uninterrupted(work: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end even if the caller is cancelled meanwhile; its cancellation follows afterwards.

    A group on its way from one place to another would be lost if the step that moves it stopped half way.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is not None:
            log.error("a step failed while its caller was cancelled", exc_info=task.exception())
        raise
