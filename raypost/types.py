"""The records of every role: trajectories, groups, requests, counts.

Owns the status machine and the alignment of token fields. Owns neither the columnar form in which groups cross
process borders (packed.py) nor policy: staleness arithmetic is in staleness.py, what happens to a group in
producer.py.

Invariant: `response_ids`, `logprobs`, `policy_versions` and `response_mask` of a trajectory always have
one length, also after any number of partial continuations.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from raypost.errors import AlignmentError

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
MaskArray = NDArray[np.bool_]

T_co = TypeVar("T_co", covariant=True)


class Ref(Protocol[T_co]):
    """A value in Ray's object store, as a role passes it on without opening it; awaiting it opens it."""

    def __await__(self) -> Generator[Any, None, T_co]:
        """Give the value."""
        ...


NO_VERSION = -1
"""`policy_versions` entry of a token that no policy produced (a tool's or an environment's)."""


class Status(StrEnum):
    """Where a trajectory, or a group of them, stands."""

    INIT = "init"
    """Not generated yet."""
    COMPLETED = "completed"
    """Generated to its end and judged."""
    ABORTED = "aborted"
    """Interrupted by a pause; its tokens are kept and generation continues later."""
    EXPIRED = "expired"
    """Too stale to train on; generated again, or dropped."""
    FAILED = "failed"
    """Generation or judging failed; `error` says why. Never trained, never a zero reward."""
    FILTERED = "filtered"
    """Judged, but not valid for training (for instance all rewards of its group are equal)."""
    ARCHIVED = "archived"
    """Kept for the record only."""


class ProduceBatchStatus(StrEnum):
    """How a round of production, or a take, ended."""

    NORMAL = "normal"
    UPDATE_WEIGHT_AND_ABORT = "update_weight_and_abort"
    """Production stopped because a weight sync is due."""
    EXPIRED_BATCH = "expired_batch"
    """Production ran as far ahead as staleness allows; only newer weights let it continue."""


EVALUATION_PRIORITY = -1
"""Evaluation goes before training's requests, which have 0."""

_FINISH_STATUS = {
    "stop": Status.COMPLETED,
    "length": Status.COMPLETED,
    "tool_calls": Status.COMPLETED,
    "abort": Status.ABORTED,
}


def status_of_finish(finish_reason: str | None) -> Status:
    """Status that an engine's finish reason means, ignoring case. Unknown or missing reasons are FAILED."""
    return _FINISH_STATUS.get((finish_reason or "").lower(), Status.FAILED)


