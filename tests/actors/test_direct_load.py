"""What is written straight into a model is what vLLM's loaders put there, and what they change is left to them."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from raypost.errors import WeightError
from raypost.weights.held import HeldWeights, ReadBack
from raypost.weights.manifest import Manifest, TensorEntry
from tests.unit.test_held_weights import NAMES, SIZE, opened, published, weights

linear = pytest.importorskip("vllm.model_executor.layers.linear")
vllm_layers = pytest.importorskip("vllm.model_executor.layers.vocab_parallel_embedding")
direct_load = pytest.importorskip("actors.rollout.direct_load")
packing = pytest.importorskip("actors.rollout.packing")

INPUT = torch.eye(SIZE)
Way = Literal["as vLLM", "in place", "prepared"]
StandIns = dict[torch.nn.Module, torch.nn.Module]
WAYS = pytest.mark.parametrize("way", ["in place", "prepared"])
WEIGHTS = ("q", "k", "v", "o", "embedding")


def layer_of(kind: type[torch.nn.Module], shape: tuple[int, ...], method: object = None) -> Any:
    layer: Any = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.weight = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
    layer.quant_method, layer.input_size_per_partition = method, shape[-1]
    return layer


class Engine:
    """Two linear layers, which vLLM's own method packs and frees, a padded embedding, a head tied to it and a norm."""

    def __init__(self, rows: int = SIZE) -> None:
        """`rows`: of the second linear layer, to which SIZE are sent."""
        method = linear.UnquantizedLinearMethod()
        self.model: Any = torch.nn.Module()
        self.model.qkv = layer_of(torch.nn.Module, (3 * SIZE, SIZE), method)
        self.model.o = layer_of(torch.nn.Module, (rows, SIZE), method)
        of_embedding = vllm_layers.UnquantizedEmbeddingMethod()
        embedding, head = (
            layer_of(vllm_layers.ParallelLMHead, (SIZE + 2, SIZE), of_embedding) for _ in range(2)
        )
        head.weight = embedding.weight
        self.model.embedding, self.model.head = embedding, head
        self.model.norm = layer_of(torch.nn.Module, (SIZE,))
        self.held = HeldWeights(ThreadPoolExecutor(1))
        self.packing = packing.Packing(self.model, self.held)
        self.direct = direct_load.DirectLoad(self.model, self.held, torch.float32)
        self.change: float | None = None
        """What the loader of the norm adds."""

    def load(self, version: int, seed: int, names: Iterable[str] = (), way: Way = "in place") -> None:
        """Load a version, the first one as vLLM does."""
        tensors = self.publish(version, seed, names)
        if way == "prepared":
            self.install(self.prepare(tensors))
            return
        self.packing.note(self.held, version)
        if way == "in place":
            assert self.direct.can_load([entry.name for entry, _ in tensors])
            self.direct.load(self.held.sent(tensors))
            return
        self._load_as_vllm(tensors)

    def publish(self, version: int, seed: int, names: Iterable[str] = ()) -> list[tuple[TensorEntry, Tensor]]:
        """Send a version, of which only these tensors change; return them."""
        self.sent = weights(seed) | {"o": weights(seed + 1)["q"]}
        self.manifest: Manifest
        self.manifest, self.buckets = published(version, self.sent)
        return [one for one in opened(self.manifest, self.buckets) if not names or one[0].name in names]

    def prepare(self, tensors: list[tuple[TensorEntry, Tensor]]) -> StandIns:
        """Write into stand-ins, and note it in a draft."""
        assert self.direct.can_load([entry.name for entry, _ in tensors])
        self.draft = self.held.draft()
        self.packing.note(self.draft, self.manifest.version)
        stand_ins: StandIns = self.direct.prepare(self.draft.sent(tensors))
        return stand_ins

    def install(self, stand_ins: StandIns) -> None:
        """Load what was prepared."""
        self.direct.install(stand_ins)
        assert self.direct.replaced(stand_ins) is None
        self.held = self.draft

    def _load_as_vllm(self, tensors: list[tuple[TensorEntry, Tensor]]) -> None:
        children = {name: one for name, one in self.model.named_children() if name != "head"}
        parameters = {name: torch.zeros(layer.weight.shape) for name, layer in children.items()}
        with self.held.recording((f"{name}.weight", one) for name, one in parameters.items()):
            for name, tensor in self.held.sent(tensors):
                self.copy(parameters, name, tensor)
        for name, parameter in parameters.items():
            layer = getattr(self.model, name)
            layer.weight = torch.nn.Parameter(parameter, requires_grad=False)
            if name == "embedding":
                self.model.head.weight = layer.weight
                self.packing.pack_heads()
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

    def verify_stand_ins(self, stand_ins: StandIns) -> ReadBack:
        self.draft.begin_to_verify(self.packing.readable(self.model) | self.direct.parameters(stand_ins))
        return self.draft.verify(self.manifest)

    def computes_with(self) -> dict[str, Tensor]:
        """Return the weights as the kernels compute with them."""
        model = self.model
        qkv = model.qkv.cpu_linear(INPUT, None, None).T
        parts = {name: qkv[n * SIZE : (n + 1) * SIZE] for n, name in enumerate(NAMES)}
        o = model.o.cpu_linear(INPUT, None, None).T
        head = model.head.cpu_linear(INPUT, model.head.weight, None).T[:SIZE]
        assert torch.equal(head, model.embedding.weight[:SIZE])
        return parts | {"o": o, "embedding": head, "norm": model.norm.weight}


