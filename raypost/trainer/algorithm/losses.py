"""What the policy minimises: pure functions over torch tensors of trained tokens.

Owns the formulas, not their scale: the caller hands in what each token counts (`sequence_scales`), computed over
the whole minibatch of all ranks and micro-batches. So the sum of the losses of any split of the minibatch by
sequences is the loss of the minibatch.

    LossTokens, Correction -> the policy loss of each token, times its importance weight
                              + KL to the reference - entropy -> times its scale -> sum

A policy loss of one's own is `module:function` with the signature of `PolicyLoss`: of LossTokens and LossConfig,
it returns loss_T with a gradient and a bool clipped_T, whose tokens it kept from the gradient or capped.

Axes: N sequences of a minibatch; T trained tokens of one micro-batch, row after row (prompt, padding and masked
tokens are not among them), B its sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raypost.config import LossConfig, LossKind
from raypost.config.algorithm import Aggregation
from raypost.config.imports import load_function
from raypost.trainer.algorithm.corrections import Correction
from raypost.trainer.algorithm.rewards import kl_estimate
from raypost.trainer.algorithm.sequences import row_means


@dataclass(frozen=True, slots=True)
class LossTokens:
    """The trained tokens of a micro-batch. Only `logprobs_T` and `entropy_T` carry a gradient."""

    logprobs_T: Tensor
    """Of the policy that is trained, now."""
    entropy_T: Tensor
    """Of its distribution at the token, nats."""
    proximal_T: Tensor
    """Logprobs that the loss's ratio is taken against; see corrections.proximal_logprobs."""
    rollout_T: Tensor
    """Logprobs that the engine sampled with."""
    advantages_T: Tensor
    rows_T: Tensor
    """int64: which of the micro-batch's sequences a token belongs to, 0 to num_rows - 1."""
    num_rows: int
    reference_T: Tensor | None = None
    """Logprobs of the frozen reference; None: there is none."""

    def __post_init__(self) -> None:
        """Check that all fields have one length."""
        lengths = {name: len(values) for name, values in self._tensors().items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the fields of a token must have one length, got {lengths}")

    def kept(self, keep_T: Tensor) -> LossTokens:
        """Return only the tokens where `keep_T` is True. The rows keep their numbers."""
        kept: dict[str, Any] = {name: values[keep_T] for name, values in self._tensors().items()}
        return replace(self, **kept)

    def _tensors(self) -> dict[str, Tensor]:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


PolicyLoss = Callable[[LossTokens, LossConfig], tuple[Tensor, Tensor]]
"""tokens, config -> loss_T with gradient, clipped_T bool."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The loss of a micro-batch and what it is made of. All but `loss` are without gradient."""

    loss: Tensor
    """Scalar, with gradient: policy + KL coefficient * kl - entropy coefficient * entropy, each scaled."""
    policy: Tensor
    """Scalar: the policy loss's part of `loss`."""
    kl: Tensor
    """Scalar: the KL term's part."""
    ratio_T: Tensor
    """exp(logprob - proximal), of the tokens that were not rejected, as the two below."""
    clipped_T: Tensor
    kl_T: Tensor | None
    """Estimate of KL(policy || reference); None without a reference."""


# ---------------------------------------------------------------- scale


def sequence_scales(
    aggregation: Aggregation,
    lengths_N: Sequence[int],
    constant_length: int | None = None,
    sessions_N: Sequence[Hashable] | None = None,
) -> NDArray[np.float64]:
    """Return what a trained token of each sequence counts in the minibatch's loss: scales_N, float64.

    token: 1 / all tokens (DAPO, arXiv 2503.14476). sequence: 1 / (N * own length) (GRPO, arXiv 2402.03300).
    constant: 1 / (N * constant_length) (Dr.GRPO, arXiv 2503.20783). Sequences of equal `sessions_N` count as one of
    the N: `sequence` is a mean over sessions of means over their sequences. `lengths_N` counts rejected tokens too, so
    that rejecting some does not make the others louder. Raises ValueError for a sequence without a token.
    """
    lengths = np.asarray(lengths_N, np.float64)
    if lengths.ndim != 1 or (lengths < 1).any():
        bad = np.flatnonzero(lengths.ravel() < 1).tolist()
        raise ValueError(f"sequences {bad[:8]} have no trained token: leave them out of the minibatch")
    if aggregation == "token":
        return np.full(len(lengths), 1 / max(1.0, lengths.sum()))
    counts = Counter(range(len(lengths)) if sessions_N is None else sessions_N)
    if aggregation == "sequence":
        own = np.ones(len(lengths)) if sessions_N is None else np.asarray([counts[one] for one in sessions_N])
        return 1 / (max(1, len(counts)) * own * lengths)
    if aggregation != "constant":
        raise ValueError(f"unknown aggregation {aggregation!r}; there are token, sequence, constant")
    if constant_length is None or constant_length < 1:
        raise ValueError(
            f"aggregation 'constant' needs a constant_length of 1 or more, got {constant_length}"
        )
    return np.full(len(lengths), 1 / (max(1, len(counts)) * constant_length))


# ---------------------------------------------------------------- policy losses


def ppo(tokens: LossTokens, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprob - proximal), per token.

    Clip: PPO, arXiv 1707.06347; asymmetric: DAPO, arXiv 2503.14476. With `dual_clip` c, not more than -c A where
    A < 0: arXiv 1912.09729.
    """
    return _clipped(torch.exp(tokens.logprobs_T - tokens.proximal_T), tokens.advantages_T, config)


def gspo(tokens: LossTokens, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Return `ppo`'s loss with the geometric mean of the sequence's ratios as the ratio of each of its tokens.

    GSPO, arXiv 2507.18071; with aggregation `sequence` it is the paper's. Advantages may differ by token.
    """
    gap_T = tokens.logprobs_T - tokens.proximal_T
    ratio_T = torch.exp(row_means(gap_T, tokens.rows_T, tokens.num_rows))[tokens.rows_T]
    return _clipped(ratio_T, tokens.advantages_T, config)


def cispo(tokens: LossTokens, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Return -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprob: a capped token keeps its gradient.

    CISPO of MiniMax-M1, arXiv 2506.13585, whose authors use no lower bound: clip_low = 1.
    """
    ratio_T = torch.exp(tokens.logprobs_T.detach() - tokens.proximal_T)
    capped_T = ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -capped_T * tokens.advantages_T * tokens.logprobs_T, capped_T != ratio_T


def _clipped(ratio_T: Tensor, advantages_T: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    free_T = ratio_T * advantages_T
    bound_T = ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages_T
    gain_T, clipped_T = torch.minimum(free_T, bound_T), bound_T < free_T
    if config.dual_clip is not None:
        floor_T = config.dual_clip * advantages_T
        cut_T = (advantages_T < 0) & (gain_T < floor_T)
        gain_T, clipped_T = torch.where(cut_T, floor_T, gain_T), clipped_T | cut_T
    return -gain_T, clipped_T


POLICY_LOSSES: dict[str, PolicyLoss] = {"ppo": ppo, "gspo": gspo, "cispo": cispo}
"""By the names that raypost.config.LossKind lists."""
assert POLICY_LOSSES.keys() == set(get_args(LossKind)), "every name of LossKind has one entry"


def load_policy_loss(kind: str) -> PolicyLoss:
    """Return the policy loss of a name or an import path. Raises ConfigError."""
    return POLICY_LOSSES.get(kind) or load_function(kind, "train.loss.kind")


# ---------------------------------------------------------------- the other terms


def policy_objective(
    tokens: LossTokens,
    correction: Correction,
    scales_T: Tensor,
    config: LossConfig,
    policy_loss: PolicyLoss | None = None,
) -> LossTerms:
    """Return a micro-batch's loss: sum_T scale * (weight * policy + KL coefficient * kl - entropy coefficient * H).

    `scales_T`: `sequence_scales` of each token's sequence. A rejected token adds nothing; scales are not raised for
    it. `policy_loss`: what `load_policy_loss` gave for `config.kind`, so that a step loads it once. The KL term is
    there if `config.kl` puts it in the loss; `unbiased` is DeepSeek-V3.2's, arXiv 2512.02556. Raises ValueError if
    it needs a reference and there is none.
    """
    policy_loss = policy_loss or load_policy_loss(config.kind)
    weights_T, keep_T = correction.weights_T, correction.keep_T
    if not len(tokens.logprobs_T) == len(weights_T) == len(scales_T):
        raise ValueError(f"{len(tokens.logprobs_T)} tokens, {len(weights_T)} weights, {len(scales_T)} scales")
    if keep_T is not None:
        # Left out, not multiplied by 0: a ratio that overflowed would still make its gradient NaN.
        tokens, weights_T, scales_T = tokens.kept(keep_T), weights_T[keep_T], scales_T[keep_T]
    loss_T, clipped_T = policy_loss(tokens, config)
    policy = loss = (scales_T * weights_T * loss_T).sum()
    kl, kl_T = torch.zeros_like(policy), None
    if config.kl.coefficient and config.kl.place == "loss" and tokens.reference_T is None:
        raise ValueError("the KL term needs the reference's logprobs, but there are none: compute them first")
    if tokens.reference_T is not None:
        kl_T = kl_estimate(config.kl.kind, tokens.logprobs_T - tokens.reference_T, torch.expm1)
        if config.kl.place == "loss":
            counted_T = kl_T
            if config.kl.unbiased:
                counted_T = kl_T * torch.exp(tokens.logprobs_T - tokens.proximal_T)
            kl = config.kl.coefficient * (scales_T * counted_T).sum()
            loss = loss + kl
        kl_T = kl_T.detach()
    if config.entropy_coefficient:
        loss = loss - config.entropy_coefficient * (scales_T * tokens.entropy_T).sum()
    ratio_T = torch.exp((tokens.logprobs_T - tokens.proximal_T).detach())
    return LossTerms(loss, policy.detach(), kl.detach(), ratio_T, clipped_T, kl_T)


def sft_loss(logprobs_T: Tensor, scales_T: Tensor, coefficient: float = 1.0) -> Tensor:
    """Return supervised tokens' cross entropy, to be added to the policy's loss: -coefficient * sum_T scale * logprob.

    `scales_T`: `sequence_scales` of the optimizer step's supervised sequences alone, over all ranks and micro-batches.
    """
    return -coefficient * (scales_T * logprobs_T).sum()


@dataclass(frozen=True, slots=True)
class ValueTerms:
    """The critic's loss of a micro-batch (scalar, with gradient) and which tokens its clip decided."""

    loss: Tensor
    clipped_T: Tensor


def value_loss(
    values_T: Tensor, before_T: Tensor, returns_T: Tensor, scales_T: Tensor, clip: float | None
) -> ValueTerms:
    """Return sum_T scale / 2 * max((v - R)^2, (clip(v, before +- clip) - R)^2): the critic's loss.

    `before_T`: its values before the step's first update. Clip: as PPO's code has it, arXiv 2005.12729; None: none.
    """
    error_T = (values_T - returns_T).square()
    if clip is None:
        return ValueTerms((scales_T * error_T).sum() / 2, torch.zeros_like(error_T, dtype=torch.bool))
    near_T = torch.maximum(torch.minimum(values_T, before_T + clip), before_T - clip)
    bound_T = (near_T - returns_T).square()
    clipped_T = bound_T > error_T
    return ValueTerms((scales_T * torch.maximum(error_T, bound_T)).sum() / 2, clipped_T)
