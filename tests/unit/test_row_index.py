"""The index of JSONL files: the same source from the second start on, without reading it whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from raypost.config import JudgeConfig, SourceConfig, TaskConfig
from raypost.data import row_index, rows
from raypost.data.task_source import build_source, check_source, held_out
from raypost.errors import ConfigError

NUM_ROWS = 60


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_index, "MIN_ROWS", 20)


@pytest.fixture
def task(tmp_path: Path) -> TaskConfig:
    for part in "ab":
        path = tmp_path / f"{part}.jsonl"
        lines = [
            json.dumps({"prompt": f"{part} {n}", "q": f"other {n}", "answer": n})
            for n in range(NUM_ROWS // 2)
        ]
        path.write_text("\n\n".join(lines) + "\n")
        os.utime(path, (1e9, 1e9))
    return task_of(tmp_path)


def task_of(folder: Path, **changes: Any) -> TaskConfig:
    source: dict[str, Any] = {
        "kind": "jsonl",
        "dataset": str(folder / "*.jsonl"),
        "index_dir": folder / "index",
    }
    return TaskConfig(source=SourceConfig(**(source | changes)), judge=JudgeConfig(kind="exact"))


def everything(task: TaskConfig) -> tuple[str, list[Any], list[Any]]:
    source: Any = build_source(task, 0)
    return source.identity, [source.sample(n) for n in range(len(source))], held_out(task, 0)


def indexes(task: TaskConfig) -> list[Path]:
    assert task.source.index_dir is not None
    return sorted(task.source.index_dir.glob("*"))


def test_from_the_second_start_on_the_files_are_not_read_whole(
    task: TaskConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = everything(task)
    assert len(before[1]) > 40 and len(indexes(task)) == 1

    def read(*_: object) -> Any:
        raise AssertionError("the files were read whole")

    with monkeypatch.context() as patch:
        patch.setattr(rows, "_line_offsets", read)
        patch.setattr(rows.JsonlRows, "scan", read)
        assert everything(task) == before
        assert check_source(task, 0) == before[1][:64]
    assert len(indexes(task)) == 1


@pytest.mark.parametrize(
    "changes",
    [{"question_field": "q"}, {"size": 40}, {"dataset": "a.jsonl"}, {"dataset": ("b.jsonl", "a.jsonl")}],
)
def test_another_reading_of_the_same_files_has_an_index_of_its_own(
    task: TaskConfig, tmp_path: Path, changes: dict[str, Any]
) -> None:
    first = everything(task)
    if names := changes.get("dataset"):
        paths = tuple(str(tmp_path / name) for name in ([names] if isinstance(names, str) else names))
        changes = {"dataset": paths}
    for _ in range(2):
        other = everything(task_of(tmp_path, **changes))
        assert other == everything(task_of(tmp_path, **changes, index_dir=None)) != first
    assert everything(task) == first and len(indexes(task)) == 2


@pytest.mark.parametrize("touch", [False, True], ids=["as long", "longer"])
def test_files_that_changed_are_read_again(task: TaskConfig, tmp_path: Path, touch: bool) -> None:
    before = everything(task)
    path = tmp_path / "a.jsonl"
    text = path.read_text().replace("a 1", "a 2222" if touch else "a 8")
    path.write_text(text)
    os.utime(path, (1e9 + 5, 1e9 + 5))
    after = everything(task)
    assert after != before and after == everything(task_of(tmp_path, index_dir=None))


@pytest.mark.parametrize("damage", ["cut", "flipped", "head", "empty", "format"])
def test_a_damaged_index_is_none(task: TaskConfig, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = everything(task)
    (path,) = indexes(task)
    data = path.read_bytes()
    if damage == "format":
        path.write_bytes(data.replace(b'"key": [2', b'"key": [3'))
    else:
        flipped = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        path.write_bytes({"cut": data[:-8], "flipped": flipped, "head": b"{" + data, "empty": b""}[damage])
    assert everything(task) == before
    assert path.read_bytes() == data


def test_a_file_that_may_change_once_more_is_not_indexed(task: TaskConfig, tmp_path: Path) -> None:
    os.utime(tmp_path / "b.jsonl")
    everything(task)
    assert indexes(task) == []


def test_a_folder_that_cannot_be_written_costs_nothing(task: TaskConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for index_dir in (tmp_path / "file" / "index", None):
        assert everything(task_of(tmp_path, index_dir=index_dir)) == everything(task)


def test_half_a_reading_is_not_kept(task: TaskConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypost.data.task_source.CHECK_S", -1.0)
    assert len(check_source(task, 0)) == 1
    assert indexes(task) == []


def test_rows_that_are_no_prompts_are_named_and_nothing_is_kept(task: TaskConfig, tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text(path.read_text() + '\n{"prompt": 3}\n')
    os.utime(path, (1e9, 1e9))
    with pytest.raises(ConfigError, match=r"b\.jsonl line 61 must be like"):
        everything(task)
    assert indexes(task) == []


def test_old_indexes_go(task: TaskConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_index, "MAX_FILES", 2)
    for size in (40, 41, 42):
        everything(task_of(tmp_path, size=size))
    assert len(indexes(task)) == 2
