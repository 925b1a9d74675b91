"""Low-rank adapters (LoRA, arXiv 2106.09685) by PEFT: added to a model, switched off, merged into its weights.

Owns the translation between an adapted model and the plain one it came from: under their own names, the weights of
an adapted model are those of the plain one plus what the adapters add. Knows nothing of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from raypost.config import LoraConfig
from raypost.errors import ConfigError
from raypost.weights.low_rank import merged
from raypost.weights.manifest import DOWN, UP
from raypost.weights.names import named_weights

_NAME = "default"
_BASE = ".base_layer."


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the plain model, computed from tensors of the adapted one."""

    parts: tuple[Tensor, ...]
    """What must be in memory, whole, before `value` is asked for."""
    compute: Callable[..., Tensor] = Tensor.detach
    """Of the parts."""

    def value(self) -> Tensor:
        """Return the weight, without gradient."""
        return self.compute(*self.parts)


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Adapt the model in place: only adapters are trained from now on. A new adapter adds exactly nothing.

    Raises ConfigError if no layer has one of the names in `config.target_modules`.
    """
    targets = _linear_layers(model) if config.target_modules == "all-linear" else list(config.target_modules)
    peft_config = PeftConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=targets, task_type="CAUSAL_LM"
    )
    try:
        inject_adapter_in_model(peft_config, model, adapter_name=_NAME)
    except ValueError as error:
        raise ConfigError(f"train.lora: {error}") from error
    embedding = model.get_input_embeddings().weight
    for name, layer in _layers(model):
        base = layer.get_base_layer()
        if not isinstance(base, nn.Linear | Conv1D) or base.weight is embedding:
            raise ConfigError(
                f"train.lora.target_modules: {name!r} is {_kind(base)}, and only linear layers with weights "
                "of their own can be adapted: leave it out"
            )


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off within: the model is as it was before training."""
    layers = [layer for _, layer in _layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Weight]]:
    """Yield the weights of a model under the plain model's names, adapters, if it has any, merged."""
    layers = {f"{name}.weight": layer for name, layer in _layers(model)}
    for name, weight in base_weights(model):
        if layer := layers.get(name):
            compute = partial(_merged, scale=layer.scaling[_NAME], transposed=_is_transposed(layer))
            weight = Weight((*weight.parts, *_factors(layer)), compute)
        yield name, weight


def _merged(base: Tensor, down: Tensor, up: Tensor, *, scale: float, transposed: bool) -> Tensor:
    """As low_rank.merged; `transposed`: the layer stores its matrix the other way round than the factors are."""
    return merged(base, up.t(), down.t(), scale) if transposed else merged(base, down, up, scale)


def adapter_scales(model: nn.Module) -> dict[str, float]:
    """Return by the plain model's name of each adapted matrix what the product of its factors is multiplied by."""
    return {f"{name}.weight": layer.scaling[_NAME] for name, layer in _layers(model)}


def adapter_factors(model: nn.Module) -> Iterator[tuple[str, Weight]]:
    """Yield both factors of each adapted matrix, named after it with DOWN and UP: matrix + scale * up @ down."""
    for name, layer in _layers(model):
        down, up = (Weight((factor,)) for factor in _factors(layer))
        if _is_transposed(layer):
            down, up = (Weight(factor.parts, lambda one: one.detach().t()) for factor in (up, down))
        yield f"{name}.weight{DOWN}", down
        yield f"{name}.weight{UP}", up


def base_weights(model: nn.Module) -> Iterator[tuple[str, Weight]]:
    """Yield the weights of a model under the plain model's names, without what adapters add."""
    for name, tensor in named_weights(model):
        if ".lora_" not in name:
            yield name.replace(_BASE, "."), Weight((tensor,))


def _layers(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            yield name, layer


def _factors(layer: LoraLayer) -> tuple[Tensor, Tensor]:
    return layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight


def _is_transposed(layer: LoraLayer) -> bool:
    return isinstance(layer.get_base_layer(), Conv1D)


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """All but the head. PEFT would count the routers of experts among them."""
    head = model.get_output_embeddings()
    modules = model.named_modules()
    return [name for name, one in modules if isinstance(one, nn.Linear | Conv1D) and one is not head]


def _kind(base: nn.Module) -> str:
    return (
        "tied to the embedding" if isinstance(base, nn.Linear | Conv1D) else f"of type {type(base).__name__}"
    )
