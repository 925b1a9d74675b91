"""One rank of training: the DeepSpeed engine, one train step, weights out, state in and out.

The only module that imports deepspeed. Owns the process group, the optimizer and the order of a step; the
formulas are in losses.py, corrections.py and advantage.py, what goes where in packing.py.

    PackedGroups -> plan_batch -> per minibatch: micro_batches -> logprobs -> loss -> backward ... -> step

Invariants: every rank is called with the same arguments in the same order, since a step, a gather and a
checkpoint are collectives; a step is trained once; a step whose gradient is not finite changes nothing.

DeepSpeed reads DS_ACCELERATOR and the process group MASTER_ADDR and MASTER_PORT from the environment: set
them before this module is imported.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import logger as deepspeed_logger
from torch import Tensor
from transformers import AutoTokenizer

from raypost.config import Config, TrainConfig
from raypost.corrections import truncated_weights
from raypost.errors import CheckpointError, LedgerError
from raypost.losses import policy_loss
from raypost.metrics import REWARD_MEAN
from raypost.packed import PackedGroups, unpack_groups
from raypost.packing import MicroBatch, Sample, TrainBatch, micro_batches, plan_batch
from raypost.policy import DTYPES, Policy, load_model
from raypost.step_sums import StepSums
from raypost.types import FloatArray, IntArray
from raypost.weights import Bytes

log = logging.getLogger(__name__)

_TAG = "deepspeed"
_META = "trainer.json"
_NAMED_GROUPS = 16
"""Groups that a log line names at most."""


def learning_rate(train: TrainConfig, step: int) -> float:
    """Rate of a 1-based step: linear from 0 over the warm-up, then by schedule down to 0 after the last."""
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    done = (step - 1 - train.warmup_steps) / max(1, train.num_steps - train.warmup_steps)
    done = min(1.0, done)
    factor = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return train.learning_rate * factor[train.lr_schedule]


class TrainEngine:
    """One rank's share of the model, its gradient and its optimizer."""

    def __init__(self, config: Config, model_path: str, rank: int, world_size: int) -> None:
        self._config, self._train = config, config.train
        self._model_path, self._rank, self._world_size = model_path, rank, world_size
        self._step, self._skipped_steps = 0, 0
        self._metrics: dict[str, float] = {}
        self._device = torch.device(config.device)
        if config.device == "cpu":
            torch.set_num_threads(self._train.threads)
        deepspeed_logger.setLevel(logging.WARNING)
        _start_process_group(config, rank, world_size)
        torch.manual_seed(config.seed)
        model = load_model(model_path, config.model.dtype, self._train.gradient_checkpointing)
        self._policy = Policy(model)
        optimizer = torch.optim.AdamW(
            self._policy.parameters(),
            lr=self._train.learning_rate,
            weight_decay=self._train.weight_decay,
            fused=True,
        )
        self._engine, *_ = deepspeed.initialize(
            model=self._policy,
            optimizer=optimizer,
            config=_deepspeed_config(config, world_size),
            dist_init_required=False,
        )

    @property
    def step(self) -> int:
        """The last step that was trained."""
        return self._step

    def close(self) -> None:
        """Leave the process group. The engine is of no use afterwards."""
        self._engine.destroy()
        if dist.is_initialized():
            dist.destroy_process_group()

    # ---------------------------------------------------------------- the step

    def train_step(self, packed: PackedGroups, step: int) -> dict[str, float]:
        """Train on a batch as `step`; returns the step's metrics, the same on every rank.

        A repeated step is not trained again and returns its metrics. A metric that does not exist (the
        mismatch at lag 0 when no token has it) or is not finite is absent. `skipped_steps` counts optimizer
        steps that were not made since the start, because nothing was trainable or a gradient was not finite.
        Raises LedgerError for a step that lies before the last one.
        """
        if step <= self._step:
            if step == self._step and self._metrics:
                return self._metrics
            raise LedgerError(f"step {step} cannot be trained: step {self._step} was the last one")
        start = time.monotonic()
        torch.manual_seed(self._config.seed * 1_000_003 + step)
        batch = plan_batch(unpack_groups(packed), self._train.advantage, self._train.num_minibatches)
        if batch.left_out and self._rank == 0:
            log.warning("step %d leaves out %s", step, _first(batch.left_out))
        rate = learning_rate(self._train, step)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        metrics = self._optimize(batch, step)
        metrics["lr"] = rate
        self._metrics = _batch_metrics(batch) | metrics | {"step_s": time.monotonic() - start}
        self._metrics["tokens_per_s"] = self._metrics["response_tokens"] / self._metrics["step_s"]
        self._step = step
        return self._metrics

    def _optimize(self, batch: TrainBatch, step: int) -> dict[str, float]:
        plans = [
            micro_batches(samples, self._rank, self._world_size, self._train.micro_batch_tokens)
            for samples in batch.minibatches
        ]
        # One optimizer step: the current policy is the proximal one, and needs no forward pass of its own.
        proximal = None
        if len(plans) > 1:
            proximal = [[self._proximal(micro) for micro in plan] for plan in plans]
        sums, norms = StepSums(), []
        for i, plan in enumerate(plans):
            samples = batch.minibatches[i]
            normaliser = sum(sample.num_trained for sample in samples)
            if normaliser == 0:
                self._skip(step, samples, "nothing is trainable")
                continue
            for j, micro in enumerate(plan):
                self._engine.set_gradient_accumulation_boundary(j == len(plan) - 1)
                proximal_T = proximal[i][j] if proximal else None
                self._backward(micro, proximal_T, normaliser, step, sums)
            norm = self._apply()
            if math.isfinite(norm):
                norms.append(norm)
            else:
                self._skip(step, samples, "the gradient is not finite")
        metrics = sums.reduced(self._device).metrics(len(plans))
        if norms:
            metrics["grad_norm"] = sum(norms) / len(norms)
        metrics["skipped_steps"] = float(self._skipped_steps)
        return metrics

    def _backward(
        self, micro: MicroBatch, proximal_T: Tensor | None, normaliser: int, step: int, sums: StepSums
    ) -> None:
        logprobs_T, entropy_T = self._forward(micro)
        before_T = logprobs_T.detach() if proximal_T is None else proximal_T
        rollout_T = self._tensor(micro.rollout_logprobs_T)
        weights_T = truncated_weights(before_T, rollout_T, self._train.importance_cap)
        loss, loss_sums = policy_loss(
            logprobs_T,
            before_T,
            self._tensor(micro.advantages_T),
            weights_T,
            normaliser=normaliser,
            clip_low=self._train.clip_low,
            clip_high=self._train.clip_high,
        )
        finite = math.isfinite(loss_sums.loss)
        # DeepSpeed averages gradients over ranks; the normaliser is global, so they are to be summed. A loss
        # that overflowed may have a finite gradient: NaN makes the norm on every rank refuse the step.
        self._engine.backward(loss * (self._world_size if finite else math.nan))
        if not finite:
            keys = _first(sorted({str(sample.key) for sample in micro.samples}))
            place = f"step {step}, rank {self._rank}"
            log.warning("%s: the loss of a micro-batch is not finite; its groups: %s", place, keys)
        sums.add(loss_sums, entropy_T, before_T, weights_T, micro, step)

    def _forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        return self._engine(
            self._tensor(micro.input_ids_BL),
            self._tensor(micro.index_T),
            self._tensor(micro.targets_T),
            self._tensor(micro.temperatures_T),
        )

    @torch.no_grad()
    def _proximal(self, micro: MicroBatch) -> Tensor:
        return self._forward(micro)[0]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _apply(self) -> float:
        """One optimizer step. Returns the gradient's norm before clipping; not finite: nothing changed."""
        if self._train.zero_stage > 0:
            self._engine.step()
            return float(self._engine.get_global_grad_norm())
        # Without ZeRO, DeepSpeed neither reports the norm nor refuses one that is not finite.
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self._train.max_grad_norm).item()
        if math.isfinite(norm):
            self._engine.step()
        else:
            self._engine.zero_grad()
        return norm

    def _skip(self, step: int, samples: Sequence[Sample], why: str) -> None:
        self._skipped_steps += 1
        if self._rank == 0:
            keys = _first(sorted({str(sample.key) for sample in samples}))
            log.warning("step %d: an optimizer step is skipped, %s; groups: %s", step, why, keys or "none")

    # ---------------------------------------------------------------- logprobs and weights

    @torch.no_grad()
    def canary_logprobs(self, token_ids: IntArray) -> FloatArray:
        """Logprob of every token but the first, given those before it, at temperature 1. A collective."""
        ids = torch.from_numpy(np.asarray(token_ids, np.int64)).to(self._device)
        index = torch.arange(len(ids) - 1, device=self._device)
        ones = torch.ones(len(ids) - 1, device=self._device)
        logprobs, _ = self._engine(ids[None, :-1], index, ids[1:], ones)
        return logprobs.float().cpu().numpy()

    def gather_weights(self) -> Iterator[tuple[str, Bytes, str, tuple[int, ...]]]:
        """(checkpoint name, flat bytes, dtype, shape) of every weight, on rank 0; nothing elsewhere.

        A collective at ZeRO 3: every rank must exhaust it. At most `train.bucket_mb` are gathered at a
        time, and bytes are valid only until the next are asked for.
        """
        dtype = DTYPES[self._config.model.dtype]
        for chunk in _chunks(self._policy.named_weights(), self._train.bucket_mb * 2**20):
            partitioned = [tensor for _, tensor in chunk if hasattr(tensor, "ds_id")]
            with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
                if self._rank == 0:
                    for name, tensor in chunk:
                        yield name, *_as_bytes(tensor, dtype)

    # ---------------------------------------------------------------- state

    def save(self, path: Path) -> None:
        """Write optimizer, weights, step and random state below `path`; every rank writes its shard."""
        state = {"step": self._step, "skipped_steps": self._skipped_steps, "rng": torch.get_rng_state()}
        # Under a name of our own: DeepSpeed keeps its counters beside, and would win.
        self._engine.save_checkpoint(str(path), tag=_TAG, client_state={"raypost": state}, save_latest=False)
        if self._rank == 0:
            (path / _META).write_text(json.dumps(self._identity() | {"step": self._step}))
        dist.barrier()

    def load(self, path: Path) -> int:
        """Restore what `save` wrote; returns the step. Raises CheckpointError if it does not fit."""
        try:
            meta = json.loads((path / _META).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path / _META} cannot be read: {error}") from error
        for name, value in self._identity().items():
            if meta.get(name) != value:
                raise CheckpointError(
                    f"{path} was saved with {name} {meta.get(name)}, this run has {value}: use the same"
                )
        found, state = self._engine.load_checkpoint(str(path), tag=_TAG)
        if found is None:
            raise CheckpointError(f"{path / _TAG} holds no DeepSpeed state")
        state = state["raypost"]
        torch.set_rng_state(state["rng"].cpu())
        self._step, self._skipped_steps, self._metrics = state["step"], state["skipped_steps"], {}
        return self._step

    def save_hf(self, path: Path) -> None:
        """Write the model as a Hugging Face folder (safetensors) with its tokenizer. A collective."""
        state = {}
        for name, data, dtype, shape in self.gather_weights():
            flat = torch.from_numpy(data.copy()).view(getattr(torch, dtype))
            state[name] = flat.reshape(shape)
        if self._rank == 0:
            self._policy.model.save_pretrained(str(path), state_dict=state)
            AutoTokenizer.from_pretrained(self._model_path).save_pretrained(str(path))
        dist.barrier()

    def _identity(self) -> dict[str, Any]:
        return {
            "zero_stage": self._train.zero_stage,
            "num_workers": self._world_size,
            "dtype": self._config.model.dtype,
        }


