"""One rank of the policy's training: its loss, the inputs of its loss, and its weights on their way out.

    compute_old_logprobs, compute_ref_logprobs -> compute_advantages -> train

`train` without inputs makes the other calls itself. Called one by one, each returns columns (train_batch.py), the
same on every rank, so that a critic's values may come from other processes. The formulas are in losses.py,
corrections.py and advantage.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from raypost.config import Config
from raypost.data.tokenizer import Tokenizer
from raypost.trainer.algorithm.corrections import correct, proximal_logprobs
from raypost.trainer.algorithm.losses import (
    POLICY_LOSSES,
    LossTokens,
    load_policy_loss,
    policy_objective,
    sft_loss,
)
from raypost.trainer.algorithm.statistics import PolicyStatistics
from raypost.trainer.algorithm.token_advantages import (
    PolicyInputs,
    TokenAdvantages,
    TokenValues,
    token_advantages,
    with_advantage,
)
from raypost.trainer.average import WeightAverage
from raypost.trainer.batch.packing import MicroBatch
from raypost.trainer.batch.sft import SftExamples
from raypost.trainer.batch.train_batch import Column
from raypost.trainer.engine import FrozenModel
from raypost.trainer.model.head import Sampling
from raypost.trainer.model.lora import (
    Weight,
    adapter_factors,
    adapter_scales,
    add_adapters,
    base_weights,
    merged_weights,
    without_adapters,
)
from raypost.trainer.model.policy import Policy, canary_logprobs, load_model, save_model
from raypost.trainer.model.self_check import check_head
from raypost.trainer.rank import Objective, Rank, Supervised
from raypost.trainer.snapshot import Snapshot
from raypost.trainer.state_files import AVERAGE
from raypost.types import FloatArray, IntArray
from raypost.types.packed import PackedGroups
from raypost.types.staleness import oldest_so_far, staleness_of
from raypost.weights.names import CheckpointNames

Outputs = tuple[Tensor, Tensor]
"""The policy's forward pass gives logprobs_T and entropy_T."""


