"""What comes to an engine's process is what was sent, on every transport, or is refused by name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import psutil
import pytest

from actors.rollout.staging import StagedVersion, Staging
from raypost.errors import TransportError, WeightError
from raypost.weights.group import BroadcastGroup, Host
from raypost.weights.manifest import DOWN, UP, Bytes, Manifest, pack, pack_adapters, verify, views
from raypost.weights.seats import Member, Seats

LONG_S = 30.0
NAMES = ("first", "second", "third", "fourth")


def version(number: int) -> tuple[Manifest, list[Bytes]]:
    """Four tensors of one shape in two buckets."""
    noise = np.random.default_rng(number)
    tensors = [(name, noise.integers(0, 256, 640, np.uint8), "float32", (160,)) for name in NAMES]
    return pack(number, tensors, bucket_bytes=1280)


class Memory:
    """Files of the same machine, as the rollout worker fills them."""

    def __init__(self, folder: Path, staging: list[Staging]) -> None:
        self.folder, self.staging = folder, staging

    def send(self, manifest: Manifest, buckets: list[Bytes], first: int = 0) -> list[str]:
        """Bring buckets to every process; what each has to say against them."""
        paths = []
        for number, bucket in enumerate(buckets[first:]):
            paths.append(str(self.folder / f"{manifest.version}-{number}"))
            bucket.tofile(paths[-1])
        problems = []
        for one in self.staging:
            with pipe() as (reader, answers):
                one.map(manifest, answers, paths)
                problems.append(reader.read().decode())
        return problems


class Group:
    """A broadcast group by gloo on this machine."""

    def __init__(self, folder: Path, staging: list[Staging]) -> None:
        self.staging = staging
        self.host = Host(
            "127.0.0.1", "gloo", LONG_S, [Member(f"r{i}", 0, "", 1) for i in range(len(staging))]
        )

    def send(self, manifest: Manifest, buckets: list[Bytes], first: int = 0) -> list[str]:
        """As by memory."""
        seats = Seats.decoded(
            self.host.seats.encoded().replace('"first_bucket": 0', f'"first_bucket": {first}')
        )
        readers = []
        for number, one in enumerate(self.staging):
            reader, writer = os.pipe()
            readers.append(os.fdopen(reader, "rb"))
            one.receive(manifest, os.fdopen(writer, "wb"), seats, seats.rank_of(f"r{number}", 0))
        for bucket in buckets[first:]:
            bucket.flags.writeable = False
            self.host.send(bucket)
        problems = []
        for answers in readers:
            with answers:
                problems.append(answers.read().decode())
        return problems


@contextmanager
def pipe() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as answers:
        yield answers, os.fdopen(writer, "wb")


Way = Memory | Group


@pytest.fixture(params=[Memory, Group])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Way:
    staging = [Staging(ThreadPoolExecutor(1), prepare=lambda manifest, buckets: None) for _ in range(2)]
    made: Way = request.param(tmp_path, staging)
    return made


def taken(staging: Staging, manifest: Manifest) -> StagedVersion:
    return staging.take(manifest.version, manifest.digest)


def load(way: Way, number: int) -> None:
    """Bring a version as it is, and take and release it."""
    manifest, buckets = version(number)
    assert way.send(manifest, buckets) == ["", ""]
    for staging in way.staging:
        staged = taken(staging, manifest)
        for (entry, found), (_, sent) in zip(
            views(manifest, staged.buckets), views(manifest, buckets), strict=True
        ):
            assert np.array_equal(found, sent), entry.name
        staging.give_up(staged)


def test_versions_come_as_they_were_sent_one_after_the_other(way: Way) -> None:
    for number in range(4):
        load(way, number)


def flip(buckets: list[Bytes]) -> list[Bytes]:
    buckets[1][700] ^= 1
    return buckets


Spoil = Callable[[list[Bytes]], list[Bytes]]


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        pytest.param(flip, "fourth", id="a bit flipped"),
        pytest.param(lambda buckets: buckets[::-1], "first", id="buckets swapped"),
        pytest.param(
            lambda buckets: [buckets[0], version(0)[1][1]], "third", id="a bucket of the former version"
        ),
        pytest.param(lambda buckets: [buckets[0], buckets[0]], "third", id="a bucket twice"),
    ],
)
def test_other_bytes_than_were_published_are_refused_with_the_tensors_name(
    way: Way, spoil: Spoil, named: str
) -> None:
    load(way, 0)
    manifest, buckets = version(1)
    for problem in way.send(manifest, spoil([bucket.copy() for bucket in buckets])):
        assert f"version 1: tensor '{named}'" in problem
    for staging in way.staging:
        with pytest.raises(WeightError, match=f"tensor '{named}'"):
            taken(staging, manifest)
    load(way, 2)


def test_a_bucket_that_was_left_out_is_refused(tmp_path: Path) -> None:
    way = Memory(tmp_path, [Staging(ThreadPoolExecutor(1), prepare=lambda manifest, buckets: None)])
    manifest, buckets = version(0)
    assert "buckets have (1280,) bytes" in way.send(manifest, buckets[:1])[0]


def test_nothing_but_the_version_that_was_brought_is_taken(way: Way) -> None:
    staging = way.staging[0]
    with pytest.raises(WeightError, match="no version is staged"):
        staging.take(0, "")
    manifest, buckets = version(0)
    way.send(manifest, buckets)
    with pytest.raises(WeightError, match="version 0 is staged, not version 1"):
        staging.take(1, manifest.digest)
    with pytest.raises(WeightError, match="version 0 is staged"):
        staging.take(0, "of other bytes")
    taken(staging, manifest)
    with pytest.raises(WeightError, match="no version is staged"):
        taken(staging, manifest)


def test_a_base_stays_and_factors_are_sent_alone(way: Way) -> None:
    base, kept = pack(0, [("w", np.arange(16, dtype=np.uint8), "float32", (2, 2))], 1 << 20)
    for number in range(3):
        factors = [
            (f"w{DOWN}", np.full(8, number, np.uint8), "float32", (1, 2)),
            (f"w{UP}", np.full(8, number, np.uint8), "float32", (2, 1)),
        ]
        manifest, buckets = pack_adapters(number, base, factors, {"w": 1.0}, 1 << 20)
        assert way.send(manifest, kept + buckets, first=1 if number else 0) == ["", ""]
        for staging in way.staging:
            staged = taken(staging, manifest)
            assert np.array_equal(staged.buckets[0], kept[0])
            staging.give_up(staged)


def test_a_base_that_is_not_here_is_asked_for(tmp_path: Path) -> None:
    way = Group(tmp_path, [Staging(ThreadPoolExecutor(1), prepare=lambda manifest, buckets: None)])
    seats = Seats.decoded(way.host.seats.encoded().replace('"first_bucket": 0', '"first_bucket": 1'))
    base, _ = version(0)
    for manifest in (base, replace(base, base="of adapters", base_buckets=1)):
        with pipe() as (_, answers), pytest.raises(WeightError, match="without its first 1 buckets"):
            way.staging[0].receive(manifest, answers, seats, 1)


def test_of_a_delta_only_what_changed_is_sent_verified_and_taken(way: Way) -> None:
    manifest, buckets = version(0)
    manifest = replace(manifest, base_buckets=1)
    assert way.send(manifest, buckets, first=1) == ["", ""]
    for staging in way.staging:
        staged = taken(staging, manifest)
        assert staged.absent == 1 and not len(staged.buckets[0])
        assert np.array_equal(staged.buckets[1], buckets[1])
        staging.give_up(staged)
    for problem in way.send(
        replace(manifest, version=1), flip([bucket.copy() for bucket in buckets]), first=1
    ):
        assert "version 1: tensor 'fourth'" in problem
    assert way.send(manifest, buckets) == ["", ""]
    assert taken(way.staging[0], manifest).absent == 0


def test_replicas_of_several_ranks_sit_beside_each_other_behind_the_trainer() -> None:
    host = Host("127.0.0.1", "gloo", LONG_S, [Member("a", 0, "", 2), Member("b", 3, "", 2)])
    seats = Seats.decoded(host.seats.encoded())
    assert seats == host.seats and seats.size == 5
    assert [seats.rank_of(worker, rank) for worker in "ab" for rank in (0, 1)] == [1, 2, 3, 4]


def test_who_waits_for_a_member_that_does_not_come_gives_up_in_time() -> None:
    host = Host("127.0.0.1", "gloo", 0.3, [Member("r0", 0, "", 1)])
    with pytest.raises(TransportError, match=r"rank 0 of 2 .* could not join"):
        host.send(np.zeros(8, np.uint8))


def test_who_waits_for_bytes_that_do_not_come_gives_up_in_time_and_says_so() -> None:
    host = Host("127.0.0.1", "gloo", 2.0, [Member("r0", 0, "", 1)])
    staging = Staging(ThreadPoolExecutor(1), prepare=lambda manifest, buckets: None)
    manifest, buckets = version(0)
    with pipe() as (reader, answers):
        staging.receive(manifest, answers, host.seats, 1)
        host.send(buckets[0])
        assert "rank 1 of 2" in reader.read().decode()
    with pytest.raises(TransportError):
        taken(staging, manifest)


def test_a_version_is_prepared_once_it_is_verified_and_before_it_counts_as_staged(way: Way) -> None:
    (manifest, buckets), prepared = version(0), list[tuple[int, Manifest]]()
    for place, staging in enumerate(way.staging):

        def prepare(sent: Manifest, given: list[Bytes], place: int = place) -> None:
            verify(sent, given)
            time.sleep(0.05)
            prepared.append((place, sent))

        staging._prepare = prepare
    assert way.send(manifest, buckets) == ["", ""]
    assert sorted(place for place, _ in prepared) == [0, 1]
    wrong = [bucket.copy() for bucket in buckets]
    wrong[0][3] ^= 1
    assert all(way.send(manifest, wrong)), "and nothing of wrong bytes is prepared"
    assert len(prepared) == 2


def test_a_sender_whose_receiver_is_gone_gives_up() -> None:
    host = Host("127.0.0.1", "gloo", 2.0, [Member("r0", 0, "", 1)])
    with ThreadPoolExecutor(1) as thread:
        data = np.zeros(1 << 22, np.uint8)
        received = thread.submit(lambda: BroadcastGroup(host.seats, 1).broadcast(data.copy()))
        host.send(data)
        received.result()
    with pytest.raises(TransportError, match=r"rank 0 of 2 .* failed"):
        host.send(data)


def test_sockets_listen_on_the_given_address_alone() -> None:
    before = {one.laddr for one in psutil.Process().net_connections("tcp")}
    host = Host("127.0.0.1", "gloo", LONG_S, [Member("r0", 0, "", 1)])
    with ThreadPoolExecutor(1) as thread:
        joined = thread.submit(BroadcastGroup, host.seats, 1)
        thread.submit(lambda: joined.result().broadcast(np.zeros(8, np.uint8)))
        host.send(np.zeros(8, np.uint8))
    made = [one for one in psutil.Process().net_connections("tcp") if one.laddr not in before]
    assert {one.laddr.ip for one in made if one.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
