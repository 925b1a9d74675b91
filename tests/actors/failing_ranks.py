"""Ranks that fail and hang by rule, of a module that imports no torch: their processes start in a moment."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import ray

from actors.training.once import Once
from raypost.config import Config
from raypost.errors import CheckpointError


class FailingRank(Once):
    """Step 1: rank 1 is broken and rank 0 waits for it. Step 2: rank 1 does not answer."""

    def __init__(self, config: Config, model_path: str, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def fit(self, packed: object, step: int) -> dict[str, float]:
        if (self._rank, step) == (1, 1):
            raise CheckpointError("rank 1 is broken")
        if self._rank == step - 1:
            threading.Event().wait(2 if step == 1 else 20)
        return {}

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]  # of Ray
    def facts(self) -> SimpleNamespace:
        return SimpleNamespace(pid=os.getpid(), ready=True)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]  # of Ray
    def close(self) -> None:
        pass