@pytest.fixture
def engine() -> Engine:
    engine = Engine()
    engine.load(0, seed=0, way="as vLLM")
    return engine


def assert_computes_with_what_was_sent(engine: Engine) -> None:
    for name, weight in engine.computes_with().items():
        assert torch.equal(weight, engine.sent[name]), name


@WAYS
def test_later_versions_are_written_where_the_first_one_was_loaded(engine: Engine, way: Way) -> None:
    in_use = [engine.model.embedding.weight, engine.model.norm.weight]
    freed = engine.model.o.weight
    for version in (1, 2):
        engine.load(version, seed=10 * version, way=way)
        assert engine.verify().left_out == ()
        assert_computes_with_what_was_sent(engine)
    assert engine.model.embedding.weight is in_use[0] and engine.model.norm.weight is in_use[1], (
        "the same ones"
    )
    assert engine.model.head.weight is in_use[0]
    assert torch.equal(in_use[0][SIZE:], torch.zeros(2, SIZE)), "what pads it stays"
    assert engine.model.o.weight is freed and freed.numel() == engine.model.qkv.weight.numel() == 0


@WAYS
def test_what_was_sent_may_be_freed_once_it_is_loaded(engine: Engine, way: Way) -> None:
    engine.load(1, seed=10, way=way)
    engine.verify()
    for bucket in engine.buckets:
        bucket.fill(7)
    assert_computes_with_what_was_sent(engine)


@WAYS
def test_layers_of_which_nothing_was_sent_stay_as_they_are(engine: Engine, way: Way) -> None:
    before = engine.computes_with()
    engine.load(1, seed=10, names=("o",), way=way)
    engine.sent = {**before, "o": engine.sent["o"]}
    assert_computes_with_what_was_sent(engine)


@pytest.mark.parametrize("name", ["norm", "o"])
def test_a_flipped_bit_is_found(engine: Engine, name: str) -> None:
    write = engine.direct._write

    def flipped(place: Any, tensor: Tensor, *args: Any, **how: Any) -> None:
        tensor = tensor.clone()
        if place.parameter == f"{name}.weight":
            tensor.view(torch.int32).view(-1)[3] ^= 1
        write(place, tensor, *args, **how)

    before = engine.computes_with()
    engine.direct._write = flipped
    stand_ins = engine.prepare(engine.publish(1, seed=10))
    with pytest.raises(WeightError, match=name):
        engine.verify_stand_ins(stand_ins)
    engine.sent = before
    assert_computes_with_what_was_sent(engine)
    engine.load(2, seed=20)
    with pytest.raises(WeightError, match=name):
        engine.verify()


