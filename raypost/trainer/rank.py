"""What one rank of training does with a batch: logprobs, minibatches, epochs, the order of an optimizer step.

    PackedGroups -> plan_batch -> per epoch and minibatch: micro_batches -> loss -> backward ... -> step

Owns the loop that every model shares, and which steps were trained; what a model's loss is belongs to policy_rank.py
and critic_rank.py, what DeepSpeed does with it to engine.py.

Invariants: all ranks get the same calls in the same order; a step is trained once; an optimizer step that has
nothing to train or whose gradient is not finite changes nothing and is counted.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from raypost.config import Config, TrainConfig
from raypost.config.algorithm import Aggregation
from raypost.errors import CheckpointError, LedgerError
from raypost.observe import metrics
from raypost.trainer.algorithm.losses import sequence_scales
from raypost.trainer.algorithm.statistics import all_reduce
from raypost.trainer.batch.packing import MicroBatch, PackingRule, micro_batches
from raypost.trainer.batch.train_batch import Column, Limits, Sample, TrainBatch, plan_batch
from raypost.trainer.engine import Kind, Output, TrainEngine, start_process_group
from raypost.trainer.memory import first_of, group_names, memory_named
from raypost.trainer.model.policy import Critic, Policy, load_model, pair_cost
from raypost.trainer.model.self_check import check_packing
from raypost.trainer.offload import HostStates
from raypost.trainer.random_state import load_random_state, seed_everything
from raypost.trainer.snapshot import Snapshot
from raypost.trainer.state_files import MASTER, StoredState
from raypost.types import SESSION, GroupKey
from raypost.types.packed import PackedGroups

log = logging.getLogger(__name__)


def learning_rate(train: TrainConfig, step: int) -> float:
    """Return the rate of a 1-based step: linear from 0 over the warm-up, then by schedule down to 0 after the last."""
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    done = (step - 1 - train.warmup_steps) / max(1, train.num_steps - train.warmup_steps)
    done = min(1.0, done)
    factor = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return train.learning_rate * factor[train.lr_schedule]


LossOf = Callable[[MicroBatch, Tensor], Tensor]
"""The loss of a micro-batch, this rank's part of a sum, from it and scales_T: what each token counts there."""


@dataclass(frozen=True, slots=True)
class Supervised:
    """Samples that a train step learns in addition to its batch."""

    updates: list[list[Sample]]
    """The samples of each of its optimizer steps; their tokens count alike."""
    loss_of: LossOf


class Statistics(Protocol):
    """Sums over the micro-batches of a step on this rank."""

    def reduce(self, device: torch.device) -> None:
        """Add up the sums of all ranks, on each. A collective."""

    def metrics(self, num_minibatches: int) -> dict[str, float]:
        """Return the step's figures."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What a train step minimises on its batch."""

    loss_of: LossOf
    statistics: Statistics
    active: Callable[[Sample], bool] | None = None
    """Whether a sample's loss can differ from 0; others are not computed, but count in the scales. None: all can."""
    aggregation: Aggregation = "token"
    constant_length: int | None = None
    supervised: Supervised | None = None


Work = tuple[MicroBatch, dict[int, float], LossOf]
"""A micro-batch of an optimizer step, what a trained token counts by the id of its sample, and its loss."""
Inputs = TypeVar("Inputs")
"""What a model is trained on, in addition to the batch."""


