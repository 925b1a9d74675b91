"""Checkpoints appear whole, are refused when damaged or foreign, and hold plain state without pickle."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypost.checkpoint import (
    BEST,
    LATEST,
    MANIFEST,
    SCORES,
    CheckpointDir,
    SavePace,
    load_state,
    save_state,
    verify_files,
)
from raypost.errors import CheckpointError
from raypost.types import Group, RolloutState, SampleParams, Status
from raypost.types.packed import arrays_of, pack_groups

OURS: dict[str, str | int] = {"config": "abc", "seed": 3}


def make_dir(
    tmp_path: Path, keep: int = 2, fingerprint: Mapping[str, str | int] = OURS, keep_best: bool = False
) -> CheckpointDir:
    return CheckpointDir(tmp_path / "checkpoints", keep, fingerprint, keep_best=keep_best)


def write(checkpoints: CheckpointDir, step: int) -> Path:
    path = checkpoints.begin(step)
    (path / "trainer").mkdir()
    (path / "trainer" / "shard.json").write_text(f"{step}0")
    save_state(path, "producer", {"step": step})
    return checkpoints.commit(step)


def newest(checkpoints: CheckpointDir) -> tuple[int, Path]:
    found = checkpoints.latest()
    assert found is not None
    return found


def test_newest_committed_checkpoint_is_found_with_its_contents(tmp_path: Path) -> None:
    checkpoints = make_dir(tmp_path)
    assert checkpoints.latest() is None
    for step in (9, 10):
        write(checkpoints, step)
    step, path = newest(checkpoints)
    assert (step, path.name) == (10, "step-10")
    assert (path / "trainer" / "shard.json").read_text() == "100"
    assert load_state(path, "producer") == {"step": 10}
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest["fingerprint"] == OURS and set(manifest["files"]) == {
        "trainer/shard.json", "producer.json", "producer.npy"}  # fmt: skip


def test_uncommitted_checkpoint_is_invisible_and_removed_by_the_next(tmp_path: Path) -> None:
    checkpoints = make_dir(tmp_path)
    write(checkpoints, 1)
    (checkpoints.begin(2) / "half").write_text("x")
    assert newest(make_dir(tmp_path))[0] == 1
    assert list(checkpoints.begin(2).iterdir()) == []
    assert checkpoints.steps() == [1]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = make_dir(tmp_path, keep=2)
    for step in (1, 2, 3, 10, 11):
        write(checkpoints, step)
        assert len(checkpoints.steps()) <= 2
    assert checkpoints.steps() == [10, 11]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [LATEST, "step-10", "step-11"]


def test_the_best_score_keeps_its_checkpoint_whatever_its_age(tmp_path: Path) -> None:
    checkpoints = make_dir(tmp_path, keep=1, keep_best=True)
    for step, score in ((10, 0.2), (20, 0.7), (30, math.nan), (40, 0.6), (50, None), (60, math.inf)):
        write(checkpoints, step)
        checkpoints.record_score(step, score)
    assert checkpoints.steps() == [20, 60] and checkpoints.best() == (20, 0.7)
    write(checkpoints, 70)
    checkpoints.record_score(70, 0.7)
    assert checkpoints.best() == (70, 0.7), "of equal ones the newest"
    assert checkpoints.steps() == [70]
    write(checkpoints, 80)
    checkpoints.record_score(80, -1.0)
    assert checkpoints.steps() == [70, 80]


def test_without_keep_best_scores_decide_nothing(tmp_path: Path) -> None:
    checkpoints = make_dir(tmp_path, keep=1)
    for step, score in ((1, 0.9), (2, 0.1)):
        write(checkpoints, step)
        checkpoints.record_score(step, score)
    assert checkpoints.steps() == [2] and checkpoints.best() == (2, 0.1)
    assert not (tmp_path / "checkpoints" / BEST).is_symlink()


def test_a_checkpoint_whose_score_is_awaited_stays_until_it_comes(tmp_path: Path) -> None:
    checkpoints = make_dir(tmp_path, keep=1, keep_best=True)
    write(checkpoints, 10)
    checkpoints.record_score(10, 0.5)
    checkpoints.await_score(20)
    for step in (20, 30, 40):
        write(checkpoints, step)
    assert checkpoints.steps() == [10, 20, 40]
    checkpoints.record_score(20, 0.6)
    assert checkpoints.steps() == [20, 40] and checkpoints.best() == (20, 0.6)
    checkpoints.await_score(50)
    write(checkpoints, 50)
    write(checkpoints, 60)
    checkpoints.record_score(50, None)
    assert checkpoints.steps() == [20, 60], "an evaluation that gave nothing keeps nothing"


def test_a_score_may_come_before_its_checkpoint_and_for_a_step_without_one(tmp_path: Path) -> None:
    checkpoints = make_dir(tmp_path, keep=1, keep_best=True)
    checkpoints.record_score(0, 0.99)
    assert checkpoints.best() is None and not (tmp_path / "checkpoints").exists()
    checkpoints.record_score(5, 0.8)
    write(checkpoints, 5)
    checkpoints.record_score(7, 0.95)
    write(checkpoints, 9)
    assert checkpoints.best() == (5, 0.8) and checkpoints.steps() == [5, 9]


def test_a_resumed_run_knows_which_checkpoint_is_best(tmp_path: Path) -> None:
    first = make_dir(tmp_path, keep=1, keep_best=True)
    for step, score in ((10, 0.7), (20, 0.4)):
        write(first, step)
        first.record_score(step, score)
    first.begin(30)
    first.record_score(30, 0.9)  # killed before it could commit
    second = make_dir(tmp_path, keep=1, keep_best=True)
    assert second.best() == (10, 0.7)
    write(second, 30)
    assert second.steps() == [10, 30] and second.best() == (10, 0.7), "the score was another checkpoint's"
    second.record_score(30, 0.8)
    assert make_dir(tmp_path, keep=1, keep_best=True).best() == (30, 0.8)
    shutil.rmtree(tmp_path / "checkpoints" / "step-30")
    third = make_dir(tmp_path, keep=1, keep_best=True)
    write(third, 30)
    assert third.best() is None, "whoever removes a checkpoint removes its score"


@pytest.mark.parametrize("text", ["", "[]", '{"x": 1}', '{"1": "high"}', '{"1": null}'])
def test_damaged_scores_are_refused_by_name(tmp_path: Path, text: str) -> None:
    write(make_dir(tmp_path), 1)
    (tmp_path / "checkpoints" / SCORES).write_text(text)
    with pytest.raises(CheckpointError, match=r"scores\.json cannot be read"):
        make_dir(tmp_path)


def test_links_lead_to_the_newest_and_the_best_checkpoint_also_when_the_folder_moves(tmp_path: Path) -> None:
    checkpoints = make_dir(tmp_path, keep=2, keep_best=True)
    for step, score in ((1, 0.5), (2, 0.4), (3, 0.3)):
        write(checkpoints, step)
        checkpoints.record_score(step, score)
    moved = (tmp_path / "checkpoints").rename(tmp_path / "moved")
    assert (moved / LATEST).readlink().name == "step-3" and (moved / BEST).readlink().name == "step-1"
    assert (moved / BEST / "trainer" / "shard.json").read_text() == "10"
    assert CheckpointDir(moved, 2, OURS).steps() == [1, 2, 3]
    assert verify_files(moved / BEST) == 1


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_retention_keeps_exactly_the_newest_the_best_and_the_awaited(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    with patch("os.fsync"):  # what makes writing slow, and no part of this
        retain_at_random(tmp_path_factory.mktemp("run"), data)


def retain_at_random(root: Path, data: st.DataObject) -> None:
    keep, keep_best = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    checkpoints = make_dir(root, keep, keep_best=keep_best)
    alive: set[int] = set()
    awaited: set[int] = set()
    scores: dict[int, float] = {}
    for step in range(1, data.draw(st.integers(2, 7))):
        if data.draw(st.booleans()):
            checkpoints.await_score(step)
            awaited.add(step)
        write(checkpoints, step)
        alive.add(step)
        for late in data.draw(st.lists(st.sampled_from(sorted(awaited or {step})), max_size=2, unique=True)):
            score = data.draw(st.sampled_from([None, math.nan, 0.0, 0.5, 1.0]))
            # Retention has already happened when a score comes, and happens again.
            alive = survivors(alive, awaited, scores, keep, keep_best)
            checkpoints.record_score(late, score)
            awaited.discard(late)
            if score is not None and math.isfinite(score):
                scores[late] = score
        alive = survivors(alive, awaited, scores, keep, keep_best)
        assert set(checkpoints.steps()) == alive
        checkpoints = checkpoints if awaited else make_dir(root, keep, keep_best=keep_best)
        scores = scores if awaited else {step: score for step, score in scores.items() if step in alive}


def survivors(
    alive: set[int], awaited: set[int], scores: dict[int, float], keep: int, keep_best: bool
) -> set[int]:
    kept = set(sorted(alive)[-keep:]) | (alive & awaited)
    scored = [(scores[step], step) for step in alive if step in scores]
    if keep_best and scored:
        kept.add(max(scored)[1])
    return kept


def test_commit_again_changes_nothing_and_a_step_can_be_written_anew(tmp_path: Path) -> None:
    checkpoints = make_dir(tmp_path)
    path = write(checkpoints, 4)
    assert checkpoints.commit(4) == path and newest(checkpoints)[0] == 4
    (checkpoints.begin(4) / "other.json").write_text("1")
    checkpoints.commit(4)
    assert (newest(checkpoints)[1] / "other.json").read_text() == "1"
    with pytest.raises(CheckpointError, match=r"begin\(5\) comes before commit\(5\)"):
        checkpoints.commit(5)


def test_a_checkpoint_written_anew_is_there_before_the_old_one_is_removed(tmp_path: Path) -> None:
    checkpoints = make_dir(tmp_path, keep=1)
    write(checkpoints, 4)
    path = checkpoints.begin(4)
    (path / "new.json").write_text("1")
    with patch.object(shutil, "rmtree", side_effect=OSError("killed here")), pytest.raises(OSError):
        checkpoints.commit(4)
    step, path = newest(make_dir(tmp_path, keep=1))
    assert step == 4 and (path / "new.json").exists()


def test_checkpoints_by_time_take_a_twentieth_of_it_at_most() -> None:
    now = [0.0]
    pace = SavePace(60.0, lambda: now[0])
    due = []
    for second in range(1, 1000):
        now[0] = float(second)
        if pace.due():
            due.append(second)
            pace.saved(took_s=1.0 if len(due) < 3 else 10.0)
    assert due == [60, 120, 180, 380, 580, 780, 980]
    assert not SavePace(None, lambda: 1e9).due()


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "add", "manifest", "no manifest"])
def test_damaged_checkpoint_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    checkpoints = make_dir(tmp_path)
    path = write(checkpoints, 7)
    shard = path / "trainer" / "shard.json"
    if damage == "flip":
        shard.write_bytes(b"71")
    elif damage == "truncate":
        shard.write_bytes(b"7")
    elif damage == "remove":
        shard.unlink()
    elif damage == "add":
        (path / "trainer" / "shard2.json").write_text("1")
    elif damage == "manifest":
        (path / MANIFEST).write_text('{"files": {}')
    else:
        (path / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="manifest" if "manifest" in damage else "shard"):
        checkpoints.latest()


def test_with_fallback_the_newest_undamaged_checkpoint_is_taken_and_the_others_are_put_aside(
    tmp_path: Path,
) -> None:
    checkpoints = make_dir(tmp_path, keep=3)
    for step in (3, 5, 7):
        write(checkpoints, step)
    root = tmp_path / "checkpoints"
    (root / "step-7" / "trainer" / "shard.json").write_bytes(b"")
    (root / "step-5" / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match=r"checkpoint\.fallback=true"):
        checkpoints.latest()
    assert checkpoints.latest(fallback=True) == (3, root / "step-3")
    assert checkpoints.steps() == [3] and (root / "step-7.damaged").is_dir()
    assert (newest(checkpoints), newest(make_dir(tmp_path))) == ((3, root / "step-3"),) * 2
    write(checkpoints, 7)
    assert newest(checkpoints)[0] == 7
    (root / "step-3" / MANIFEST).unlink()
    shutil.rmtree(root / "step-7")
    with pytest.raises(CheckpointError, match="no undamaged checkpoint is left"):
        checkpoints.latest(fallback=True)
    write(checkpoints, 9)
    with pytest.raises(CheckpointError, match="belongs to another run"):
        make_dir(tmp_path, fingerprint={"seed": 8}).latest(fallback=True)


@pytest.mark.parametrize("other", [{"config": "abd", "seed": 3}, {"config": "abc", "seed": 4}, {"seed": 3}])
def test_checkpoint_of_another_run_is_refused_with_both_values(
    tmp_path: Path, other: dict[str, str | int]
) -> None:
    write(make_dir(tmp_path), 1)
    with pytest.raises(CheckpointError, match=r"belongs to another run: its (config|seed) is"):
        make_dir(tmp_path, fingerprint=other).latest()


def test_state_comes_back_with_its_types_and_values(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "none": None, "flag": True, "big": 2**127 + 1, "float": 0.1, "text": "ü", "bytes": b"\x00\xff",
        "list": [1, [2.5, "x"], ()], "tuple": ("task", 3), "keys": {("a", 1): 2, 5: "five", Status.ABORTED: 1},
        "dollar": {"$array": 0}, "array": np.arange(6, dtype=np.int16).reshape(2, 3), "empty": np.empty(0, bool),
        "scalar": np.float32(0.5), "status": Status.EXPIRED, "params": SampleParams(max_tokens=3),
    }  # fmt: skip
    save_state(tmp_path, "mixed", state)
    back = load_state(tmp_path, "mixed")
    for name in ("array", "empty"):
        assert back[name].dtype == state[name].dtype and np.array_equal(back.pop(name), state.pop(name))
    assert back == state
    assert type(back["status"]) is Status and type(back["tuple"]) is tuple and type(back["flag"]) is bool


def test_packed_groups_are_state(tmp_path: Path) -> None:
    made = RolloutState(task="t", group_id=1, sample_index=0, prompt_ids=np.arange(3, dtype=np.int32),
                        sample_params=SampleParams(max_tokens=9, stop_token_ids=(1, 2)), metadata={"answer": "4"},
                        status=Status.ABORTED)  # fmt: skip
    made.append_segment(np.arange(2, dtype=np.int32), np.zeros(2, np.float32), np.ones(2, np.int32))
    packed = pack_groups([Group(task="t", group_id=1, states=[made])])
    save_state(tmp_path, "buffer", {"groups": [packed]})
    (back,) = load_state(tmp_path, "buffer")["groups"]
    assert back.tasks == packed.tasks
    for mine, theirs in zip(arrays_of(back), arrays_of(packed), strict=True):
        assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs)


@pytest.mark.parametrize("thing", [object(), {1, 2}, np.asarray([object()]), lambda: 0])
def test_what_is_not_plain_is_refused_with_its_place(tmp_path: Path, thing: object) -> None:
    with pytest.raises(CheckpointError, match=r"run\.tasks\[1\]"):
        save_state(tmp_path, "run", {"tasks": [1, thing]})


def test_state_never_builds_what_is_not_a_record_of_ours(tmp_path: Path) -> None:
    save_state(tmp_path, "evil", {})
    for name in (
        "os:system",
        "raypost.checkpoint:CheckpointDir",
        "raypost.checkpoint:shutil",
        "builtins:eval",
    ):
        (tmp_path / "evil.json").write_text(json.dumps({"$class": name, "fields": {}}))
        with pytest.raises(CheckpointError, match="'evil'"):
            load_state(tmp_path, "evil")


@pytest.mark.parametrize(
    "text", ["", "[", '{"$array": 3}', '{"$enum": "raypost.types:Status", "value": "x"}']
)
def test_damaged_state_is_refused_by_name(tmp_path: Path, text: str) -> None:
    save_state(tmp_path, "producer", {"a": np.arange(3)})
    (tmp_path / "producer.json").write_text(text)
    with pytest.raises(CheckpointError, match="state 'producer'"):
        load_state(tmp_path, "producer")


def test_state_of_the_earlier_format_is_refused_by_name(tmp_path: Path) -> None:
    save_state(tmp_path, "producer", {"a": np.arange(3)})
    (tmp_path / "producer.npy").rename(tmp_path / "producer.npz")
    with pytest.raises(CheckpointError, match="earlier format"):
        load_state(tmp_path, "producer")


@pytest.mark.parametrize("kept", [0, 20, 130])
def test_arrays_that_were_cut_off_are_refused(tmp_path: Path, kept: int) -> None:
    save_state(tmp_path, "producer", {"a": np.arange(3)})
    os.truncate(tmp_path / "producer.npy", kept)
    with pytest.raises(CheckpointError, match="state 'producer'"):
        load_state(tmp_path, "producer")


def test_nonsense_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be >= 1, got 0"):
        make_dir(tmp_path, keep=0)
    with pytest.raises(ValueError, match="step must be >= 0, got -1"):
        make_dir(tmp_path).begin(-1)


DAMAGE: dict[str, Any] = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "emptied": lambda file: os.truncate(file, 0),
    "one byte short": lambda file: os.truncate(file, file.stat().st_size - 1),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "one bit": lambda file: file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]),
    "last bit": lambda file: file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1])),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "backwards": lambda file: file.write_bytes(file.read_bytes()[::-1]),
    "removed": lambda file: file.unlink(),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a link to nothing": lambda file: (file.unlink(), file.symlink_to("nowhere")),
    "a link to itself": lambda file: (file.unlink(), file.symlink_to(file.name)),
    "renamed": lambda file: file.rename(file.with_name(f"not-{file.name}")),
    "pickled": lambda file: file.write_bytes(pickle.dumps({"a": 1})),
    "text": lambda file: file.write_text("[" * 100_000),
    "binary": lambda file: file.write_bytes(b"\xff\xfe\x00" * 9),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["trainer/shard.json", "producer.json", "producer.npy", MANIFEST])
def test_every_damage_of_every_file_is_one_sentence_with_the_way_on(
    tmp_path: Path, name: str, damage: str
) -> None:
    checkpoints = make_dir(tmp_path)
    path = checkpoints.begin(5)
    (path / "trainer").mkdir()
    (path / "trainer" / "shard.json").write_text('{"weights": 7}')
    save_state(path, "producer", {"a": np.arange(9)})
    path = checkpoints.commit(5)
    DAMAGE[damage](path / name)
    with pytest.raises(CheckpointError, match=r"^[^\n]*$") as refusal:
        checkpoints.latest()
    assert Path(name).name in str(refusal.value)
    assert "checkpoint.fallback=true" in str(refusal.value) and "--fallback" in str(refusal.value)


def mended(checkpoints: CheckpointDir, path: Path, step: int) -> None:
    """Give a checkpoint the manifest of the files that it has, as whoever can write the folder could."""
    os.rename(path, path.with_name(f"step-{step}.tmp"))
    checkpoints.commit(step)


@pytest.mark.parametrize("name", ["producer.json", "producer.npy", "trainer/shard.json", "trainer/state.pt",
                                  "optimizer", "hf/model.bin", "hf/tokenizer.py", "state.safetensors"])  # fmt: skip
def test_a_pickle_in_any_file_with_the_manifest_mended_is_refused_and_never_run(
    tmp_path: Path, name: str
) -> None:
    checkpoints = make_dir(tmp_path)
    path, marker = write(checkpoints, 5), tmp_path / "ran"
    (path / "hf").mkdir()
    (path / name).write_bytes(pickle.dumps(Touches(str(marker))))
    mended(checkpoints, path, 5)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        checkpoints.latest()
    with pytest.raises(CheckpointError, match="state 'producer'") if "producer" in name else nullcontext():
        load_state(path, "producer")
    assert not marker.exists()


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


def test_arrays_of_objects_and_a_checkpoint_under_another_step_are_refused(tmp_path: Path) -> None:
    checkpoints = make_dir(tmp_path)
    path = write(checkpoints, 5)
    np.save(path / "producer.npy", np.asarray([{1}], object), allow_pickle=True)
    mended(checkpoints, path, 5)
    with pytest.raises(CheckpointError, match="arrays of Python objects"):
        checkpoints.latest()
    write(checkpoints, 7).rename(tmp_path / "checkpoints" / "step-9")
    with pytest.raises(CheckpointError, match=r"manifest\.json is of step 7"):
        checkpoints.latest()


def test_nothing_counts_as_durable_before_it_is_committed(tmp_path: Path) -> None:
    checkpoints = make_dir(tmp_path)
    assert checkpoints.durable == 0
    write(checkpoints, 4)
    path = checkpoints.begin(6)
    save_state(path, "producer", {})
    assert checkpoints.durable == 4
    with patch.object(Path, "rename", side_effect=OSError(28, "no space")), pytest.raises(OSError):
        checkpoints.commit(6)
    assert checkpoints.durable == 4 and newest(make_dir(tmp_path))[0] == 4
    checkpoints.commit(6)
    assert checkpoints.durable == 6 and newest(make_dir(tmp_path))[0] == 6


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    full = patch.object(np, "save", side_effect=OSError("12 requested and 0 written"))
    with full, pytest.raises(OSError, match=r"12 requested and 0 written: '.*producer\.npy'"):
        save_state(tmp_path, "producer", {"a": np.arange(3)})
