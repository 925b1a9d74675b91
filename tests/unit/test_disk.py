"""A disk that refuses: what waits for it, how long, what is said, and that nothing is lost or written twice."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest

from jobs import space as space_module
from jobs.space import Space
from raypost.buffer.journal import BufferJournal
from raypost.buffer.replay_buffer import ReplayBuffer
from raypost.errors import CheckpointError
from raypost.faults import Incident
from raypost.files import disk, jsonl
from raypost.files.disk import Fsync, Patience, Syncing, named, patiently, probe, refusal
from raypost.files.jsonl import LineFile, read_lines
from raypost.ledger.journal import Journal
from raypost.ledger.ledger import Ledger
from raypost.types import Status, TaskLimits
from tests.unit.buffer_groups import counts, group, put

FULL = OSError(errno.ENOSPC, "No space left on device")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Disk:
    """Stands in for `open` where lines are written: it takes `room` bytes and no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 10**9
        real = open

        def opened(path: Path, mode: str, **options: Any) -> Any:
            file = real(path, mode, **options)
            return _Full(file, self) if mode == "ab" else file

        monkeypatch.setattr(jsonl, "open", opened, raising=False)


class _Full:
    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def __enter__(self) -> _Full:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: memoryview) -> int:
        if not self._disk.room:
            raise FULL
        taken = data[: self._disk.room]
        self._disk.room -= len(taken)
        return int(self._file.write(taken))


def test_a_refusal_is_found_in_what_caused_an_error_and_nowhere_else() -> None:
    error = CheckpointError("cannot be written")
    error.__cause__ = FULL
    remote = RuntimeError("in an actor")
    remote.cause = error  # type: ignore[attr-defined]
    assert refusal(remote) is FULL and refusal(FULL) is FULL
    assert (
        refusal(OSError(errno.EIO, "broken")) is None
        and refusal(ValueError()) is None
        and refusal(None) is None
    )


def test_what_is_said_names_the_file_what_is_free_and_what_to_do(tmp_path: Path) -> None:
    text = str(named(FULL, tmp_path / "gone" / "ledger.jsonl"))
    for part in (
        "No space left on device",
        "MB free there",
        "free some",
        "same command",
        "gone/ledger.jsonl",
    ):
        assert part in text


def test_patience_ends_and_begins_again_once_it_was_written() -> None:
    clock = Clock()
    patience = Patience(10, clock)
    assert patience.is_left(FULL, Path("x"))
    clock.now = 9.9
    assert patience.is_left(FULL, Path("x"))
    patience.restored(Path("x"))
    clock.now = 19.0
    assert patience.is_left(FULL, Path("x"))
    clock.now = 29.1
    assert not patience.is_left(FULL, Path("x"))
    assert not Patience(10, clock).is_left(OSError(errno.EIO, "broken"), Path("x"))
    assert not Patience(0, clock).is_left(FULL, Path("x"))


def test_a_writer_tries_again_until_it_is_written_or_patience_ends(tmp_path: Path) -> None:
    clock, left = Clock(), [FULL, FULL]

    def write() -> str:
        if left:
            raise left.pop()
        return "written"

    def sleep(seconds: float) -> None:
        clock.now += seconds

    assert patiently(write, tmp_path, Patience(10, clock), sleep) == "written"
    left += [FULL] * 1000
    with pytest.raises(OSError, match="free some"):
        patiently(write, tmp_path, Patience(10, clock), sleep)
    assert len(left) == 1000 - 21


def test_lines_that_a_disk_refuses_wait_in_order_and_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_of_lines = Disk(monkeypatch)
    file = LineFile(tmp_path / "lines", patience_s=60)
    file.append(['{"n": 0}'])
    disk_of_lines.room = 5
    for n in (1, 2, 3):
        file.append([f'{{"n": {n}}}'])
    assert [line["n"] for line in read_lines(tmp_path / "lines")] == [0]
    with pytest.raises(OSError, match="free some"):
        file.append(['{"n": 4}'], now=True)
    disk_of_lines.room = 10**9
    file.append(['{"n": 5}'])
    assert [line["n"] for line in read_lines(tmp_path / "lines")] == [0, 1, 2, 3, 5]


def test_lines_without_patience_left_raise_and_name_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_of_lines = Disk(monkeypatch)
    disk_of_lines.room = 0
    with pytest.raises(OSError, match=r"MB free there.*free some.*metrics\.jsonl"):
        LineFile(tmp_path / "metrics.jsonl").append(["{}"])
    clock = Clock()
    file = LineFile(tmp_path / "metrics.jsonl", patience_s=60)
    file._patience = Patience(60, clock)
    file.append(["{}"])
    clock.now = 61.0
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        file.append(["{}"])