@dataclass(slots=True, kw_only=True, frozen=True)
class SampleParams:
    """How one trajectory is sampled. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch those off."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()


def _empty_ints() -> IntArray:
    return np.empty(0, np.int32)


def _empty_floats() -> FloatArray:
    return np.empty(0, np.float32)


def _empty_mask() -> MaskArray:
    return np.empty(0, np.bool_)


@dataclass(slots=True, kw_only=True)
class RolloutState:
    """One trajectory and its status.

    `prompt_ids` has P entries. The four response fields have T entries: token ids, the logprob each had
    under the policy that sampled it, the version of that policy, and whether the token is trained
    (False for tool and environment tokens).
    """

    task: str
    group_id: int
    """Ordinal of the prompt among all prompts this task ever sampled; unique for the whole run."""
    sample_index: int
    """Which of the group's siblings, from 0 to group_size - 1."""
    prompt_ids: IntArray
    sample_params: SampleParams
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the judge needs (answer, dataset entry). Plain data only."""
    status: Status = Status.INIT
    response_ids: IntArray = field(default_factory=_empty_ints)
    logprobs: FloatArray = field(default_factory=_empty_floats)
    policy_versions: IntArray = field(default_factory=_empty_ints)
    response_mask: MaskArray = field(default_factory=_empty_mask)
    response_text: str = ""
    reward: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    num_aborts: int = 0
    """How often a pause interrupted this trajectory."""
    worker: str = ""
    """Rollout worker that produced the last segment."""
    priority: int = 0
    """Of its requests where engines are shared; see GenerateRequest."""

    def __post_init__(self) -> None:
        self.check_aligned()

    @property
    def num_tokens(self) -> int:
        """Length of the response so far, T."""
        return len(self.response_ids)

    @property
    def remaining_tokens(self) -> int:
        """How many more tokens may be generated; `sample_params.max_tokens` itself never changes."""
        return self.sample_params.max_tokens - len(self.response_ids)

    def check_aligned(self) -> None:
        """Raise AlignmentError unless the four response fields have one length."""
        lengths = {
            "response_ids": len(self.response_ids),
            "logprobs": len(self.logprobs),
            "policy_versions": len(self.policy_versions),
            "response_mask": len(self.response_mask),
        }
        if len(set(lengths.values())) != 1:
            raise AlignmentError(
                f"group {self.group_id} sample {self.sample_index}: lengths differ: {lengths}"
            )

    def append_segment(
        self,
        ids: IntArray,
        logprobs: FloatArray,
        versions: IntArray,
        mask: MaskArray | None = None,
    ) -> None:
        """Append one generated (mask all True) or foreign segment of S tokens. Raises AlignmentError."""
        if mask is None:
            mask = np.ones(len(ids), np.bool_)
        if not len(ids) == len(logprobs) == len(versions) == len(mask):
            raise AlignmentError(
                f"group {self.group_id} sample {self.sample_index}: segment lengths differ: ids {len(ids)}, "
                f"logprobs {len(logprobs)}, versions {len(versions)}, mask {len(mask)}"
            )
        self.response_ids = np.concatenate([self.response_ids, np.asarray(ids, np.int32)])
        self.logprobs = np.concatenate([self.logprobs, np.asarray(logprobs, np.float32)])
        self.policy_versions = np.concatenate([self.policy_versions, np.asarray(versions, np.int32)])
        self.response_mask = np.concatenate([self.response_mask, np.asarray(mask, np.bool_)])

    def reset(self) -> None:
        """Forget the response, as if it had never been generated. Identity and prompt stay."""
        self.status = Status.INIT
        self.response_ids = _empty_ints()
        self.logprobs = _empty_floats()
        self.policy_versions = _empty_ints()
        self.response_mask = _empty_mask()
        self.response_text = ""
        self.reward = None
        self.finish_reason = None
        self.error = None
        self.worker = ""


_GROUP_PRIORITY = (Status.FAILED, Status.ABORTED, Status.EXPIRED, Status.FILTERED)


def group_status(states: Sequence[RolloutState]) -> Status:
    """Status of a group: the worst of its members (FAILED > ABORTED > EXPIRED > FILTERED), INIT if any
    member was never generated, else COMPLETED. Raises ValueError if empty."""
    if not states:
        raise ValueError("a group has at least one trajectory")
    present = {state.status for state in states}
    for status in _GROUP_PRIORITY:
        if status in present:
            return status
    return Status.INIT if Status.INIT in present else Status.COMPLETED


@dataclass(slots=True, kw_only=True)
class Group:
    """The siblings of one prompt. `group_id` is unique within its task."""

    task: str
    group_id: int
    states: list[RolloutState]

    @property
    def key(self) -> GroupKey:
        return (self.task, self.group_id)

    @property
    def status(self) -> Status:
        return group_status(self.states)

    @property
    def num_tokens(self) -> int:
        """Response tokens of all members."""
        return sum(state.num_tokens for state in self.states)


GroupKey = tuple[str, int]
"""(task, group_id): how the ledger and the buffer name a group."""


@dataclass(slots=True, kw_only=True, frozen=True)
class GenerateRequest:
    """One continuation asked of an engine. `token_ids` is the prompt and everything generated so far."""

    request_id: str
    token_ids: IntArray
    sample_params: SampleParams
    """With `max_tokens` already lowered to what remains."""
    priority: int = 0
    """Lower ones are decoded first where engines are shared: evaluation has EVALUATION_PRIORITY."""


@dataclass(slots=True, kw_only=True, frozen=True)
class GenerateResult:
    """What an engine generated: S ids with logprobs and per-token policy versions (all length S)."""

    response_ids: IntArray
    logprobs: FloatArray
    policy_versions: IntArray
    finish_reason: str
    worker: str
    error: str | None = None

    @classmethod
    def nothing(cls, finish_reason: str, worker: str = "", error: str | None = None) -> GenerateResult:
        """A result without tokens: the request was refused ("abort") or failed ("error")."""
        return cls(
            response_ids=_empty_ints(),
            logprobs=_empty_floats(),
            policy_versions=_empty_ints(),
            finish_reason=finish_reason,
            worker=worker,
            error=error,
        )


@dataclass(slots=True, kw_only=True, frozen=True)
class WeightReport:
    """What an engine says it holds: a version and the digest of the bytes it loaded."""

    version: int
    digest: str
    worker: str = ""
    load_s: float = 0.0


@dataclass(slots=True, kw_only=True, frozen=True)
class SyncReport:
    """What one weight sync did, as it is recorded."""

    version: int
    digest: str
    num_workers: int
    nbytes: int
    """Published for it: of a base that adapters are added to, only with the first version that has it."""
    seconds: float
    publish_s: float
    load_s: float
    """Of the slowest worker."""
    canary_difference: float
    """Largest logprob difference between an engine and the trainer; 0 when the canary is off."""


@dataclass(slots=True, kw_only=True, frozen=True)
class WorkerStats:
    """One rollout worker's state now; counters are totals since it started."""

    worker: str
    version: int
    running: int
    generated_tokens: int
    busy_s: float
    uptime_s: float


@dataclass(slots=True, kw_only=True, frozen=True)
class Span:
    """An interval of one actor's time, in seconds since the epoch."""

    actor: str
    kind: str
    """One of "rollout", "train", "sync", "evaluate", "wait", "pause", "checkpoint"."""
    start_s: float
    end_s: float


@dataclass(slots=True, kw_only=True, frozen=True)
class GroupCounts:
    """Where every group is. sampled = trained + filtered + failed + expired + buffered + in_flight + lost."""

    sampled: int = 0
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    expired: int = 0
    buffered: int = 0
    """In the replay buffer, a lease that is not acknowledged yet included."""
    in_flight: int = 0

    @property
    def lost(self) -> int:
        """Groups no one can account for. Must be 0."""
        rest = self.trained + self.filtered + self.failed + self.expired + self.buffered + self.in_flight
        return self.sampled - rest

    def as_dict(self) -> dict[str, int]:
        """All counts, `lost` included, under the names of the report."""
        names = ("sampled", "trained", "filtered", "failed", "expired", "buffered", "in_flight", "lost")
        return {name: cast(int, getattr(self, name)) for name in names}
