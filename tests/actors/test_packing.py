"""Packed weights that are not those that were loaded are found, on layers that pack as vLLM's CPU kernels do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.rollout.packing import Packing
from raypost.errors import WeightError
from raypost.weights.held import HeldWeights

vllm_layers = pytest.importorskip("vllm.model_executor.layers.vocab_parallel_embedding")
quantization = pytest.importorskip("vllm.model_executor.layers.quantization.base_config")


class Method(quantization.QuantizeMethodBase):  # type: ignore[misc,name-defined]  # vLLM has no types
    """Keeps a copy that only the kernel sees."""

    def __init__(self, frees: bool) -> None:
        self.frees = frees
        self.packed = 0

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the tests make them."""

    def apply(self, layer: Any, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: Any) -> None:
        self.packed += 1
        copy = layer.weight.detach().clone()
        layer.copy = copy
        layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, copy, bias)
        if self.frees:
            layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


def layer_of(kind: type[torch.nn.Module], weight: Tensor, frees: bool) -> Any:
    layer: Any = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.input_size_per_partition = weight.shape[1]
    layer.quant_method = Method(frees)
    return layer


class Model(torch.nn.Module):
    """A linear layer, an embedding and a head that is tied to it."""

    def __init__(self, has_head: bool = True) -> None:
        super().__init__()
        self.linear = layer_of(torch.nn.Linear, torch.randn(6, 4), frees=True)
        self.embedding = layer_of(vllm_layers.VocabParallelEmbedding, torch.randn(8, 4), frees=False)
        if has_head:
            self.head = layer_of(vllm_layers.ParallelLMHead, torch.randn(8, 4), frees=False)
            self.head.weight = self.embedding.weight
        self.held = HeldWeights(ThreadPoolExecutor(1))
        self.packing = Packing(self, self.held)
        self.sync(0)

    def sync(self, version: int, heads: bool = True) -> None:
        """Load other weights, and pack what vLLM packs."""
        self.packing.note(self.held, version)
        self.linear.weight = torch.nn.Parameter(torch.randn(6, 4), requires_grad=False)
        self.embedding.weight.copy_(torch.randn(8, 4))
        for layer in (self.linear, self.embedding):
            layer.quant_method.process_weights_after_loading(layer)
        if heads:
            self.packing.pack_heads()


@pytest.mark.parametrize("version", range(1, 6))
def test_kernels_that_compute_with_what_was_loaded_pass(version: int) -> None:
    model = Model()
    model.sync(version)
    assert model.packing.verify(version, share=1) == 2


def test_a_head_is_asked_at_every_version_and_each_other_layer_at_some() -> None:
    model = Model()
    asked = []
    for version in range(4):
        model.sync(version)
        asked.append(model.packing.verify(version, share=2))
    assert asked == [2, 1, 2, 1]


def test_a_tied_head_that_was_left_stale_is_refused_by_name() -> None:
    model = Model()
    model.sync(1, heads=False)
    with pytest.raises(WeightError, match="version 1: column 1 of what is packed for 'head' is not what was"):
        model.packing.verify(1)


def test_a_layer_whose_kernel_kept_its_former_weights_is_refused_by_name() -> None:
    model = Model()
    former = model.linear.cpu_linear
    model.sync(2)
    model.linear.cpu_linear = former
    with pytest.raises(WeightError, match="column 2 of what is packed for 'linear'"):
        model.packing.verify(2, share=2)


def test_a_layer_of_which_nothing_was_seen_packed_is_refused_by_name() -> None:
    model = Model()
    del model.linear.raypost_column
    with pytest.raises(WeightError, match="nothing shows what was packed for 'linear'"):
        model.packing.verify(0)


def test_an_embedding_is_packed_only_where_logits_are_computed_with_it() -> None:
    assert Model().embedding.quant_method.packed == 0
    assert Model(has_head=False).embedding.quant_method.packed == 1
