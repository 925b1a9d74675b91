"""How a batch is split over tasks: by weights that may change with the step.

Owns the weights of a step and the split. What a step was allotted once is remembered by progress.py: a
user's function is asked once a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from raypost.config import TaskConfig
from raypost.errors import ConfigError

WeightFunction = Callable[[int, dict[str, float]], Mapping[str, float]]
"""(step, weights by task) -> weights by task."""


def allocate(batch_size: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Split a batch over tasks by largest remainder; ties go to the task named first. The sum is exact.

    Every task is in the result, possibly with 0. Raises ConfigError for a negative size or no weight.
    """
    total = math.fsum(weights.values())
    if batch_size < 0:
        raise ConfigError(f"batch_size must be >= 0, got {batch_size}")
    if not (total > 0 and math.isfinite(total)) or min(weights.values()) < 0:
        raise ConfigError(f"task weights must be >= 0 with a positive, finite sum, got {dict(weights)}")
    exact = {task: batch_size * weight / total for task, weight in weights.items()}
    shares = {task: math.floor(value) for task, value in exact.items()}
    # Rounded, so that equal fractions are equal in spite of floating point and the order decides.
    by_remainder = sorted(weights, key=lambda task: round(shares[task] - exact[task], 9))
    for task in by_remainder[: batch_size - sum(shares.values())]:
        shares[task] += 1
    return shares


def scheduled_weight(task: TaskConfig, step: int) -> float:
    """Return the task's weight at `step`: that of the last entry of its schedule which has begun."""
    begun = [start for start in task.weight_schedule if start <= step]
    return task.weight_schedule[max(begun)] if begun else task.weight


class Allocation:
    """Groups of each task in the batch of a step."""

    def __init__(
        self, tasks: Sequence[TaskConfig], batch_size: int, function: WeightFunction | None = None
    ) -> None:
        """Split `batch_size` groups; `function` changes the scheduled weights."""
        self._tasks = tuple(tasks)
        self.batch_size = batch_size
        self._function = function

    def weights(self, step: int) -> dict[str, float]:
        """Return the weights of `step` by task. Raises ConfigError if the function names other tasks."""
        scheduled = {task.name: scheduled_weight(task, step) for task in self._tasks}
        if self._function is None:
            return scheduled
        weights = dict(self._function(step, dict(scheduled)))
        if set(weights) != set(scheduled):
            raise ConfigError(
                f"task_weights returned weights of {sorted(weights)} for step {step}: it must return one for each "
                f"of {sorted(scheduled)}"
            )
        return {name: float(weights[name]) for name in scheduled}

    def __call__(self, step: int) -> dict[str, int]:
        """Return the groups of each task, possibly 0. Raises ConfigError if no weight is left."""
        try:
            return allocate(self.batch_size, self.weights(step))
        except ConfigError as error:
            raise ConfigError(f"step {step}: {error}") from None
