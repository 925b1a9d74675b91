"""The journal of the buffer: what comes back after a death, what is refused, how big it gets."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raypost.buffer.journal_files as module
from raypost.buffer.encoding import equal_plain
from raypost.buffer.journal import BufferJournal
from raypost.buffer.replay_buffer import ReplayBuffer
from raypost.errors import BufferCutError, CheckpointError, LedgerError
from raypost.types import BufferBounds, OpenLease, Status, TaskLimits
from raypost.types.packed import pack_groups, unpack_groups
from tests.unit.buffer_groups import counts, group, ids, lease_ids, now, only, put, same_bytes

LIMITS = {"default": TaskLimits(2, retry=True), "other": TaskLimits(1)}


class Host:
    """Buffers over one folder, one after the other, as an actor that is restarted has them."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.options = folder, options
        self.start()

    def start(self, attempt: str = "first", limits: dict[str, TaskLimits] | None = None) -> None:
        self.journal = BufferJournal(self.folder, attempt, **self.options)
        try:
            self.buffer = ReplayBuffer(limits or LIMITS, BufferBounds(max_groups=50), journal=self.journal)
        except CheckpointError:
            self.die()
            raise

    def die(self) -> None:
        self.journal.close()

    def restart(self) -> None:
        self.die()
        self.start()

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def data(self) -> list[Path]:
        return sorted(self.folder.glob("data-*"))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path / "buffer")
    yield made
    made.die()


def fill(host: Host) -> None:
    """A group in every place there is."""
    put(host.buffer, *(group(n, [0], [0, 1]) for n in range(4)), train_step=2)
    put(host.buffer, *(group(n, [1], status=Status.ABORTED) for n in range(4, 7)), train_step=2)
    lease_ids(host.buffer, 1, default=1)
    now(host.buffer.acknowledge(1))
    lease_ids(host.buffer, 2, default=1)
    now(host.buffer.pop("default", [Status.ABORTED], 2, 3))
    now(host.buffer.drop([("default", 4)]))
    now(host.buffer.refresh(3, 8))


def test_everything_is_as_it_was_after_a_death(host: Host) -> None:
    fill(host)
    before, state = now(host.buffer.counts()), now(host.buffer.state_dict())
    lease, report = now(host.buffer.lease(2, {})), now(host.buffer.refresh(3, 8))
    host.restart()
    assert host.journal.recovered
    after, again = now(host.buffer.state_dict()), now(host.buffer.lease(2, {}))
    assert now(host.buffer.counts()) == before
    assert equal_plain(after, state)
    assert lease is not None and again is not None and same_bytes(lease.batch, again.batch)
    assert len(report) == 2 and now(host.buffer.refresh(3, 8)) == report
    assert ids(now(host.buffer.pop("default", [Status.ABORTED], 2, 3))) == [5]
    contents = now(host.buffer.reclaim(9))
    assert ("default", 5) in contents.groups and contents.leases[2].keys == lease.keys
    host.restart()
    assert now(host.buffer.reclaim(9)) == contents
    assert ids(now(host.buffer.pop("default", [Status.ABORTED], 9, 10))) == [5, 6]


def test_a_former_holder_is_refused_after_a_death_too(host: Host) -> None:
    put(host.buffer, group(0, [0], status=Status.ABORTED))
    now(host.buffer.pop("default", [Status.ABORTED], 1, 5))
    now(host.buffer.reclaim(100))
    host.restart()
    for rewritten in (False, True):
        if rewritten:
            host.journal.rewrite_log()
            host.restart()
        with pytest.raises(LedgerError, match="replaced"):
            now(host.buffer.put(pack_groups([group(0, [0])]), 1, 5))
    assert ids(now(host.buffer.pop("default", [Status.ABORTED], 1, 101))) == [0]


def test_trained_groups_stay_trained_after_a_death(host: Host) -> None:
    fill(host)
    host.restart()
    put(host.buffer, group(0, [1]), train_step=2)
    assert Status.COMPLETED not in counts(host.buffer)


def test_fullness_survives_a_death_between_the_marks(host: Host) -> None:
    put(host.buffer, *(group(n, [0]) for n in range(50)))
    lease_ids(host.buffer, 1, default=5)
    now(host.buffer.acknowledge(1))
    host.restart()
    assert now(host.buffer.counts()).is_full


