"""Trainer state in files: any ranks read what any ranks wrote, and what is damaged or foreign is refused by name."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from raypost.checkpoint import FACTS
from raypost.errors import CheckpointError
from raypost.trainer.snapshot import Snapshot
from raypost.trainer.state_files import MASTER, Part, StoredState, write_facts, write_parts

SHAPES = {"embed": [4, 3], "norm": [3], "deep.weight@0/x": [2, 2, 2]}


def whole(name: str, kind: str) -> torch.Tensor:
    size = int(torch.tensor(SHAPES[name]).prod())
    return torch.arange(size, dtype=torch.float32) + 100 * len(name) + 1000 * len(kind)


def parts_of(name: str, cuts: list[int]) -> list[Part]:
    ends = [*cuts, whole(name, MASTER).numel()]
    pairs = zip([0, *cuts], ends, strict=True)
    return [
        Part(name, low, 7, {kind: whole(name, kind)[low:high] for kind in (MASTER, "exp_avg")})
        for low, high in pairs
        if low < high
    ]


def write(folder: Path, shares: list[list[Part]]) -> None:
    folder.mkdir()
    for rank, parts in enumerate(shares):
        write_parts(folder, parts, rank, len(shares))
    write_facts(folder, {"weights": SHAPES, "num_workers": len(shares)})


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "state"
    write(folder, [parts_of("embed", [5])[:1], parts_of("embed", [5])[1:] + parts_of("norm", []),
                   parts_of("deep.weight@0/x", [])])  # fmt: skip
    yield folder


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whoever_wrote_which_parts_any_range_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("any") / "state"
    num_ranks = data.draw(st.integers(1, 4))
    shares: list[list[Part]] = [[] for _ in range(num_ranks)]
    for name in SHAPES:
        size = whole(name, MASTER).numel()
        for part in parts_of(name, sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=3)))):
            shares[data.draw(st.integers(0, num_ranks - 1))].append(part)
    write(folder, shares)
    state = StoredState(folder)
    for name in SHAPES:
        expected = whole(name, "exp_avg")
        low = data.draw(st.integers(0, len(expected)))
        into = torch.full((data.draw(st.integers(0, len(expected) - low)),), -1.0)
        state.fill("exp_avg", name, low, into)
        assert torch.equal(into, expected[low : low + len(into)])
        state.fill("never stored", name, low, into)
        assert not into.any() and state.updates(name) == 7


@pytest.mark.parametrize("short", [False, True])
def test_a_snapshot_is_of_its_moment_where_there_is_memory_for_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    if short:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=20))

    def save_config(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")

    weights = torch.arange(3.0)
    exported = tmp_path / "state" / "hf" / "config.json"
    snapshot = Snapshot(
        0, 1, {"weights": {"norm": [3]}, "num_workers": 1}, [Part("norm", 0, 1, {MASTER: weights})]
    )
    snapshot.exports["hf"] = save_config
    assert snapshot.is_copy is not short
    weights += 10
    for _ in range(2):
        snapshot.write(tmp_path / "state")
    into = torch.empty(3)
    StoredState(tmp_path / "state").fill(MASTER, "norm", 0, into)
    assert into.tolist() == ([10.0, 11.0, 12.0] if short else [0.0, 1.0, 2.0]) and exported.exists()


def test_another_model_is_refused_with_both_shapes(stored: Path) -> None:
    state = StoredState(stored)
    state.check_shapes(SHAPES)
    with pytest.raises(CheckpointError, match=r"embed has shape \(4, 3\), this run's \(3, 4\)"):
        state.check_shapes({**SHAPES, "embed": [3, 4]})
    with pytest.raises(CheckpointError, match=r"more has shape None, this run's \(1,\)"):
        state.check_shapes({**SHAPES, "more": [1]})
    with pytest.raises(CheckpointError, match=r"norm has shape \(3,\), this run's None"):
        state.check_shapes({"embed": [4, 3], "deep.weight@0/x": [2, 2, 2]})


def test_a_part_that_is_missing_or_there_twice_is_refused(stored: Path) -> None:
    write_parts(stored, parts_of("embed", [6])[:1], 0, 3)
    with pytest.raises(CheckpointError, match="parts of master/embed do not make 12 elements"):
        StoredState(stored)
    write_parts(stored, parts_of("embed", [4])[:1], 0, 3)
    with pytest.raises(CheckpointError, match=r"parts of (exp_avg|master)/embed"):
        StoredState(stored)
    (stored / "state-0-of-3.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"state-0-of-3\.safetensors is damaged"):
        StoredState(stored)


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


@pytest.mark.parametrize("name", [FACTS, "state-0-of-3.safetensors", "state-2-of-3.safetensors"])
@pytest.mark.parametrize("content", ["pickle", "nothing", "half", "folder", "list", "number"])
def test_a_file_that_is_something_else_is_refused_by_name_and_runs_nothing(
    stored: Path, name: str, content: str
) -> None:
    file, marker = stored / name, stored / "ran"
    before = file.read_bytes()
    file.unlink()
    if content == "folder":
        file.mkdir()
    else:
        file.write_bytes({
            "pickle": pickle.dumps(Touches(str(marker))), "nothing": b"", "half": before[: len(before) // 2],
            "list": b"[1]", "number": b"7",
        }[content])  # fmt: skip
    with pytest.raises(CheckpointError, match=name):
        StoredState(stored)
    assert not marker.exists()


def test_tensors_of_other_types_and_strange_names_are_refused(stored: Path) -> None:
    file = stored / "state-2-of-3.safetensors"
    for tensors, words in (
        ({"master/deep.weight@0/x@0": torch.zeros(8, dtype=torch.float16)}, "not flat and float32"),
        ({"master/deep.weight@0/x@0": torch.zeros(2, 4)}, "not flat and float32"),
        ({"weights": torch.zeros(8)}, "no part of a weight"),
    ):
        save_file(tensors, file, {"updates": "{}"})
        with pytest.raises(CheckpointError, match=words):
            StoredState(stored)


@pytest.mark.parametrize(
    "facts", [{}, {"format": 1}, {"format": 3}, {"format": 2}, {"format": 2, "weights": 1}]
)
def test_facts_of_another_format_or_incomplete_are_refused(stored: Path, facts: dict[str, object]) -> None:
    (stored / FACTS).write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match=r"this version reads format 2|is damaged"):
        StoredState(stored)
