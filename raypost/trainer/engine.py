"""A model under DeepSpeed on one rank: forward, backward, optimizer step, weights out, state in and out.

The only module that imports deepspeed. Owns the process group, the optimizer and where weights and state lie;
what is computed with them is in rank.py. A model is any module; its weights have the names it gives them.

Invariants: every rank calls the same methods in the same order, since nearly all are collectives; a step whose
gradient is not finite changes nothing.

DeepSpeed reads DS_ACCELERATOR and the process group MASTER_ADDR and MASTER_PORT from the environment: set
them before this module is imported.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger as deepspeed_logger
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import Tensor, nn

from raypost.config import Config
from raypost.errors import CheckpointError
from raypost.trainer.model.lora import Weight
from raypost.trainer.offload import tensors_of

_DAMAGE = (OSError, EOFError, ValueError, RuntimeError, KeyError, AssertionError, pickle.UnpicklingError)
"""What reading a damaged checkpoint, or one of another model, raises somewhere below."""
_MASTERS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
"""Where DeepSpeed's optimizers keep float32 weights: at ZeRO 3, at 1 and 2, and without ZeRO in bfloat16."""
_TAG = "deepspeed"
_UNIVERSAL = "universal"
_META = "trainer.json"


Kind = Literal["policy", "critic"]
"""What is trained."""
Output = TypeVar("Output")
"""What a model's forward pass returns."""


