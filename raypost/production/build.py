"""What a configuration means for production and its buffer: strategies, limits, bounds, and the split of a batch."""

from __future__ import annotations

from raypost.config import Config, TaskConfig
from raypost.config.imports import load_function
from raypost.production.allocation import Allocation
from raypost.production.strategy import AsyncProduceStrategy, build_strategy
from raypost.types import BufferBounds, TaskLimits


def strategy_of(task: TaskConfig, config: Config) -> AsyncProduceStrategy:
    """Return the task's strategy. Raises ConfigError if a function it names cannot be imported."""
    smallest = task.strategy.min_group_size or config.train.advantage.smallest_group
    strategy = task.strategy.model_copy(update={"min_group_size": smallest, "max_pending": task.max_pending})
    return build_strategy(strategy, config.sync.sync_weights_interval)


def task_limits(config: Config) -> dict[str, TaskLimits]:
    """Return how the replay buffer expires each task's groups."""
    return {task.name: strategy_of(task, config).limits for task in config.tasks}


def buffer_bounds(config: Config) -> BufferBounds:
    """Return the replay buffer's high-water marks."""
    buffer = config.buffer
    return BufferBounds(buffer.max_groups, int(buffer.max_gb * 2**30))


def allocation_of(config: Config) -> Allocation:
    """Return how a batch is split over tasks. Raises ConfigError if `task_weights` cannot be imported."""
    function = load_function(config.task_weights, "task_weights") if config.task_weights else None
    return Allocation(config.tasks, config.train.batch_size, function)
