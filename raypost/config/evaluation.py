"""Held-out evaluation: of what, how often, on which engines."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from raypost.config.resources import ConfigModel, PoolConfig
from raypost.config.source import SourceConfig


class EvalConfig(ConfigModel):
    """Held-out evaluation."""

    source: SourceConfig | None = None
    """Problems for evaluation alone, of which the first `num_prompts` that differ are used; null: one question in ten
    of each task's own source, which is held out from training."""
    task: str | None = None
    """Name of the task that `source` evaluates, by its judge and prompt template; null: the only one. Others are
    evaluated on what they hold out."""
    num_prompts: Annotated[int, Field(ge=0)] = 128
    """Evaluation prompts of each task; 0: no evaluation."""
    samples: Annotated[int, Field(ge=1)] = 1
    """Responses to each prompt."""
    pass_threshold: float = 1.0
    """Least reward with which a response counts as passed, for pass@k."""
    pool: PoolConfig | None = None
    """Engines for evaluation alone, which then runs beside production; null: production's engines, in the pause of a
    sync."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature of evaluation; 0: greedy."""
    interval: Annotated[int, Field(ge=0)] = 0
    """Train steps between evaluations; 0: only before and after training."""
    timeout_s: Annotated[float, Field(gt=0)] = 600
    """Longest time that one evaluation may take, seconds; that each of its rounds may, where a task's
    `agent_loop.max_concurrent` has its trajectories play in several."""

    @property
    def pass_k(self) -> tuple[int, ...]:
        """The k for which pass@k is reported: 1, 2, 4 and so on up to `samples`, and `samples` itself."""
        return (*(2**n for n in range(self.samples.bit_length()) if 2**n < self.samples), self.samples)

    @model_validator(mode="after")
    def _samples_differ(self) -> EvalConfig:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples is {self.samples}, but temperature is 0, at which all responses to a prompt are the same: "
                "use 1 sample, or a temperature above 0"
            )
        return self
