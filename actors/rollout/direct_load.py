"""DirectLoad: writes a version to where vLLM's own loaders put the first one.

vLLM's layerwise reload takes every layer apart, counts what each loader copies, fills new memory and copies that into
the old. The first load goes that way, and is watched: afterwards it is known, copy by copy, where each tensor goes
(raypost/weights/held.py). Later ones are written there:

    parameter that the model computes with (embeddings, norms; all of them on a GPU)    in place
    parameter that is packed and freed (linear layers on CPU)                           made for the packing: the tensor
                                                                                        itself where it is all of it

Then vLLM's own method packs the layer. Owns which layers may be loaded so: those without quantization, each element of
which was seen coming from a tensor. A version that has others is left to vLLM's reload.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from raypost.weights.held import Form, HeldWeights, Place

Module = torch.nn.Module

METHODS = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Of layers whose weights are loaded as they are sent. Not those of experts, which may change their order in place."""


class DirectLoad:
    """The layers of one model, and how each is loaded without being taken apart."""

    def __init__(self, model: Module, held: HeldWeights, dtype: torch.dtype) -> None:
        """`held`: where the tensors go, once that was recorded. `dtype`: the model computes in it."""
        self._held = held
        self._dtype = dtype
        self._own = {
            layer: {own: f"{name}.{own}" if name else own for own, _ in layer.named_parameters(recurse=False)}
            for name, layer in model.named_modules()
        }
        """Names of a layer's parameters in the layer, and in the model."""
        self._layers = {
            name: (layer, own) for layer, names in self._own.items() for own, name in names.items()
        }
        self._attention: list[Any] = [one for one in model.modules() if is_deferred_attention_layer(one)]
        self._fitting: dict[Module, bool] = {}

    def can_load(self, names: Collection[str]) -> bool:
        """Return whether tensors of these names can be loaded so: they are all that goes into their layers."""
        held, given = self._held, set(names)
        if not given:
            return True
        if not held.is_known or held.left_out or not all(map(held.places, given)):
            return False
        layers = {self._layers[place.parameter][0] for name in given for place in held.places(name)}
        parts = [part for layer in layers for part in self._parts(layer)]
        return all(part.tensor in given for part in parts) and all(map(self._fits, layers))

    def _parts(self, layer: Module) -> list[Place]:
        return [part for name in self._own[layer].values() for part in self._held.parts(name)]

    def _fits(self, layer: Module) -> bool:
        """Return whether all of a layer's parameters are in use as they are loaded, or made anew of what is sent."""
        if layer not in self._fitting:
            is_plain = type(getattr(layer, "quant_method", None)) in METHODS
            names = self._own[layer].items()
            self._fitting[layer] = is_plain and all(
                self._fits_parameter(name, getattr(layer, own)) for own, name in names
            )
        return self._fitting[layer]

    def _fits_parameter(self, name: str, parameter: Tensor) -> bool:
        form, parts = self._held.form(name), self._held.parts(name)
        if Form.of(parameter) == form:
            return True
        is_freed = parameter.numel() == 0 and parameter.dtype == form.dtype
        return is_freed and sum(prod(part.there.size) for part in parts) == prod(form.shape)

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write tensors, all of which can be loaded so, into the model."""
        lacking: dict[Module, int] = {}
        made: dict[Module, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in tensors:
            for place in self._held.places(name):
                layer, own = self._layers[place.parameter]
                self._write(place, tensor, getattr(layer, own), made[layer], own)
                if layer not in lacking:
                    lacking[layer] = len(self._parts(layer))
                lacking[layer] -= 1
                if not lacking[layer]:
                    _pack(layer, made.pop(layer))
        for layer in self._attention:
            layer.process_weights_after_loading(self._dtype)

    def _write(
        self, place: Place, tensor: Tensor, parameter: Tensor, made: dict[str, Tensor], own: str
    ) -> None:
        form, sent = self._held.form(place.parameter), place.here.of_tensor(tensor)
        if Form.of(parameter) == form:
            place.there.of_tensor(parameter).copy_(sent)
            return
        if own not in made:
            if sent.numel() == prod(form.shape) and Form.of(sent.view(form.shape)) == form:
                made[own] = sent.view(form.shape)
                return
            made[own] = torch.empty(form.shape, dtype=form.dtype, device=parameter.device)
        place.there.of_tensor(made[own]).copy_(sent)


def _pack(layer: Any, made: dict[str, Tensor]) -> None:
    """Have a layer's method make of its weights what its kernels compute with, and free those made for that."""
    freed = {own: layer._parameters[own] for own in made}
    for own, weight in made.items():
        layer._parameters[own] = torch.nn.Parameter(weight, requires_grad=False)
    if getattr(layer, "quant_method", None) is not None:
        layer.quant_method.process_weights_after_loading(layer)
    for own, parameter in freed.items():
        if layer._parameters[own].numel():
            raise RuntimeError(
                f"{type(layer).__name__} keeps {own!r} unpacked, which it freed at the first load"
            )
        layer._parameters[own] = parameter