class TrainEngine(Generic[Output]):
    """One rank's share of a model, its gradient and its optimizer."""

    def __init__(self, config: Config, module: nn.Module, rank: int, kind: Kind) -> None:
        """`kind` names what is trained, so that one's checkpoint is not taken for another's."""
        train = config.train
        self._config = config
        self._train = train
        self._kind = kind
        self._rank = rank
        self.device = torch.device(config.device)
        self.module = module
        deepspeed_logger.setLevel(logging.WARNING)
        start_process_group(config, rank)
        groups = parameter_groups(module, train.weight_decay)
        self._weight_decays = [group["weight_decay"] for group in groups]
        optimizer = torch.optim.AdamW(groups, lr=train.learning_rate, fused=True)
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=_deepspeed_config(config),
            dist_init_required=False,
        )

    def states(self) -> Iterator[Tensor]:
        """Yield weights, frozen ones too, gradients, the optimizer's state, and what ZeRO keeps of each."""
        module = self.module
        return tensors_of(self._engine.optimizer, list(module.parameters()), list(module.buffers()))

    def scratch(self) -> Iterator[Tensor]:
        """Yield those of them that hold nothing between steps: the buffers in which gradients are summed, gigabytes."""
        buckets = getattr(self._engine.optimizer, "ipg_buckets", {})
        return tensors_of([bucket.buffer for bucket in buckets.values()])

    def close(self) -> None:
        """Let go of the model, and leave the process group. The engine is of no use afterwards."""
        self._engine.destroy()
        if dist.is_initialized():
            dist.destroy_process_group()

    # ---------------------------------------------------------------- the step

    def __call__(self, *args: object) -> Output:
        """Run the model's forward pass."""
        output: Output = self._engine(*args)
        return output

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of the steps to come."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate

    def backward(self, loss: Tensor, *, last: bool) -> bool:
        """Add the gradient of a micro-batch's loss; `last`: the minibatch ends here. Returns whether it is finite.

        The loss is this rank's part of a sum over ranks. One that is not finite makes every rank refuse the step.
        """
        finite = math.isfinite(loss.item())
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages gradients over ranks, but they are to be summed. A loss that overflowed may have a
        # finite gradient: NaN makes the norm on every rank refuse the step.
        self._engine.backward(loss * (self._train.num_workers if finite else math.nan))
        return finite

    def apply(self) -> float:
        """Make one optimizer step. Return the gradient's norm before clipping; if it is not finite, nothing changed."""
        if self._train.zero_stage > 0:
            self._engine.step()
            # A step it refused leaves the norm of the one before.
            if self._engine.optimizer.overflow:
                return math.nan
            return float(self._engine.get_global_grad_norm())
        # Without ZeRO, DeepSpeed neither reports the norm nor refuses one that is not finite.
        parameters = [one for one in self.module.parameters() if one.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._train.max_grad_norm).item()
        if math.isfinite(norm):
            self._engine.step()
        else:
            self._engine.zero_grad()
        return norm

    # ---------------------------------------------------------------- weights

    def gather(self, weights: Iterator[tuple[str, Weight]]) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight in main memory, of the model's dtype, on rank 0; nothing on the others.

        At ZeRO 3 every rank must exhaust it. At most `train.bucket_mb` are gathered at a time, and a tensor is valid
        only until the next is asked for.
        """
        dtype = getattr(torch, self._config.model.dtype)
        for chunk in _chunks(weights, self._train.bucket_mb * 2**20):
            partitioned = [part for _, weight in chunk for part in weight.parts if hasattr(part, "ds_id")]
            with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
                if self._rank == 0:
                    for name, weight in chunk:
                        tensor = weight.value()
                        yield name, (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu()

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters that the optimizer changes, under the names that the model gives them."""
        yield from ((name, one) for name, one in self.module.named_parameters() if one.requires_grad)

    def optimized_weights(self) -> list[Tensor]:
        """Return what the optimizer's step changes, float32.

        That is this rank's flat partitions, or the parameters themselves where they are float32 and whole.
        """
        for name in _MASTERS:
            if parts := getattr(self._engine.optimizer, name, None):
                return list(parts)
        return [weight for _, weight in self.trained_weights()]

    def whole_weight(self, weight: Tensor) -> Tensor:
        """Return the optimizer's float32 value of one of `trained_weights`, in its whole shape. A collective."""
        whole: Tensor | None = safe_get_full_fp32_param(weight)
        return weight.detach() if whole is None else whole

    def set_whole_weight(self, weight: Tensor, value: Tensor) -> None:
        """Give one of `trained_weights` another value in the optimizer; the model does not see it.

        Raises ValueError for another shape.
        """
        shape = getattr(weight, "ds_shape", weight.shape)
        if value.shape != shape:
            raise ValueError(f"a weight of shape {tuple(shape)} got a value of shape {tuple(value.shape)}")
        value = value.to(self.device)
        if safe_get_full_fp32_param(weight) is None:
            weight.data.copy_(value)
        else:
            safe_set_full_fp32_param(weight, value)

    # ---------------------------------------------------------------- state

    def save(self, path: Path, state: dict[str, Any]) -> None:
        """Write optimizer, weights and `state` below `path`; every rank writes its shard."""
        # Under a name of our own: DeepSpeed keeps its counters beside, and would win.
        self._engine.save_checkpoint(str(path), tag=_TAG, client_state={"raypost": state}, save_latest=False)
        if self._rank == 0:
            (path / _META).write_text(json.dumps(self._identity() | {"step": state["step"]}))
        dist.barrier()

    def load(self, path: Path) -> dict[str, Any]:
        """Restore what `save` wrote; return its `state`. Raises CheckpointError if it does not fit."""
        try:
            meta = json.loads((path / _META).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path / _META} cannot be read: {error}") from error
        if not isinstance(meta, dict):
            raise CheckpointError(f"{path / _META} must hold a mapping, got {type(meta).__name__}")
        other = [name for name, value in self._identity().items() if meta.get(name) != value]
        layout = set(other) <= {"zero_stage", "num_workers"} and 0 not in (
            meta.get("zero_stage"),
            self._train.zero_stage,
        )
        if other and not layout:
            name = other[0]
            raise CheckpointError(
                f"{path} was saved with {name} {meta.get(name)}, this run has {self._identity()[name]}: use the same"
            )
        try:
            found, state = (
                self._load_elsewhere(path) if other else self._engine.load_checkpoint(str(path), tag=_TAG)
            )
        except _DAMAGE as error:
            raise CheckpointError(f"{path / _TAG} is damaged or not of this model: {error!r:.300}") from error
        if found is None:
            raise CheckpointError(f"{path / _TAG} holds no DeepSpeed state")
        restored: dict[str, Any] = state["raypost"]
        return restored

    def _load_elsewhere(self, path: Path) -> tuple[str | None, dict[str, Any]]:
        """Restore a state of another number of ranks or ZeRO stage, by way of a form that depends on neither."""
        problem = ""
        if self._rank == 0:
            shutil.rmtree(path / _UNIVERSAL, ignore_errors=True)
            try:
                _make_universal(path / _TAG, path / _UNIVERSAL)
            except _DAMAGE as error:
                problem = repr(error)
        # Every rank must learn of a failure, or the others would wait for this one.
        told = [problem]
        dist.broadcast_object_list(told, src=0)
        if told[0]:
            raise RuntimeError(told[0])
        settings = self._engine._config
        settings.load_universal_checkpoint = True
        try:
            found, state = self._engine.load_checkpoint(str(path), tag=_UNIVERSAL)
        finally:
            settings.load_universal_checkpoint = False
            # Restored at ZeRO 3, all groups have the settings of the first, and one counter of steps among them,
            # which each would advance.
            for of_weights in self._engine.optimizer.optimizer.state.values():
                if isinstance(of_weights.get("step"), Tensor):
                    of_weights["step"] = of_weights["step"].clone()
            for group, decay in zip(self._engine.optimizer.param_groups, self._weight_decays, strict=True):
                group["weight_decay"] = decay
        dist.barrier()
        if self._rank == 0:
            shutil.rmtree(path / _UNIVERSAL, ignore_errors=True)
            (path / "latest_universal").unlink(missing_ok=True)
        return found, state

    def _identity(self) -> dict[str, Any]:
        return {
            "kind": self._kind,
            "zero_stage": self._train.zero_stage,
            "num_workers": self._train.num_workers,
            "dtype": self._config.model.dtype,
        }