def test_another_attempt_begins_anew_and_the_old_files_are_gone(host: Host) -> None:
    fill(host)
    old = host.data()
    host.die()
    host.start("second")
    assert not host.journal.recovered and counts(host.buffer) == {}
    put(host.buffer, group(0, [0]))
    host.die()
    host.start("second")
    assert counts(host.buffer) == {Status.COMPLETED: 1}
    assert len(host.data()) <= 2 and host.journal.nbytes < 2000 and old


def test_restored_checkpoint_replaces_the_journal(host: Host) -> None:
    saved = ReplayBuffer(LIMITS)
    put(saved, group(1, [1]), group(2, [1], status=Status.ABORTED), train_step=2)
    lease_ids(saved, 2, default=1)
    state = now(saved.state_dict())
    now(host.buffer.acknowledge(1))
    for _ in range(2):
        now(host.buffer.load_state_dict(state))
        host.restart()
    assert counts(host.buffer) == {Status.COMPLETED: 1, Status.ABORTED: 1}
    put(host.buffer, group(3, [1]), train_step=2)
    host.restart()
    with pytest.raises(CheckpointError, match="restored over"):
        now(host.buffer.load_state_dict(state))
    assert lease_ids(host.buffer, 2, default=2) == [1, 3]


@pytest.mark.parametrize("kept", [0, 3, 16, 20, -1])
def test_record_that_was_cut_off_is_removed_and_said(
    host: Host, caplog: pytest.LogCaptureFixture, kept: int
) -> None:
    put(host.buffer, group(0, [0]))
    whole = host.log.stat().st_size
    put(host.buffer, group(1, [0]))
    length = host.log.stat().st_size - whole
    host.die()
    os.truncate(host.log, whole + kept % length)
    with caplog.at_level(logging.WARNING):
        host.start()
    assert ("unfinished record" in caplog.text) == (kept != 0)
    assert counts(host.buffer) == {Status.COMPLETED: 1}
    # Shorter than what was cut off.
    now(host.buffer.acknowledge(1))
    host.restart()
    put(host.buffer, group(1, [0]), group(2, [0]))
    host.restart()
    assert lease_ids(host.buffer, 2, default=3) == [0, 1, 2]


def test_data_without_a_record_is_ignored(host: Host) -> None:
    put(host.buffer, group(0, [0]))
    whole = host.log.stat().st_size
    put(host.buffer, group(1, [0] * 99))
    host.die()
    os.truncate(host.log, whole)
    host.start()
    put(host.buffer, group(1, [0, 0]))
    host.restart()
    assert lease_ids(host.buffer, 1, default=2) == [0, 1]


