"""What is read back from a model, on layers whose loaders do what an engine's do: join, cut, pad, cast and pack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from raypost.errors import WeightError
from raypost.weights.held import HeldWeights, ReadBack
from raypost.weights.low_rank import merged
from raypost.weights.manifest import DOWN, UP, Manifest, TensorEntry, bytes_of, pack, pack_adapters
from raypost.weights.tensors import as_bytes

SIZE = 8
NAMES = ("q", "k", "v")


class Layer:
    """Joined queries, keys and values, which are packed; a padded embedding and a norm, which are not."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.shapes = {"qkv": (3 * SIZE, SIZE), "embedding": (SIZE + 2, SIZE), "norm": (SIZE,)}
        self.parameters: dict[str, Tensor] = {}
        self.before_packing: Callable[[dict[str, Tensor]], None] = lambda parameters: None
        """What happens to the parameters between the loaders and the packing."""

    def on_meta(self) -> dict[str, Tensor]:
        return {
            name: torch.empty(shape, dtype=self.dtype, device="meta") for name, shape in self.shapes.items()
        }

    def load(self, held: HeldWeights, meta: dict[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
        """As vLLM does: into parameters on the meta device first, which counts, then into real ones."""
        real = {name: self.parameters.get(name, torch.zeros(shape)) for name, shape in self.shapes.items()}
        real = {
            name: one.to(self.dtype) if one.numel() else torch.zeros(self.shapes[name], dtype=self.dtype)
            for name, one in real.items()
        }
        names = set()
        for name, tensor in tensors:
            names.add(name)
            for parameters in (meta, real):
                self._copy(parameters, name, tensor)
        self.before_packing(real)
        if names.intersection(NAMES):
            held.unpacked("qkv", real["qkv"])
        self.parameters = {**real, "qkv": torch.empty(0)}

    @staticmethod
    def _copy(parameters: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        if name in NAMES:
            parameters["qkv"].data.narrow(0, NAMES.index(name) * SIZE, SIZE).copy_(tensor)
        elif name == "embedding":
            parameters["embedding"].data[:SIZE].copy_(tensor)
        else:
            parameters["norm"].data.copy_(tensor)


def weights(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(SIZE, SIZE) for name in (*NAMES, "embedding")} | {"norm": torch.randn(SIZE)}


def opened(manifest: Manifest, buckets: list[np.ndarray]) -> Iterator[tuple[TensorEntry, Tensor]]:
    def tensor_of(entry: TensorEntry) -> Tensor:
        return torch.from_numpy(bytes_of(entry, buckets)).view(torch.float32).reshape(entry.shape)

    for entry in manifest.tensors:
        tensor = tensor_of(entry)
        if entry.added is not None:
            added = entry.added
            tensor = merged(tensor, tensor_of(added.down), tensor_of(added.up), added.scale)
        yield entry, tensor


class Engine:
    """A layer and what was sent to it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.held, self.layer = HeldWeights(ThreadPoolExecutor(1)), Layer(dtype)

    def take(self, version: int, tensors: dict[str, Tensor]) -> None:
        """Load a version of all these tensors."""
        self.load(*published(version, tensors))

    def load(self, manifest: Manifest, buckets: list[np.ndarray], only: tuple[str, ...] = ()) -> None:
        self.manifest = manifest
        tensors = (one for one in opened(manifest, buckets) if not only or one[0].name in only)
        meta = self.layer.on_meta()
        if self.held.is_known:
            self.layer.load(self.held, meta, self.held.sent(tensors))
        else:
            with self.held.recording(meta.items()):
                self.layer.load(self.held, meta, self.held.sent(tensors))

    def sync(self, version: int, seed: int) -> ReadBack:
        self.take(version, weights(seed))
        return self.verify()

    def verify(self) -> ReadBack:
        self.held.begin_to_verify(self.layer.parameters)
        return self.held.verify(self.manifest)


def published(version: int, tensors: dict[str, Tensor]) -> tuple[Manifest, list[np.ndarray]]:
    return pack(version, as_bytes(tensors.items()), 1 << 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_is_read_where_the_model_has_it_or_before_it_is_packed(dtype: torch.dtype) -> None:
    engine = Engine(dtype)
    for version in range(3):
        found = engine.sync(version, seed=version)
        assert found == ReadBack(
            in_use=(SIZE * SIZE + SIZE) * dtype.itemsize,
            unpacked=3 * SIZE * SIZE * dtype.itemsize,
            left_out=(),
        )


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize(
    ("parameter", "element", "tensor"), [("qkv", 70, "k"), ("embedding", 3, "embedding")]
)
def test_one_flipped_bit_in_the_model_is_refused_with_the_tensors_name(
    parameter: str, element: int, tensor: str, version: int
) -> None:
    engine = Engine()

    def flip(parameters: dict[str, Tensor]) -> None:
        parameters[parameter].view(-1).view(torch.int32)[element] ^= 1

    if version:
        engine.sync(0, seed=0)
    engine.layer.before_packing = flip
    with pytest.raises(
        WeightError, match=f"version {version}: .*'{parameter}' .* of '{tensor}'.*load it again"
    ):
        engine.sync(version, seed=version)


def test_tensors_of_one_shape_that_changed_places_are_refused() -> None:
    engine = Engine()
    engine.sync(0, seed=0)

    def swap(parameters: dict[str, Tensor]) -> None:
        q, k, v = parameters["qkv"].clone().chunk(3)
        parameters["qkv"].copy_(torch.cat([k, q, v]))

    engine.layer.before_packing = swap
    with pytest.raises(WeightError, match="of 'q'"):
        engine.sync(1, seed=1)


@pytest.mark.parametrize("name", ["q", "norm"])
def test_a_tensor_that_was_taken_and_not_loaded_is_refused(name: str) -> None:
    engine = Engine()
    engine.sync(0, seed=0)
    engine.manifest, buckets = published(1, weights(1))
    tensors = list(engine.held.sent(opened(engine.manifest, buckets)))
    engine.layer.load(engine.held, engine.layer.on_meta(), [one for one in tensors if one[0] != name])
    with pytest.raises(WeightError, match=f"of '{name}'"):
        engine.verify()


@pytest.mark.parametrize("taken", [True, False])
def test_a_model_that_says_it_loaded_and_did_not_is_refused(taken: bool) -> None:
    engine = Engine()
    engine.sync(0, seed=0)
    engine.manifest, buckets = published(1, weights(1))
    if taken:
        list(engine.held.sent(opened(engine.manifest, buckets)))
    with pytest.raises(WeightError, match=r"version 1: .*'q'"):
        engine.verify()


def test_a_parameter_of_which_nothing_was_seen_is_refused() -> None:
    engine = Engine()
    engine.take(0, weights(0))
    engine.layer.parameters["norm"] = torch.empty(0)
    with pytest.raises(WeightError, match="nothing shows that 'norm' was loaded into 'norm'"):
        engine.verify()


def test_what_is_not_sent_again_must_still_be_there() -> None:
    engine = Engine()
    engine.sync(0, seed=0)
    engine.load(*published(1, {**weights(0), "norm": torch.ones(SIZE)}), only=("norm",))
    engine.verify()
    engine.layer.parameters["embedding"][2, 1] += 1
    with pytest.raises(WeightError, match="of 'embedding'"):
        engine.verify()


def test_a_matrix_with_an_adapter_is_compared_with_the_sum() -> None:
    engine = Engine()
    base, kept = published(0, weights(0))
    for version in range(3):
        torch.manual_seed(version)
        factors = {f"q{DOWN}": torch.randn(2, SIZE), f"q{UP}": torch.randn(SIZE, 2)}
        manifest, buckets = pack_adapters(version, base, as_bytes(factors.items()), {"q": 0.5}, 1 << 20)
        engine.load(manifest, kept + buckets)
        engine.verify()

    def spoil(parameters: dict[str, Tensor]) -> None:
        parameters["qkv"][0] += 1e-3

    engine.layer.before_packing = spoil
    engine.load(manifest, kept + buckets)
    with pytest.raises(WeightError, match="of 'q'"):
        engine.verify()


def test_what_a_loader_changes_on_the_way_is_left_out_and_named() -> None:
    engine = Engine()
    copy = engine.layer._copy

    def doubled(parameters: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        copy(parameters, name, tensor)
        if name == "norm":
            parameters["norm"].copy_(2 * parameters["norm"])

    engine.layer._copy = doubled  # type: ignore[method-assign]  # a layer of another kind
    found = engine.sync(0, seed=0)
    assert found.left_out == ("norm",) and found.in_use == SIZE * SIZE * 4
