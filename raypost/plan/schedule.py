"""What a configuration means for production: bounds, quantities, and what cannot work.

Owns the arithmetic that `raypost plan` shows and refuses by. Problems name the inequality that is broken, its
two numbers and the fix; warnings say what works, but not as one might think.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from raypost.config import Config, StrategyConfig, TaskConfig
from raypost.errors import ConfigError
from raypost.production.build import allocation_of, strategy_of
from raypost.production.strategy import oversample_budget


@dataclass(slots=True, kw_only=True, frozen=True)
class Bound:
    """How old one task's data may be: expired, and never trained, from `threshold` train steps on."""

    task: str
    strategy: str
    threshold: int
    rule: str
    """How the threshold comes about."""
    oldest: str
    """The oldest data that is trained."""
    beyond: str
    """What becomes of older data."""


def shares(config: Config) -> dict[str, int]:
    """Return the groups of each task in the first batch."""
    return allocation_of(config)(1)


def horizon(task: TaskConfig, config: Config) -> int:
    """Return the most batches of a task that are in production or stored; 1 for a synchronous task."""
    return strategy_of(task, config).horizon if task.strategy.kind == "async" else 1


def started_at_once(task: TaskConfig, groups: int, config: Config) -> int:
    """Return the most groups of a task that its bound lets be in flight; `groups` is its share of a batch."""
    strategy = task.strategy
    surplus = 0 if strategy.kind == "sync" else oversample_budget(strategy.over_sample_threshold, groups)
    started = groups * horizon(task, config) + surplus
    return min(started, task.max_pending) if task.max_pending else started


def bound(task: TaskConfig, config: Config) -> Bound:
    """Return how old the task's data may be."""
    strategy, interval = strategy_of(task, config), config.sync.sync_weights_interval
    threshold = task.strategy.stale_threshold(interval)
    on_policy = "on-policy" if threshold == 1 else f"{threshold - 1} step{'s' * (threshold > 2)} old"
    return Bound(
        task=task.name,
        strategy=task.strategy.kind,
        threshold=threshold,
        rule=f"(max_staleness {task.strategy.bound_periods} + 1) x sync_weights_interval {interval}",
        oldest=f"staleness {threshold - 1}: {on_policy}",
        beyond="generated again" if strategy.limits.retry else "dropped",
    )


# ---------------------------------------------------------------- what cannot work


def schedule_problems(config: Config) -> Iterator[str]:
    """Yield what would starve, deadlock, or never expire what it should."""
    yield from _weight_problems(config)
    yield from _buffer_problems(config)
    for task in config.tasks:
        yield from (f"task {task.name!r}: {text}" for text in _strategy_problems(task, config))


def _weight_problems(config: Config) -> Iterator[str]:
    try:
        allocation = allocation_of(config)
        changes = {start for task in config.tasks for start in task.weight_schedule}
        for step in sorted({1, config.train.num_steps, *changes}):
            allocation(step)
    except ConfigError as error:
        yield f"{error}; every step needs a positive weight"
    # A user's function may raise anything; it would end the run at that step.
    except Exception as error:
        yield f"task_weights {config.task_weights!r} raised {type(error).__name__}: {error}"


def _buffer_problems(config: Config) -> Iterator[str]:
    buffer, batch = config.buffer, config.train.batch_size
    if buffer.max_groups is None:
        return
    if buffer.max_groups < 2 * batch:
        yield (
            f"buffer.max_groups {buffer.max_groups} < 2 x train.batch_size {batch}: the batch that is trained stays "
            f"until it is acknowledged, and the next is collected beside it; use at least {2 * batch}"
        )
    triggers = {task.name: max(0, task.strategy.tail_batch_trigger_size) for task in config.tasks}
    waiting = sum(triggers.values())
    if waiting and waiting + 2 * batch > buffer.max_groups:
        of = " + ".join(f"{trigger} ({name})" for name, trigger in triggers.items() if trigger)
        yield (
            f"tail_batch_trigger_size {of} + 2 x train.batch_size {batch} > buffer.max_groups {buffer.max_groups}: the "
            "expired groups that wait for their tail batches would keep the buffer full; raise max_groups to "
            f"{waiting + 2 * batch} or lower the triggers"
        )


def _strategy_problems(task: TaskConfig, config: Config) -> Iterator[str]:
    strategy = task.strategy
    if strategy.should_continue is not None and config.placement == "separate":
        yield (
            f"should_continue {strategy.should_continue!r} ends rounds with fewer groups than the batch has, and a "
            "consumer that waits for whole batches would starve: remove it, or use placement: colocate"
        )
    yield from _token_problems(strategy)
    if strategy.tail_batch_max_tries is not None and strategy.tail_batch_trigger_size < 0:
        yield (
            f"tail_batch_max_tries is {strategy.tail_batch_max_tries}, but tail_batch_trigger_size is -1: there is "
            "no tail batch to wait for, and the group would never be finished; use 0 or more"
        )


def _token_problems(strategy: StrategyConfig) -> Iterator[str]:
    tokens, bound = strategy.max_token_staleness, strategy.bound_periods
    if tokens is not None and tokens >= bound:
        yield (
            f"max_token_staleness {tokens} >= max_staleness {bound}: a group expires before one of its tokens "
            f"is masked, so nothing ever is; use less than {bound}, or null"
        )


# ---------------------------------------------------------------- what surprises


def strategy_warnings(task: TaskConfig, config: Config) -> Iterator[str]:
    """Yield what works, but not as one might think."""
    strategy, groups = task.strategy, shares(config)[task.name]
    if task.weight > 0 and groups == 0:
        yield "its weight is so small that no group of a batch is its own"
    if strategy.kind == "sync":
        unused = {"max_staleness", "over_sample_threshold"} & strategy.model_fields_set
        yield from (f"strategy 'sync' does not use {name}" for name in sorted(unused))
        return
    if strategy.max_staleness > 0 and not strategy.enable_partial_rollout:
        yield (
            f"max_staleness is {strategy.max_staleness} without partial rollout: a sync throws away what is "
            "half generated, and long responses suffer most; set enable_partial_rollout: true"
        )
    if strategy.max_staleness == 0 and strategy.enable_partial_rollout:
        yield (
            "max_staleness is 0: a trajectory that a sync interrupts is too old to be continued, and starts again"
        )
    if strategy.over_sample_threshold > 1:
        yield (
            f"over_sample_threshold {strategy.over_sample_threshold:g} starts "
            f"{oversample_budget(strategy.over_sample_threshold, groups)} groups beyond the staleness bound, for "
            f"batches of {groups}: those that none has room for are expired; 0 to 1 is usual"
        )
    if strategy.tail_batch_trigger_size < 0:
        yield (
            "tail_batch_trigger_size is -1: groups that grow too old are dropped, and long responses grow old most "
            "often, so what is trained is biased towards short ones; 0 generates them again"
        )
    if strategy.tail_batch_trigger_size > groups:
        yield (
            f"tail_batch_trigger_size {strategy.tail_batch_trigger_size} exceeds its {groups} groups a "
            "batch: expired groups wait long before they are generated again"
        )