def test_a_checkpoint_does_not_name_lines_that_still_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_of_lines = Disk(monkeypatch)
    journal = Journal(tmp_path / "j", patience_s=60)
    disk_of_lines.room = 0
    journal.append({"time": 0, "event": "note"}, 0.0)
    journal.flush()
    with pytest.raises(OSError, match="No space"):
        journal.sync()
    disk_of_lines.room = 10**9
    assert journal.sync() == (tmp_path / "j").stat().st_size > 0


def test_a_snapshot_that_a_disk_refuses_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypost.ledger.journal.TAIL_BYTES", 1)
    ledger = Ledger(tmp_path / "ledger.jsonl", patience_s=60)
    ledger.sampled(("sums", 0))
    ledger.dropped(("sums", 0), Status.FAILED)
    with monkeypatch.context() as patch:
        patch.setattr("raypost.ledger.closed.os.write", _refuse)
        ledger.flush()
    ledger.flush()
    (snapshot,) = read_lines(tmp_path / "ledger.jsonl")
    assert snapshot["closed"][0] == 1


def _refuse(*_: object) -> int:
    raise FULL


def test_a_put_waits_for_the_disk_of_its_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 9: the bound of a disk pushes back on production."""
    monkeypatch.setattr(disk, "RETRY_S", 0.01)
    journal = BufferJournal(tmp_path / "buffer", "first", patience_s=30)
    buffer = ReplayBuffer({"default": TaskLimits(None)}, journal=journal)
    put(buffer, group(0, [0]))
    size = max(path.stat().st_size for path in (tmp_path / "buffer").iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    lifted = threading.Event()

    def lift() -> None:
        lifted.set()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))
    timer = threading.Timer(0.1, lift)
    timer.start()
    try:
        put(buffer, group(1, [0] * 200))
    finally:
        timer.join(120)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert lifted.is_set() and counts(buffer) == {Status.COMPLETED: 2}
    journal.close()
    again = BufferJournal(tmp_path / "buffer", "first")
    assert counts(ReplayBuffer({"default": TaskLimits(None)}, journal=again)) == {Status.COMPLETED: 2}
    again.close()


def test_a_folder_is_looked_at_without_leaving_anything(tmp_path: Path) -> None:
    assert probe(tmp_path) is None and list(tmp_path.iterdir()) == []
    assert "gone" in str(probe(tmp_path / "gone"))


async def test_the_driver_says_when_it_waits_and_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    told: list[tuple[Incident, dict[str, Any]]] = []
    answers: list[OSError | None] = [None, FULL, FULL, None]

    async def tell(incident: Incident, **fields: Any) -> None:
        told.append((incident, fields))

    monkeypatch.setattr(space_module, "probe", lambda _: answers.pop(0) if answers else None)
    monkeypatch.setattr(space_module, "PROBE_S", 0.001)
    monkeypatch.setattr(space_module, "RETRY_S", 0.001)
    watching = asyncio.create_task(Space(tmp_path, 60, said.append, tell).watch())
    async with asyncio.timeout(10):
        while not told:
            await asyncio.sleep(0.001)
    watching.cancel()
    assert "production waits for its disk, up to 60 s: [Errno 28]" in said[0] and "goes on" in said[1]
    assert told[0][0] is Incident.DISK_REFUSED and "No space" in told[0][1]["cause"]


@pytest.mark.parametrize(("mode", "expected"), [("off", 0), ("interval", 2), ("every", 6)])
def test_what_is_written_goes_to_the_disk_itself_as_often_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Fsync, expected: int
) -> None:
    clock, synced = Clock(), [0]

    def fsync(_: int) -> None:
        synced[0] += 1

    monkeypatch.setattr(os, "fsync", fsync)
    file = LineFile(tmp_path / "lines")
    file._syncing = Syncing(mode, clock)
    for _ in range(6):
        clock.now += 0.4
        file.append(["{}"])
    assert synced[0] == expected


def test_a_buffer_syncs_what_a_record_names_before_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink().name))
    journal = BufferJournal(tmp_path / "buffer", "first", fsync="every")
    put(ReplayBuffer({"default": TaskLimits(None)}, journal=journal), group(0, [0]))
    assert synced == ["data-00000001", "log"]
    journal.close()
