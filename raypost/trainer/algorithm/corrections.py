"""What is done about the gap between the policy that sampled a token and the policy that trains on it.

Owns the proximal logprobs, the importance weights and the rejection of tokens and sequences; mismatch.py measures
the gap. Weights and rejection compare two logprobs of the same token: the proximal policy's, which the loss's ratio
is taken against, and the rollout engine's. Nothing here has a gradient.

    rollout (behaviour) --weight--> proximal --ratio of the loss--> current policy

A rejected token keeps its place in every denominator: the caller's scales and the statistics count it.

Axes: T trained tokens of whole sequences, row after row, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from raypost.config import BoundsConfig, CorrectionConfig, Level
from raypost.trainer.algorithm.sequences import row_means, row_sums


@dataclass(frozen=True, slots=True)
class Correction:
    """What a micro-batch's tokens count in the policy loss. Without gradient."""

    weights_T: Tensor
    """Factor of the policy loss of each token."""
    keep_T: Tensor | None = None
    """bool: False where a token is rejected; None: all are kept."""

    @classmethod
    def none(cls, like_T: Tensor) -> Correction:
        """Return weights of 1 and no rejection: for data that the trained policy sampled itself."""
        return cls(torch.ones_like(like_T, requires_grad=False))


@torch.no_grad()
def proximal_logprobs(
    kind: Literal["recompute", "interpolate", "rollout"],
    logprobs_T: Tensor,
    rollout_T: Tensor,
    staleness_T: Tensor,
    before_T: Tensor | None = None,
) -> Tensor:
    """Return logprobs of the policy that the loss's ratio is taken against: proximal_T, without gradient.

    recompute: `before_T`, the trainer's before the step's first update (decoupled PPO, arXiv 2110.00641); without
    it the current ones, which are the same in a step of one update. rollout: the engine's own (coupled PPO).
    interpolate: log-linearly between the rollout's and the current ones, by how far the proximal version lies between
    theirs, staleness / (staleness + 1), which costs no forward pass (arXiv 2512.06547). Raises ValueError for another
    kind.
    """
    if kind == "rollout":
        return rollout_T
    current_T = logprobs_T.detach()
    if kind == "recompute":
        return current_T if before_T is None else before_T.detach()
    if kind != "interpolate":
        raise ValueError(f"unknown proximal policy {kind!r}; there are recompute, interpolate, rollout")
    behind_T = staleness_T.to(torch.float64).clamp(min=0)
    alpha_T = (behind_T / (behind_T + 1)).to(current_T.dtype)
    return rollout_T + alpha_T * (current_T - rollout_T)


@torch.no_grad()
def correct(
    config: CorrectionConfig,
    proximal_T: Tensor,
    rollout_T: Tensor,
    rows_T: Tensor,
    num_rows: int,
    staleness_T: Tensor,
    trainer_T: Tensor | None = None,
) -> Correction:
    """Return importance weights and rejection of a micro-batch's tokens.

    weight: exp(proximal - rollout) at its level, truncated to its bounds (rho of V-trace, arXiv 1802.01561), divided
    by (1 + staleness)^staleness_power (arXiv 1511.05950). reject: tokens or sequences whose ratio lies outside its
    bounds (masked importance sampling). veto: sequences with a token whose ratio lies below. `staleness_T` is
    train_step - 1 - policy_version. Where proximal is `rollout`, every weight is 1 (the loss's own ratio holds all
    of the gap), and rejection compares `trainer_T`, the trainer's logprobs, with the rollout's: it must be given.
    """
    gap_T = proximal_T - rollout_T
    if config.proximal == "rollout" and (config.reject or config.veto):
        if trainer_T is None:
            raise ValueError("rejection with proximal 'rollout' needs the trainer's logprobs, trainer_T")
        gap_T = trainer_T - rollout_T
    if config.weight is None or config.proximal == "rollout":
        weights_T = torch.ones_like(gap_T)
    else:
        weights_T = level_ratios(config.weight.level, gap_T, rows_T, num_rows)
        weights_T = (
            weights_T.clamp(config.weight.lower, config.weight.upper)
            if _bounded(config.weight)
            else weights_T
        )
    if config.staleness_power:
        weights_T = weights_T * (1 + staleness_T.to(weights_T.dtype)).pow(-config.staleness_power)
    keep_T: Tensor | None = None
    if config.reject is not None and _bounded(config.reject):
        ratio_T = level_ratios(config.reject.level, gap_T, rows_T, num_rows)
        keep_T = inside(ratio_T, config.reject.lower, config.reject.upper)
    if config.veto is not None:
        low_T = torch.exp(gap_T) < config.veto
        vetoed_T = (row_sums(low_T.to(gap_T.dtype), rows_T, num_rows) > 0)[rows_T]
        keep_T = ~vetoed_T if keep_T is None else keep_T & ~vetoed_T
    return Correction(weights_T, keep_T)


def level_ratios(level: Level, gap_T: Tensor, rows_T: Tensor, num_rows: int) -> Tensor:
    """Return exp of each token's gap, of its sequence's sum, or of its sequence's mean: ratios_T.

    token; sequence: the product over the sequence, which is exact and has a variance that grows with length;
    geometric: its T-th root, which has not and is biased.
    """
    if level == "token":
        return torch.exp(gap_T)
    if level == "sequence":
        return torch.exp(row_sums(gap_T, rows_T, num_rows))[rows_T]
    if level == "geometric":
        return torch.exp(row_means(gap_T, rows_T, num_rows))[rows_T]
    raise ValueError(f"unknown level {level!r}; there are token, sequence, geometric")


def inside(ratio_T: Tensor, lower: float | None, upper: float | None) -> Tensor:
    """Return whether lower <= ratio <= upper, where None bounds nothing; NaN is outside of any bound."""
    keep_T = torch.ones_like(ratio_T, dtype=torch.bool)
    if lower is not None:
        keep_T = keep_T & (ratio_T >= lower)
    if upper is not None:
        keep_T = keep_T & (ratio_T <= upper)
    return keep_T


def _bounded(bounds: BoundsConfig) -> bool:
    return bounds.lower is not None or bounds.upper is not None
