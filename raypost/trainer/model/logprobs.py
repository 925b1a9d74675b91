"""Logprobs of chosen tokens under the distribution that was sampled from: barred tokens, temperature, top-k, top-p.

Owns the function from logits to logprobs and its gradient, for one chunk of tokens. Does not own the chunks: the
caller cuts a batch into as many as memory wants, so that logits never exist for all of it.

The order of the transforms is vLLM's, whose `processed_logprobs` these must equal: leave out what `min_tokens` bars,
divide by the temperature, keep the top k, then the smallest set of the rest that holds top_p of their probability,
and normalise again.

Axes: T chosen tokens of one chunk, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


class _ChosenLogprobs(torch.autograd.Function):
    """Logprob at the chosen token and entropy of softmax(logits / temperature) within the support.

    Keeps one buffer of the logits' size for the backward pass, where autograd's own would keep three. The
    backward pass works once.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        logits_TV: Tensor,
        targets_T: Tensor,
        temperatures_T: Tensor,
        support_TV: Tensor | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(logits_TV.dtype, torch.float32)
        log_p_TV = logits_TV.to(wide) / temperatures_T[:, None]
        if support_TV is not None:
            log_p_TV.masked_fill_(~support_TV, -torch.inf)
        log_p_TV -= log_p_TV.logsumexp(-1, keepdim=True)
        chosen_T = log_p_TV.gather(-1, targets_T[:, None]).squeeze(-1)
        p_TV = log_p_TV.exp()
        # A token that cannot occur has logprob -inf and adds 0 to the entropy, not NaN.
        log_p_TV.clamp_(min=torch.finfo(wide).min)
        entropy_T = -torch.bmm(p_TV[:, None], log_p_TV[:, :, None]).view(-1)
        ctx.save_for_backward(p_TV, targets_T, temperatures_T, entropy_T)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        ctx.dtype = logits_TV.dtype
        ctx.entropy_gradient = entropy_gradient
        return chosen_T, entropy_T

    @staticmethod
    def backward(  # type: ignore[no-untyped-def]
        ctx, grad_T: Tensor, entropy_grad_T: Tensor | None
    ) -> tuple[Tensor, None, None, None, None]:
        p_TV, targets_T, temperatures_T, entropy_T = ctx.saved_tensors
        grad_T = grad_T / temperatures_T
        # In place: the graph is walked once, and another buffer of this size would double the peak.
        if ctx.entropy_gradient and entropy_grad_T is not None:
            # d entropy / d logit = -p (log p + entropy) / temperature.
            slope_TV = p_TV.clamp(min=torch.finfo(p_TV.dtype).tiny).log_().add_(entropy_T[:, None])
            slope_TV.mul_((entropy_grad_T / temperatures_T)[:, None]).add_(grad_T[:, None])
            grad_TV = p_TV.mul_(slope_TV).neg_()
        else:
            grad_TV = p_TV.mul_(-grad_T[:, None])
        grad_TV.scatter_add_(-1, targets_T[:, None], grad_T[:, None])
        return grad_TV.to(ctx.dtype), None, None, None, None


def chosen_logprobs(
    logits_TV: Tensor,
    targets_T: Tensor,
    temperatures_T: Tensor,
    support_TV: Tensor | None = None,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return each target's logprob under softmax(logits / temperature), and the entropy in nats; float32 or wider.

    logits_TV, targets_T int64, temperatures_T > 0 -> logprobs_T with gradient, entropy_T with one if
    `entropy_gradient`. `support_TV` (bool, see `sampling_support`): tokens outside have probability 0; a target
    outside has logprob -inf. The support itself gets no gradient.
    """
    logprobs_T, entropy_T = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]  # torch has no type for it
        logits_TV, targets_T, temperatures_T, support_TV, entropy_gradient
    )
    return logprobs_T, entropy_T


@torch.no_grad()
def sampling_support(scaled_TV: Tensor, targets_T: Tensor, top_p_T: Tensor, top_k_T: Tensor) -> Tensor | None:
    """Return the tokens that top-k and top-p leave: support_TV, bool; None where neither cuts anything.

    `scaled_TV`: logits, already divided by the temperature. `top_k_T` int64, 0 = all; `top_p_T` in (0, 1]. The target
    is always inside: the engine sampled it, and where it seems outside the trainer's arithmetic differs from the
    engine's at the edge.
    """
    if bool((top_p_T >= 1).all()) and bool((top_k_T <= 0).all()):
        return None
    vocabulary = scaled_TV.shape[-1]
    sorted_TV, order_TV = scaled_TV.to(torch.promote_types(scaled_TV.dtype, torch.float32)).sort(-1)
    k_T = torch.where(top_k_T > 0, top_k_T.clamp(max=vocabulary), vocabulary)
    smallest_T = sorted_TV.gather(-1, (vocabulary - k_T)[:, None])
    sorted_TV.masked_fill_(sorted_TV < smallest_T, -torch.inf)
    inside_TV = sorted_TV.isfinite()
    below_TV = sorted_TV.softmax(-1).cumsum(-1)
    # Without a bound nothing is cut, whatever rounding does to the sum.
    cut_TV = (below_TV <= 1 - top_p_T[:, None].to(below_TV.dtype)) & (top_p_T[:, None] < 1)
    cut_TV[:, -1] = False
    inside_TV &= ~cut_TV
    support_TV = torch.zeros_like(inside_TV).scatter_(-1, order_TV, inside_TV)
    return support_TV.scatter_(-1, targets_T[:, None], True)


def unbarred_support(barred_TS: Tensor, targets_T: Tensor, vocabulary: int) -> Tensor:
    """Return the tokens that could be sampled, [T, V], bool: all but the ids of `barred_TS`, in which -1 is none.

    The target is always inside, as in `sampling_support`.
    """
    support_TV = torch.ones(len(barred_TS), vocabulary, dtype=torch.bool, device=barred_TS.device)
    rows, places = (barred_TS >= 0).nonzero(as_tuple=True)
    support_TV[rows, barred_TS[rows, places]] = False
    return support_TV.scatter_(-1, targets_T[:, None], True)
