"""What an engine is asked and answers, and the protocols of what makes and judges a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from raypost.types.arrays import FloatArray, IntArray, Ref, bytes_of, empty_floats, empty_ints
from raypost.types.packed import PackedGroups
from raypost.types.rollout import Group, GroupKey, RolloutState, SampleParams

EVALUATION_PRIORITY = -1
"""Priority of evaluation's requests. Those of training have 0, and lower numbers are served first."""


@dataclass(slots=True, kw_only=True, frozen=True)
class GenerateRequest:
    """A request to an engine to continue `token_ids`: the prompt and everything generated so far."""

    request_id: str
    token_ids: IntArray
    sample_params: SampleParams
    """`max_tokens` and `min_tokens` are already lowered to what remains."""
    priority: int = 0
    """Lower numbers are decoded first on shared engines; evaluation has EVALUATION_PRIORITY."""
    group: str | None = None
    """Of requests that are made at once, and of whose answers none is of use without the others: they may come
    together, which costs less. None: the answer is wanted at once."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the array as bytes, see arrays.py."""
        if protocol < 5:
            return object.__reduce_ex__(self, protocol)
        ids = bytes_of(self.token_ids, np.int32)
        return _request_of, (self.request_id, ids, self.sample_params, self.priority, self.group)


def _request_of(
    request_id: str, ids: bytes, params: SampleParams, priority: int, group: str | None
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        token_ids=np.frombuffer(ids, np.int32),
        sample_params=params,
        priority=priority,
        group=group,
    )


class Work(NamedTuple):
    """What an engine has to do."""

    requests: int
    tokens: int
    """Prompts and the longest responses that these may get."""


@dataclass(slots=True, kw_only=True, frozen=True)
class GenerateResult:
    """Tokens that an engine generated: ids, logprobs and policy versions, each of length S."""

    response_ids: IntArray
    logprobs: FloatArray
    policy_versions: IntArray
    finish_reason: str
    worker: str
    error: str | None = None
    left: Work | None = None
    """What the worker had to do besides when it answered; None: it did not say."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the arrays as bytes, see arrays.py."""
        if protocol < 5:
            return object.__reduce_ex__(self, protocol)
        ids, logprobs = bytes_of(self.response_ids, np.int32), bytes_of(self.logprobs, np.float32)
        versions = bytes_of(self.policy_versions, np.int32)
        return _result_of, (
            ids, logprobs, versions, self.finish_reason, self.worker, self.error, self.left
        )  # fmt: skip

    @classmethod
    def nothing(cls, finish_reason: str, worker: str = "", error: str | None = None) -> GenerateResult:
        """Return a result without tokens, for a request that was refused ("abort") or failed ("error")."""
        return cls(
            response_ids=empty_ints(),
            logprobs=empty_floats(),
            policy_versions=empty_ints(),
            finish_reason=finish_reason,
            worker=worker,
            error=error,
        )


def _result_of(
    ids: bytes,
    logprobs: bytes,
    versions: bytes,
    finish_reason: str,
    worker: str,
    error: str | None,
    left: Work | None,
) -> GenerateResult:
    return GenerateResult(
        response_ids=np.frombuffer(ids, np.int32),
        logprobs=np.frombuffer(logprobs, np.float32),
        policy_versions=np.frombuffer(versions, np.int32),
        finish_reason=finish_reason,
        worker=worker,
        error=error,
        left=left,
    )


@dataclass(slots=True, kw_only=True, frozen=True)
class WorkerStats:
    """Current state of one rollout worker. `generated_tokens` counts since it started."""

    worker: str
    version: int
    running: int
    generated_tokens: int
    """Of the requests that were answered."""
    answered: int = 0
    """Requests that came back with tokens."""
    request_s: float = 0.0
    """Seconds that the engine worked on each request, summed."""
    share: float = 1.0
    """Below 1: it is slow, with this part of its siblings' rate."""


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

    async def forget(self, keys: Sequence[GroupKey]) -> None:
        """Close what is kept for these groups, which do not come back as they are. Repeatable."""
        ...


class Judge(Protocol):
    """Scores responses."""

    async def judge(self, states: list[RolloutState]) -> list[float]:
        """Return one reward per state. Raises JudgeError; a failure is never a reward."""
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
