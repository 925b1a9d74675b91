"""The configuration of the trainer: its ranks, its steps and its algorithm. Part of config.py's schema."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from raypost.config.algorithm import AdvantageConfig, CorrectionConfig, LossConfig, SftConfig
from raypost.config.resources import ConfigModel, WorkerPoolConfig


class CriticConfig(WorkerPoolConfig):
    """The critic: a model with a value head, trained beside the policy by a trainer group of its own."""

    name: str | None = None
    """A local Hugging Face folder or a hub id; null: what the policy starts from."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5


class LoraConfig(ConfigModel):
    """Low-rank adapters: all that is trained of a model that stays as it is otherwise."""

    rank: Annotated[int, Field(ge=1)] = 16
    alpha: Annotated[int, Field(ge=1)] = 32
    """Adapters add alpha / rank times their product."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Ends of the names of the layers that are adapted; all-linear: all but the head."""
    sync: Literal["adapter", "merged"] = "adapter"
    """adapter: what a sync sends is the adapters, and engines add them to the weights they hold. merged: whole
    weights, adapters added by the trainer."""


class TrainConfig(WorkerPoolConfig):
    """The trainer group and the optimisation."""

    num_steps: Annotated[int, Field(ge=1)]
    batch_size: Annotated[int, Field(ge=1)]
    """Groups a train step, over all tasks."""
    threads: Annotated[int, Field(ge=1)] = 1
    """Compute threads of a rank on CPU."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    micro_batch_tokens: Annotated[int, Field(ge=1)] = 8192
    """Upper bound of tokens in one forward pass, padding included."""
    packing: bool = True
    """Put many trajectories into one row without padding. What it computes is compared with single sequences at the
    start; false for a model that cannot."""
    share_prompts: Literal["auto", "off"] = "auto"
    """auto: a prompt is computed once for the trajectories of a group where that takes less time; needs packing."""
    logits_mb: Annotated[int, Field(ge=1)] = 512
    """Upper bound of the logits that exist at a time, MiB of float32; what needs more is computed in chunks, and
    again in the backward pass."""
    num_minibatches: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps a batch is split into; 1 is a single step on the whole batch."""
    num_epochs: Annotated[int, Field(ge=1)] = 1
    """Times a train step goes over its batch."""
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    correction: CorrectionConfig = CorrectionConfig()
    critic: CriticConfig | None = None
    """Needed by, and only used with, the advantage `gae`."""
    lora: LoraConfig | None = None
    """Train adapters of the policy only; null: train all of it."""
    sft: SftConfig | None = None
    """Supervised examples that every train step learns beside its batch; null: none."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep an exponential moving average of the policy's weights, updated at each train step, and save it too; null:
    none."""
    offload_optimizer: bool = False
    """Keep the optimizer's state, and compute its step, on the CPU: less GPU memory, more time."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of matrices; biases and the weights of norms never decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    gradient_checkpointing: bool = False
    bucket_mb: Annotated[int, Field(ge=1)] = 256
    """Size of a weight bucket in the object store, MiB."""
    step_timeout_s: Annotated[float, Field(gt=0)] = 1800
    """Longest time a train step, a publication of weights or a checkpoint may take."""

    @model_validator(mode="after")
    def _critic_is_used(self) -> TrainConfig:
        kind = self.advantage.kind
        if kind == "gae" and self.critic is None:
            raise ValueError("advantage.kind is 'gae', but critic is null: set critic, for instance to {}")
        if self.critic is not None and kind != "gae" and ":" not in kind:
            raise ValueError(
                f"critic is set, but advantage.kind {kind!r} uses none: leave it out, or use gae"
            )
        return self

    @model_validator(mode="after")
    def _offload_needs_zero(self) -> TrainConfig:
        stages = {"train.zero_stage": self.zero_stage}
        if self.critic is not None:
            stages["train.critic.zero_stage"] = self.critic.zero_stage
        for name, stage in stages.items():
            if self.offload_optimizer and stage == 0:
                raise ValueError(
                    f"offload_optimizer is true, but {name} is 0, where DeepSpeed offloads nothing: use {name} 1 or "
                    "more, or offload_optimizer: false"
                )
        return self

    @property
    def num_updates(self) -> int:
        """Optimizer steps a train step."""
        return self.num_epochs * self.num_minibatches

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether a step needs the logprobs before it, beyond those of its own forward passes."""
        moved = self.num_updates > 1 and self.correction.proximal == "recompute"
        return moved or (self.needs_ref_logprobs and self.loss.kl.place == "reward")

    @property
    def needs_ref_logprobs(self) -> bool:
        """Whether a step needs those of the frozen reference."""
        return self.loss.kl.coefficient > 0

    @property
    def for_critic(self) -> TrainConfig:
        """The configuration of the critic's trainer group. Raises ValueError if there is none."""
        if self.critic is None:
            raise ValueError("train.critic is null: there is no critic")
        own = {name: getattr(self.critic, name) for name in CriticConfig.model_fields if name != "name"}
        return self.model_copy(update=own | {"lora": None})
