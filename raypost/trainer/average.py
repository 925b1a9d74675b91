"""An exponential moving average of a model's weights, kept beside the optimizer's own.

    average <- decay * average + (1 - decay) * weights, after every train step that moved the weights

Owns the average, its file in a checkpoint and its use in place of the weights; where DeepSpeed keeps those is
engine.py's. It starts as the weights it is made from.

Memory: 4 bytes a trained weight on the device of the optimizer's float32 weights, of which each rank has its own
part from ZeRO 1 on, and all at ZeRO 0. Saving, restoring and exporting need one whole weight at a time more, and
saving all of the average, in float32, in rank 0's main memory.

Invariants: all ranks make the same calls in the same order; outside `in_place` the model's weights are untouched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from raypost.errors import CheckpointError
from raypost.trainer.engine import TrainEngine
from raypost.trainer.model.lora import Weight

FILE = "average.safetensors"
"""In a checkpoint: every trained weight's average, whole and in float32, whatever the ranks and the ZeRO stage."""


class WeightAverage:
    """One rank's part of the average of an engine's trained weights."""

    def __init__(self, engine: TrainEngine[Any], decay: float, rank: int) -> None:
        """Begin with the engine's weights as they are."""
        self._engine = engine
        self._decay = decay
        self._rank = rank
        self.parts = [part.detach().clone() for part in engine.optimized_weights()]
        """What it keeps on this rank."""

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the weights as they are now."""
        for mine, now in zip(self.parts, self._engine.optimized_weights(), strict=True):
            mine.lerp_(now.detach().to(mine.device), 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the optimizer's float32 weights are the average: what `whole_weight` reads and sets."""
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

    def save(self, path: Path) -> None:
        """Write it below `path`. A collective."""
        state = {}
        with self.in_place():
            for name, weight in self._engine.trained_weights():
                whole = self._engine.whole_weight(weight)
                if self._rank == 0:
                    state[name] = whole.detach().to("cpu", torch.float32, copy=True).contiguous()
        if self._rank == 0:
            save_file(state, str(path / FILE))

    def load(self, path: Path) -> None:
        """Restore what `save` wrote on any number of ranks, at any ZeRO stage. A collective.

        Raises CheckpointError without a file, or if it is damaged or of another model.
        """
        file = path / FILE
        if not file.exists():
            raise CheckpointError(
                f"{path} holds no average of the weights: it was saved without train.ema_decay; leave it out"
            )
        try:
            with safe_open(str(file), "pt") as stored, self.in_place():
                for name, weight in self._engine.trained_weights():
                    self._engine.set_whole_weight(weight, stored.get_tensor(name))
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{file} is damaged or of another model: {error}") from error
