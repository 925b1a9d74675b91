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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypost import metrics
from raypost.config import Config, TrainConfig
from raypost.errors import LedgerError
from raypost.packed import PackedGroups
from raypost.trainer.algorithm.losses import sequence_scales
from raypost.trainer.batch.packing import MicroBatch, PackingRule, micro_batches
from raypost.trainer.batch.train_batch import Column, Limits, Sample, TrainBatch, plan_batch
from raypost.trainer.engine import Engine, start_process_group
from raypost.trainer.memory import first_of, group_names, memory_named
from raypost.trainer.offload import HostStates
from raypost.trainer.random_state import load_random_state, save_random_state

log = logging.getLogger(__name__)


def learning_rate(train: TrainConfig, step: int) -> float:
    """Rate of a 1-based step: linear from 0 over the warm-up, then by schedule down to 0 after the last."""
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    done = (step - 1 - train.warmup_steps) / max(1, train.num_steps - train.warmup_steps)
    done = min(1.0, done)
    factor = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return train.learning_rate * factor[train.lr_schedule]


def begin(config: Config, rank: int, world_size: int) -> None:
    """What every model of a rank begins with, before it is made: threads, the other ranks, the seed."""
    if config.device == "cpu":
        torch.set_num_threads(config.train.threads)
    start_process_group(config, rank, world_size)
    torch.manual_seed(config.seed)


@dataclass(frozen=True, slots=True)
class Part:
    """A micro-batch on the rank's device, with what each of its tokens counts in the minibatch's loss."""

    micro: MicroBatch
    scales_T: Tensor


LossOf = Callable[[Part], Tensor]
"""The loss of a micro-batch, this rank's part of a sum."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What a train step learns beside its batch."""

    updates: list[list[Sample]]
    """The samples of each of its optimizer steps; their tokens count alike."""
    loss_of: LossOf


@dataclass(frozen=True, slots=True)
class _Work:
    """Micro-batches of one kind of an optimizer step. Equally many on every rank."""

    micros: list[MicroBatch]
    scale_of: dict[int, float]
    """Of a trained token, by the id of its sample."""
    loss_of: LossOf


