"""What of a batch is trained, and in which minibatch.

Owns which trajectories are trainable and the reasons for the rest. Every rank plans the whole batch alone, and
all plans agree, since they are a function of the batch.

Per-token figures of a batch (advantages, logprobs of some policy, values) are columns: one float32 array over
the response tokens of all its trajectories, in the order and with the offsets of the batch's own columns. So
they can be computed by one process and used by another, and each sample knows its place in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from raypost.config import AdvantageConfig
from raypost.trainer.batch.selection import member_reward, select_members
from raypost.types import NO_VERSION, SESSION, Group, GroupKey, RolloutState, Status
from raypost.types.packed import PackedGroups, unpack_groups
from raypost.types.turns import turns_of

Column = NDArray[np.float32]

_ROUNDING = 1e-4
"""By how much a logprob may exceed 0."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One trainable trajectory."""

    state: RolloutState
    start: int
    """Place of its first response token in the batch's columns."""

    @property
    def key(self) -> GroupKey:
        """Its group."""
        return (self.state.task, self.state.group_id)

    @property
    def num_inputs(self) -> int:
        """Tokens the model reads: all but the last, which predicts nothing that is trained."""
        return len(self.state.prompt_ids) + len(self.state.response_ids) - 1

    @property
    def num_trained(self) -> int:
        """Tokens that count in the loss's normaliser."""
        return int(np.count_nonzero(self.state.response_mask))

    @property
    def session(self) -> tuple[str, object]:
        """The member of its group that it belongs to: its session, or itself."""
        session = self.state.metadata.get(SESSION)
        return ("sample", self.state.sample_index) if session is None else ("session", session)

    @property
    def member(self) -> tuple[GroupKey, object]:
        """The member of its group, named in the whole batch."""
        return (self.key, self.session)

    @property
    def trained(self) -> NDArray[np.int64]:
        """Places of its trained tokens in the response."""
        return np.flatnonzero(self.state.response_mask)

    @property
    def places(self) -> NDArray[np.int64]:
        """Places of its trained tokens in the batch's columns."""
        return self.start + self.trained

    @property
    def turn_numbers(self) -> NDArray[np.int64]:
        """Turn of each of its trained tokens, from 0."""
        starts = [turn.start for turn in turns_of(self.state)]
        return np.maximum(0, np.searchsorted(starts, self.trained, side="right") - 1)

    @property
    def turn_rewards(self) -> NDArray[np.float64]:
        """Reward of each of its turns."""
        return np.asarray([turn.reward for turn in turns_of(self.state)], np.float64)

    @property
    def last(self) -> int:
        """Place of its last response token, trained or not."""
        return self.start + self.state.num_tokens - 1

    @property
    def cut_off(self) -> bool:
        """Whether a limit of tokens or turns ended it, not itself."""
        return (self.state.finish_reason or "").lower() == "length"

    def with_one_more(self, start: int) -> Sample:
        """Return it at another place and with one more token, which is trained and has no meaning.

        What would predict that token is the state after the last.
        """
        state = self.state
        longer = replace(
            state,
            response_ids=np.append(state.response_ids, np.int32(0)),
            logprobs=np.append(state.logprobs, np.float32(0)),
            policy_versions=np.append(state.policy_versions, np.int32(NO_VERSION)),
            response_mask=np.append(state.response_mask, True),
        )
        return Sample(longer, start)


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """What of a batch is trained, a list of groups of samples per minibatch, and why the rest is not."""

    minibatches: list[list[list[Sample]]]
    left_out: list[str]
    num_tokens: int
    """Length of a column."""
    groups_left_out: dict[GroupKey, str] = field(default_factory=dict)
    """Groups of which nothing is trained, and why."""

    @property
    def groups(self) -> list[list[Sample]]:
        """Trainable members of every group that is trained, in the batch's order."""
        return [group for minibatch in self.minibatches for group in minibatch]

    @property
    def samples(self) -> list[Sample]:
        """Of all minibatches."""
        return [sample for group in self.groups for sample in group]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model can read."""

    vocab_size: int
    max_tokens: int
    """Of prompt and response together."""


def plan_batch(
    packed: PackedGroups, advantage: AdvantageConfig, num_minibatches: int, limits: Limits | None = None
) -> TrainBatch:
    """Split the groups in their order into minibatches of trainable samples.

    Left out, each by its name, are trajectories that are not COMPLETED, without a finite reward, a prompt or a trained
    token, longer than the limits, with ids outside the vocabulary, or with a trained token whose logprob is no
    logarithm of a probability, whose policy is not known, or that was chosen greedily; groups of which fewer members
    are left than `advantage` compares; and those without the members that `advantage.select` wants. Members that it
    does not choose are not trained.
    """
    groups = unpack_groups(packed)
    first = np.cumsum([0, *packed.group_sizes]).tolist()
    starts = packed.response_offsets.tolist()
    left_out: list[str] = []
    groups_left_out: dict[GroupKey, str] = {}
    minibatches: list[list[list[Sample]]] = []
    for part in np.array_split(np.arange(len(groups)), num_minibatches):
        members = [
            _trainable(groups[g], starts[first[g] : first[g + 1]], advantage, limits, left_out) for g in part
        ]
        minibatches.append([group for group in members if group])
        for g, trained in zip(part, members, strict=True):
            if not trained:
                # The last words about it: what was said of its members comes before.
                of_group = [text for text in left_out if text.startswith(f"group {groups[g].key}")]
                groups_left_out[groups[g].key] = "; ".join(of_group[-2:])
    return TrainBatch(minibatches, left_out, starts[-1], groups_left_out)


def _trainable(
    group: Group,
    starts: Sequence[int],
    advantage: AdvantageConfig,
    limits: Limits | None,
    left_out: list[str],
) -> list[Sample]:
    samples: list[Sample] = []
    for state, start in zip(group.states, starts, strict=True):
        reason = _untrainable(state) or _unreadable(state, limits)
        if reason is None:
            samples.append(Sample(state, start))
        else:
            left_out.append(f"group {group.key} sample {state.sample_index}: {reason}")
    # Trajectories of one session have one reward between them: they are one member.
    members: dict[tuple[str, object], list[Sample]] = {}
    for sample in samples:
        members.setdefault(sample.session, []).append(sample)
    smallest, select = advantage.smallest_group, advantage.select
    if len(members) < smallest:
        left_out.append(
            f"group {group.key}: {len(members)} trainable of {len(group.members)}, {smallest} are needed"
        )
        return []
    if select is None:
        return samples
    candidates = list(members.values())
    returns = [
        member_reward([sample.state.reward or 0.0 for sample in member], advantage.session_reward)
        for member in candidates
    ]
    size = min(select.size, len(returns))
    chosen = select_members(returns, size, select.selector, select.bounds)
    if chosen is None:
        left_out.append(
            f"group {group.key}: the mean reward of no choice of {size} of {len(returns)} members lies within "
            f"train.advantage.select.bounds {list(select.bounds)}"
        )
        return []
    keys = {candidates[i][0].session for i in chosen}
    return [sample for sample in samples if sample.session in keys]


def _untrainable(state: RolloutState) -> str | None:
    if state.status is not Status.COMPLETED:
        return f"status is {state.status}" + (f" ({state.error})" if state.error else "")
    if state.reward is None or not np.isfinite(state.reward):
        return f"reward is {state.reward}"
    if not len(state.prompt_ids):
        return "the prompt is empty"
    if not state.response_mask.any():
        return "no token is trained"
    logprobs = state.logprobs[state.response_mask]
    if not np.isfinite(logprobs).all():
        return "a trained token's logprob is not finite"
    if logprobs.max() > _ROUNDING:
        return f"a trained token's logprob is {logprobs.max():.3g}, above 0: no probability exceeds 1"
    if state.policy_versions[state.response_mask].min() < 0:
        return "a trained token has no policy version: mask what no policy produced"
    if state.sample_params.temperature <= 0:
        return f"temperature is {state.sample_params.temperature}: greedy tokens have no logprob to train"
    return None


def _unreadable(state: RolloutState, limits: Limits | None) -> str | None:
    if limits is None:
        return None
    length = len(state.prompt_ids) + len(state.response_ids)
    if length > limits.max_tokens:
        return (
            f"it has {length} tokens, more than {limits.max_tokens}, the longest max_prompt_tokens + max_tokens "
            "of a task"
        )
    ids = np.concatenate([state.prompt_ids, state.response_ids])
    outside = ids[(ids < 0) | (ids >= limits.vocab_size)]
    if len(outside):
        return f"token id {outside[0]} is outside the model's vocabulary of {limits.vocab_size}"
    return None
