"""What is written straight into a model is what vLLM's loaders put there, and what they change is left to them."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from raypost.errors import WeightError
from raypost.weights.held import HeldWeights, ReadBack
from raypost.weights.manifest import Manifest
from tests.unit.test_held_weights import NAMES, SIZE, opened, published, weights

linear = pytest.importorskip("vllm.model_executor.layers.linear")
vllm_layers = pytest.importorskip("vllm.model_executor.layers.vocab_parallel_embedding")
direct_load = pytest.importorskip("actors.rollout.direct_load")
packing = pytest.importorskip("actors.rollout.packing")

INPUT = torch.eye(SIZE)
WEIGHTS = ("q", "k", "v", "o", "embedding")


def layer_of(kind: type[torch.nn.Module], shape: tuple[int, ...], method: object = None) -> Any:
    layer: Any = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.weight = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
    layer.quant_method, layer.input_size_per_partition = method, shape[-1]
    return layer


class Engine:
    """Two linear layers, which vLLM's own method packs and frees, a padded embedding and a norm."""

    def __init__(self, rows: int = SIZE) -> None:
        """`rows`: of the second linear layer, to which SIZE are sent."""
        method = linear.UnquantizedLinearMethod()
        self.model: Any = torch.nn.Module()
        self.model.qkv = layer_of(torch.nn.Module, (3 * SIZE, SIZE), method)
        self.model.o = layer_of(torch.nn.Module, (rows, SIZE), method)
        of_embedding = vllm_layers.UnquantizedEmbeddingMethod()
        self.model.embedding = layer_of(vllm_layers.ParallelLMHead, (SIZE + 2, SIZE), of_embedding)
        self.model.norm = layer_of(torch.nn.Module, (SIZE,))
        self.held = HeldWeights(ThreadPoolExecutor(1))
        self.packing = packing.Packing(self.model, self.held)
        self.direct = direct_load.DirectLoad(self.model, self.held, torch.float32)
        self.change: float | None = None
        """What the loader of the norm adds."""

    def load(self, version: int, seed: int, names: Iterable[str] = (), direct: bool = True) -> None:
        """Load a version: the first one, and all that are not `direct`, as vLLM does."""
        sent = weights(seed) | {"o": weights(seed + 1)["q"]}
        self.sent, self.packing.version = sent, version
        self.manifest: Manifest
        self.manifest, self.buckets = published(version, sent)
        tensors = [one for one in opened(self.manifest, self.buckets) if not names or one[0].name in names]
        if direct:
            assert self.direct.can_load([entry.name for entry, _ in tensors])
            self.direct.load(self.held.sent(tensors))
            return
        parameters = {name: torch.zeros(layer.weight.shape) for name, layer in self.model.named_children()}
        with self.held.recording((f"{name}.weight", one) for name, one in parameters.items()):
            for name, tensor in self.held.sent(tensors):
                self.copy(parameters, name, tensor)
        for name, parameter in parameters.items():
            layer = getattr(self.model, name)
            layer.weight = torch.nn.Parameter(parameter, requires_grad=False)
            if layer.quant_method is not None:
                layer.quant_method.process_weights_after_loading(layer)

    def copy(self, parameters: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        if name in NAMES:
            parameters["qkv"].narrow(0, NAMES.index(name) * SIZE, SIZE).copy_(tensor)
        elif name == "norm" and self.change is not None:
            parameters["norm"].copy_(tensor + self.change)
        else:
            parameters[name][: len(tensor)].copy_(tensor)

    def verify(self) -> ReadBack:
        self.held.begin_to_verify(self.packing.readable(self.model))
        self.packing.verify(self.manifest.version, share=1)
        return self.held.verify(self.manifest)

    def computes_with(self) -> dict[str, Tensor]:
        """Return the weights as the kernels compute with them."""
        model = self.model
        qkv = model.qkv.cpu_linear(INPUT, None, None).T
        parts = {name: qkv[n * SIZE : (n + 1) * SIZE] for n, name in enumerate(NAMES)}
        o = model.o.cpu_linear(INPUT, None, None).T
        embedding = model.embedding.cpu_linear(INPUT, model.embedding.weight, None).T[:SIZE]
        return parts | {"o": o, "embedding": embedding, "norm": model.norm.weight}


@pytest.fixture
def engine() -> Engine:
    engine = Engine()
    engine.load(0, seed=0, direct=False)
    return engine


def assert_computes_with_what_was_sent(engine: Engine) -> None:
    for name, weight in engine.computes_with().items():
        assert torch.equal(weight, engine.sent[name]), name


def test_later_versions_are_written_where_the_first_one_was_loaded(engine: Engine) -> None:
    in_use = [engine.model.embedding.weight, engine.model.norm.weight]
    freed = engine.model.o.weight
    for version in (1, 2):
        engine.load(version, seed=10 * version)
        assert engine.verify().left_out == ()
        assert_computes_with_what_was_sent(engine)
    assert engine.model.embedding.weight is in_use[0] and engine.model.norm.weight is in_use[1], "in place"
    assert torch.equal(in_use[0][SIZE:], torch.zeros(2, SIZE)), "what pads it stays"
    assert engine.model.o.weight is freed and freed.numel() == engine.model.qkv.weight.numel() == 0


def test_what_was_sent_may_be_freed_once_it_is_loaded(engine: Engine) -> None:
    engine.load(1, seed=10)
    engine.verify()
    for bucket in engine.buckets:
        bucket.fill(7)
    assert_computes_with_what_was_sent(engine)


def test_layers_of_which_nothing_was_sent_stay_as_they_are(engine: Engine) -> None:
    before = engine.computes_with()
    engine.load(1, seed=10, names=("o",))
    engine.sent = {**before, "o": engine.sent["o"]}
    assert_computes_with_what_was_sent(engine)


def test_a_flipped_bit_is_found(engine: Engine) -> None:
    write = engine.direct._write

    def flipped(place: Any, tensor: Tensor, *args: Any) -> None:
        write(place, tensor, *args)
        if place.parameter == "norm.weight":
            args[0].view(torch.int32)[3] ^= 1

    engine.direct._write = flipped
    engine.load(1, seed=10)
    with pytest.raises(WeightError, match="norm"):
        engine.verify()


@pytest.mark.parametrize("names", [("q", "k"), ("v", "norm")])
def test_a_part_of_what_goes_into_a_layer_is_left_to_vllm(engine: Engine, names: tuple[str, ...]) -> None:
    assert not engine.direct.can_load(names)
    assert engine.direct.can_load([*NAMES, *names])


def test_nothing_is_known_before_the_first_load() -> None:
    assert not Engine().direct.can_load(["norm"])


def test_a_loader_that_changes_something_is_left_to_vllm() -> None:
    engine = Engine()
    engine.change = 1.0
    engine.load(0, seed=0, direct=False)
    assert not engine.direct.can_load([*WEIGHTS, "norm"])
    assert not engine.direct.can_load(["o"]), "it may have part in what was changed"


@pytest.mark.parametrize("spoil", ["method", "form", "padding"])
def test_a_layer_that_does_more_with_its_weights_is_left_to_vllm(spoil: str) -> None:
    engine = Engine(rows=SIZE + (2 if spoil == "padding" else 0))
    if spoil == "method":
        engine.model.norm.quant_method = type("Reordering", (linear.UnquantizedLinearMethod,), {})()
    engine.load(0, seed=0, direct=False)
    if spoil == "form":
        engine.model.norm.weight = torch.nn.Parameter(engine.model.norm.weight.double(), requires_grad=False)
    assert engine.direct.can_load(["norm"]) == (spoil == "padding")
    assert engine.direct.can_load(["o"]) == (spoil != "padding")
    assert engine.direct.can_load([*NAMES, "embedding"])
