"""Weights survive the way through buckets, and damage is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from raypost.errors import WeightError
from raypost.weights.manifest import (
    ALIGNMENT,
    DOWN,
    UP,
    Bytes,
    Manifest,
    bytes_of,
    pack,
    pack_adapters,
    verify,
    views,
)
from tests.present import present

Tensor = tuple[str, Bytes, str, tuple[int, ...]]


def make_tensors(seed: int = 0) -> tuple[dict[str, NDArray[Any]], list[Tensor]]:
    rng = np.random.default_rng(seed)
    shapes = {"embed": (7, 5), "norm": (3,), "scalar": (), "head": (4, 2, 3), "empty": (0, 4)}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    flat = [(name, a.reshape(-1).view(np.uint8), "float32", a.shape) for name, a in arrays.items()]
    return arrays, flat


@pytest.mark.parametrize("bucket_bytes", [1, 64, 100, 200, 1 << 20])
def test_tensors_come_back_bit_for_bit_whatever_the_bucket_size(bucket_bytes: int) -> None:
    arrays, tensors = make_tensors()
    manifest, buckets = pack(3, tensors, bucket_bytes)
    verify(manifest, buckets)
    back = {
        entry.name: data.view(np.float32).reshape(entry.shape) for entry, data in views(manifest, buckets)
    }
    assert list(back) == list(arrays)
    for name in arrays:
        assert np.array_equal(back[name], arrays[name])
    largest = max(a.nbytes for a in arrays.values())
    assert all(size <= max(bucket_bytes, largest) for size in manifest.bucket_sizes)
    assert all(entry.offset % ALIGNMENT == 0 for entry in manifest.tensors)


def test_views_do_not_copy() -> None:
    manifest, buckets = pack(1, make_tensors()[1], 1 << 20)
    assert all(
        np.shares_memory(data, buckets[e.bucket]) for e, data in views(manifest, buckets) if data.nbytes
    )


def test_digest_ignores_version_and_layout_but_not_names_dtypes_shapes_or_bytes() -> None:
    tensors = make_tensors()[1]
    digest = pack(1, tensors, 1 << 20)[0].digest
    assert pack(2, tensors, 64)[0].digest == digest
    assert pack(1, make_tensors(seed=1)[1], 1 << 20)[0].digest != digest
    name, data, dtype, shape = tensors[0]
    for changed in [
        ("other", data, dtype, shape),
        (name, data, "int32", shape),
        (name, data, dtype, shape[::-1]),
    ]:
        assert pack(1, [changed, *tensors[1:]], 1 << 20)[0].digest != digest


def test_one_flipped_bit_is_refused_with_the_tensors_name() -> None:
    manifest, buckets = pack(4, make_tensors()[1], 100)
    entry = next(e for e in manifest.tensors if e.name == "head")
    buckets[entry.bucket][entry.offset + 5] ^= 1
    with pytest.raises(WeightError, match="version 4: tensor 'head'"):
        verify(manifest, buckets)


def test_missing_bucket_and_forged_manifest_are_refused() -> None:
    manifest, buckets = pack(1, make_tensors()[1], 64)
    with pytest.raises(WeightError, match="buckets have"):
        verify(manifest, buckets[:-1])
    renamed = replace(manifest, tensors=(replace(manifest.tensors[0], name="x"), *manifest.tensors[1:]))
    with pytest.raises(WeightError, match="digest"):
        verify(renamed, buckets)


def test_repeated_name_empty_iterable_and_bad_bucket_size_are_refused() -> None:
    tensors = make_tensors()[1]
    with pytest.raises(WeightError, match="'embed' is published twice"):
        pack(1, [tensors[0], tensors[0]], 64)
    with pytest.raises(WeightError, match="no tensors"):
        pack(1, [], 64)
    with pytest.raises(ValueError, match="bucket_bytes must be >= 1, got 0"):
        pack(1, tensors, 0)


def test_noncontiguous_and_read_only_bytes_are_packed() -> None:
    data = np.arange(16, dtype=np.uint8)
    data.flags.writeable = False
    manifest, buckets = pack(1, [("half", data[::2], "uint8", (8,))], 64)
    assert np.array_equal(next(views(manifest, buckets))[1], data[::2])


# ---------------------------------------------------------------- adapters


def flat(name: str, array: Any) -> Tensor:
    return name, array.reshape(-1).view(np.uint8), str(array.dtype), array.shape


def make_adapters(
    version: int = 7, seed: int = 0, scale: float = 0.5, bucket_bytes: int = 1 << 20
) -> tuple[Manifest, list[Bytes], Manifest]:
    """A version with adapters of `embed` [7, 5], and all buckets."""
    base, buckets = pack(0, make_tensors()[1], 100)
    rng = np.random.default_rng(seed)
    factors = [
        flat("embed" + DOWN, rng.normal(size=(2, 5)).astype(np.float32)),
        flat("embed" + UP, rng.normal(size=(7, 2)).astype(np.float32)),
    ]
    manifest, own = pack_adapters(version, base, factors, {"embed": scale}, bucket_bytes)
    return manifest, buckets + own, base


def test_a_version_with_adapters_is_the_base_and_a_bucket_of_factors() -> None:
    manifest, buckets, base = make_adapters()
    verify(manifest, buckets)
    assert (manifest.base, manifest.base_buckets) == (base.digest, len(base.bucket_sizes))
    assert len(buckets) == len(base.bucket_sizes) + 1 and buckets[-1].nbytes < 200
    added = {entry.name: entry.added for entry in manifest.tensors}
    assert [name for name, one in added.items() if one] == ["embed"]
    rng = np.random.default_rng(0)
    embed = present(added["embed"])
    for factor in (embed.down, embed.up):
        expected = rng.normal(size=factor.shape).astype(np.float32)
        assert np.array_equal(bytes_of(factor, buckets).view(np.float32).reshape(factor.shape), expected)


@pytest.mark.parametrize("make", [lambda: pack(3, make_tensors()[1], 64)[0], lambda: make_adapters()[0]])
def test_a_manifest_survives_its_way_as_text(make: Any) -> None:
    assert Manifest.decoded(make().encoded()) == make()


def test_digest_covers_base_factors_and_scale_but_neither_version_nor_layout() -> None:
    manifest = make_adapters()[0]
    assert make_adapters(version=8, bucket_bytes=64)[0].digest == manifest.digest
    others = [make_adapters(seed=1)[0], make_adapters(scale=0.25)[0], make_adapters()[2]]
    assert len({manifest.digest, *(other.digest for other in others)}) == 4
    contents = [{entry.name: entry.content for entry in one.tensors} for one in (manifest, others[1])]
    assert [name for name in contents[0] if contents[0][name] != contents[1][name]] == ["embed"]


def test_a_damaged_factor_and_a_damaged_base_are_named_and_a_wrong_scale_is_noticed() -> None:
    manifest, buckets, _ = make_adapters()
    factor = present(manifest.tensors[0].added).up
    buckets[factor.bucket][factor.offset + 3] ^= 1
    with pytest.raises(WeightError, match=r"version 7: tensor 'embed\.lora_up'"):
        verify(manifest, buckets)
    manifest, buckets, base = make_adapters()
    victim = next(entry for entry in manifest.tensors if entry.name == "norm")
    buckets[victim.bucket][victim.offset] ^= 1
    with pytest.raises(WeightError, match="version 7: tensor 'norm'"):
        verify(manifest, buckets)
    verify(manifest, buckets, len(base.bucket_sizes))
    manifest, buckets, _ = make_adapters()
    louder = replace(manifest.tensors[0], added=replace(present(manifest.tensors[0].added), scale=0.75))
    with pytest.raises(WeightError, match="the manifest's own digest"):
        verify(replace(manifest, tensors=(louder, *manifest.tensors[1:])), buckets)


def test_another_base_than_the_one_named_is_refused() -> None:
    manifest, buckets, _ = make_adapters()
    other = replace(manifest.tensors[1], digest="0" * 32)
    tensors = (manifest.tensors[0], other, *manifest.tensors[2:])
    with pytest.raises(WeightError, match="version 7: its base is not the one with digest"):
        verify(replace(manifest, tensors=tensors), buckets, manifest.base_buckets)


def test_factors_must_come_in_pairs_for_matrices_of_the_base_and_fit_them() -> None:
    base = pack(0, make_tensors()[1], 100)[0]
    down, up = np.zeros((2, 5), np.float32), np.zeros((7, 2), np.float32)
    cases = {
        "'embed' lacks a factor": ([flat("embed" + DOWN, down)], {"embed": 1.0}),
        "'other.lora_down' adapts no tensor": ([flat("other" + DOWN, down), flat("other" + UP, up)], {}),
        r"\(7, 5\) cannot be added to by factors \(7, 2\) and \(1, 5\)": (
            [flat("embed" + DOWN, down[:1]), flat("embed" + UP, up)],
            {"embed": 1.0},
        ),
    }
    for message, (factors, scales) in cases.items():
        with pytest.raises(WeightError, match=message):
            pack_adapters(1, base, factors, scales, 1 << 20)