def _start_process_group(config: Config, rank: int, world_size: int) -> None:
    # DeepSpeed would compile an operator for inference here, which training never calls.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="gloo" if config.device == "cpu" else "nccl",
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timedelta(seconds=config.train.step_timeout_s),
        rank=rank,
        world_size=world_size,
    )


def _deepspeed_config(config: Config, world_size: int) -> dict[str, Any]:
    train = config.train
    return {
        # Micro-batches differ in size and number: the engine is told where a minibatch ends.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": world_size,
        "gradient_clipping": train.max_grad_norm if train.zero_stage > 0 else 0.0,
        "zero_optimization": {
            "stage": train.zero_stage,
            "overlap_comm": config.device == "cuda" and train.zero_stage > 1,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "steps_per_print": None,
    }


def _batch_metrics(batch: TrainBatch) -> dict[str, float]:
    samples = batch.samples
    tokens = sum(sample.num_trained for sample in samples)
    metrics = {"num_samples": float(len(samples)), "response_tokens": float(tokens)}
    if samples:
        metrics[REWARD_MEAN] = float(np.mean([sample.state.reward for sample in samples]))
        metrics["response_tokens_mean"] = tokens / len(samples)
    metrics["left_out"] = float(len(batch.left_out))
    return metrics


def _first(items: Sequence[str]) -> str:
    more = len(items) - _NAMED_GROUPS
    return ", ".join(items[:_NAMED_GROUPS]) + (f" and {more} more" if more > 0 else "")


def _size(tensor: Tensor) -> int:
    return getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size()


def _chunks(weights: Iterator[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    chunk: list[tuple[str, Tensor]] = []
    for name, tensor in weights:
        if chunk and sum(_size(other) for _, other in chunk) + _size(tensor) > max_bytes:
            yield chunk
            chunk = []
        chunk.append((name, tensor))
    if chunk:
        yield chunk


def _as_bytes(tensor: Tensor, dtype: torch.dtype) -> tuple[Bytes, str, tuple[int, ...]]:
    tensor = tensor.detach()
    if tensor.is_floating_point():
        tensor = tensor.to(dtype)
    flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
