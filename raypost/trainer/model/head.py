"""Logprobs of chosen tokens straight from hidden states: logits exist for a few rows at a time only.

Owns the last step of a language model, from hidden states to logprobs, cut into chunks of rows; the formula of a
chunk is logprobs.py's. What all rows' logits would take (4 bytes times vocabulary a row, several times over) is
bounded: with several chunks, the backward pass computes each one's logits again.

Where top-k or top-p cut, the tokens that were left are found again from the trainer's own logits, with the sampled
token always among them, so that its logprob is finite. vLLM can send the engine's own (`return_sampling_mask`), but
on the GPU's second model runner only, and at a cost of all their ids a token. It is not needed: engine and trainer
disagree about the edge of the nucleus only, and with logits that differ by 0.01 (bfloat16) that adds 0 to 7 % to the
gap that the difference makes in the logprobs anyway; with 0.0001 it adds nothing.

Axes: T rows, C rows of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from raypost.trainer.model.logprobs import chosen_logprobs, sampling_support, unbarred_support


@dataclass(frozen=True, slots=True)
class Sampling:
    """How each of T tokens was sampled: what its logprob refers to. None: nothing is cut, no token is barred."""

    temperatures_T: Tensor
    top_p_T: Tensor | None = None
    top_k_T: Tensor | None = None
    barred_TS: Tensor | None = None
    """Ids of at most S tokens that could not be sampled; -1: none."""

    def rows(self, rows: slice) -> Sampling:
        """Return it for some of the tokens."""
        parts = (self.top_p_T, self.top_k_T, self.barred_TS)
        return Sampling(self.temperatures_T[rows], *(None if one is None else one[rows] for one in parts))


@dataclass(frozen=True, slots=True)
class LogitRule:
    """What a model does to its head's output: logits = cap * tanh(scale * output / cap); no cap: None."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitRule:
        """Read the rule from a model's configuration, by the names families of models use; `check_head` verifies it."""
        scale = getattr(config, "logit_scale", None) or 1.0
        scale /= getattr(config, "logits_scaling", None) or 1.0
        return cls(scale=float(scale), cap=getattr(config, "final_logit_softcapping", None))

    def __call__(self, output_CV: Tensor) -> Tensor:
        """Apply the rule to a chunk of the head's output."""
        if self.scale != 1.0:
            output_CV = output_CV * self.scale
        return output_CV if self.cap is None else self.cap * torch.tanh(output_CV / self.cap)


def sampled_logprobs(
    logits_TV: Tensor, targets_T: Tensor, sampling: Sampling, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return each target's logprob under the distribution it was sampled from, and the distribution's entropy, nats."""
    support_TV = None
    if sampling.barred_TS is not None:
        support_TV = unbarred_support(sampling.barred_TS, targets_T, logits_TV.shape[-1])
    if sampling.top_p_T is not None and sampling.top_k_T is not None:
        scaled_TV = logits_TV.detach() / sampling.temperatures_T[:, None]
        if support_TV is not None:
            scaled_TV.masked_fill_(~support_TV, -torch.inf)
        cut_TV = sampling_support(scaled_TV, targets_T, sampling.top_p_T, sampling.top_k_T)
        support_TV = support_TV if cut_TV is None else cut_TV
    return chosen_logprobs(
        logits_TV, targets_T, sampling.temperatures_T, support_TV, entropy_gradient=entropy_gradient
    )


class ChunkedHead(nn.Module):
    """A model's head over again, with the same weights and another forward pass.

    The logits of as many rows exist at a time as take `max_bytes` in float32; up to so many rows in all, the
    backward pass computes nothing again.
    """

    def __init__(
        self, head: nn.Linear, rule: LogitRule, max_bytes: int, entropy_gradient: bool = False
    ) -> None:
        """Share the weights of `head`; make at most `max_bytes` of logits at a time.

        `entropy_gradient`: the entropy has a gradient, which takes a little more memory.
        """
        super().__init__()
        self.weight = head.weight
        self.bias = head.bias
        self._rule = rule
        self._chunk = max(1, max_bytes // (4 * head.out_features))
        self._entropy_gradient = entropy_gradient

    def forward(self, hidden_TH: Tensor, targets_T: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Return logprobs_T and entropy_T, float32 or wider."""
        num_rows = len(targets_T)
        if num_rows <= self._chunk:
            return self._logprobs(hidden_TH, targets_T, sampling)
        parts = []
        for start in range(0, num_rows, self._chunk):
            rows = slice(start, start + self._chunk)
            parts.append(
                checkpoint(
                    self._logprobs,
                    hidden_TH[rows],
                    targets_T[rows],
                    sampling.rows(rows),
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _logprobs(self, hidden_CH: Tensor, targets_C: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        logits_CV = self._rule(linear(hidden_CH, self.weight, self.bias))
        return sampled_logprobs(logits_CV, targets_C, sampling, self._entropy_gradient)
