"""Batches kept since the last checkpoint: there as a whole or not at all, and bounded by it."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest

from raypost.buffer.encoding import to_buffers
from raypost.buffer.kept import KeptBatches
from raypost.errors import CheckpointError
from raypost.types.packed import PackedGroups, pack_groups
from tests.unit.buffer_groups import group


def batch(step: int) -> PackedGroups:
    return pack_groups([group(10 * step + n, [step, step], [step]) for n in range(3)])


def raw(packed: PackedGroups) -> bytes:
    return b"".join(to_buffers(packed))


def test_what_was_kept_is_read_back_to_the_byte_also_by_the_next_process(tmp_path: Path) -> None:
    kept = KeptBatches(tmp_path / "batches")
    for step in (1, 2):
        kept.keep(step, batch(step))
    assert all(kept.settle(step) for step in (1, 2))
    again = KeptBatches(tmp_path / "batches")
    assert again.steps() == [1, 2]
    assert [raw(again.read(step)) for step in (1, 2)] == [raw(batch(step)) for step in (1, 2)]


def test_a_batch_is_there_as_soon_as_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, go = KeptBatches(tmp_path), Event()
    replace = Path.replace

    def slowly(self: Path, target: Path) -> Path:
        go.wait(120)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", slowly)
    kept.keep(1, batch(1))
    assert kept.steps() == [], "a reader never sees half of one"
    go.set()
    assert raw(kept.read(1)) == raw(batch(1))


def test_a_checkpoint_ends_all_up_to_its_step_and_another_attempt_all(tmp_path: Path) -> None:
    kept = KeptBatches(tmp_path)
    for step in range(1, 6):
        kept.keep(step, batch(step))
        kept.settle(step)
    kept.forget(3)
    assert kept.steps() == [4, 5]
    kept.forget(3)
    kept.keep(4, batch(1))
    assert raw(kept.read(4)) == raw(batch(4)), "asked for again, a batch is what it was"
    (tmp_path / "step-00000006.tmp").write_bytes(b"half of a batch")
    kept.clear()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_batch_is_never_trained(tmp_path: Path, damage: str) -> None:
    kept = KeptBatches(tmp_path)
    kept.keep(7, batch(7))
    kept.settle(7)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data[:-9] if damage == "cut" else data)
    with pytest.raises(CheckpointError, match=r"batch of step 7 .*step-00000007.*same command"):
        kept.read(7)


def test_a_batch_that_cannot_be_written_is_said_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "batches").write_text("a file where the folder should be")
    kept = KeptBatches(tmp_path / "batches")
    kept.keep(1, batch(1))
    assert not kept.settle(1)
    assert "the batch of step 1 is not kept" in caplog.text
