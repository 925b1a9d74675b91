"""Low-rank adapters (LoRA, arXiv 2106.09685) by PEFT: added to a model, switched off, merged into its weights.

Owns the translation between an adapted model and the plain one it came from: under their own names, the weights of
an adapted model are those of the plain one plus what the adapters add. Knows nothing of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from raypost.errors import ConfigError
from raypost.train_config import LoraConfig

_NAME = "default"
_BASE = ".base_layer."


@dataclass(frozen=True, slots=True)
class MergedWeight:
    """A matrix and the adapter's two factors: base + scale * up @ down."""

    base: Tensor
    down: Tensor
    up: Tensor
    scale: float

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """What must be in memory before `value` is asked for."""
        return self.base, self.down, self.up

    def value(self) -> Tensor:
        """The merged matrix, of the base's type; computed in float32."""
        added = self.up.detach().float() @ self.down.detach().float()
        return (self.base.detach().float() + self.scale * added).to(self.base.dtype)


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Adapt the model in place: only adapters are trained from now on. A new adapter adds exactly nothing.

    Raises ConfigError if no layer has one of the names in `config.target_modules`.
    """
    targets = "all-linear" if config.target_modules == "all-linear" else list(config.target_modules)
    peft_config = PeftConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=targets, task_type="CAUSAL_LM"
    )
    try:
        inject_adapter_in_model(peft_config, model, adapter_name=_NAME)
    except ValueError as error:
        raise ConfigError(f"train.lora: {error}") from error


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model as it was before training."""
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_weights(
    weights: Iterator[tuple[str, Tensor]], model: nn.Module
) -> Iterator[tuple[str, Tensor | MergedWeight]]:
    """The weights of an adapted model under the plain model's names, adapters merged."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    for name, tensor in weights:
        before, found, after = name.partition(_BASE)
        if found and after == "weight":
            layer = layers[before]
            down, up = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
            yield f"{before}.weight", MergedWeight(tensor, down, up, layer.scaling[_NAME])
        elif found:
            yield f"{before}.{after}", tensor
        elif ".lora_" not in name:
            yield name, tensor
