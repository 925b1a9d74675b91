"""An exponential moving average of a model's weights, kept beside the optimizer's own.

    average <- decay * average + (1 - decay) * weights, after every train step that moved the weights

Owns the average and its use in place of the weights; where DeepSpeed keeps those is engine.py's, which saves it as
it saves them. It starts as the weights it is made from.

Memory: 4 bytes a trained weight on the device of the optimizer's float32 weights, of which each rank has its own
part from ZeRO 1 on, and all at ZeRO 0. Exporting needs one whole weight at a time more.

Invariants: all ranks make the same calls in the same order; outside `in_place` the model's weights are untouched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from raypost.trainer.engine import TrainEngine
from raypost.trainer.model.lora import Weight


class WeightAverage:
    """One rank's part of the average of an engine's trained weights."""

    def __init__(self, engine: TrainEngine[Any], decay: float) -> None:
        """Begin with the engine's weights as they are."""
        self._engine = engine
        self._decay = decay
        self.parts = [part.detach().clone() for part in engine.optimized_weights()]
        """What it keeps on this rank."""

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the weights as they are now."""
        for mine, now in zip(self.parts, self._engine.optimized_weights(), strict=True):
            mine.lerp_(now.detach().to(mine.device), 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the optimizer's float32 weights are the average: what `whole_weight` reads."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for mine, now in zip(self.parts, self._engine.optimized_weights(), strict=True):
            kept = now.detach().clone()
            now.data.copy_(mine)
            mine.copy_(kept)

    def averaged(self, weights: Iterator[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """Yield the weights with each trained one replaced by its average, float32.

        To be read within `in_place`, to the end, by every rank.
        """
        for name, weight in weights:
            yield name, replace(weight, parts=tuple(map(self._of, weight.parts)))

    def _of(self, weight: Tensor) -> Tensor:
        return self._engine.whole_weight(weight) if weight.requires_grad else weight
