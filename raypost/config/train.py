"""The configuration of the trainer: its ranks, its steps and its optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from raypost.config.algorithm import AdvantageConfig, CorrectionConfig, LossConfig, SftConfig
from raypost.config.resources import ConfigModel, RankPoolConfig


class CriticConfig(RankPoolConfig):
    """The critic: a model with a value head, trained beside the policy by a trainer group of its own."""

    name: str | None = None
    """A local Hugging Face folder or a hub id; null: what the policy starts from."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Highest learning rate of the critic's optimizer; it follows `train.lr_schedule`."""


class LoraConfig(ConfigModel):
    """Low-rank adapters: all that is trained of a model that stays as it is otherwise."""

    rank: Annotated[int, Field(ge=1)] = 16
    """Rank of the two factors of each adapter."""
    alpha: Annotated[int, Field(ge=1)] = 32
    """Scale: an adapter adds alpha / rank times the product of its factors."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Last parts of the names of the layers that get an adapter, such as q_proj. all-linear: all linear layers but
    the head."""
    sync: Literal["adapter", "merged"] = "adapter"
    """What a weight sync sends. adapter: the adapters, which engines add to the weights they hold. merged: weights to
    which the trainer has added the adapters; those that no adapter touches are not sent again."""


class TrainConfig(RankPoolConfig):
    """The trainer group and the optimisation."""

    num_steps: Annotated[int, Field(ge=1)]
    """Train steps of the run. A finished run is continued by raising this."""
    batch_size: Annotated[int, Field(ge=1, le=1_048_576)]
    """Groups (prompts with their trajectories) in the batch of a train step, over all tasks."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] = 8192
    """Most tokens of one forward pass, padding included."""
    packing: bool = True
    """Put many trajectories into one row without padding. The logprobs are compared with those of single sequences at
    the start; set it to false for a model that fails this check."""
    share_prompts: Literal["auto", "off"] = "auto"
    """Whether a prompt is computed once for all trajectories of its group. auto: where this takes less time, and
    `packing` is on. off: never."""
    logits_mb: Annotated[int, Field(ge=1, le=1_048_576)] = 512
    """Most memory for logits at a time, MiB of float32; more are computed in chunks, and again in the backward
    pass."""
    num_minibatches: Annotated[int, Field(ge=1)] = 1
    """Parts of a batch with an optimizer step each; 1: a single step on the whole batch."""
    num_epochs: Annotated[int, Field(ge=1)] = 1
    """Times that a train step goes over its batch."""
    advantage: AdvantageConfig = AdvantageConfig()
    """How advantages come from rewards."""
    loss: LossConfig = LossConfig()
    """What the policy minimises."""
    correction: CorrectionConfig = CorrectionConfig()
    """How data of older policies, and of engines that round differently, is corrected."""
    critic: CriticConfig | None = None
    """The critic, which the advantage `gae` needs; null: none."""
    lora: LoraConfig | None = None
    """Train adapters of the policy only; null: train all of it."""
    sft: SftConfig | None = None
    """Supervised examples that every train step learns beside its batch; null: none."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay per train step of an exponential moving average of the policy's weights, which is saved beside them; null:
    no average."""
    offload_optimizer: bool = False
    """Keep the optimizer's state, and compute its step, on the CPU: less GPU memory, more time."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Highest learning rate of the policy's optimizer (AdamW)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up: constant, or falling to 0 after the last train step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Train steps in which the learning rate rises linearly from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of matrices; biases and the weights of norms never decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Norm that the gradient is clipped to."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, more time."""
    bucket_mb: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Size of the buckets in which weights are gathered and sent, MiB."""
    step_timeout_s: Annotated[float, Field(gt=0)] = 1800
    """Longest time that a train step, a publication of weights or a checkpoint may take, seconds."""

    @model_validator(mode="after")
    def _critic_is_used(self) -> TrainConfig:
        kind = self.advantage.kind
        if kind == "gae" and self.critic is None:
            raise ValueError("advantage.kind is 'gae', but critic is null: set critic, for instance to {}")
        if self.critic is not None and kind != "gae":
            raise ValueError(
                f"critic is set, but advantage.kind {kind!r} gives it nothing to learn from: leave it out, or use gae"
            )
        return self

    @model_validator(mode="after")
    def _warm_up_ends(self) -> TrainConfig:
        if self.warmup_steps > self.num_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps}, more than num_steps {self.num_steps}: the learning rate would "
                "never reach learning_rate; use fewer"
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
