"""The records that roles exchange: trajectories, groups, generation requests, counts.

Owns the statuses and the alignment of token fields. Does not own the columnar form in which groups travel between
processes (packed.py), the arithmetic of staleness (staleness.py), or what happens to a group (production/).

Invariant: `response_ids`, `logprobs`, `policy_versions` and `response_mask` of a trajectory always have the same
length, after any number of partial continuations too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from raypost.errors import AlignmentError
from raypost.types.arrays import (
    FloatArray,
    IntArray,
    MaskArray,
    bytes_of,
    empty_floats,
    empty_ints,
    empty_mask,
)


class Status(StrEnum):
    """State of a trajectory, or of a group of them."""

    INIT = "init"
    """Not generated yet."""
    COMPLETED = "completed"
    """Generated to the end and judged."""
    ABORTED = "aborted"
    """Interrupted by a pause; its tokens are kept, and generation continues later."""
    EXPIRED = "expired"
    """Too stale to train on; generated again, or dropped."""
    FAILED = "failed"
    """Generation or judging failed; `error` says why. Never trained on, and never counted as a zero reward."""
    FILTERED = "filtered"
    """Judged, but not used for training (for instance because all rewards of the group are equal)."""
    ARCHIVED = "archived"
    """Leased to the trainer; counted as this until its step is acknowledged."""


_FINISH_STATUS = {
    "stop": Status.COMPLETED,
    "length": Status.COMPLETED,
    "tool_calls": Status.COMPLETED,
    "abort": Status.ABORTED,
}


def status_of_finish(finish_reason: str | None) -> Status:
    """Return the status that an engine's finish reason stands for, ignoring case; FAILED if unknown or missing."""
    return _FINISH_STATUS.get((finish_reason or "").lower(), Status.FAILED)


@dataclass(slots=True, kw_only=True, frozen=True)
class SampleParams:
    """Sampling parameters of one trajectory. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 do not cut."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response; none: it ends at `max_tokens`."""
    min_tokens: int = 0
    """Tokens of the response, observations included, before the first that may be one of `stop_token_ids`."""


@dataclass(slots=True, kw_only=True)
class RolloutState:
    """One trajectory and its status.

    `prompt_ids` has P entries. The four response fields have T entries: token ids, the logprob each had
    under the policy that sampled it, the version of that policy, and whether the token is trained
    (False for tool and environment tokens).
    """

    task: str
    group_id: int
    """Position of the prompt in the sequence of all prompts this task has sampled; unique within the run."""
    sample_index: int
    """Position among the group's siblings, 0 to group_size - 1. Trajectories of one session share it."""
    prompt_ids: IntArray
    sample_params: SampleParams
    metadata: dict[str, Any] = field(default_factory=dict)
    """Data for the judge (the answer, the dataset's entry). Plain data only, as packed.py defines it."""
    status: Status = Status.INIT
    response_ids: IntArray = field(default_factory=empty_ints)
    logprobs: FloatArray = field(default_factory=empty_floats)
    policy_versions: IntArray = field(default_factory=empty_ints)
    response_mask: MaskArray = field(default_factory=empty_mask)
    response_text: str = ""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    judge_words: str = ""
    """What the judge said, where it says something."""
    judge_s: float = 0.0
    """Seconds of the judge's call, which scores a group."""
    judge_retries: int = 0
    """Times that the judge asked once more in that call."""
    finish_reason: str | None = None
    error: str | None = None
    num_aborts: int = 0
    """Number of pauses that interrupted this trajectory."""
    worker: str = ""
    """Rollout worker that generated the last segment."""
    priority: int = 0
    """Priority of its requests on shared engines; see GenerateRequest."""
    num_retries: int = 0
    """How often it was played again because the world had failed it."""
    num_restarts: int = 0
    """How often it began again because its episode was gone when a pause was over."""

    def __post_init__(self) -> None:
        """Raise AlignmentError unless the four response fields have one length."""
        self.check_aligned()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the arrays as bytes, see arrays.py."""
        if protocol < 5:
            return object.__reduce_ex__(self, protocol)
        tokens = [bytes_of(getattr(self, name), dtype) for name, dtype in TOKEN_ARRAYS.items()]
        return _state_of, (*tokens, _rest_of(self))

    @property
    def num_tokens(self) -> int:
        """Length T of the response so far."""
        return len(self.response_ids)

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens that may still be generated; `sample_params.max_tokens` itself never changes."""
        return self.sample_params.max_tokens - len(self.response_ids)

    def check_aligned(self) -> None:
        """Raise AlignmentError unless the four response fields have one length."""
        length = len(self.response_ids)
        if length == len(self.logprobs) == len(self.policy_versions) == len(self.response_mask):
            return
        names = ("response_ids", "logprobs", "policy_versions", "response_mask")
        lengths = {name: len(getattr(self, name)) for name in names}
        raise AlignmentError(f"group {self.group_id} sample {self.sample_index}: lengths differ: {lengths}")

    def append_segment(
        self,
        ids: IntArray,
        logprobs: FloatArray,
        versions: IntArray,
        mask: MaskArray | None = None,
    ) -> None:
        """Append a segment of S tokens. Without `mask` all are trained. Raises AlignmentError if lengths differ."""
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

    def set_reward(self, reward: float | None) -> None:
        """Take a reward, with what a Score says beside it; None: there is none."""
        score = reward if isinstance(reward, Score) else Score(0.0)
        self.reward = None if reward is None else float(reward)
        self.reward_parts, self.judge_words = dict(score.parts), score.words
        self.judge_s, self.judge_retries = score.seconds, score.retries

    def reset(self) -> None:
        """Forget the response, as if it had never been generated. Identity and prompt stay."""
        self.status = Status.INIT
        self.response_ids = empty_ints()
        self.logprobs = empty_floats()
        self.policy_versions = empty_ints()
        self.response_mask = empty_mask()
        self.response_text = ""
        self.set_reward(None)
        self.finish_reason = None
        self.error = None
        self.worker = ""