@pytest.mark.parametrize(
    "damaged",
    [b"", b"\0", b"\xff" * 15, b"\xff" * 9000, b"{}", pickle.dumps(print), b"folder", b"flip", b"cut"],
)
def test_another_attempt_begins_anew_whatever_the_folder_holds(host: Host, damaged: bytes) -> None:
    fill(host)
    host.die()
    if damaged == b"flip":
        for path in (host.log, *host.data()):
            damage(path, 30)
    elif damaged == b"cut":
        os.truncate(host.log, host.log.stat().st_size // 2)
    elif damaged == b"folder":
        for path in (host.log, *host.data()):
            path.unlink()
            (path / "below").mkdir(parents=True)
    else:
        host.log.write_bytes(damaged)
        host.data()[0].write_bytes(damaged)
    host.start("second")
    assert not host.journal.recovered and counts(host.buffer) == {}
    put(host.buffer, group(0, [0]))
    host.die()
    host.start("second")
    assert counts(host.buffer) == {Status.COMPLETED: 1}


class Evil:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("attempt", ["first", "second"])
@pytest.mark.parametrize("name", ["log", "data-00000001", "spare", "lock"])
def test_a_hostile_pickle_in_any_file_of_the_journal_runs_nothing(
    host: Host, tmp_path: Path, name: str, attempt: str
) -> None:
    fill(host)
    host.die()
    (host.folder / name).write_bytes(pickle.dumps(Evil(tmp_path / "was-here")))
    with contextlib.suppress(CheckpointError):
        host.start(attempt)
        for one in host.buffer.state.groups:
            unpack_groups(host.buffer.groups.view(one))
    assert not (tmp_path / "was-here").exists()


@pytest.mark.parametrize("at", [120, 300, -1])
def test_a_log_is_cut_at_its_damage_and_the_buffer_answers_once_it_is_mended(host: Host, at: int) -> None:
    for n in range(3):
        put(host.buffer, group(n, [0]))
    host.die()
    damage(host.log, at)
    for _ in range(2):  # it dies again before it was mended
        host.start()
        with pytest.raises(BufferCutError, match=r"log, and \d+ bytes from there on are lost"):
            put(host.buffer, group(3, [0]))
        for asked in (
            host.buffer.refresh(1),
            host.buffer.pop("default", (Status.COMPLETED,), 1, 1),
            host.buffer.lease(1, {"default": 1}),
            host.buffer.acknowledge(1),
            host.buffer.counts(),
            host.buffer.state_dict(),
        ):
            with pytest.raises(BufferCutError):
                now(asked)
        host.die()
    host.start()
    contents = now(host.buffer.reclaim(9))
    assert len(contents.groups) < 3 and "log" in contents.cut
    refuses(host, LedgerError, "replaced", claim=8)
    mended = now(host.buffer.mend(9, [("default", 0), ("default", 1)], {}, 0))
    assert set(mended.groups) == set(contents.groups) & {("default", 0), ("default", 1)}
    assert now(host.buffer.mend(9, [], {}, 0)) == mended, "repeated, it changes nothing"
    host.restart()
    put(host.buffer, group(2, [0]))
    assert counts(host.buffer) == {Status.COMPLETED: len(mended.groups) + 1}


def refuses(host: Host, error: type[Exception], words: str, *, claim: int) -> None:
    with pytest.raises(error, match=words):
        now(host.buffer.mend(claim, [], {}, 0))


@pytest.mark.parametrize("at", [0, 100, -60, None])
def test_groups_whose_data_is_damaged_are_gone_and_the_others_stay(host: Host, at: int | None) -> None:
    put(host.buffer, group(0, [0] * 20), group(1, [0] * 20))
    lease_ids(host.buffer, 1, default=1)
    host.restart()  # so that the next groups are in another file
    put(host.buffer, group(2, [0] * 20), group(3, [0] * 20))
    host.die()
    if at is None:
        host.data()[0].unlink()
    else:
        damage(host.data()[0], at)
    host.start()
    contents = now(host.buffer.reclaim(9))
    assert set(contents.groups) == {("default", 2), ("default", 3)} and contents.leases == {}
    assert "data-00000001" in contents.cut
    now(host.buffer.mend(9, contents.groups, {}, 0))
    assert lease_ids(host.buffer, 1, default=2) == [2, 3]


def test_a_lease_that_was_cut_off_is_made_again_of_its_batch_or_its_groups_or_not_at_all(host: Host) -> None:
    put(host.buffer, *(group(n, [0]) for n in range(6)))
    batch = now(host.buffer.lease(1, {"default": 2}))
    assert batch is not None
    host.buffer.lose("a test says so")
    for _ in range(2):
        host.restart()
        whole, part = OpenLease((("default", 2), ("default", 3)), (0, 0)), OpenLease((("default", 9),), (0,))
        living = [("default", n) for n in range(6)]
        other = OpenLease((("default", 4),), (0,))  # what was kept of its step is another batch
        leases = {1: OpenLease(batch.keys, batch.staleness), 2: whole, 3: part, 4: other}
        now(host.buffer.mend(9, living, leases, 0, {1: batch.batch, 4: batch.batch}))
    again = now(host.buffer.lease(1, {}))
    assert again is not None and again.keys == batch.keys and same_bytes(again.batch, batch.batch)
    assert lease_ids(host.buffer, 2) == [2, 3] and now(host.buffer.lease(3, {})) is None
    assert lease_ids(host.buffer, 4) == [4]
    assert counts(host.buffer) == {Status.COMPLETED: 1, Status.ARCHIVED: 5}, "each is in one lease"
    assert now(host.buffer.acknowledge(3)) == (*batch.keys, *whole.keys)


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x41
    path.write_bytes(data)


def test_journal_of_other_tasks_is_refused(host: Host) -> None:
    put(host.buffer, group(0, [0]))
    host.die()
    with pytest.raises(CheckpointError, match="has tasks"):
        host.start(limits={"x": TaskLimits(1)})


def test_two_writers_never_share_a_folder(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.1)
    with pytest.raises(CheckpointError, match="another process"):
        BufferJournal(host.folder, "first")


@pytest.mark.parametrize("which", ["log", "data"])
def test_a_disk_that_refuses_in_the_middle_of_a_write_changes_nothing(host: Host, which: str) -> None:
    put(host.buffer, *(group(n, [0] * 40) for n in range(8)))
    sizes = {path: path.stat().st_size for path in host.folder.iterdir()}
    target = host.log if which == "log" else host.data()[-1]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[target] + 20, hard))
    try:
        with pytest.raises(CheckpointError, match=f"{target.name} cannot be written"):
            if which == "log":
                lease_ids(host.buffer, 1, default=8)
            else:
                put(host.buffer, group(9, [0]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert host.log.stat().st_size == sizes[host.log] and counts(host.buffer) == {Status.COMPLETED: 8}
    put(host.buffer, group(9, [0]))
    host.restart()
    assert counts(host.buffer) == {Status.COMPLETED: 9}


def test_disk_stays_bounded_while_groups_stream_through(tmp_path: Path) -> None:
    host = Host(tmp_path / "b", file_bytes=20_000, garbage_bytes=20_000, log_bytes=4000)
    sizes = []
    for step in range(1, 300):
        put(host.buffer, *(group(4 * step + n, [step - 1] * 20) for n in range(4)), train_step=step)
        assert len(lease_ids(host.buffer, step, default=4)) == 4
        now(host.buffer.acknowledge(step))
        sizes.append(host.journal.nbytes)
    assert max(sizes) < 80_000
    host.restart()
    assert counts(host.buffer) == {}
    host.die()


def test_what_lives_among_garbage_is_moved_and_survives(tmp_path: Path) -> None:
    """One group in eight stays for ever: no data file ever dies by itself."""
    limits = {"default": TaskLimits(None), "other": TaskLimits(None)}
    host = Host(tmp_path / "b", file_bytes=5000, garbage_bytes=5000, log_bytes=4000)
    host.die()
    host.start(limits=limits)
    for step in range(1, 100):
        put(host.buffer, *(group(8 * step + n, [step]) for n in range(7)), group(step, [step], task="other"))
        assert len(lease_ids(host.buffer, step, default=7)) == 7
        now(host.buffer.acknowledge(step))
        assert host.journal.nbytes < 2.5 * host.journal.live_bytes + 25_000
    host.die()
    host.start(limits=limits)
    assert counts(host.buffer, "other") == {Status.COMPLETED: 99}
    assert lease_ids(host.buffer, 100, other=99) == list(range(1, 100))
    host.die()


def test_a_death_while_the_log_is_rewritten_leaves_the_old_one(host: Host, tmp_path: Path) -> None:
    fill(host)
    expected = now(host.buffer.counts())
    copy = tmp_path / "copy"
    shutil.copytree(host.folder, copy)
    (copy / "log.tmp").write_bytes(b"half")
    (copy / "data-00000099").write_bytes(b"half a block")
    other = Host(copy)
    assert now(other.buffer.counts()) == expected and len(other.data()) == 2
    other.die()


def test_last_claim_survives_a_rewritten_log_though_its_groups_are_back(host: Host) -> None:
    put(host.buffer, group(0, [0], status=Status.ABORTED))
    now(host.buffer.pop("default", [Status.ABORTED], 1, 5))
    put(host.buffer, group(0, [0], status=Status.ABORTED))
    host.journal.rewrite_log()
    host.restart()
    with pytest.raises(LedgerError, match="claim 4 came after claim 5"):
        now(host.buffer.pop("default", [Status.ABORTED], 1, 4))


def test_rewritten_log_says_everything(host: Host) -> None:
    fill(host)
    host.journal.append({"full": True})
    host.restart()
    expected, state = now(host.buffer.counts()), host.buffer.state
    assert state.full and state.out and state.leases and state.expired[0]
    host.journal.rewrite_log()
    host.restart()
    assert now(host.buffer.counts()) == expected
    for name in (
        "groups",
        "out",
        "claim",
        "fence",
        "leases",
        "leased",
        "acknowledged",
        "expired",
        "full",
        "next",
        "restored",
    ):
        assert getattr(host.buffer.state, name) == getattr(state, name), name
    assert {task: one.ranges() for task, one in host.buffer.state.trained.items()} == {"default": [[0, 1]]}


def test_expired_members_are_reset_on_disk_too(host: Host) -> None:
    put(host.buffer, group(0, [0, 0], [1]), train_step=2)
    assert len(now(host.buffer.refresh(3))) == 1
    host.restart()
    old, young = only(now(host.buffer.pop("default", [Status.EXPIRED], 1, 1))).states
    assert (old.num_tokens, young.num_tokens) == (0, 1)
