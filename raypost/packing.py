"""From groups to micro-batches: what is trained, on which rank, in which forward pass.

Owns which trajectories of a batch are trainable, their order, and the padded arrays. Owns no formula: the
advantages are handed in. Everything is a function of the batch and of the number of ranks, so every rank
plans the whole batch alone and all plans agree.

    groups -> trainable (reasons for the rest) -> advantages -> minibatches -> ranks -> micro-batches

Invariants: each trainable trajectory with a gradient is in exactly one micro-batch; a micro-batch has at most
`max_tokens` padded tokens; every rank has the same number of micro-batches, made up with empty ones, because
each forward and backward pass may be a collective.

Axes: B trajectories of a micro-batch, L its longest input, T its trained tokens, flat, row after row.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raypost.advantage import group_advantages
from raypost.types import Group, GroupKey, RolloutState, Status


@dataclass(frozen=True, slots=True)
class Sample:
    """One trainable trajectory and its advantage."""

    state: RolloutState
    advantage: float

    @property
    def key(self) -> GroupKey:
        return (self.state.task, self.state.group_id)

    @property
    def num_inputs(self) -> int:
        """Tokens the model reads: all but the last, which predicts nothing that is trained."""
        return len(self.state.prompt_ids) + len(self.state.response_ids) - 1

    @property
    def num_trained(self) -> int:
        """Tokens that count in the loss's normaliser."""
        return int(np.count_nonzero(self.state.response_mask))


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """What of a batch is trained, a list of samples per minibatch, and why the rest is not."""

    minibatches: list[list[Sample]]
    left_out: list[str]

    @property
    def samples(self) -> list[Sample]:
        """Of all minibatches."""
        return [sample for minibatch in self.minibatches for sample in minibatch]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass. `samples` is empty for a filler, whose T is 0.

    Row b of `input_ids_BL` is a prompt and its response, padded on the right: under causal attention no real
    token sees padding, so no mask is needed. `index_T` = b * L + position of the token *before* each trained
    one: where the model predicts it.
    """

    samples: tuple[Sample, ...]
    input_ids_BL: NDArray[np.int64]
    index_T: NDArray[np.int64]
    targets_T: NDArray[np.int64]
    rollout_logprobs_T: NDArray[np.float32]
    policy_versions_T: NDArray[np.int32]
    advantages_T: NDArray[np.float32]
    temperatures_T: NDArray[np.float32]

    @property
    def num_trained(self) -> int:
        return len(self.targets_T)


def plan_batch(groups: Sequence[Group], advantage: str, num_minibatches: int) -> TrainBatch:
    """Split the groups in their order into minibatches of trainable samples with advantages.

    A trajectory without a finite reward, with a status other than COMPLETED, without a trained token or with
    logprobs that are not finite is left out; so is a group of which fewer than 2 are left.
    """
    left_out: list[str] = []
    minibatches: list[list[Sample]] = []
    for part in np.array_split(np.arange(len(groups)), num_minibatches):
        samples: list[Sample] = []
        for i in part:
            samples += _group_samples(groups[i], advantage, left_out)
        minibatches.append(samples)
    return TrainBatch(minibatches, left_out)


def _group_samples(group: Group, advantage: str, left_out: list[str]) -> list[Sample]:
    states = []
    for state in group.states:
        reason = _untrainable(state)
        if reason is None:
            states.append(state)
        else:
            left_out.append(f"group {group.key} sample {state.sample_index}: {reason}")
    if len(states) < 2:
        left_out.append(f"group {group.key}: {len(states)} trainable of {len(group.states)}, 2 are needed")
        return []
    rewards = np.asarray([state.reward for state in states], np.float64)
    advantages = group_advantages(advantage, rewards, [len(states)])
    return [Sample(state, float(value)) for state, value in zip(states, advantages, strict=True)]


def _untrainable(state: RolloutState) -> str | None:
    if state.status is not Status.COMPLETED:
        return f"status is {state.status}" + (f" ({state.error})" if state.error else "")
    if state.reward is None or not np.isfinite(state.reward):
        return f"reward is {state.reward}"
    if not len(state.prompt_ids):
        return "the prompt is empty"
    if not state.response_mask.any():
        return "no token is trained"
    if not np.isfinite(state.logprobs[state.response_mask]).all():
        return "a trained token's logprob is not finite"
    return None


def plan_micro_batches(lengths: Sequence[int], world_size: int, max_tokens: int) -> list[list[list[int]]]:
    """Sample indices by [rank][micro-batch]: balanced by tokens, sorted by length, equally many everywhere.

    Longest first, each sample goes to the rank with the fewest tokens so far; a rank's samples are then cut
    where the padded size would pass `max_tokens`. An empty list is a filler. Raises ValueError naming a
    sample that is longer than `max_tokens`.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if order and lengths[order[0]] > max_tokens:
        raise ValueError(
            f"sample {order[0]} has {lengths[order[0]]} tokens, more than micro_batch_tokens {max_tokens}"
        )
    load = [(0, rank) for rank in range(world_size)]
    ranks: list[list[list[int]]] = [[] for _ in range(world_size)]
    for i in order:
        tokens, rank = heapq.heappop(load)
        heapq.heappush(load, (tokens + lengths[i], rank))
        batches = ranks[rank]
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    most = max(1, *map(len, ranks))
    for batches in ranks:
        batches.extend([] for _ in range(most - len(batches)))
    return ranks


def micro_batches(samples: Sequence[Sample], rank: int, world_size: int, max_tokens: int) -> list[MicroBatch]:
    """This rank's micro-batches of one minibatch, at least one, equally many on every rank.

    A sample with advantage 0 is not computed: its loss and its gradient are exactly 0, and it counts in the
    normaliser, which is the caller's.
    """
    active = [sample for sample in samples if sample.advantage != 0.0]
    plan = plan_micro_batches([sample.num_inputs for sample in active], world_size, max_tokens)[rank]
    return [_build([active[i] for i in part]) for part in plan]


def _build(samples: list[Sample]) -> MicroBatch:
    longest = max((sample.num_inputs for sample in samples), default=1)
    input_ids_BL = np.zeros((max(1, len(samples)), longest), np.int64)
    index, targets, logprobs, versions, advantages, temperatures = [], [], [], [], [], []
    for row, sample in enumerate(samples):
        state = sample.state
        ids = np.concatenate([state.prompt_ids, state.response_ids])
        input_ids_BL[row, : sample.num_inputs] = ids[:-1]
        trained = np.flatnonzero(state.response_mask)
        index.append(row * longest + len(state.prompt_ids) + trained - 1)
        targets.append(state.response_ids[trained])
        logprobs.append(state.logprobs[trained])
        versions.append(state.policy_versions[trained])
        advantages.append(np.full(len(trained), sample.advantage))
        temperatures.append(np.full(len(trained), state.sample_params.temperature))

    def flat(parts: list[NDArray], dtype: type) -> NDArray:
        return np.concatenate([np.empty(0), *parts]).astype(dtype)

    return MicroBatch(
        samples=tuple(samples),
        input_ids_BL=input_ids_BL,
        index_T=flat(index, np.int64),
        targets_T=flat(targets, np.int64),
        rollout_logprobs_T=flat(logprobs, np.float32),
        policy_versions_T=flat(versions, np.int32),
        advantages_T=flat(advantages, np.float32),
        temperatures_T=flat(temperatures, np.float32),
    )
