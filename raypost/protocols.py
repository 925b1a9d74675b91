"""The interfaces between roles.

The same names hold for an object in this process and for an actor behind `actors.remote.Remote`, so that every role
can be tested without Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from raypost.packed import PackedGroups
from raypost.pause import PauseMode
from raypost.types import (
    FloatArray,
    GenerateRequest,
    GenerateResult,
    Group,
    GroupCounts,
    GroupKey,
    IntArray,
    ProduceBatchStatus,
    Ref,
    RolloutState,
    RunStatus,
    Status,
    SyncReport,
    WeightReport,
)
from raypost.weights.manifest import Bytes, Manifest

T = TypeVar("T")
BatchT_co = TypeVar("BatchT_co", covariant=True)
"""A batch as its buffer hands it out: PackedGroups in one process, a Ref of them from another. Production passes it
on and cannot open it."""


class Generator(Protocol):
    """What an agent loop needs of the rollout pool."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate until a stop token, the token limit, or a pause ("abort": partial tokens)."""
        ...


class AgentLoop(Protocol):
    """Makes a group's trajectories and has them judged."""

    async def run(self, group: Group) -> Group:
        """Generate every member that is not COMPLETED, judge, return the group with statuses set.

        Members interrupted by a pause come back ABORTED with their tokens; failures come back FAILED with
        `error`. Raises only on a bug or when the hosting process died.
        """
        ...

    async def interrupt(self) -> None:
        """End judging within its grace period; its members come back ABORTED. Repeatable; called by an abort.

        A loop whose judging takes no time to speak of does nothing here.
        """
        ...


class Judge(Protocol):
    """Scores responses."""

    async def judge(self, states: list[RolloutState]) -> list[float]:
        """Return one reward per state. Raises JudgeError; a failure is never a reward."""
        ...


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

    async def swap(self, version: int) -> None:
        """Freeze open requests, load `version`, which is staged, and go on. Idempotent.

        Raises StaleWeightsError unless `version` is staged, and WeightError if a worker holds something else.
        """
        ...


class WeightSource(Protocol):
    """Where a version of the weights comes from: the trainer group."""

    async def publish(self, version: int) -> tuple[Manifest, list[Ref[Bytes]]]:
        """Return the weights as `version`: their manifest, and one ref for each bucket."""
        ...

    async def canary(self, token_ids: IntArray) -> FloatArray:
        """Return the logprob of every token but the first under the current weights, at temperature 1."""
        ...

    async def offload(self) -> None:
        """Leave the device to others, where it is shared. Idempotent."""
        ...


class Reference(Protocol):
    """Computes the frozen reference's logprobs instead of the trainer's ranks."""

    async def start(self) -> Sequence[object]:
        """Start whatever computes; return what each part of it says about itself."""
        ...

    async def compute_ref_logprobs(self, batch_ref: Ref[PackedGroups]) -> Ref[FloatArray]:
        """Return a ref of a column: logprobs of the batch's trained tokens, sampled as they were, 0 elsewhere."""
        ...

    async def shutdown(self) -> None:
        """End it. Does not raise because a part is gone."""
        ...


class WeightSink(Protocol):
    """Where a version of the weights goes: the rollout pool."""

    async def stage_weights(self, manifest: Manifest, buckets: list[Ref[Bytes]]) -> None:
        """Bring a version close to the live workers while they generate. Raises WeightError if what came differs."""
        ...

    async def load_weights(self, manifest: Manifest, buckets: list[Ref[Bytes]]) -> list[WeightReport]:
        """Load into every live worker; what each says it holds. Raises WeightError if that differs."""
        ...

    async def canary(self, prompt_ids: IntArray) -> list[tuple[str, FloatArray]]:
        """(worker, logprobs of the prompt's tokens but the first) for every live worker."""
        ...


class ExpiredGroup(NamedTuple):
    """A group that grew too old; `stored` if it stays in the buffer to be generated again."""

    key: GroupKey
    stored: bool
    mean_tokens: float
    """Mean response length of its members before they were reset: dropping by age favours short answers."""


@dataclass(slots=True, kw_only=True, frozen=True)
class PutResult:
    """What became of a group that was put: its status, its staleness, and whether it was stored."""

    status: Status
    staleness: int
    stored: bool
    too_old: bool = False
    """Whether age is what made it EXPIRED; otherwise it was interrupted too often."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Lease(Generic[BatchT_co]):
    """A batch taken for `step`. It stays in the buffer until `acknowledge(step)`."""

    step: int
    keys: tuple[GroupKey, ...]
    staleness: tuple[int, ...]
    """Per group, at `step`."""
    num_samples: int
    batch: BatchT_co

    def with_batch(self, batch: T) -> Lease[T]:
        """Return the lease with its batch in another form."""
        return Lease(
            step=self.step,
            keys=self.keys,
            staleness=self.staleness,
            num_samples=self.num_samples,
            batch=batch,
        )


@dataclass(slots=True, frozen=True)
class TaskLimits:
    """How one task's groups expire in the buffer; both thresholds in train steps, None: never."""

    stale_threshold: int | None
    token_stale_threshold: int | None = None
    retry: bool = False
    """Keep an expired group, to be generated again."""
    max_tries: int | None = None
    """Interruptions of one trajectory after which its group is kept as EXPIRED, tokens and all."""


