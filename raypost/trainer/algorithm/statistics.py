"""Statistics of a train step, summed over micro-batches and ranks.

Owns how a step's figures add up, so that they do not depend on how the batch was split. Computes nothing
that enters the gradient.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from raypost.observe import metrics
from raypost.trainer.algorithm.corrections import Correction
from raypost.trainer.algorithm.losses import LossTerms, LossTokens, ValueTerms
from raypost.trainer.algorithm.mismatch import LagSums


class PolicyStatistics:
    """The policy's statistics: sums and extremes over the tokens that this rank computed."""

    def __init__(self) -> None:
        """Begin with no tokens."""
        self._sums = np.zeros(9)
        """loss, policy loss, KL loss, tokens, entropy, kept tokens, KL, supervised loss and tokens."""
        self._lags = LagSums.zero()

    def add(
        self,
        tokens: LossTokens,
        correction: Correction,
        terms: LossTerms,
        staleness_T: Tensor,
        trainer_T: Tensor | None = None,
    ) -> None:
        """Add one micro-batch.

        `trainer_T`: the trainer's logprobs before the step's first update; None: they are `tokens.logprobs_T`.
        `staleness_T`: train_step - 1 - policy_version.
        """
        with torch.no_grad():
            logprobs_T = tokens.logprobs_T.detach()
            keep_T = torch.ones_like(logprobs_T, dtype=torch.bool)
            if correction.keep_T is not None:
                keep_T = correction.keep_T
            ratio_T, clipped_T, kl_T = (torch.zeros_like(logprobs_T) for _ in range(3))
            ratio_T[keep_T] = terms.ratio_T
            clipped_T[keep_T] = terms.clipped_T.to(clipped_T.dtype)
            if terms.kl_T is not None:
                kl_T[keep_T] = terms.kl_T
            before_T = logprobs_T if trainer_T is None else trainer_T
            columns = (
                before_T, tokens.rollout_T, correction.weights_T, ratio_T, clipped_T, keep_T, staleness_T,
                tokens.entropy_T, kl_T,
            )  # fmt: skip
            # One transfer from the device for all of them.
            table = torch.stack([column.detach().double() for column in columns]).cpu().numpy()
            scalars = torch.stack([one.detach().double() for one in (terms.loss, terms.policy, terms.kl)])
        before, rollout, weights, ratio, clipped, keep, lags, entropy, kl = table
        kept = keep > 0
        self._sums += (*scalars.tolist(), len(kept), entropy.sum(), kept.sum(), kl.sum(), 0, 0)
        self._lags += LagSums.of(before, rollout, lags.astype(np.int64), weights, kept, ratio, clipped > 0)

    def add_sft(self, logprobs_T: Tensor, loss: Tensor) -> None:
        """Add a micro-batch of supervised examples; `loss`: what it adds to the loss."""
        cross_entropy = -logprobs_T.detach().double().sum().item()
        self._sums += (loss.item(), 0, 0, 0, 0, 0, 0, cross_entropy, len(logprobs_T))

    def reduce(self, device: torch.device) -> None:
        """Add up the statistics of all ranks, on each. A collective."""
        self._sums = all_reduce(self._sums, dist.ReduceOp.SUM, device)
        self._lags = LagSums(
            all_reduce(self._lags.sums, dist.ReduceOp.SUM, device),
            all_reduce(self._lags.maxima, dist.ReduceOp.MAX, device),
        )

    def metrics(self, num_minibatches: int) -> dict[str, float]:
        """Return the figures that exist: losses are means over minibatches, others over tokens (LagSums.metrics).

        entropy: nats a token. reference_kl: of kept tokens, nats; absent while it is 0, as without a reference.
        sft_loss: cross entropy of the supervised tokens, of which there were sft_tokens, in nats a token and without
        its coefficient; absent without examples.
        """
        loss, policy, kl_loss, tokens, entropy, kept, kl, sft, sft_tokens = self._sums
        figures: dict[str, float] = {metrics.LOSS: loss / num_minibatches}
        if tokens:
            figures[metrics.POLICY_LOSS] = policy / num_minibatches
            figures[metrics.ENTROPY] = entropy / tokens
        if kl:
            figures[metrics.REFERENCE_KL] = kl / kept
            figures[metrics.KL_LOSS] = kl_loss / num_minibatches
        if sft_tokens:
            figures[metrics.SFT_LOSS] = sft / sft_tokens
            figures[metrics.SFT_TOKENS] = sft_tokens
        figures |= self._lags.metrics()
        return {name: float(value) for name, value in figures.items() if math.isfinite(value)}


class ValueStatistics:
    """The critic's statistics: sums over the tokens that this rank computed."""

    def __init__(self) -> None:
        """Begin with no tokens."""
        self._sums = np.zeros(8)
        """loss, tokens, clipped ones, return, its square, error, its square, value."""

    def add(self, values_T: Tensor, returns_T: Tensor, terms: ValueTerms) -> None:
        """Add one micro-batch."""
        with torch.no_grad():
            columns = torch.stack([values_T.detach().double(), returns_T.double(), terms.clipped_T.double()])
        values, returns, clipped = columns.cpu().numpy()
        error = returns - values
        self._sums += (
            terms.loss.item(), len(values), clipped.sum(), returns.sum(), np.square(returns).sum(), error.sum(),
            np.square(error).sum(), values.sum(),
        )  # fmt: skip

    def reduce(self, device: torch.device) -> None:
        """Add up the statistics of all ranks, on each. A collective."""
        self._sums = all_reduce(self._sums, dist.ReduceOp.SUM, device)

    def metrics(self, num_minibatches: int) -> dict[str, float]:
        """Return the figures of a step: value_loss, value_mean, return_mean, value_clip_fraction, explained_variance.

        explained_variance = 1 - Var(return - value) / Var(return); absent where all returns are equal.
        """
        loss, count, clipped, returns, return_square, error, error_square, value = self._sums
        figures: dict[str, float] = {metrics.VALUE_LOSS: loss / num_minibatches}
        if count:
            figures |= {
                metrics.VALUE_MEAN: value / count,
                metrics.RETURN_MEAN: returns / count,
                metrics.VALUE_CLIP_FRACTION: clipped / count,
            }
            variance = return_square / count - (returns / count) ** 2
            rest = error_square / count - (error / count) ** 2
            if variance > 1e-12:
                figures[metrics.EXPLAINED_VARIANCE] = 1 - rest / variance
        return {name: float(value) for name, value in figures.items() if math.isfinite(value)}


def all_reduce(values: np.ndarray, op: dist.ReduceOp.RedOpType, device: torch.device) -> np.ndarray:
    """Return the sum, or another reduction, of an array over all ranks. A collective."""
    tensor = torch.from_numpy(values).to(device)
    dist.all_reduce(tensor, op=op)
    return tensor.cpu().numpy()
