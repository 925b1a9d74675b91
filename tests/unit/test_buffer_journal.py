"""The journal of the buffer: what comes back after a death, what is refused, how big it gets."""

from __future__ import annotations

import logging
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import raypost.buffer.journal as module
from raypost.buffer.encoding import equal_plain
from raypost.buffer.journal import BufferJournal
from raypost.buffer.replay_buffer import ReplayBuffer
from raypost.errors import CheckpointError, LedgerError
from raypost.protocols import BufferBounds, TaskLimits
from raypost.types import Status
from tests.unit.buffer_groups import counts, group, ids, lease_ids, now, only, put, same_bytes

LIMITS = {"default": TaskLimits(2, retry=True), "other": TaskLimits(1)}


class Host:
    """Buffers over one folder, one after the other, as an actor that is restarted has them."""

    def __init__(self, folder: Path, **options: int) -> None:
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
    assert now(host.buffer.reclaim()) == (("default", 5),)
    host.restart()
    assert now(host.buffer.reclaim()) == (("default", 5),)
    assert ids(now(host.buffer.pop("default", [Status.ABORTED], 9, 1))) == [5, 6]


def test_claims_begin_again_after_a_reclaim_and_a_death(host: Host) -> None:
    put(host.buffer, group(0, [0], status=Status.ABORTED))
    now(host.buffer.pop("default", [Status.ABORTED], 1, 5))
    now(host.buffer.reclaim())
    host.restart()
    assert ids(now(host.buffer.pop("default", [Status.ABORTED], 1, 1))) == [0]


def test_claims_begin_again_after_a_reclaim_that_had_nothing_to_take_back(host: Host) -> None:
    put(host.buffer, group(0, [0], status=Status.ABORTED))
    assert ids(now(host.buffer.pop("default", [Status.ABORTED], 1, 1))) == [0]
    now(host.buffer.drop([("default", 0)]))
    assert now(host.buffer.reclaim()) == ()
    host.restart()
    put(host.buffer, group(1, [0], status=Status.ABORTED))
    assert ids(now(host.buffer.pop("default", [Status.ABORTED], 1, 1))) == [1]


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


@pytest.mark.parametrize("at", [0, 5, 9, 20, 120, -1])
def test_damaged_log_is_refused_by_name(host: Host, at: int) -> None:
    for n in range(3):
        put(host.buffer, group(n, [0]))
    host.die()
    damage(host.log, at)
    with pytest.raises(CheckpointError, match="log"):
        host.start()


@pytest.mark.parametrize("at", [0, 100, -60])
def test_damaged_data_is_refused_by_name(host: Host, at: int) -> None:
    put(host.buffer, group(0, [0] * 20))
    host.die()
    damage(host.data()[-1], at)
    with pytest.raises(CheckpointError, match=r"data-0.*damaged"):
        host.start()


def test_missing_or_short_data_is_refused(host: Host) -> None:
    put(host.buffer, group(0, [0]))
    host.die()
    (path,) = host.data()
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(CheckpointError, match="ends after"):
        host.start()
    path.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        host.start()


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
        "reclaimed",
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
