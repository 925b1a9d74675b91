"""ProduceProgress: what was asked of production and what was taken from it, as absolute counters.

Owns the counters, the split of a batch over tasks and the window metrics. Invariants: every counter only
grows, whatever is paused, retried or repeated; the deficit is always `target - consumed - COMPLETED`, so an
interrupted round is simply continued; `load_state_dict` changes this object, never replaces its parts.
Units: targets and consumption are groups; rewards and failed, filtered or produced samples are samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from raypost.errors import CheckpointError, ConfigError
from raypost.protocols import ProductionMetrics


def allocate(batch_size: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Split a batch over tasks by largest remainder; ties go to the task named first. The sum is exact.

    Every task is in the result, possibly with 0. Raises ConfigError for a negative size or no weight.
    """
    total = math.fsum(weights.values())
    if batch_size < 0:
        raise ConfigError(f"batch_size must be >= 0, got {batch_size}")
    if total <= 0 or min(weights.values()) < 0:
        raise ConfigError(f"task weights must be >= 0 with a positive sum, got {dict(weights)}")
    exact = {task: batch_size * weight / total for task, weight in weights.items()}
    shares = {task: math.floor(value) for task, value in exact.items()}
    # Rounded, so that equal fractions are equal in spite of floating point and the order decides.
    by_remainder = sorted(weights, key=lambda task: round(shares[task] - exact[task], 9))
    for task in by_remainder[: batch_size - sum(shares.values())]:
        shares[task] += 1
    return shares


class ProduceProgress:
    """Counters of one run's production; read them live, after every await."""

    def __init__(self, tasks: Iterable[str]) -> None:
        self.target: dict[str, int] = dict.fromkeys(tasks, 0)
        """Groups asked for so far, per task, over all steps up to `target_upto`."""
        self.consumed: dict[str, int] = dict.fromkeys(self.target, 0)
        """Groups taken so far, per task."""
        self.target_upto = 0
        """Last step whose share is in `target`."""
        self.producer_future_step = 1
        """Step that production works for; it runs ahead of the consumer."""
        self.next_consumer_step = 1
        """Step whose batch is taken next; what is put now is aged at this step."""
        self._metrics = ProductionMetrics()

    def ensure_target_upto(self, step: int, allocation: Mapping[str, int]) -> None:
        """Raise the targets by `allocation` for every step up to `step` not in them yet. Idempotent."""
        for _ in range(self.target_upto, step):
            for task, groups in allocation.items():
                self.target[task] += groups
            self.target_upto += 1

    def advance_future_step(self) -> None:
        """The step that production worked for is complete."""
        self.producer_future_step += 1

    def consume(self, step: int, taken: Mapping[str, int]) -> None:
        """Record what was really taken for `step`; the next batch is that of `step + 1`."""
        for task, groups in taken.items():
            self.consumed[task] += groups
        self.next_consumer_step = step + 1

    @property
    def metrics(self) -> ProductionMetrics:
        """The window that is being filled; not yet read."""
        return self._metrics

    def count_expired(self, mean_tokens: float) -> None:
        """Count a group that grew too old, with its mean response length before it was reset."""
        window = self._metrics
        window.expired_groups += 1
        window.expired_tokens_mean += (mean_tokens - window.expired_tokens_mean) / window.expired_groups

    def read_metrics(self) -> ProductionMetrics:
        """The window since the last call; the next one starts at zero."""
        window, self._metrics = self._metrics, ProductionMetrics()
        return window

    def state_dict(self) -> dict[str, Any]:
        """All counters and the open window as plain data."""
        return {
            "target": dict(self.target),
            "consumed": dict(self.consumed),
            "target_upto": self.target_upto,
            "producer_future_step": self.producer_future_step,
            "next_consumer_step": self.next_consumer_step,
            "metrics": dataclasses.asdict(self._metrics),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore in place: whoever holds `target` or `consumed` sees the restored values.

        Raises CheckpointError if the state is damaged or its tasks are not this run's.
        """
        try:
            target, consumed = dict(state["target"]), dict(state["consumed"])
            upto, future, following = (
                int(state[name]) for name in ("target_upto", "producer_future_step", "next_consumer_step")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"damaged progress state: {error!r}") from error
        if set(target) != set(self.target):
            raise CheckpointError(
                f"progress state is of tasks {sorted(target)}, this run has {sorted(self.target)}: restore "
                "the task list or start a new run"
            )
        self.target.update(target)
        self.consumed.update(consumed)
        self.target_upto, self.producer_future_step, self.next_consumer_step = upto, future, following
        # A metric that the saved run did not know yet starts at zero.
        known = {field.name for field in dataclasses.fields(ProductionMetrics)}
        saved = {name: value for name, value in state.get("metrics", {}).items() if name in known}
        self._metrics = ProductionMetrics(**saved)
