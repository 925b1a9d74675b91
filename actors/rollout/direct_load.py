"""DirectLoad: writes a version to where vLLM's own loaders put the first one.

vLLM's layerwise reload takes every layer apart, counts what each loader copies, fills new memory and copies that into
the old. The first load goes that way, and is watched: afterwards it is known, copy by copy, where each tensor goes
(raypost/weights/held.py). Later ones are written there:

    parameter that the model computes with (embeddings, norms; all of them on a GPU)    in place, or a copy
    parameter that is packed and freed (linear layers on CPU)                           made for the packing: the tensor
                                                                                        itself where it is all of it

Then vLLM's own method packs the layer. Owns which layers may be loaded so: those without quantization, each element of
which was seen coming from a tensor. A version that has others is left to vLLM's reload.

    load       into the model itself, which waits: no memory but its own
    prepare    into stand-ins, copies of its layers, while the model runs: as much memory again
    install    stand-ins become the layers: no byte is copied
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
        self._names: dict[Module, str] = {layer: name for name, layer in model.named_modules()}
        self._layers = {
            name: (layer, own) for layer, names in self._own.items() for own, name in names.items()
        }
        self._tied = list(_tied(self._own))
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
        """Write tensors, all of which can be loaded so, into the model, which must not run meanwhile."""
        self._fill(tensors, lambda layer: layer)
        self._finish_attention()

    @torch.no_grad()
    def prepare(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[Module, Module]:
        """Write tensors, all of which can be loaded so, into stand-ins: copies of their layers, with new memory.

        Return them by their layers. The model may run meanwhile, and nothing of what was sent is needed afterwards.
        """
        stand_ins: dict[Module, Module] = {}

        def of(layer: Module) -> Module:
            if layer not in stand_ins:
                stand_ins[layer] = _copy(layer)
            return stand_ins[layer]

        self._fill(tensors, of)
        return stand_ins

    def install(self, stand_ins: Mapping[Module, Module]) -> list[object]:
        """Have layers compute with what their stand-ins have. Return what they had, which takes time to free."""
        former: list[object] = []
        for layer, stand_in in stand_ins.items():
            former.append(dict(vars(layer)))
            for own, parameter in stand_in._parameters.items():
                mine = layer._parameters[own]
                if mine is not None and parameter is not None and parameter is not mine:
                    former.append(mine.data)
                    mine.data = parameter.data
            vars(layer).update({name: one for name, one in vars(stand_in).items() if name != "_parameters"})
        self._finish_attention()
        return former

    def parameters(self, stand_ins: Mapping[Module, Module]) -> dict[str, Tensor]:
        """Return the stand-ins' parameters by their names in the model."""
        return {
            name: one
            for layer, stand_in in stand_ins.items()
            for own, name in self._own[layer].items()
            if (one := stand_in._parameters[own]) is not None
        }

    def replaced(self, stand_ins: Mapping[Module, Module]) -> str | None:
        """Return which layer computes with something else than its stand-in has; None: none."""
        for layer, stand_in in stand_ins.items():
            parts = {name for name, one in vars(stand_in).items() if vars(layer).get(name) is not one}
            pairs = ((layer._parameters[own], one) for own, one in stand_in._parameters.items())
            moved = any(
                mine is not None and one is not None and mine.data_ptr() != one.data_ptr()
                for mine, one in pairs
            )
            if moved or parts != {"_parameters"}:
                return self._names[layer]
        return None

    def _finish_attention(self) -> None:
        for layer in self._attention:
            layer.process_weights_after_loading(self._dtype)

    def _fill(self, tensors: Iterable[tuple[str, Tensor]], target_of: Callable[[Module], Any]) -> None:
        """Write tensors into the targets of their layers, and pack each layer that is complete."""
        lacking: dict[Module, int] = {}
        made: dict[Module, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in tensors:
            for place in self._held.places(name):
                layer, own = self._layers[place.parameter]
                target = target_of(layer)
                self._write(place, tensor, layer, made[layer], own, in_place=target is layer)
                if layer not in lacking:
                    lacking[layer] = len(self._parts(layer))
                lacking[layer] -= 1
                if not lacking[layer]:
                    _pack(target, made.pop(layer))
        for layer, own, owner, its in self._tied:
            if owner in lacking:
                target_of(layer)._parameters[own] = target_of(owner)._parameters[its]
                _pack(target_of(layer), {})

    def _write(
        self,
        place: Place,
        tensor: Tensor,
        layer: Module,
        made: dict[str, Tensor],
        own: str,
        in_place: bool,
    ) -> None:
        """Write a part of a tensor into the parameter `own` of a layer, or into what is made in its place."""
        form, sent = self._held.form(place.parameter), place.here.of_tensor(tensor)
        parameter: Tensor = getattr(layer, own)
        in_use = Form.of(parameter) == form
        if in_use and in_place:
            place.there.of_tensor(parameter).copy_(sent)
            return
        if own not in made:
            if not in_use and sent.numel() == prod(form.shape) and Form.of(sent.view(form.shape)) == form:
                made[own] = sent.view(form.shape)
                return
            # What is sent may leave a part of it as it was: the padding of a vocabulary.
            made[own] = (
                parameter.detach().clone()
                if in_use
                else torch.empty(form.shape, dtype=form.dtype, device=parameter.device)
            )
        place.there.of_tensor(made[own]).copy_(sent)


def _tied(layers: Iterable[Module]) -> Iterator[tuple[Module, str, Module, str]]:
    """Yield each layer's parameter that it has from a layer before it, and which one there."""
    first: dict[int, tuple[Module, str]] = {}
    for layer in layers:
        for own, parameter in layer._parameters.items():
            owner, its = first.setdefault(id(parameter), (layer, own))
            if parameter is not None and owner is not layer:
                yield layer, own, owner, its


def _copy(layer: Module) -> Module:
    """Return a layer of the same parts whose parameters can be replaced."""
    made = object.__new__(type(layer))
    vars(made).update(vars(layer))
    made._parameters = dict(layer._parameters)
    return made


def _pack(layer: Any, made: dict[str, Tensor]) -> None:
    """Have a layer's method make of its weights what its kernels compute with, and free those made for that alone."""
    former = {own: layer._parameters[own] for own in made}
    for own, weight in made.items():
        layer._parameters[own] = torch.nn.Parameter(weight, requires_grad=False)
    if getattr(layer, "quant_method", None) is not None:
        layer.quant_method.process_weights_after_loading(layer)
    for own, parameter in former.items():
        if parameter.numel():
            continue
        if layer._parameters[own].numel():
            raise RuntimeError(
                f"{type(layer).__name__} keeps {own!r} unpacked, which it freed at the first load"
            )
        layer._parameters[own] = parameter
