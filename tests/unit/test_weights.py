"""Weights survive the way through buckets, and damage is named."""

from dataclasses import replace

import numpy as np
import pytest

from raypost.errors import WeightError
from raypost.weights import ALIGNMENT, pack, verify, views


def make_tensors(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"embed": (7, 5), "norm": (3,), "scalar": (), "head": (4, 2, 3), "empty": (0, 4)}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    flat = [(name, a.reshape(-1).view(np.uint8), "float32", a.shape) for name, a in arrays.items()]
    return arrays, flat


@pytest.mark.parametrize("bucket_bytes", [1, 64, 100, 200, 1 << 20])
def test_tensors_come_back_bit_for_bit_whatever_the_bucket_size(bucket_bytes):
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


def test_views_do_not_copy():
    manifest, buckets = pack(1, make_tensors()[1], 1 << 20)
    assert all(
        np.shares_memory(data, buckets[e.bucket]) for e, data in views(manifest, buckets) if data.nbytes
    )


def test_digest_ignores_version_and_layout_but_not_names_dtypes_shapes_or_bytes():
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


def test_one_flipped_bit_is_refused_with_the_tensors_name():
    manifest, buckets = pack(4, make_tensors()[1], 100)
    entry = next(e for e in manifest.tensors if e.name == "head")
    buckets[entry.bucket][entry.offset + 5] ^= 1
    with pytest.raises(WeightError, match="version 4: tensor 'head'"):
        verify(manifest, buckets)


def test_missing_bucket_and_forged_manifest_are_refused():
    manifest, buckets = pack(1, make_tensors()[1], 64)
    with pytest.raises(WeightError, match="buckets have"):
        verify(manifest, buckets[:-1])
    renamed = replace(manifest, tensors=(replace(manifest.tensors[0], name="x"), *manifest.tensors[1:]))
    with pytest.raises(WeightError, match="digest"):
        verify(renamed, buckets)


def test_repeated_name_empty_iterable_and_bad_bucket_size_are_refused():
    tensors = make_tensors()[1]
    with pytest.raises(WeightError, match="'embed' is published twice"):
        pack(1, [tensors[0], tensors[0]], 64)
    with pytest.raises(WeightError, match="no tensors"):
        pack(1, [], 64)
    with pytest.raises(ValueError, match="bucket_bytes must be >= 1, got 0"):
        pack(1, tensors, 0)


def test_noncontiguous_and_read_only_bytes_are_packed():
    data = np.arange(16, dtype=np.uint8)
    data.flags.writeable = False
    manifest, buckets = pack(1, [("half", data[::2], "uint8", (8,))], 64)
    assert np.array_equal(next(views(manifest, buckets))[1], data[::2])