TOKEN_ARRAYS: dict[str, type[np.generic]] = {
    "prompt_ids": np.int32,
    "response_ids": np.int32,
    "logprobs": np.float32,
    "policy_versions": np.int32,
    "response_mask": np.bool_,
}
"""Token arrays of a RolloutState, and their types."""
_REST = [name for name in RolloutState.__slots__ if name not in TOKEN_ARRAYS]
_rest_of = attrgetter(*_REST)


def _state_of(*parts: Any) -> RolloutState:
    state, (*tokens, rest) = object.__new__(RolloutState), parts
    for (name, dtype), data in zip(TOKEN_ARRAYS.items(), tokens, strict=True):
        setattr(state, name, np.frombuffer(data, dtype))
    for name, value in zip(_REST, rest, strict=True):
        setattr(state, name, value)
    return state


_GROUP_PRIORITY = (Status.FAILED, Status.ABORTED, Status.EXPIRED, Status.FILTERED)


def group_status(states: Sequence[RolloutState]) -> Status:
    """Return the status of a group with these members: the worst of theirs.

    FAILED > ABORTED > EXPIRED > FILTERED; then INIT if any member was never generated, else COMPLETED.
    Raises ValueError for no members.
    """
    if not states:
        raise ValueError("a group has at least one trajectory")
    present = {state.status for state in states}
    for status in _GROUP_PRIORITY:
        if status in present:
            return status
    return Status.INIT if Status.INIT in present else Status.COMPLETED


SESSION = "session_id"
"""Key of `RolloutState.metadata` whose value the trajectories of one session share."""


def members_of(states: Iterable[RolloutState]) -> list[list[RolloutState]]:
    """Return the trajectories of each member of a group: one, or those of a session, which stand together."""
    return [list(member) for _, member in groupby(states, key=attrgetter("sample_index"))]


@dataclass(slots=True, kw_only=True)
class Group:
    """The siblings of one prompt. `group_id` is unique within its task."""

    task: str
    group_id: int
    states: list[RolloutState]

    @property
    def members(self) -> list[list[RolloutState]]:
        """Its states, see members_of."""
        return members_of(self.states)

    @property
    def key(self) -> GroupKey:
        """Name of the group in the ledger and the buffer."""
        return (self.task, self.group_id)

    @property
    def status(self) -> Status:
        """Worst status of its members; see group_status."""
        return group_status(self.states)

    @property
    def num_tokens(self) -> int:
        """Response tokens of all members together."""
        return sum(state.num_tokens for state in self.states)


@dataclass(slots=True, kw_only=True, frozen=True)
class Sample:
    """One finished response, as a reward function sees it. Functions ask for its fields by name."""

    prompt: str
    """Text of the prompt, before any chat template."""
    response: str
    """Text of the response."""
    prompt_ids: IntArray
    response_ids: IntArray
    """What the policy sampled, token by token."""
    answer: str | None
    """The data's answer; None where it has none."""
    metadata: dict[str, Any]
    """The other columns of the data's row, with `question` and `answer`. What a function writes here is not kept."""
    turns: list[dict[str, Any]]
    """The conversation, the response last: messages with `role` and `content`."""


class Score(float):
    """A reward, and the named parts that it is made of; as a number it is the reward."""

    __slots__ = ("parts", "retries", "seconds", "words")
    parts: dict[str, float]
    words: str
    seconds: float
    """Of the call that gave it, as the judge's host measured it."""
    retries: int
    """Times that the judge asked once more in that call."""

    def __new__(cls, reward: float, parts: Mapping[str, float] | None = None, words: str = "") -> Score:
        """`parts`: figures by name, which become metrics of the task. `words`: why; kept with samples.

        Neither changes the reward.
        """
        score = super().__new__(cls, reward)
        score.parts = dict(parts or {})
        score.words, score.seconds, score.retries = words, 0.0, 0
        return score

    @property
    def reward(self) -> float:
        """The reward alone."""
        return float(self)


GroupKey = tuple[str, int]
"""(task, group_id): the name of a group in the ledger and the buffer."""
