"""What a model's parameters are called in a Hugging Face checkpoint, and how they are cut there.

Owns the way back from what transformers makes of a checkpoint when it loads one: it renames parameters, and keeps a
layer's experts in one tensor where the checkpoint has one for each. Checkpoint names are what engines, and everybody
else who reads the weights, go by. Knows nothing of adapters or of DeepSpeed.

Invariant: every parameter is translated by itself, so that never more than one has to be whole in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from raypost.errors import ConfigError

Shape = tuple[int, ...]


class CheckpointNames:
    """The names of one model's weights. Made while its parameters are whole, and before adapters are added."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Read the names off `model`. Raises ConfigError if the checkpoint has a tensor made of several parameters."""
        self._model = model
        stand_ins = {name: tensor.detach().to("meta") for name, tensor in named_weights(model)}
        parts = {name: _stored(model, {name: tensor}) for name, tensor in stand_ins.items()}
        self._parts = {name: own for name, own in parts.items() if list(own) != [name]}
        """Of the parameters that a checkpoint has under another name, or in parts."""
        self.shapes: dict[str, Shape] = {
            name: tuple(tensor.shape) for own in parts.values() for name, tensor in own.items()
        }
        """Of every tensor of the checkpoint, in the model's order; tied ones once."""
        whole = _stored(model, stand_ins) if self._parts else {}
        if self._parts and {n: tuple(t.shape) for n, t in whole.items()} != self.shapes:
            name = next(iter(whole.keys() ^ self.shapes.keys()), next(iter(self._parts)))
            raise ConfigError(
                f"{type(model).__name__} keeps {name!r} in a checkpoint in a form that takes several of its "
                "parameters at once, which cannot be sent to engines: use another model"
            )

    def stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's tensors for a parameter of the model, views of it where that is possible."""
        if name in self._parts:
            yield from _stored(self._model, {name: tensor}).items()
        else:
            yield name, tensor

    def one(self, name: str) -> str:
        """Return the checkpoint's name of a parameter that is one tensor there. Raises ConfigError for any other."""
        names = list(self._parts.get(name, [name]))
        if len(names) != 1:
            raise ConfigError(
                f"parameter {name!r} is {len(names)} tensors in a checkpoint, so an adapter of it cannot be sent to "
                "engines: leave its layer out of train.lora.target_modules"
            )
        return names[0]


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and saved buffers under the model's own names, tied ones once."""
    yield from model.named_parameters()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in parameters:
            yield name, tensor


def _stored(model: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    stored: dict[str, Tensor] = revert_weight_conversion(model, weights)
    return stored
