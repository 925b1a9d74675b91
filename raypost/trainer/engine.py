"""A model under DeepSpeed on one rank: forward, backward, optimizer step, weights out, state in and out.

The only module that imports deepspeed. Owns the process group, the optimizer and where weights and state lie;
what is computed with them is in rank.py. A model is any module; its weights have the names it gives them.

Invariants: every rank calls the same methods in the same order, since nearly all are collectives; a step whose
gradient is not finite changes nothing.

DeepSpeed reads DS_ACCELERATOR and the process group MASTER_ADDR and MASTER_PORT from the environment: set
them before this module is imported.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger as deepspeed_logger
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from raypost.config import Config
from raypost.trainer.model.lora import Weight
from raypost.trainer.offload import tensors_of
from raypost.trainer.state_files import MASTER, MOMENTS, Part, StoredState
from raypost.weights.meeting import meeting_store

_MASTERS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
"""Where DeepSpeed's optimizers keep their part of the float32 weights: at ZeRO 3, at 1 and 2, and in bfloat16 at 1."""

Kind = Literal["policy", "critic"]
"""What is trained."""
Output = TypeVar("Output")
"""What a model's forward pass returns."""


class _Place(NamedTuple):
    """Where a part of a weight is."""

    name: str
    weight: Any
    master: int
    """Which of the optimizer's weights has it."""
    offset: int
    """Its first element there."""
    start: int
    """The same in the flat weight itself."""
    numel: int
    shared: bool = False
    """Whether every rank has all of it."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor that has the optimizer's form."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.numel)


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
        optimizer = torch.optim.AdamW(groups, lr=train.learning_rate, fused=True)
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=_deepspeed_config(config),
            dist_init_required=False,
        )
        wrapped = self._engine.optimizer
        groups_of = zip(
            getattr(wrapped, "fp16_groups", ()), getattr(wrapped, "fp32_groups", ()), strict=False
        )
        pairs = (pair for group in groups_of for pair in zip(*group, strict=True))
        self._copies: dict[int, Tensor] = {id(weight): copy for weight, copy in pairs}
        """Float32 copies of whole weights that are bfloat16, without ZeRO."""

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

        That is this rank's flat partitions, or without ZeRO the parameters themselves or copies of them.
        """
        for name in _MASTERS:
            if parts := getattr(self._engine.optimizer, name, None):
                return list(parts)
        return [self._copies.get(id(weight), weight) for _, weight in self.trained_weights()]

    def whole_weight(self, weight: Tensor) -> Tensor:
        """Return the optimizer's float32 value of one of `trained_weights`, in its whole shape. A collective."""
        whole: Tensor | None = safe_get_full_fp32_param(weight)
        return self._copies.get(id(weight), weight).detach() if whole is None else whole

    # ---------------------------------------------------------------- state

    def _places(self) -> Iterator[_Place]:
        """Yield where this rank keeps which part of the trained weights."""
        weight: Any
        for number, (name, weight) in enumerate(self.trained_weights()):
            if hasattr(weight, "ds_id"):  # ZeRO 3
                optimizer = self._engine.optimizer
                master, offset, numel = optimizer.grad_position[optimizer.get_param_id(weight)]
                start = self._rank * numel
                place = _Place(name, weight, master, offset, start, min(numel, weight.ds_numel - start))
            elif hasattr(weight, "_hp_mapping"):  # ZeRO 1 and 2
                if (mapping := weight._hp_mapping) is None:
                    continue
                kept, of_weight = mapping.hp_fragment_address, mapping.lp_fragment_address
                master = mapping.param_group_index
                place = _Place(name, weight, master, kept.start, of_weight.start, of_weight.numel)
            else:
                place = _Place(name, weight, number, 0, 0, weight.numel(), shared=True)
            if place.numel > 0:
                yield place

    def parts(self, beside: Mapping[str, Sequence[Tensor]]) -> Iterator[Part]:
        """Yield what this rank keeps of weights and optimizer, as it is: views. Not a collective.

        `beside`: by kind, more tensors in the form of `optimized_weights`. What every rank has is split among them.
        """
        masters, states = self.optimized_weights(), self._optimizer.state
        for number, place in enumerate(self._places()):
            master = masters[place.master]
            if place.shared and number % self._train.num_workers != self._rank:
                continue
            state = states.get(master) or {"step": 0}
            kinds = {MASTER: master, **{kind: state[kind] for kind in MOMENTS if kind in state}}
            kinds |= {kind: tensors[place.master] for kind, tensors in beside.items()}
            values = {kind: place.of(tensor) for kind, tensor in kinds.items()}
            yield Part(place.name, place.start, int(state["step"]), values)

    def facts(self) -> dict[str, Any]:
        """Return what a saved state must say about the engine."""
        shapes = {
            name: list(getattr(weight, "ds_shape", weight.shape)) for name, weight in self.trained_weights()
        }
        return self._identity() | {"weights": shapes}

    @torch.no_grad()
    def restore(
        self, stored: StoredState, beside: Mapping[str, Sequence[Tensor]], *, optimizer: bool = True
    ) -> None:
        """Take weights and optimizer from a stored state of any ranks and ZeRO stage. A collective.

        `beside`: what `parts` was given. `optimizer` False: its moments begin anew. Raises CheckpointError if the
        state is of another model.
        """
        stored.check_shapes(self.facts()["weights"])
        masters, wrapped = self.optimized_weights(), self._engine.optimizer
        if self._train.zero_stage == 3:
            wrapped.checkpoint_event_prologue()
        for place in self._places():
            master = masters[place.master]
            stored.fill(MASTER, place.name, place.start, place.of(master))
            for kind, tensors in beside.items():
                stored.fill(kind, place.name, place.start, place.of(tensors[place.master]))
            state = self._optimizer.state[master]
            if not state:
                state["step"] = torch.zeros((), device=master.device)
                state |= {kind: torch.zeros_like(master) for kind in MOMENTS}
            updates = stored.updates(place.name) if optimizer else 0
            state["step"].fill_(updates)
            for kind in MOMENTS:
                if updates:
                    stored.fill(kind, place.name, place.start, place.of(state[kind]))
                else:
                    place.of(state[kind]).zero_()
            if place.shared:
                place.weight.data.copy_(master)
            elif self._train.zero_stage == 3:
                place.weight.ds_tensor.data[: place.numel].copy_(place.of(master))
        if self._train.zero_stage == 3:
            wrapped.checkpoint_event_epilogue()
        elif hasattr(wrapped, "update_lp_params"):
            wrapped.update_lp_params()
        dist.barrier()

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        """PyTorch's own, below what ZeRO puts around it."""
        wrapped = self._engine.optimizer
        inner: torch.optim.Optimizer = getattr(wrapped, "optimizer", wrapped)
        return inner

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
    backend, ranks = "gloo" if config.device == "cpu" else "nccl", config.train.num_workers
    timeout = timedelta(seconds=config.train.step_timeout_s)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    dist.init_process_group(
        backend,
        store=meeting_store(address, port, rank, ranks, timeout),
        rank=rank,
        world_size=ranks,
        timeout=timeout,
        # As DeepSpeed does: each actor sees its own device only.
        device_id=None if config.device == "cpu" else torch.device("cuda", 0),
    )
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)


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
