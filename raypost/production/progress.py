"""ProduceProgress: what was asked of production and what was taken from it, as absolute counters.

Owns the counters, what each step was allotted, and the window metrics. Invariants: every counter only grows,
whatever is paused, retried or repeated; a task's deficit is always `target - available`, so an interrupted
round is simply continued; a step's allocation is fixed when it is first asked for; `load_state_dict` changes
this object, never replaces its parts. Tasks have steps of their own: one that may not run ahead does not hold
the others back. Units: targets and consumption are groups; rewards and failed, filtered or produced samples
are samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from raypost.errors import CheckpointError
from raypost.types import ProductionMetrics, TaskMetrics

COUNTERS = ("target", "consumed", "waived", "target_upto", "producer_future_step")
"""The attributes that count by task."""


class ProduceProgress:
    """Counters of one run's production; read them live, after every await."""

    def __init__(self, tasks: Iterable[str], allocation: Callable[[int], Mapping[str, int]]) -> None:
        """`allocation` gives the groups of each task in the batch of a step."""
        self.target: dict[str, int] = dict.fromkeys(tasks, 0)
        """Groups asked for so far, per task, over all steps up to its `target_upto`."""
        self.consumed: dict[str, int] = dict.fromkeys(self.target, 0)
        """Groups taken so far, per task."""
        self.waived: dict[str, int] = dict.fromkeys(self.target, 0)
        """Groups that were asked for, but given up when a round was ended early."""
        self.target_upto: dict[str, int] = dict.fromkeys(self.target, 0)
        """Last step whose share is in `target`."""
        self.producer_future_step: dict[str, int] = dict.fromkeys(self.target, 1)
        """Step that production works for; it runs ahead of the consumer."""
        self.next_consumer_step = 1
        """Step whose batch is taken next; what is put now is aged at this step."""
        self._allocate = allocation
        self._allocations: dict[int, dict[str, int]] = {}
        self.metrics = ProductionMetrics()
        """The window that is being filled; not yet read."""

    # ---------------------------------------------------------------- targets

    def allocation(self, step: int) -> dict[str, int]:
        """Return the groups of each task in the batch of `step`; fixed once it was asked for."""
        if step not in self._allocations:
            self._allocations[step] = dict(self._allocate(step))
        return self._allocations[step]

    def ensure_target_upto(self, task: str, step: int) -> None:
        """Raise the task's target by its share of every step up to `step` not in it yet. Idempotent."""
        for following in range(self.target_upto[task] + 1, step + 1):
            self.target[task] += self.allocation(following)[task]
            self.target_upto[task] = following

    def available(self, task: str, completed: int) -> int:
        """Return how much of the target is met; `completed` groups are in the buffer."""
        return self.consumed[task] + self.waived[task] + completed

    def target_at(self, task: str, step: int) -> int:
        """Return the target as of `step`, without the shares of later steps."""
        later = range(step + 1, self.target_upto[task] + 1)
        return self.target[task] - sum(self.allocation(following)[task] for following in later)

    def consume(self, step: int, taken: Mapping[str, int]) -> None:
        """Record what was really taken for `step`; the next batch is that of `step + 1`."""
        for task, share in self.allocation(step).items():
            groups = taken.get(task, 0)
            self.consumed[task] += groups
            self.waived[task] += share - groups
        self.next_consumer_step = step + 1

    def rebuild(
        self, next_step: int, consumed: Mapping[str, int], allocations: Mapping[int, Mapping[str, int]]
    ) -> None:
        """Become what was taken up to `next_step`, which is asked for next; what was asked for beyond that is not.

        It will be again, in the same steps: what each was allotted stays. What was waived needs no counter of its own,
        since the targets begin at what was taken.
        """
        for task in self.target:
            self.target[task] = self.consumed[task] = consumed[task]
            self.waived[task] = 0
            self.target_upto[task] = next_step - 1
            self.producer_future_step[task] = next_step
        self.next_consumer_step = next_step
        self._allocations = {step: dict(shares) for step, shares in allocations.items()}
        self.metrics = ProductionMetrics()

    def forget(self, step: int) -> None:
        """Forget the allocation of steps up to `step`, which are trained."""
        self._allocations = {later: shares for later, shares in self._allocations.items() if later > step}

    # ---------------------------------------------------------------- metrics

    def count_expired(self, mean_tokens: float) -> None:
        """Count a group that grew too old, with its mean response length before it was reset."""
        window = self.metrics
        window.expired_groups += 1
        window.expired_tokens_mean += (mean_tokens - window.expired_tokens_mean) / window.expired_groups

    def read_metrics(self) -> ProductionMetrics:
        """Return the window since the last call; the next one starts at zero."""
        window = self.metrics
        self.metrics = ProductionMetrics()
        return window

    # ---------------------------------------------------------------- checkpoint

    def state_dict(self, undone: Mapping[int, Mapping[str, int]] | None = None) -> dict[str, Any]:
        """Return all counters and the open window as plain data.

        `undone` are steps that were taken, with their groups by task, but are not in the model that is saved with
        this: in the state they are not taken yet.
        """
        counted = {name: dict(getattr(self, name)) for name in COUNTERS}
        following = self.next_consumer_step
        for step, taken in (undone or {}).items():
            following = min(following, step)
            for task, share in self.allocation(step).items():
                counted["consumed"][task] -= taken.get(task, 0)
                counted["waived"][task] -= share - taken.get(task, 0)
        return {
            **counted,
            "next_consumer_step": following,
            "allocations": [[step, dict(shares)] for step, shares in sorted(self._allocations.items())],
            "metrics": dataclasses.asdict(self.metrics),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore in place: references to `target` or `consumed` stay valid.

        Raises CheckpointError if the state is damaged or its tasks are not this run's.
        """
        try:
            saved = {name: {str(k): int(v) for k, v in state[name].items()} for name in COUNTERS}
            following = int(state["next_consumer_step"])
            allocations = {int(step): dict(shares) for step, shares in state["allocations"]}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"damaged progress state: {error!r}") from error
        for name, values in saved.items():
            if set(values) != set(self.target):
                raise CheckpointError(
                    f"progress state has {name} of tasks {sorted(values)}, this run has {sorted(self.target)}: "
                    "restore the task list or start a new run"
                )
        for name, values in saved.items():
            getattr(self, name).update(values)
        self.next_consumer_step = following
        self._allocations = allocations
        # A metric that the saved run did not know yet starts at zero.
        known = {field.name for field in dataclasses.fields(ProductionMetrics)}
        window = {name: value for name, value in state.get("metrics", {}).items() if name in known}
        of_tasks = {name: TaskMetrics(**one) for name, one in window.pop("tasks", {}).items()}
        self.metrics = ProductionMetrics(tasks=of_tasks, **window)
