"""The advantages of a batch as columns, from its rewards and what the models say about its tokens.

Owns how trajectories become what advantage.py compares: which penalties their rewards carry, which of them are one
session. The formulas are advantage.py's and rewards.py's. Pure NumPy; every rank computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from raypost.config import AdvantageConfig, KlConfig
from raypost.trainer.algorithm.advantage import Scored, compute_advantages
from raypost.trainer.algorithm.rewards import kl_rewards, overlong_penalties
from raypost.trainer.batch.train_batch import Column, Sample, TrainBatch


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Columns over the batch's response tokens; 0 where a token is not trained."""

    advantages: Column
    returns: Column | None
    """What the critic is to learn; None without a critic."""


@dataclass(frozen=True, slots=True)
class TokenValues:
    """What the critic says of a batch: columns over its response tokens; 0 where it was not asked."""

    values: Column
    """Of the state in which each trained token was chosen."""
    after: Column
    """At the last token of a trajectory that was cut off there: of the state after it."""


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """What the policy is trained on, in addition to its batch; see `TrainConfig.needs_old_logprobs` and others."""

    advantages: TokenAdvantages
    old_logprobs: Column | None = None
    ref_logprobs: Column | None = None


@dataclass(frozen=True, slots=True)
class CriticInputs:
    """What the critic is trained on, in addition to its batch."""

    advantages: TokenAdvantages
    values: TokenValues
    """The critic's before the first optimizer step."""


def token_advantages(
    batch: TrainBatch,
    config: AdvantageConfig,
    kl: KlConfig,
    *,
    old_logprobs: Column | None = None,
    ref_logprobs: Column | None = None,
    values: TokenValues | None = None,
) -> TokenAdvantages:
    """Return the advantages of all trainable samples.

    With the KL divergence in the reward, both logprobs must be given; with `gae`, the values. A trajectory that was
    cut off could have gone on: for `gae` it is worth what the critic expects after its last token (arXiv
    1712.00378), besides its reward. Raises ValueError naming the group that cannot be compared.
    """
    samples = batch.samples
    if not samples:
        empty = np.zeros(batch.num_tokens, np.float32)
        return TokenAdvantages(empty, empty if values is not None else None)
    places_M = np.concatenate([sample.places for sample in samples])
    rewards_N = np.asarray([sample.state.reward for sample in samples], np.float64)
    rewards_N += overlong_penalties(
        [sample.state.num_tokens for sample in samples],
        [sample.state.sample_params.max_tokens for sample in samples],
        config.overlong_buffer,
        config.overlong_penalty,
    )
    token_rewards_M = None
    if kl.coefficient > 0 and kl.place == "reward":
        if old_logprobs is None or ref_logprobs is None:
            raise ValueError(
                "the KL divergence in the reward needs the policy's and the reference's logprobs"
            )
        token_rewards_M = kl_rewards(kl.kind, old_logprobs[places_M], ref_logprobs[places_M], kl.coefficient)
    scored = Scored(
        rewards_N=rewards_N,
        lengths_N=np.asarray([sample.num_trained for sample in samples], np.int64),
        group_sizes=[len(group) for group in batch.groups],
        group_names=[str(group[0].key) for group in batch.groups],
        sessions_N=[sample.session for sample in samples],
        turns_M=np.concatenate([sample.turn_numbers for sample in samples]),
        turn_rewards_N=[sample.turn_rewards for sample in samples],
        token_rewards_M=token_rewards_M,
        values_M=None if values is None else values.values[places_M].astype(np.float64),
        bootstrap_N=None
        if values is None
        else values.after[[one.last for one in samples]].astype(np.float64),
    )
    result = compute_advantages(scored, config)

    def column(values_M: np.ndarray) -> Column:
        whole = np.zeros(batch.num_tokens, np.float32)
        whole[places_M] = values_M
        return whole

    returns = None if result.returns_M is None else column(result.returns_M)
    return TokenAdvantages(column(result.advantages_M), returns)


def with_advantage(advantages: Column) -> Callable[[Sample], bool]:
    """Return a test of whether any token of a sample has an advantage; without one its loss and gradient are 0."""
    return lambda sample: bool(np.any(advantages[sample.places] != 0.0))