class Rank(ABC, Generic[Inputs, Output]):
    """One rank's share of the training of one model."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        rank: int,
        kind: Kind,
        wrap: Callable[[PreTrainedModel], Policy | Critic],
    ) -> None:
        """Join the other ranks and load the model, of which `wrap` makes what is trained.

        Raises ConfigError if it cannot be trained as configured.
        """
        train = config.train
        self._config = config
        self._train = train
        self._rank = rank
        if config.device == "cpu":
            torch.set_num_threads(train.threads)
        start_process_group(config, rank)
        seed_everything(config.seed)
        model = load_model(model_path, config.model.dtype, train.gradient_checkpointing)
        share_prompts = train.share_prompts == "auto"
        self._rule = PackingRule(train.micro_batch_tokens, train.packing, share_prompts, pair_cost(model))
        self._limits = Limits(model.config.get_text_config().vocab_size, config.max_model_len)
        module = wrap(model)
        self._engine = TrainEngine[Output](config, module, rank, kind)
        if train.packing:
            check_packing(self._engine, module, config.max_model_len)
        self._host_states = HostStates(self._engine.device)
        self.step = 0
        """The last step that was trained."""
        self._skipped_steps = 0
        self.left_out: dict[GroupKey, str] = {}
        """Groups of the last step that moved no weight, and why."""
        self._metrics: dict[str, float] = {}
        self._planned: tuple[PackedGroups, TrainBatch] | None = None

    def close(self) -> None:
        """Leave the process group. The rank is of no use afterwards."""
        self._engine.close()

    # ---------------------------------------------------------------- the device

    @property
    def is_offloaded(self) -> bool:
        """Whether the device's memory is freed: nothing but `reload` and `close` may be called."""
        return self._host_states.is_offloaded

    def offload(self) -> None:
        """Free the device's memory of all that lasts from step to step. Idempotent. See HostStates."""
        self._host_states.offload(self._states(), self._engine.scratch())

    def reload(self) -> None:
        """Take the memory back, as it was. Idempotent."""
        self._host_states.reload()

    def _states(self) -> Iterator[Tensor]:
        """Yield all that lasts from step to step."""
        return self._engine.states()

    # ---------------------------------------------------------------- the batch

    def _plan(self, packed: PackedGroups) -> TrainBatch:
        if self._planned is None or self._planned[0] is not packed:
            train = self._train
            batch = plan_batch(packed, train.advantage, train.num_minibatches, self._limits)
            self._planned = packed, batch
        return self._planned[1]

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        return micro_batches(samples, self._rank, self._train.num_workers, self._rule)

    def _column(
        self, samples: Sequence[Sample], length: int, compute: Callable[[MicroBatch], Tensor]
    ) -> Column:
        """Return what `compute` gives for the trained tokens of the samples, over all ranks; 0 for other tokens."""
        column = np.zeros(length, np.float32)
        with torch.no_grad():
            for micro in self._micro_batches(samples):
                with memory_named(micro, f"rank {self._rank}"):
                    column[micro.places_T] = compute(micro).float().cpu().numpy()
        return all_reduce(column, dist.ReduceOp.SUM, self._engine.device)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._engine.device)

    def _picked(self, column: Column | None, micro: MicroBatch) -> Tensor | None:
        """Return the column's entries for the tokens of a micro-batch."""
        return None if column is None else self._tensor(column[micro.places_T])

    # ---------------------------------------------------------------- the step

    def train(self, packed: PackedGroups, step: int, inputs: Inputs | None = None) -> dict[str, float]:
        """Make all optimizer steps of a batch as `step`; return the step's metrics, the same on every rank.

        A repeated step is not trained again and returns its metrics. A metric that does not exist (the mismatch at
        lag 0 when no token has it, the gradient's norm when no optimizer step was made) or is not finite is absent.
        `skipped_steps` counts optimizer steps that were not made since the start, because nothing was trainable or
        a gradient was not finite. Raises LedgerError for a step that lies before the last one.
        """
        if step == self.step and self._metrics:
            return self._metrics
        if step <= self.step:
            raise LedgerError(f"step {step} cannot be trained: step {self.step} was the last one")
        start, batch, norms = time.monotonic(), self._plan(packed), []
        left_out, trained = dict(batch.groups_left_out), set[GroupKey]()
        objective = self._objective(packed, step, inputs)
        torch.manual_seed(self._config.seed * 1_000_003 + step)
        if batch.left_out and self._rank == 0:
            log.warning("step %d leaves out %s", step, first_of(batch.left_out))
        rate = learning_rate(self._train, step)
        self._engine.set_learning_rate(rate)
        for update, groups in enumerate(batch.minibatches * self._train.num_epochs):
            samples = [sample for group in groups for sample in group]
            work = self._work(objective, samples)
            others: list[Sample] = []
            if objective.supervised is not None:
                others = objective.supervised.updates[update]
                work += self._work(Objective(objective.supervised.loss_of, objective.statistics), others)
            if not work:
                self._skip(step, samples, "nothing is trainable")
                continue
            self._accumulate(work, step)
            norm = self._engine.apply()
            keys = {sample.key for sample in samples}
            if math.isfinite(norm):
                norms.append(norm)
                trained |= keys
            else:
                self._skip(step, samples + others, "the gradient is not finite")
                left_out |= dict.fromkeys(keys, "the gradient of its optimizer step is not finite")
        figures = batch_metrics(batch)
        figures |= {metrics.LEARNING_RATE: rate, metrics.SKIPPED_STEPS: float(self._skipped_steps)}
        if norms:
            figures[metrics.GRAD_NORM] = sum(norms) / len(norms)
            self._updated()
        objective.statistics.reduce(self._engine.device)
        figures |= objective.statistics.metrics(self._train.num_updates)
        step_s = time.monotonic() - start
        speed = figures[metrics.RESPONSE_TOKENS] / step_s
        self._metrics = figures | {metrics.STEP_S: step_s, metrics.TOKENS_PER_S: speed}
        self.step = step
        self.left_out = {key: why for key, why in left_out.items() if key not in trained}
        self._planned = None
        return self._metrics

    @abstractmethod
    def _objective(self, packed: PackedGroups, step: int, inputs: Inputs | None) -> Objective:
        """Return what a step minimises."""

    def _updated(self) -> None:
        """React to a train step that moved the weights."""

    def _work(self, objective: Objective, samples: list[Sample]) -> list[Work]:
        """Return the micro-batches of one optimizer step, equally many on every rank; none without samples."""
        if not samples:
            return []
        lengths = [sample.num_trained for sample in samples]
        sessions = [
            one.member if SESSION in one.state.metadata else number for number, one in enumerate(samples)
        ]
        scales_N = sequence_scales(objective.aggregation, lengths, objective.constant_length, sessions)
        scale_of = {id(sample): float(scale) for sample, scale in zip(samples, scales_N, strict=True)}
        computed = [sample for sample in samples if objective.active is None or objective.active(sample)]
        return [(micro, scale_of, objective.loss_of) for micro in self._micro_batches(computed)]

    def _accumulate(self, work: list[Work], step: int) -> None:
        for number, (micro, scale_of, loss_of) in enumerate(work, 1):
            scales_N = np.asarray([scale_of[id(sample)] for sample in micro.samples], np.float32)
            with memory_named(micro, f"step {step}, rank {self._rank}"):
                loss = loss_of(micro, self._tensor(scales_N[micro.sample_T]))
                finite = self._engine.backward(loss, last=number == len(work))
            if not finite:
                log.warning(
                    "step %d, rank %d: the loss of a micro-batch is not finite; its groups: %s",
                    step, self._rank, first_of(group_names(micro.samples)),
                )  # fmt: skip

    def _skip(self, step: int, samples: Sequence[Sample], why: str) -> None:
        self._skipped_steps += 1
        if self._rank == 0:
            keys = first_of(group_names(samples))
            log.warning("step %d: an optimizer step is skipped, %s; groups: %s", step, why, keys or "none")

    # ---------------------------------------------------------------- state

    def save(self, path: Path) -> None:
        """Write optimizer, weights, step and random state below `path`; every rank writes what it keeps."""
        self.snapshot().write(path)

    def snapshot(self) -> Snapshot:
        """Return the state as it is now, to be written. Not a collective."""
        facts = self._engine.facts() | {"step": self.step, "skipped_steps": self._skipped_steps}
        parts = self._engine.parts(self._beside())
        return Snapshot(self._rank, self._train.num_workers, facts, parts)

    def _beside(self) -> dict[str, list[Tensor]]:
        """Return what is saved of each weight beside the optimizer's own state, by kind."""
        return {}

    def load(self, path: Path) -> int:
        """Restore what `save` wrote on any ranks at any ZeRO stage; return the step. A collective.

        Raises CheckpointError if it is damaged or does not fit.
        """
        stored = self._restore(path)
        self.step = int(stored.facts["step"])
        self._skipped_steps = int(stored.facts["skipped_steps"])
        if not load_random_state(path, self._rank):
            log.warning("%s has no random state of rank %d: it was saved with fewer ranks", path, self._rank)
        return self.step

    def begin_from(self, path: Path, *, optimizer: bool) -> None:
        """Take weights from what another run saved, and its optimizer's moments; the step stays. A collective.

        Raises CheckpointError if it is damaged or of another model.
        """
        self._restore(path, optimizer=optimizer, all_beside=False)

    def _restore(self, path: Path, *, optimizer: bool = True, all_beside: bool = True) -> StoredState:
        stored = StoredState(path)
        own = self._engine.facts()
        for name in ("kind", "dtype") if all_beside else ("kind",):
            if stored.facts.get(name) != own[name]:
                raise CheckpointError(
                    f"{path} was saved with {name} {stored.facts.get(name)}, this run has {own[name]}: use the same"
                )
        beside = self._beside()
        for kind in beside:
            if all_beside and not stored.has(kind):
                raise CheckpointError(
                    f"{path} holds no {kind} of the weights: it was saved without train.ema_decay; leave it out"
                )
        # A new run's average begins with the weights.
        sources = {kind: kind if all_beside else MASTER for kind in beside}
        self._engine.restore(stored, {sources[kind]: beside[kind] for kind in beside}, optimizer=optimizer)
        self._metrics = {}
        self._planned = None
        return stored


def batch_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return the figures of what a batch consists of."""
    samples = batch.samples
    tokens = sum(sample.num_trained for sample in samples)
    rewards = {sample.member: sample.state.reward for sample in samples}
    figures = {metrics.NUM_SAMPLES: float(len(rewards)), metrics.RESPONSE_TOKENS: float(tokens)}
    if samples:
        figures[metrics.REWARD_MEAN] = float(np.mean(list(rewards.values())))
        figures[metrics.RESPONSE_TOKENS_MEAN] = tokens / len(rewards)
    figures[metrics.LEFT_OUT] = float(len(batch.left_out))
    return figures