def test_what_is_prepared_is_whole_and_changes_nothing_before_it_is_installed(engine: Engine) -> None:
    before = {name: one.clone() for name, one in engine.computes_with().items()}
    stand_ins = engine.prepare(engine.publish(1, seed=10))
    assert engine.verify_stand_ins(stand_ins).left_out == ()
    sent, engine.sent = engine.sent, before
    assert_computes_with_what_was_sent(engine)
    engine.install(stand_ins)
    engine.sent = sent
    assert_computes_with_what_was_sent(engine)
    assert engine.verify().left_out == ()


def test_a_version_that_was_prepared_and_given_up_leaves_no_trace(engine: Engine) -> None:
    engine.prepare(engine.publish(1, seed=10))
    engine.publish(2, seed=0)
    assert_computes_with_what_was_sent(engine)
    assert engine.verify().left_out == (), "the weights of version 0 again, of which nothing is sent"


def test_a_tied_head_that_was_not_prepared_is_found(engine: Engine) -> None:
    engine.direct._tied.clear()
    engine.install(engine.prepare(engine.publish(1, seed=10)))
    with pytest.raises(WeightError, match="what is packed for 'head'"):
        engine.verify()


def test_nothing_is_computed_with_a_kernel_beside_the_requests(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of all layers share their scratch memory: one that runs on another thread spoils what requests get."""
    tensors = engine.publish(1, seed=10)
    ops = pytest.importorskip("vllm._custom_ops")
    for name in ("onednn_mm", "weight_packed_linear_cpu"):
        monkeypatch.setattr(ops, name, lambda *args, name=name: pytest.fail(f"{name} was called"))
    stand_ins = engine.prepare(tensors)
    engine.verify_stand_ins(stand_ins)
    monkeypatch.undo()
    engine.install(stand_ins)
    assert_computes_with_what_was_sent(engine)


@pytest.mark.parametrize("spoil", ["kernel", "memory"])
def test_a_layer_that_does_not_have_what_was_prepared_for_it_is_named(engine: Engine, spoil: str) -> None:
    stand_ins = engine.prepare(engine.publish(1, seed=10))
    former = engine.model.o.cpu_linear
    engine.install(stand_ins)
    if spoil == "kernel":
        engine.model.o.cpu_linear = former
    else:
        engine.model.norm.weight.data = engine.model.norm.weight.data.clone()
    assert engine.direct.replaced(stand_ins) == ("o" if spoil == "kernel" else "norm")


@pytest.mark.parametrize("names", [("q", "k"), ("v", "norm")])
def test_a_part_of_what_goes_into_a_layer_is_left_to_vllm(engine: Engine, names: tuple[str, ...]) -> None:
    assert not engine.direct.can_load(names)
    assert engine.direct.can_load([*NAMES, *names])


def test_nothing_is_known_before_the_first_load() -> None:
    assert not Engine().direct.can_load(["norm"])


def test_a_loader_that_changes_something_is_left_to_vllm() -> None:
    engine = Engine()
    engine.change = 1.0
    engine.load(0, seed=0, way="as vLLM")
    assert not engine.direct.can_load([*WEIGHTS, "norm"])
    assert not engine.direct.can_load(["o"]), "it may have part in what was changed"


@pytest.mark.parametrize("spoil", ["method", "form", "padding"])
def test_a_layer_that_does_more_with_its_weights_is_left_to_vllm(spoil: str) -> None:
    engine = Engine(rows=SIZE + (2 if spoil == "padding" else 0))
    if spoil == "method":
        engine.model.norm.quant_method = type("Reordering", (linear.UnquantizedLinearMethod,), {})()
    engine.load(0, seed=0, way="as vLLM")
    if spoil == "form":
        engine.model.norm.weight = torch.nn.Parameter(engine.model.norm.weight.double(), requires_grad=False)
    assert engine.direct.can_load(["norm"]) == (spoil == "padding")
    assert engine.direct.can_load(["o"]) == (spoil != "padding")
    assert engine.direct.can_load([*NAMES, "embedding"])