class FrozenModel(Generic[Output]):
    """A model that is only read. At ZeRO 3 its weights are spread over the ranks as well."""

    def __init__(self, config: Config, module: nn.Module) -> None:
        """Freeze `module`, and spread its weights over the ranks at ZeRO 3."""
        self._module: Any = module.requires_grad_(False).eval()
        if config.train.zero_stage == 3:
            self._module, *_ = deepspeed.initialize(
                model=module, config=_deepspeed_config(config), dist_init_required=False
            )
        else:
            self._module.to(config.device)

    def __call__(self, *args: object) -> Output:
        """Run the model's forward pass."""
        output: Output = self._module(*args)
        return output

    def states(self) -> Iterator[Tensor]:
        """Yield its weights, and what ZeRO keeps of each."""
        return tensors_of(list(self._module.parameters()), list(self._module.buffers()))


def _make_universal(source: Path, target: Path) -> None:
    """Run DeepSpeed's converter in this process, without its output."""
    from deepspeed.checkpoint import ds_to_universal

    settings = argparse.Namespace(
        input_folder=str(source), output_folder=str(target), num_extract_workers=1, num_merge_workers=1,
        keep_temp_folder=False, strict=True, inject_missing_state=True,
    )  # fmt: skip
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        ds_to_universal.main(settings)
    _complete_optimizer_state(target / "zero")
    # ZeRO 3 looks for a model's state under another name than the other stages do.
    names = [target / f"{prefix}mp_rank_00_model_states.pt" for prefix in ("", "zero_pp_rank_0_")]
    for name, other in (names, names[::-1]):
        if name.exists() and not other.exists():
            shutil.copy(name, other)


def _complete_optimizer_state(folder: Path) -> None:
    """Give a universal checkpoint the form that every stage reads.

    ZeRO 3 writes bare tensors and the number of steps in the common state, the others a mapping and a file a weight;
    ZeRO 3 reads both kinds of tensor.
    """
    common = torch.load(folder / "optimizer_state.pt", map_location="cpu", weights_only=False)
    inner = common.get("optimizer_state_dict")
    if inner is not None:
        step = inner["state"][0]["step"]
        for weight in folder.rglob("fp32.pt"):
            torch.save(step, weight.with_name("step.pt"))
            for name in ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"):
                value = torch.load(weight.with_name(name), map_location="cpu", weights_only=False)
                if isinstance(value, Tensor):
                    torch.save({"param": value}, weight.with_name(name))
    else:
        step = torch.load(next(folder.rglob("step.pt")), map_location="cpu", weights_only=False)
    groups = common["param_groups"]
    common["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": groups}
    common.setdefault("ds_version", deepspeed.__version__)
    torch.save(common, folder / "optimizer_state.pt")


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters by weight decay: matrices decay, biases and the weights of norms do not."""
    trainable = [one for one in module.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in trainable if one.ndim >= 2], "weight_decay": weight_decay},
        {"params": [one for one in trainable if one.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def start_process_group(config: Config, rank: int) -> None:
    """Join the other ranks, unless this process has."""
    if dist.is_initialized():
        return
    # DeepSpeed would compile an operator for inference here, which training never calls.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="gloo" if config.device == "cpu" else "nccl",
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timedelta(seconds=config.train.step_timeout_s),
        rank=rank,
        world_size=config.train.num_workers,
    )


def _deepspeed_config(config: Config) -> dict[str, Any]:
    train = config.train
    offload: dict[str, Any] = {}
    if train.offload_optimizer:
        offload["offload_optimizer"] = {"device": "cpu", "pin_memory": config.device == "cuda"}
    return {
        # Micro-batches differ in size and number: the engine is told where a minibatch ends.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": train.num_workers,
        "gradient_clipping": train.max_grad_norm if train.zero_stage > 0 else 0.0,
        "zero_optimization": {
            "stage": train.zero_stage,
            "overlap_comm": config.device == "cuda" and train.zero_stage > 1,
            **offload,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "steps_per_print": None,
    }


def _size(weight: Weight) -> int:
    return sum(getattr(part, "ds_numel", part.numel()) * part.element_size() for part in weight.parts)


def _chunks(weights: Iterator[tuple[str, Weight]], max_bytes: int) -> Iterator[list[tuple[str, Weight]]]:
    chunk: list[tuple[str, Weight]] = []
    for name, weight in weights:
        if chunk and sum(_size(other) for _, other in chunk) + _size(weight) > max_bytes:
            yield chunk
            chunk = []
        chunk.append((name, weight))
    if chunk:
        yield chunk