@dataclass(slots=True, frozen=True)
class BufferBounds:
    """High-water marks of the buffer; `low_water` is the fraction of them at which it is no longer full."""

    max_groups: int | None = None
    max_bytes: int | None = None
    low_water: float = 0.8


@dataclass(slots=True, kw_only=True, frozen=True)
class BufferCounts:
    """What the buffer holds now, by task and status. Every task is in both."""

    groups: dict[str, dict[Status, int]]
    """Leased groups count as ARCHIVED until acknowledged; popped ones are not here but in flight."""
    nbytes: dict[str, dict[Status, int]]
    """Bytes of token arrays that they pin; popped groups count as INIT here, since they still pin theirs."""
    is_full: bool = False
    """Above a high-water mark, and since then not yet below the low-water mark."""
    room: int | None = None
    """Groups until the high-water mark; None: there is no such mark."""
    oldest: dict[str, dict[Status, dict[int, int]]] = field(default_factory=dict)
    """COMPLETED and ABORTED groups of each task by the version of their oldest token, NEVER without one."""


class Buffer(Protocol[BatchT_co]):
    """Groups by (task, status), between production and training. Every method is idempotent."""

    async def put(self, packed: PackedGroups, train_step: int) -> list[PutResult]:
        """Store groups as of `train_step`; returns one result each, in order.

        A key that is known is replaced and keeps its place in the order; one that is leased or trained changes
        nothing. FAILED and FILTERED groups are not stored, and a popped group put as one of these is gone.
        """
        ...

    async def refresh(self, train_step: int, claim: int = 0) -> list[ExpiredGroup]:
        """Expire what is too old at `train_step`; returns what newly expired. `claim` as in `pop`; 0: none."""
        ...

    async def pop(self, task: str, sources: Sequence[Status], limit: int, claim: int) -> PackedGroups | None:
        """Hand out up to `limit` groups to be continued; None if there are none.

        All of the first status come first, then the next, each in the buffer's order. They stay journaled until they
        are put again or dropped. `claim` grows with every new request; the last one asked again gives the same groups.
        """
        ...

    async def drop(self, keys: Sequence[GroupKey]) -> None:
        """Forget popped groups that ended untrained. Unknown keys are ignored."""
        ...

    async def reclaim(self) -> tuple[GroupKey, ...]:
        """Take back all popped groups as they were: their holder is gone. Returns their keys."""
        ...

    async def lease(self, step: int, per_task: dict[str, int]) -> Lease[BatchT_co] | None:
        """Lease exactly that many COMPLETED groups a task in the buffer's order, or None and change nothing.

        Tokens at or above the task's token threshold are masked in the batch alone. Asked again for a step whose
        lease is open, it returns the same lease.
        """
        ...

    async def acknowledge(self, step: int) -> tuple[GroupKey, ...]:
        """End all leases up to `step`: these groups are trained. Returns their keys; () when repeated."""
        ...

    async def counts(self) -> BufferCounts:
        """Return groups and bytes by task and status, and whether the buffer is full."""
        ...

    async def state_dict(self) -> dict[str, Any]:
        """Return everything needed to restore the buffer, as plain data and NumPy arrays."""
        ...

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore into an empty buffer. Raises CheckpointError if it is not empty or the state is foreign."""
        ...


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


# ---------------------------------------------------------------- the roles as the driver calls them


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

    async def acknowledge(self, step: int) -> None:
        """Record that the batch of `step` is trained."""
        ...

    async def pause(self, mode: PauseMode) -> float:
        """Stop production as `mode` says; returns the seconds it took."""
        ...

    async def resume(self, version: int) -> None:
        """Produce with `version` of the weights."""
        ...

    async def swap(self, version: int) -> None:
        """Go on with `version`, which the pool has staged: pause with keep, load and resume in one call."""
        ...

    async def counts(self) -> GroupCounts:
        """Return where every group is."""
        ...

    async def save(self, folder: str, step: int) -> None:
        """Write progress, samplers, buffer and ledger as of `step`. Production must be paused."""
        ...

    async def load(self, folder: str) -> None:
        """Restore what `save` wrote; production stays paused."""
        ...


class BroadcasterRole(Protocol):
    """The way of the weights from the trainer into a pool."""

    async def prepare(self, version: int) -> None:
        """Do all of `broadcast` that needs no pause. Raises WeightError or StaleWeightsError."""
        ...

    async def broadcast(self, version: int, check: bool = True) -> SyncReport:
        """Load `version` into every live worker, verified. Raises WeightError or StaleWeightsError.

        `check`: with the comparison of logprobs, which `check` makes else.
        """
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

    async def finish(
        self, status: RunStatus, error: str | None, counts: GroupCounts | None
    ) -> dict[str, Any]:
        """Write the report and return it. `counts` None: the last that were seen."""
        ...
