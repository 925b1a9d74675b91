"""Policy losses: pure functions over torch tensors of trained tokens.

Owns the formulas, not their scale: the caller hands in the normaliser, which is the number of trained tokens
of the whole minibatch over all ranks and micro-batches. So the sum of the losses of any split of the
minibatch is the loss of the minibatch.

Axes: T trained tokens of one micro-batch (prompt, padding and masked tokens are not among them).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossSums:
    """What a micro-batch adds to the statistics of its minibatch. Sums over tokens, except the extremes."""

    loss: float
    num_tokens: int
    clipped: float
    """Tokens whose gradient the clip removed."""
    ratio: float
    ratio_min: float
    ratio_max: float


def policy_loss(
    logprobs_T: Tensor,
    proximal_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    normaliser: float,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, LossSums]:
    """Clipped policy loss, token mean over `normaliser` tokens; returns a scalar and its statistics.

    -1/normaliser * sum_T weight * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), where ratio =
    exp(logprob - proximal). Clip: PPO, arXiv 1707.06347; asymmetric: DAPO, arXiv 2503.14476; weights
    of the behaviour policy beside a proximal one: decoupled PPO, arXiv 2110.00641. Only
    `logprobs_T` gets a gradient. Raises ValueError unless the normaliser is positive.
    """
    if not normaliser > 0:
        raise ValueError(f"the normaliser must be a positive number of tokens, got {normaliser}")
    advantages_T, weights_T = advantages_T.detach(), weights_T.detach()
    ratio_T = torch.exp(logprobs_T - proximal_T.detach())
    clipped_T = torch.clamp(ratio_T, 1 - clip_low, 1 + clip_high)
    free_T, bound_T = ratio_T * advantages_T, clipped_T * advantages_T
    loss_T = -weights_T * torch.minimum(free_T, bound_T)
    loss = loss_T.sum() / normaliser
    with torch.no_grad():
        num_tokens = logprobs_T.numel()
        sums = LossSums(
            loss=loss.item(),
            num_tokens=num_tokens,
            clipped=(bound_T < free_T).sum().item(),
            ratio=ratio_T.sum().item(),
            ratio_min=ratio_T.min().item() if num_tokens else float("inf"),
            ratio_max=ratio_T.max().item() if num_tokens else float("-inf"),
        )
    return loss, sums


class _ChosenLogprobs(torch.autograd.Function):
    """log_softmax(logits / temperature) at the chosen token, and the entropy, which gets no gradient.

    Keeps one buffer of the logits' size for the backward pass, where autograd's own would keep three. The
    backward pass works once.
    """

    @staticmethod
    def forward(ctx, logits_TV: Tensor, targets_T: Tensor, temperatures_T: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        wide = torch.promote_types(logits_TV.dtype, torch.float32)
        log_p_TV = logits_TV.to(wide) / temperatures_T[:, None]
        log_p_TV -= log_p_TV.logsumexp(-1, keepdim=True)
        chosen_T = log_p_TV.gather(-1, targets_T[:, None]).squeeze(-1)
        p_TV = log_p_TV.exp()
        # A token that cannot occur has logprob -inf and adds 0 to the entropy, not NaN.
        log_p_TV.clamp_(min=torch.finfo(wide).min)
        entropy_T = -torch.bmm(p_TV[:, None], log_p_TV[:, :, None]).view(-1)
        ctx.save_for_backward(p_TV, targets_T, temperatures_T)
        ctx.mark_non_differentiable(entropy_T)
        ctx.dtype = logits_TV.dtype
        return chosen_T, entropy_T

    @staticmethod
    def backward(ctx, grad_T: Tensor, _: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        p_TV, targets_T, temperatures_T = ctx.saved_tensors
        grad_T = grad_T / temperatures_T
        # In place: the graph is walked once, and another buffer of this size would double the peak.
        grad_TV = p_TV.mul_(-grad_T[:, None])
        grad_TV.scatter_add_(-1, targets_T[:, None], grad_T[:, None])
        return grad_TV.to(ctx.dtype), None, None


def chosen_logprobs(logits_TV: Tensor, targets_T: Tensor, temperatures_T: Tensor) -> tuple[Tensor, Tensor]:
    """Logprob of each target under softmax(logits / temperature), and the entropy in nats; float32 or wider.

    logits_TV, targets_T int64, temperatures_T > 0 -> logprobs_T with gradient, entropy_T without.
    """
    logprobs_T, entropy_T = _ChosenLogprobs.apply(logits_TV, targets_T, temperatures_T)
    return logprobs_T, entropy_T
