"""Only what changed travels, and whoever applies it holds what the trainer has, bit for bit, or is refused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypost.errors import WeightError
from raypost.weights.delta import DeltaPacker, block_of
from raypost.weights.manifest import Bytes, Manifest, pack, verify, views

NAMES = (
    "embed.weight",
    "layers.0.attn.q.weight",
    "layers.0.attn.k.weight",
    "layers.0.norm.weight",
    "layers.1.attn.q.weight",
    "norm.weight",
)
BUCKET_BYTES = 256
Values = dict[str, int]


def tensors(values: Values) -> Iterator[tuple[str, Bytes, str, tuple[int, ...]]]:
    for number, (name, value) in enumerate(values.items()):
        data = np.full(16 * (1 + number), value % 251, np.uint8)
        yield name, data, "float32", (data.nbytes // 4,)


class Worker:
    """An engine: it holds tensors, and takes a version's buckets or only those that it lacks."""

    def __init__(self) -> None:
        self.held: Manifest | None = None
        self.model: dict[str, Bytes] = {}

    def sync(self, manifest: Manifest, buckets: list[Bytes]) -> int:
        """Take what `spares` asks for; return how many bytes came."""
        return self.apply(manifest, buckets, manifest.spares(self.held))

    def apply(self, manifest: Manifest, buckets: list[Bytes], spared: int) -> int:
        """Take all but the first buckets."""
        contents = {} if self.held is None else {one.name: one.content for one in self.held.tensors}
        if name := manifest.changed_in(spared, contents):
            raise WeightError(f"without {name}")
        here = [np.zeros(0, np.uint8)] * spared + buckets[spared:]
        verify(manifest, here, spared)
        self.model |= {entry.name: data.copy() for entry, data in views(manifest, here, spared)}
        self.held = manifest
        return sum(bucket.nbytes for bucket in here)

    def assert_holds(self, values: Values) -> None:
        expected = {name: data for name, data, _, _ in tensors(values)}
        assert self.model.keys() == expected.keys()
        assert all(np.array_equal(self.model[name], expected[name]) for name in expected)


def moved(values: Values, *names: str) -> Values:
    return {name: value + (name in names) for name, value in values.items()}


def packer() -> DeltaPacker[Bytes]:
    return DeltaPacker(BUCKET_BYTES, np.copy)


def resting_of(manifest: Manifest) -> list[str]:
    return [entry.name for entry in manifest.tensors if entry.bucket < manifest.base_buckets]


def start(deltas: DeltaPacker[Bytes], *moving: str) -> Values:
    """Pack two versions, of which the second tells what rests."""
    values: Values = dict.fromkeys(NAMES, 0)
    for version in range(2):
        manifest, _ = deltas.pack(version, tensors(values))
        assert manifest.base_buckets == 0
        values = moved(values, *moving)
    deltas.pack(1, tensors(values))
    return values


def test_what_rests_is_packed_once_and_does_not_travel_again() -> None:
    put: list[int] = []

    def give(bucket: Bytes) -> Bytes:
        put.append(bucket.nbytes)
        return bucket.copy()

    deltas, worker = DeltaPacker(BUCKET_BYTES, give), Worker()
    values: Values = dict.fromkeys(NAMES, 0)
    whole = sum(data.nbytes for _, data, _, _ in tensors(values))
    sent, packed = [], []
    for version in range(5):
        put.clear()
        manifest, buckets = deltas.pack(version, tensors(values))
        sent.append(worker.sync(manifest, buckets))
        packed.append(sum(put))
        worker.assert_holds(values)
        assert manifest.digest == pack(0, tensors(values), 1 << 20)[0].digest
        assert Worker().sync(manifest, buckets) >= whole
        values = moved(values, "layers.1.attn.q.weight")
    assert min(sent[:2]) >= whole and sent[2:] == [80, 80, 80]
    assert packed[2] >= whole and packed[3:] == [80, 80]


def test_a_block_travels_whole() -> None:
    deltas = packer()
    values = start(deltas, "layers.0.attn.k.weight")
    manifest, buckets = deltas.pack(2, tensors(values))
    travelling = [entry.name for entry, _ in views(manifest, buckets, manifest.base_buckets)]
    assert travelling == ["layers.0.attn.q.weight", "layers.0.attn.k.weight"]
    assert {block_of(name) for name in travelling} == {"layers.0.attn"}


