"""The roles as the driver calls them.

The same names hold for an object in this process and for an actor behind `actors.remote.Remote`, so that every role
can be tested without Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from raypost.faults import Incident
from raypost.types.arrays import Ref
from raypost.types.packed import PackedGroups
from raypost.types.pause import PauseMode
from raypost.types.production import GroupCounts, Rebuilt, TakeStatus
from raypost.types.rollout import GroupKey
from raypost.types.sync import PoolHolds, SyncReport, WeightSink

RunStatus = Literal["finished", "stopped", "failed"]
"""How a run ended."""


class RolloutControl(Protocol):
    """What the producer needs of the rollout pool."""

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Close the gate, then stop the engines. Idempotent; returns when no engine is generating.

        abort: open requests come back with their tokens. keep: they freeze in the engine until `resume`. wait:
        they run to their end.
        """
        ...

    async def resume(self, version: int) -> None:
        """Start the engines, waking those that sleep, then open the gate. Idempotent.

        Raises StaleWeightsError unless the pool holds `version`.
        """
        ...


class SwapControl(RolloutControl, Protocol):
    """A pool that can also change its version in one call."""

    async def swap(self, version: int, wait_s: float = 0.0) -> None:
        """Freeze open requests, load `version`, which is staged or is `wait_s` later, and go on. Idempotent.

        Raises StaleWeightsError unless `version` is staged, and WeightError if a worker holds something else.
        """
        ...


class RolloutPool(RolloutControl, WeightSink, Protocol):
    """The rollout workers as one. Generation does not pass it: a router knows the way to them."""

    async def start(self) -> Sequence[object]:
        """Start all engines; returns what each says about itself."""
        ...

    async def sleep(self, keep_weights: bool) -> None:
        """Free the engines' devices until the next `load_weights` or `resume`.

        The pool must be paused, with no request frozen in it.
        """
        ...

    async def states(self) -> dict[str, str]:
        """Return the state of every worker by name."""
        ...

    async def holds(self) -> PoolHolds | None:
        """Return what the engines hold and whether they serve it; None before the first version."""
        ...

    async def shutdown(self) -> None:
        """End all engines; workers that do not answer are left to the caller."""
        ...


class ProducerRole(Protocol):
    """Production of groups, and the batches made of them."""

    async def run(self) -> None:
        """Produce for ever; ends only by raising what made production impossible."""
        ...

    async def take_batch(self, step: int) -> tuple[TakeStatus, Ref[PackedGroups] | None]:
        """Lease the batch of `step` once it is there. Asked twice, it gives the same batch."""
        ...

    async def produce_batch(self, step: int) -> tuple[TakeStatus, Ref[PackedGroups] | None]:
        """Produce until the batch of `step` is there, then lease it; for jobs that do not call `run`."""
        ...

    async def acknowledge(self, step: int, left_out: dict[GroupKey, str] | None = None) -> None:
        """Record that the batch of `step` is trained; `left_out`: groups of it that were not, and why."""
        ...

    async def go_on(self) -> None:
        """Have the rollout pool serve again, if production is not paused: its controller was started again."""
        ...

    async def rebuilt(self) -> Rebuilt:
        """Return what was done with the groups in flight when its process died last, once it is what it was."""
        ...

    async def pause(self, mode: PauseMode) -> float:
        """Stop production as `mode` says; returns the seconds it took."""
        ...

    async def resume(self, version: int) -> None:
        """Produce with `version` of the weights."""
        ...

    async def swap(self, version: int, wait_s: float = 0.0) -> None:
        """Go on with `version`, which the pool has staged: pause with keep, load and resume in one call.

        `wait_s`: how long the pool may have to wait for it.
        """
        ...

    async def counts(self) -> GroupCounts:
        """Return where every group is."""
        ...

    async def save(self, folder: str, step: int) -> None:
        """Take progress, samplers, buffer and ledger as of `step`, for `write_saved`. Production must be paused."""
        ...

    async def write_saved(self, folder: str) -> bool:
        """Write what `save` took for `folder` while production goes on; False if nothing was taken for it."""
        ...

    async def load(self, folder: str) -> None:
        """Restore what `save` wrote; production stays paused."""
        ...


class BroadcasterRole(Protocol):
    """The way of the weights from the trainer into a pool."""

    async def restock(self, version: int | None = None) -> None:
        """Give the pool again what is out, and what is prepared: its controller was started again.

        `version`: that is out. One that was started again itself has it published once more.
        """
        ...

    async def prepare(self, version: int, leave: bool = False) -> None:
        """Do all of `broadcast` that needs no pause. Raises WeightError or StaleWeightsError.

        `leave`: ranks that share devices with the engines leave them.
        """
        ...

    async def broadcast(self, version: int, check: bool = True, again: bool = False) -> SyncReport:
        """Load `version` into every live worker, verified. Raises WeightError or StaleWeightsError.

        `check`: with the comparison of logprobs, which `check` makes else. `again`: although they hold other weights
        by that number.
        """
        ...

    async def forget(self) -> None:
        """Forget what was prepared by a trainer that has died since."""
        ...

    async def renew(self, version: int) -> bool:
        """Publish `version` again for workers that come back; return whether it is bitwise what the pool holds."""
        ...

    async def check(self, version: int) -> SyncReport:
        """Compare the workers' logprobs with the trainer's, which they may do while they serve. Raises WeightError."""
        ...


class EvaluatorRole(Protocol):
    """Scores on held-out problems."""

    async def evaluate(self, version: int) -> dict[str, float]:
        """Score the pool, which holds `version` and is paused."""
        ...


class TelemetryRole(Protocol):
    """The record of a run."""

    async def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record train step `step`."""
        ...

    async def log_samples(self, step: int, batch: Sequence[Ref[PackedGroups]]) -> None:
        """Keep samples of the batch of `step`. `batch`: its ref in a list, so that nobody opens it on the way."""
        ...

    async def log_eval(self, step: int, scores: Mapping[str, Any]) -> None:
        """Record an evaluation of the weights of `step`."""
        ...

    async def log_sync(self, report: SyncReport) -> None:
        """Record one weight sync."""
        ...

    async def log_incident(self, incident: Incident, fields: Mapping[str, Any]) -> None:
        """Record what happened to the run and did not end it; `fields` is plain data about it."""
        ...

    async def finish(
        self, status: RunStatus, error: str | None, counts: GroupCounts | None
    ) -> dict[str, Any]:
        """Write the report and return it. `counts` None: the last that were seen."""
        ...