class Rank:
    """One rank's share of the training of one model."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        rule: PackingRule,
        rank: int,
        world_size: int,
        *,
        vocab_size: int,
    ) -> None:
        self._config = config
        self._train = config.train
        self._engine = engine
        self._rule = rule
        self._limits = Limits(vocab_size, config.max_model_len)
        self._rank = rank
        self._world_size = world_size
        self._lent = HostStates(engine.device)
        self._step = 0
        self._skipped_steps = 0
        self._metrics: dict[str, float] = {}
        self._planned: tuple[PackedGroups, TrainBatch] | None = None

    @property
    def step(self) -> int:
        """The last step that was trained."""
        return self._step

    def close(self) -> None:
        """Leave the process group. The rank is of no use afterwards."""
        self._engine.close()

    # ---------------------------------------------------------------- the device

    @property
    def is_offloaded(self) -> bool:
        """Whether the device is lent to others: nothing but `reload` and `close` may be called."""
        return self._lent.is_lent

    def offload(self) -> None:
        """Lend the memory of all that lasts from step to step to others. Idempotent. See HostStates."""
        self._lent.offload(self._states(), self._engine.scratch())

    def reload(self) -> None:
        """Take it back, as it was. Idempotent."""
        self._lent.reload()

    def _states(self) -> Iterator[Tensor]:
        """All that lasts from step to step."""
        return self._engine.states()

    # ---------------------------------------------------------------- the batch

    def _plan(self, packed: PackedGroups) -> TrainBatch:
        if self._planned is None or self._planned[0] is not packed:
            train = self._train
            smallest = train.advantage.smallest_group
            batch = plan_batch(packed, smallest, train.num_minibatches, self._limits)
            self._planned = packed, batch
        return self._planned[1]

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        return micro_batches(samples, self._rank, self._world_size, self._rule)

    def _column(self, packed: PackedGroups, compute: Callable[[MicroBatch], Tensor]) -> Column:
        """What `compute` gives for the trained tokens of all samples, over all ranks; 0 for other tokens."""
        batch = self._plan(packed)
        return self._column_of(batch.samples, batch.num_tokens, compute)

    def _column_of(
        self, samples: Sequence[Sample], length: int, compute: Callable[[MicroBatch], Tensor]
    ) -> Column:
        column = np.zeros(length, np.float32)
        with torch.no_grad():
            for micro in self._micro_batches(samples):
                with memory_named(micro, f"rank {self._rank}"):
                    column[micro.places_T] = compute(micro).float().cpu().numpy()
        return self._engine.summed(column)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._engine.device)

    def _picked(self, column: Column | None, micro: MicroBatch) -> Tensor | None:
        """The column's entries for the tokens of a micro-batch."""
        return None if column is None else self._tensor(column[micro.places_T])

    # ---------------------------------------------------------------- the step

    def _repeated(self, step: int) -> dict[str, float] | None:
        """The metrics of a step that was trained before. Raises LedgerError for one before the last."""
        if step > self._step:
            return None
        if step == self._step and self._metrics:
            return self._metrics
        raise LedgerError(f"step {step} cannot be trained: step {self._step} was the last one")

    def _optimize(
        self,
        packed: PackedGroups,
        step: int,
        loss_of: LossOf,
        *,
        active: Callable[[Sample], bool] | None = None,
        aggregation: Any = "token",
        constant_length: int | None = None,
        beside: Beside | None = None,
    ) -> dict[str, float]:
        """All optimizer steps of a train step; returns learning rate, gradient norm and steps skipped so far.

        Samples that are not `active` are not computed, since their loss is 0, but they count in the scales. A
        gradient norm there is if an optimizer step was made.
        """
        torch.manual_seed(self._config.seed * 1_000_003 + step)
        batch, norms = self._plan(packed), []
        if batch.left_out and self._rank == 0:
            log.warning("step %d leaves out %s", step, first_of(batch.left_out))
        rate = learning_rate(self._train, step)
        self._engine.set_learning_rate(rate)
        for update, groups in enumerate(batch.minibatches * self._train.num_epochs):
            samples = [sample for group in groups for sample in group]
            others = beside.updates[update] if beside is not None else []
            work = []
            if samples:
                lengths = [sample.num_trained for sample in samples]
                scales = sequence_scales(aggregation, lengths, constant_length)
                computed = [sample for sample in samples if active is None or active(sample)]
                work.append(_Work(self._micro_batches(computed), _by_sample(samples, scales), loss_of))
            if others and beside is not None:
                scales = sequence_scales("token", [sample.num_trained for sample in others])
                work.append(_Work(self._micro_batches(others), _by_sample(others, scales), beside.loss_of))
            if not work:
                self._skip(step, samples, "nothing is trainable")
                continue
            self._accumulate(work, step)
            norm = self._engine.apply()
            if math.isfinite(norm):
                norms.append(norm)
            else:
                self._skip(step, samples + others, "the gradient is not finite")
        figures = {metrics.LEARNING_RATE: rate, metrics.SKIPPED_STEPS: float(self._skipped_steps)}
        if norms:
            figures[metrics.GRAD_NORM] = sum(norms) / len(norms)
        return figures

    def _accumulate(self, work: list[_Work], step: int) -> None:
        left = sum(len(one.micros) for one in work)
        for one in work:
            for micro in one.micros:
                left -= 1
                scales_N = np.asarray([one.scale_of[id(sample)] for sample in micro.samples], np.float32)
                with memory_named(micro, f"step {step}, rank {self._rank}"):
                    loss = one.loss_of(Part(micro, self._tensor(scales_N[micro.sample_T])))
                    finite = self._engine.backward(loss, last=left == 0)
                if not finite:
                    log.warning(
                        "step %d, rank %d: the loss of a micro-batch is not finite; its groups: %s",
                        step, self._rank, first_of(group_names(micro.samples)),
                    )  # fmt: skip

    def _finish(self, step: int, figures: dict[str, float], start: float) -> dict[str, float]:
        """Count the step as trained; `start`: the monotonic time it began."""
        step_s = time.monotonic() - start
        speed = figures[metrics.RESPONSE_TOKENS] / step_s
        self._metrics = figures | {metrics.STEP_S: step_s, metrics.TOKENS_PER_S: speed}
        self._step = step
        self._planned = None
        return self._metrics

    def _skip(self, step: int, samples: Sequence[Sample], why: str) -> None:
        self._skipped_steps += 1
        if self._rank == 0:
            keys = first_of(group_names(samples))
            log.warning("step %d: an optimizer step is skipped, %s; groups: %s", step, why, keys or "none")

    @property
    def _num_updates(self) -> int:
        """Optimizer steps a train step."""
        return self._train.num_updates

    # ---------------------------------------------------------------- state

    def save(self, path: Path) -> None:
        """Write optimizer, weights, step and random state below `path`; every rank writes its shard."""
        self._engine.save(path, {"step": self._step, "skipped_steps": self._skipped_steps})
        save_random_state(path, self._rank)

    def load(self, path: Path) -> int:
        """Restore what `save` wrote; returns the step. Raises CheckpointError if it does not fit."""
        state = self._engine.load(path)
        if not load_random_state(path, self._rank):
            log.warning("%s has no random state of rank %d: it was saved with fewer ranks", path, self._rank)
        self._step = int(state["step"])
        self._skipped_steps = int(state["skipped_steps"])
        self._metrics = {}
        self._planned = None
        return self._step


def batch_metrics(batch: TrainBatch) -> dict[str, float]:
    """What a batch consists of."""
    samples = batch.samples
    tokens = sum(sample.num_trained for sample in samples)
    figures = {metrics.NUM_SAMPLES: float(len(samples)), metrics.RESPONSE_TOKENS: float(tokens)}
    if samples:
        figures[metrics.REWARD_MEAN] = float(np.mean([sample.state.reward for sample in samples]))
        figures[metrics.RESPONSE_TOKENS_MEAN] = tokens / len(samples)
    figures[metrics.LEFT_OUT] = float(len(batch.left_out))
    return figures


def _by_sample(samples: Sequence[Sample], scales_N: np.ndarray) -> dict[int, float]:
    return {id(sample): float(scale) for sample, scale in zip(samples, scales_N, strict=True)}
