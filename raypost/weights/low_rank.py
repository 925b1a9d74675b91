"""What a low-rank adapter (LoRA, arXiv 2106.09685) makes of a matrix: the one formula of trainer and engine."""

from __future__ import annotations

from torch import Tensor


def merged(base: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return base + scale * up @ down of base [a, b], down [rank, b], up [a, rank]: float32, then base's dtype."""
    added = up.detach().float() @ down.detach().float()
    return added.mul_(scale).add_(base.detach().float()).to(base.dtype)