@pytest.mark.parametrize(
    ("late", "is_whole"),
    [
        pytest.param("embed.weight", False, id="alone in its block"),
        pytest.param("layers.0.attn.q.weight", False, id="the first of its block"),
        pytest.param("layers.0.attn.k.weight", True, id="after one that was taken to rest"),
    ],
)
def test_what_moves_after_all_is_sent_with_its_block_and_rests_no_more(late: str, is_whole: bool) -> None:
    deltas, worker = packer(), Worker()
    values = start(deltas, "norm.weight")
    for version in (2, 3):
        worker.sync(*deltas.pack(version, tensors(values)))
        values = moved(values, "norm.weight")
    values = moved(values, late)
    manifest, buckets = deltas.pack(4, tensors(values))
    assert (manifest.base_buckets == 0) is is_whole
    worker.sync(manifest, buckets)
    worker.assert_holds(values)
    for version in (5, 6):
        values = moved(values, "norm.weight")
        manifest, buckets = deltas.pack(version, tensors(values))
        travelling = {entry.name for entry, _ in views(manifest, buckets, manifest.base_buckets)}
        assert travelling == {"norm.weight", *(name for name in NAMES if block_of(name) == block_of(late))}
        assert all(block_of(name) != block_of(late) for name in resting_of(manifest))
        worker.sync(manifest, buckets)
        worker.assert_holds(values)


def test_a_delta_for_another_base_is_refused_with_the_tensors_name() -> None:
    deltas, other = packer(), packer()
    values = start(deltas, "norm.weight")
    strange = moved(values, "layers.0.norm.weight")
    for version in range(3):
        worker = Worker()
        worker.sync(*other.pack(version, tensors(strange)))
    manifest, buckets = deltas.pack(3, tensors(values))
    assert manifest.base_buckets and manifest.spares(worker.held) == 0
    with pytest.raises(WeightError, match=r"without layers\.0\.norm\.weight"):
        worker.apply(manifest, buckets, manifest.base_buckets)
    worker.assert_holds(strange)
    worker.sync(manifest, buckets)
    worker.assert_holds(values)


def test_a_flipped_bit_of_what_travels_is_refused_by_name() -> None:
    deltas, worker = packer(), Worker()
    values = start(deltas, "norm.weight")
    worker.sync(*deltas.pack(2, tensors(values)))
    manifest, buckets = deltas.pack(3, tensors(moved(values, "norm.weight")))
    buckets[-1][3] ^= 1
    with pytest.raises(WeightError, match=r"tensor 'norm\.weight'"):
        worker.sync(manifest, buckets)


def test_weights_are_never_whole_in_the_packers_memory() -> None:
    """Each bucket is filled in the memory of the one before, and a larger tensor is given as it is."""
    seen: list[Bytes] = []
    large = np.ones(3 * BUCKET_BYTES, np.uint8)
    given = [*tensors(dict.fromkeys(NAMES, 0)), ("large", large, "uint8", (large.nbytes,))]
    deltas = DeltaPacker(BUCKET_BYTES, seen.append)
    for version in range(2):
        deltas.pack(version, given)
    alone = [bucket for bucket in seen if bucket.nbytes > BUCKET_BYTES]
    assert len(alone) == 2 and all(np.shares_memory(bucket, large) for bucket in alone)
    filled = [bucket for bucket in seen if bucket.nbytes <= BUCKET_BYTES]
    assert len(filled) >= 4 and all(np.shares_memory(bucket, filled[0]) for bucket in filled)


Changes = list[tuple[frozenset[str], frozenset[int]]]


@given(
    st.lists(
        st.tuples(st.frozensets(st.sampled_from(NAMES), max_size=3), st.frozensets(st.integers(0, 2))),
        min_size=3,
        max_size=9,
    )
)
def test_whatever_changes_and_whoever_misses_a_version_all_end_with_the_trainers_bytes(
    changes: Changes,
) -> None:
    """Per version: what moves, and which of three workers take part in its sync; a new one joins at each."""
    deltas, workers = packer(), [Worker() for _ in range(3)]
    values: Values = dict.fromkeys(NAMES, 0)
    for version, (moving, present) in enumerate(changes):
        values = moved(values, *moving)
        manifest, buckets = deltas.pack(version, tensors(values))
        assert manifest.digest == pack(0, tensors(values), 1 << 20)[0].digest
        for worker in (*(workers[number] for number in present), Worker()):
            worker.sync(manifest, buckets)
            worker.assert_holds(values)
