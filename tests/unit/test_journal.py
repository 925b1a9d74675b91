"""The journal: nothing half written is read, and what a restore undid does not count."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypost.files import jsonl
from raypost.ledger.journal import FLUSH_LINES, FLUSH_S, Journal, JournalReader

ROOT = Path(__file__).resolve().parents[2]


def append(journal: Journal, *numbers: int, now_s: float = 0.0) -> None:
    for n in numbers:
        journal.append({"time": now_s, "event": "note", "n": n}, now_s)


def numbers(path: Path, void: bool = False) -> list[int]:
    return [fields["n"] for fields, _ in JournalReader(path).lines(void=void) if "n" in fields]


def written(path: Path) -> list[int]:
    return numbers(path) if path.exists() else []


def test_lines_do_not_pile_up_in_memory(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    append(journal, *range(FLUSH_LINES + 1))
    assert len(written(tmp_path / "j")) == FLUSH_LINES


def test_a_line_takes_with_it_those_that_waited_long(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    append(journal, 0, now_s=100.0)
    append(journal, 1, now_s=100.0 + FLUSH_S / 2)
    assert written(tmp_path / "j") == []
    append(journal, 2, now_s=100.0 + FLUSH_S)
    assert written(tmp_path / "j") == [0, 1, 2]
    append(journal, 3, now_s=200.0)
    append(journal, 4, now_s=150.0)  # the clock was set back
    assert written(tmp_path / "j") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("torn", [b"", b"{", b'{"time": 1, "event": "note", "n": 9}', b"x" * 200_000])
def test_a_torn_last_line_is_not_read_and_is_gone_before_the_next_one(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "j"
    first = Journal(path)
    append(first, 0, 1)
    first.flush()
    with open(path, "ab") as file:
        file.write(torn)
    assert numbers(path) == [0, 1]
    second = Journal(path)
    append(second, 2)
    second.flush()
    assert numbers(path) == [0, 1, 2]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_damaged_lines_in_the_middle_are_skipped_and_counted(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    append(journal, 0)
    journal.flush()
    with open(tmp_path / "j", "ab") as file:
        file.write(b'\0\0\0\n[1]\n{"event": 3}\n{"event": "note"}\n\xff\n')
    append(journal, 1)
    journal.flush()
    reader = JournalReader(tmp_path / "j")
    assert [fields["n"] for fields, _ in reader.lines()] == [0, 1]
    assert reader.num_damaged == 5


def test_a_full_disk_writes_nothing_by_half_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    append(journal, 0)
    journal.flush()

    class Full:
        """A file that takes three bytes and no more."""

        def __init__(self, *arguments: object, **options: object) -> None:
            self.file = open(path, "ab", buffering=0)  # noqa: SIM115  closed by __exit__
            self.left = 3

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def write(self, data: memoryview) -> int:
            if not self.left:
                raise OSError(28, "No space left on device")
            self.left = 0
            return self.file.write(data[:3])

    append(journal, 1)
    monkeypatch.setattr(jsonl, "open", Full, raising=False)
    with pytest.raises(OSError, match="No space"):
        journal.flush()
    monkeypatch.delattr(jsonl, "open")
    assert path.read_bytes().endswith(b"\n")
    append(journal, 2)
    journal.flush()
    assert numbers(path) == [0, 1, 2]


def test_a_kill_loses_no_line_that_was_flushed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from raypost.ledger.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for n in range(100): journal.append({'time': 0, 'event': 'note', 'n': n}, 0)\n"
        "journal.flush(); journal.append({'time': 0, 'event': 'note', 'n': 100}, 0)\n"
        "print('flushed', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "j")], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"flushed\n"
        process.kill()
        assert process.wait(120) == -signal.SIGKILL
    assert numbers(tmp_path / "j") == list(range(100))


@pytest.mark.no_cover  # other tests reach the same lines in a tenth of the time
def test_whoever_reads_while_it_is_written_sees_whole_lines_in_order(tmp_path: Path) -> None:
    path, stop = tmp_path / "j", threading.Event()
    journal = Journal(path)
    append(journal, 0)
    journal.flush()

    def write() -> None:
        for n in range(1, 5001):
            append(journal, n)
            if n % 7 == 0:
                journal.flush()
        journal.flush()
        stop.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = 0
    while not stop.is_set():
        reader = JournalReader(path)
        found = [fields["n"] for fields, _ in reader.lines()]
        assert found == list(range(len(found))) and len(found) >= seen
        assert reader.num_damaged == 0
        seen = len(found)
    thread.join(120)
    assert numbers(path) == list(range(5001))


def test_a_reader_sees_the_file_as_it_was_when_the_reader_was_made(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    append(journal, 0)
    journal.flush()
    reader = JournalReader(tmp_path / "j")
    append(journal, 1)
    journal.flush()
    assert [line.fields["n"] for line in reader.lines()] == [0]
    assert [line.fields["n"] for line in reader.lines(void=True)] == [0]


def test_memory_of_a_reader_does_not_grow_with_the_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    append(journal, *range(20_000))
    journal.flush()
    tracemalloc.start()
    try:
        assert sum(1 for _ in JournalReader(tmp_path / "j").lines()) == 20_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 500_000 < (tmp_path / "j").stat().st_size / 2


# ---------------------------------------------------------------- restores


def restart(journal: Journal, offset: int | None) -> None:
    """As a new process does: from a checkpoint, or anew."""
    event = {"event": "started"} if offset is None else {"event": "restored", "offset": offset}
    journal.append({"time": 0.0, **event}, 0.0)


def test_what_lies_between_a_checkpoint_and_its_restore_is_void(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    append(journal, 0, 1)
    offset = journal.sync()
    append(journal, 2, 3)
    restart(journal, offset)
    append(journal, 4)
    journal.flush()
    assert numbers(tmp_path / "j") == [0, 1, 4]
    reader = JournalReader(tmp_path / "j")
    assert [(line.fields["n"], line.void) for line in reader.lines(void=True) if "n" in line.fields] == [
        (0, False), (1, False), (2, True), (3, True), (4, False),
    ]  # fmt: skip


def test_a_run_that_began_anew_has_no_past(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    append(journal, 0, 1)
    restart(journal, None)
    append(journal, 2)
    journal.flush()
    assert numbers(tmp_path / "j") == [2]


def test_an_offset_beyond_the_file_is_its_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    append(journal, 0)
    restart(journal, 10**9)
    append(journal, 1)
    journal.flush()
    assert numbers(tmp_path / "j") == [0, 1]


@settings(deadline=None, max_examples=120)
@given(
    st.lists(st.one_of(st.just("write"), st.just("save"), st.integers(0, 5), st.just("anew")), max_size=25)
)
def test_the_history_is_that_of_the_checkpoints_that_were_restored(
    tmp_path_factory: pytest.TempPathFactory, script: list[str | int]
) -> None:
    """Any order of writing, saving and restoring any earlier checkpoint, also one of an undone branch."""
    path = tmp_path_factory.mktemp("journal") / "j"
    journal, history, saved = Journal(path), [], []
    for n, action in enumerate(script):
        if action == "write":
            append(journal, n)
            history.append(n)
        elif action == "save":
            saved.append((journal.sync(), list(history)))
        elif action == "anew":
            journal.flush()
            journal, history = Journal(path), []
            restart(journal, None)
        elif saved:
            journal.flush()
            offset, kept = saved[int(action) % len(saved)]
            journal, history = Journal(path), list(kept)
            restart(journal, None)  # the ledger says so when it is made
            restart(journal, offset)
    journal.flush()
    assert written(path) == history
