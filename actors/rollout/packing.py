"""What vLLM makes of loaded weights: the packed copies that its CPU kernels compute with, and whether they are right.

Owns the moment between a layer's loading and its packing: what is there then is noted, and what needs no packing is
left as it is. A packed copy cannot be read; the kernel is asked for one of its columns instead, by the product with a
unit vector, which is exact. With every version other layers are asked, for another column.

A layer's stand-in (direct_load.py) is a copy of it, and counts as the layer itself: its name and the note of what was
packed for it are attributes of the layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from raypost.errors import WeightError
from raypost.weights.held import HeldWeights

Module = torch.nn.Module

KEEPING = (UnquantizedEmbeddingMethod,)
"""Methods that leave the weights as they were loaded, beside what they pack."""

SHARE = 8
"""One in so many layers is asked for a column while requests wait: to answer, a kernel reads all that it has packed."""


class Packing:
    """The layers of one model that vLLM processes after their weights are loaded."""

    def __init__(self, model: Module, held: HeldWeights) -> None:
        """Stand between `model` and that processing; `held` is told what is there before it."""
        self._held = held
        self._layers: dict[str, Any] = {
            name: module
            for name, module in model.named_modules()
            if isinstance(getattr(module, "quant_method", None), QuantizeMethodBase)
        }
        for name, layer in self._layers.items():
            layer.raypost_name = name
        self._version: int | None = None
        heads = [module for module in self._layers.values() if isinstance(module, ParallelLMHead)]
        # A model without a head of its own computes logits with its embedding.
        self._only_looked_up = VocabParallelEmbedding if heads else ()
        for method in {module.quant_method for module in self._layers.values()}:
            method.process_weights_after_loading = functools.partial(
                self._process, method.process_weights_after_loading
            )

    def note(self, held: HeldWeights, version: int | None) -> None:
        """Tell `held` from now on what is packed, as of a version; None: nothing is noted."""
        self._held, self._version = held, version

    def _process(self, pack: Callable[[Module], None], layer: Any) -> None:
        weight = getattr(layer, "weight", None)
        if self._version is not None and type(layer.quant_method) not in KEEPING:
            for own, parameter in layer.named_parameters(recurse=False):
                self._held.unpacked(f"{layer.raypost_name}.{own}", parameter)
        if isinstance(layer, self._only_looked_up) and not isinstance(layer, ParallelLMHead):
            # Packed for products that nobody asks for, at the price of a head.
            layer.cpu_linear = torch.nn.functional.linear
            return
        pack(layer)
        if self._version is not None and isinstance(weight, Tensor) and weight.dim() == 2:
            column = self._version % weight.shape[1]
            layer.raypost_column = column, weight[:, column].detach().clone()

    def pack_heads(self) -> None:
        """Refresh the packed copy that a head tied to the embedding keeps on CPU; a reload does not."""
        for module in self._layers.values():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def readable(self, model: Module) -> dict[str, Tensor]:
        """Return the parameters that the model computes with as they were loaded, if their form is the same."""
        packed = {id(one) for module in self._experts() for one in module.parameters()}
        return {name: one for name, one in model.named_parameters() if id(one) not in packed}

    def _experts(self) -> Iterator[Module]:
        """Layers of experts may keep the form and change the order."""
        return (module for module in self._layers.values() if hasattr(module.quant_method, "moe_kernel"))

    def verify(self, version: int, share: int = SHARE) -> int:
        """Ask kernels for a column of what they have packed; return how many were asked.

        Heads are asked always, of the other layers one in `share`, others at every version. Only for the thread that
        the model runs on, since kernels share their scratch memory. Raises WeightError naming the layer whose kernel
        computes with something else than was loaded.
        """
        asked = 0
        for number, (name, layer) in enumerate(self._layers.items()):
            kernel: Any = getattr(layer, "cpu_linear", None)
            if kernel is None or kernel is torch.nn.functional.linear:
                continue
            if number % share != version % share and not isinstance(layer, ParallelLMHead):
                continue
            weight: Any = layer.weight
            if weight.dim() == 2:
                column = version % weight.shape[1]
                expected = weight[:, column]
            elif hasattr(layer, "raypost_column"):
                column, expected = layer.raypost_column
            else:
                raise WeightError(
                    f"version {version}: nothing shows what was packed for {name!r}: load it again"
                )
            size: int = layer.input_size_per_partition if weight.dim() != 2 else weight.shape[1]
            unit = torch.zeros(1, size, dtype=expected.dtype)
            unit[0, column] = 1
            if not torch.equal(kernel(unit, weight, None)[0], expected):
                raise WeightError(
                    f"version {version}: column {column} of what is packed for {name!r} is not what was loaded: "
                    "load it again"
                )
            asked += 1
        return asked