class PolicyRank(Rank[PolicyInputs, Outputs]):
    """One rank's share of the policy, and of its frozen reference if there is one."""

    def __init__(self, config: Config, model_path: str, rank: int) -> None:
        """Load the model. Raises ConfigError if it cannot be trained as configured."""
        train = config.train
        self._model_path = model_path
        super().__init__(config, model_path, rank, "policy", self._wrap)
        self._policy_loss = load_policy_loss(train.loss.kind)
        check_head(self._engine, self._policy)
        self._examples: SftExamples | None = None
        if train.sft is not None:
            tokenizer = Tokenizer.load(model_path)
            self._examples = SftExamples(train.sft, tokenizer, config.seed, config.max_model_len)
        self._average: WeightAverage | None = None
        if train.ema_decay is not None:
            self._average = WeightAverage(self._engine, train.ema_decay)
        self._reference: FrozenModel[Outputs] | None = None
        if train.needs_ref_logprobs and train.lora is None and train.loss.kl.pool is None:
            self._reference = self._frozen_reference()

    def _wrap(self, model: PreTrainedModel) -> Policy:
        """Take down the names of the weights while they are the model's own, then add adapters if configured."""
        self._names = CheckpointNames(model)
        if self._train.lora is not None:
            add_adapters(model, self._train.lora)
        entropy_gradient = self._train.loss.entropy_coefficient != 0
        self._policy = Policy(model, self._train.logits_mb * 2**20, entropy_gradient)
        return self._policy

    def _frozen_reference(self) -> FrozenModel[Outputs]:
        """Load the model that training starts from, laid out as the policy is."""
        reference = Policy(
            load_model(self._model_path, self._config.model.dtype), self._train.logits_mb * 2**20
        )
        frozen = FrozenModel[Outputs](self._config, reference)
        reference.chunked = self._policy.chunked
        reference.set_packed(self._policy.packed)
        return frozen

    def _states(self) -> Iterator[Tensor]:
        yield from super()._states()
        if self._reference is not None:
            yield from self._reference.states()
        if self._average is not None:
            yield from self._average.parts

    # ---------------------------------------------------------------- one step, call by call

    def compute_old_logprobs(self, packed: PackedGroups) -> Column:
        """Return logprobs of the trained tokens under the current weights. A collective."""
        return self._logprobs(packed)

    def compute_ref_logprobs(self, packed: PackedGroups) -> Column:
        """Return the same under the frozen reference. A collective. Raises ValueError without one."""
        if not self._train.needs_ref_logprobs:
            raise ValueError("there is no reference: it is loaded if train.loss.kl.coefficient is positive")
        if (pool := self._train.loss.kl.pool) is not None:
            raise ValueError(
                f"the reference is on the engines of train.loss.kl.pool {pool.name!r}: ask those"
            )
        if self._reference is None:
            # The adapters are all that sets the policy apart from what it was.
            with without_adapters(self._policy.model):
                return self._logprobs(packed)
        return self._logprobs(packed, self._reference)

    def _logprobs(self, packed: PackedGroups, model: FrozenModel[Outputs] | None = None) -> Column:
        batch = self._plan(packed)
        return self._column(batch.samples, batch.num_tokens, lambda micro: self._forward(micro, model)[0])

    def compute_advantages(
        self,
        packed: PackedGroups,
        old_logprobs: Column | None = None,
        ref_logprobs: Column | None = None,
        values: TokenValues | None = None,
    ) -> TokenAdvantages:
        """Return advantages of the batch's tokens, and with values the critic's returns. No collective."""
        train = self._train
        return token_advantages(
            self._plan(packed), train.advantage, train.loss.kl,
            old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, values=values,
        )  # fmt: skip

    def _objective(self, packed: PackedGroups, step: int, inputs: PolicyInputs | None) -> Objective:
        """Return the policy's objective; what is not given is computed, as far as it needs no other model."""
        loss, needs_old = self._train.loss, self._train.needs_old_logprobs
        if inputs is None:
            old = self.compute_old_logprobs(packed) if needs_old else None
            ref = self.compute_ref_logprobs(packed) if self._train.needs_ref_logprobs else None
            inputs = PolicyInputs(self.compute_advantages(packed, old, ref), old, ref)
        elif inputs.old_logprobs is None and needs_old:
            raise ValueError(
                "several optimizer steps a batch need the logprobs before the first: compute them"
            )
        statistics = PolicyStatistics()
        # Where only the advantage makes a loss, a sample without one has none.
        idle = loss.kind in POLICY_LOSSES and not loss.entropy_coefficient and not loss.kl.coefficient
        return Objective(
            lambda micro, scales_T: self._loss(micro, scales_T, step, inputs, statistics),
            statistics,
            active=with_advantage(inputs.advantages.advantages) if idle else None,
            aggregation=loss.aggregation,
            constant_length=max(task.max_tokens for task in self._config.tasks),
            supervised=self._supervised(step, statistics),
        )

    def _updated(self) -> None:
        if self._average is not None:
            self._average.update()

    def _supervised(self, step: int, statistics: PolicyStatistics) -> Supervised | None:
        sft = self._train.sft
        if sft is None or self._examples is None:
            return None
        coefficient = sft.coefficient

        def loss_of(micro: MicroBatch, scales_T: Tensor) -> Tensor:
            logprobs_T, _ = self._forward(micro)
            loss = sft_loss(logprobs_T, scales_T, coefficient)
            statistics.add_sft(logprobs_T, loss)
            return loss

        return Supervised(self._examples.of_updates(step, self._train.num_updates), loss_of)

    def _loss(
        self,
        micro: MicroBatch,
        scales_T: Tensor,
        step: int,
        inputs: PolicyInputs,
        statistics: PolicyStatistics,
    ) -> Tensor:
        train = self._train
        logprobs_T, entropy_T = self._forward(micro)
        rollout_T = self._tensor(micro.rollout_logprobs_T)
        versions_T = micro.policy_versions_T
        if self._config.sync.keeps_kv_cache:
            versions_T = oldest_so_far(versions_T, micro.sample_T)
        staleness_T = self._tensor(staleness_of(versions_T, step))
        before_T = self._picked(inputs.old_logprobs, micro)
        kind = train.correction.proximal
        proximal_T = proximal_logprobs(kind, logprobs_T, rollout_T, staleness_T, before_T)
        tokens = LossTokens(
            logprobs_T=logprobs_T,
            entropy_T=entropy_T,
            proximal_T=proximal_T,
            rollout_T=rollout_T,
            advantages_T=self._tensor(inputs.advantages.advantages[micro.places_T]),
            rows_T=self._tensor(micro.sample_T),
            num_rows=len(micro.samples),
            reference_T=self._picked(inputs.ref_logprobs, micro),
        )
        trainer_T = logprobs_T.detach() if before_T is None else before_T
        correction = correct(
            train.correction, proximal_T, rollout_T, tokens.rows_T, tokens.num_rows, staleness_T, trainer_T
        )
        terms = policy_objective(tokens, correction, scales_T, train.loss, self._policy_loss)
        statistics.add(tokens, correction, terms, staleness_T, before_T)
        return terms.loss

    def _forward(self, micro: MicroBatch, model: FrozenModel[Outputs] | None = None) -> Outputs:
        sampling = Sampling(self._tensor(micro.temperatures_T))
        if micro.top_p_T is not None and micro.top_k_T is not None:
            sampling = replace(
                sampling, top_p_T=self._tensor(micro.top_p_T), top_k_T=self._tensor(micro.top_k_T)
            )
        if micro.barred_TS is not None:
            sampling = replace(sampling, barred_TS=self._tensor(micro.barred_TS))
        return (model or self._engine)(
            self._tensor(micro.input_ids_BL),
            self._tensor(micro.index_T),
            self._tensor(micro.targets_T),
            sampling,
            micro.segments,
        )

    # ---------------------------------------------------------------- state

    def _beside(self) -> dict[str, list[Tensor]]:
        return {} if self._average is None else {AVERAGE: self._average.parts}

    def export_snapshot(self, exports: Mapping[str, bool]) -> Snapshot:
        """Return a snapshot that also writes Hugging Face folders, by name: False the model, True its average.

        A collective. Raises ValueError if there is no average.
        """
        snapshot = self.snapshot()
        for name, ema in exports.items():
            weights = self._whole_weights(ema)
            if self._rank == 0:
                snapshot.exports[name] = functools.partial(self._write_hf, weights)
        return snapshot

    # ---------------------------------------------------------------- logprobs and weights

    def canary_logprobs(self, token_ids: IntArray) -> FloatArray:
        """Return the logprob of every token but the first, given those before it, at temperature 1. A collective."""
        return canary_logprobs(self._engine, token_ids, self._engine.device)

    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight, adapters merged, in main memory under its checkpoint name, on rank 0 only.

        A collective at ZeRO 3: every rank must exhaust it. A tensor is valid only until the next is asked for.
        """
        return self._stored(merged_weights(self._policy.model))

    def gather_average(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights' moving average as `gather_weights` does. Raises ValueError without one."""
        if self._average is None:
            raise ValueError("there is no average of the weights: it is kept if train.ema_decay is set")
        with self._average.in_place():
            yield from self._stored(self._average.averaged(merged_weights(self._policy.model)))

    def gather_base(self) -> Iterator[tuple[str, Tensor]]:
        """Yield as `gather_weights` does, without what adapters add: what stays the same for the whole run."""
        return self._stored(base_weights(self._policy.model))

    def gather_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield as `gather_weights` does, the adapters' factors alone, named after their matrices with DOWN and UP."""
        for name, tensor in self._engine.gather(adapter_factors(self._policy.model)):
            matrix, dot, factor = name.rpartition(".")
            yield f"{self._names.one(matrix)}{dot}{factor}", tensor

    @property
    def adapter_scales(self) -> dict[str, float]:
        """What the product of an adapter's factors counts, by the checkpoint name of its matrix."""
        return {self._names.one(name): scale for name, scale in adapter_scales(self._policy.model).items()}

    def _stored(self, weights: Iterator[tuple[str, Weight]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under the names, and in the parts, that a checkpoint has."""
        for name, tensor in self._engine.gather(weights):
            yield from self._names.stored(name, tensor)

    def save_hf(self, path: Path, ema: bool = False) -> None:
        """Write the model as a Hugging Face folder (safetensors) with its tokenizer. A collective.

        `ema`: with its weights' moving average. Raises ValueError if there is none.
        """
        weights = self._whole_weights(ema)
        if self._rank == 0:
            self._write_hf(weights, path)
        dist.barrier()

    def _whole_weights(self, ema: bool) -> dict[str, Tensor]:
        weights = self.gather_average() if ema else self.gather_weights()
        return {name: tensor.clone() for name, tensor in weights}

    def _write_hf(self, weights: Mapping[str, Tensor], path: Path) -> None:
        save_model(self._policy.model, weights, Path(self._model_path), path)
