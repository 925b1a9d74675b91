"""Checkpoints appear whole, are refused when damaged or foreign, and hold plain state without pickle."""

import json

import numpy as np
import pytest

from raypost.checkpoint import MANIFEST, CheckpointDir
from raypost.errors import CheckpointError
from raypost.packed import pack_groups
from raypost.types import Group, RolloutState, SampleParams, Status

OURS = {"config": "abc", "seed": 3}


def make_dir(tmp_path, keep=2, fingerprint=OURS):
    return CheckpointDir(tmp_path / "checkpoints", keep, fingerprint)


def write(checkpoints, step):
    path = checkpoints.begin(step)
    (path / "trainer").mkdir()
    (path / "trainer" / "shard").write_bytes(b"weights of %d" % step)
    checkpoints.save_state(path, "producer", {"step": step})
    return checkpoints.commit(step)


def test_newest_committed_checkpoint_is_found_with_its_contents(tmp_path):
    checkpoints = make_dir(tmp_path)
    assert checkpoints.latest() is None
    for step in (9, 10):
        write(checkpoints, step)
    step, path = checkpoints.latest()
    assert (step, path.name) == (10, "step-10")
    assert (path / "trainer" / "shard").read_bytes() == b"weights of 10"
    assert checkpoints.load_state(path, "producer") == {"step": 10}
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest["fingerprint"] == OURS and set(manifest["files"]) == {
        "trainer/shard", "producer.json", "producer.npz"}  # fmt: skip


def test_uncommitted_checkpoint_is_invisible_and_removed_by_the_next(tmp_path):
    checkpoints = make_dir(tmp_path)
    write(checkpoints, 1)
    (checkpoints.begin(2) / "half").write_text("x")
    assert make_dir(tmp_path).latest()[0] == 1
    assert list(checkpoints.begin(2).iterdir()) == []
    assert checkpoints.steps() == [1]


def test_only_the_newest_are_kept(tmp_path):
    checkpoints = make_dir(tmp_path, keep=2)
    for step in (1, 2, 3, 10, 11):
        write(checkpoints, step)
        assert len(checkpoints.steps()) <= 2
    assert checkpoints.steps() == [10, 11]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-10", "step-11"]


def test_commit_again_changes_nothing_and_a_step_can_be_written_anew(tmp_path):
    checkpoints = make_dir(tmp_path)
    path = write(checkpoints, 4)
    assert checkpoints.commit(4) == path and checkpoints.latest()[0] == 4
    (checkpoints.begin(4) / "other").write_text("new")
    checkpoints.commit(4)
    assert (checkpoints.latest()[1] / "other").read_text() == "new"
    with pytest.raises(CheckpointError, match=r"begin\(5\) comes before commit\(5\)"):
        checkpoints.commit(5)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "add", "manifest", "no manifest"])
def test_damaged_checkpoint_is_refused_by_name(tmp_path, damage):
    checkpoints = make_dir(tmp_path)
    path = write(checkpoints, 7)
    shard = path / "trainer" / "shard"
    if damage == "flip":
        shard.write_bytes(b"Weights of 7")
    elif damage == "truncate":
        shard.write_bytes(b"weights")
    elif damage == "remove":
        shard.unlink()
    elif damage == "add":
        (path / "trainer" / "shard2").write_text("x")
    elif damage == "manifest":
        (path / MANIFEST).write_text('{"files": {}')
    else:
        (path / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="manifest" if "manifest" in damage else "shard"):
        checkpoints.latest()


@pytest.mark.parametrize("other", [{"config": "abd", "seed": 3}, {"config": "abc", "seed": 4}, {"seed": 3}])
def test_checkpoint_of_another_run_is_refused_with_both_values(tmp_path, other):
    write(make_dir(tmp_path), 1)
    with pytest.raises(CheckpointError, match=r"belongs to another run: its (config|seed) is"):
        make_dir(tmp_path, fingerprint=other).latest()


def test_state_comes_back_with_its_types_and_values(tmp_path):
    checkpoints = make_dir(tmp_path)
    state = {
        "none": None, "flag": True, "big": 2**127 + 1, "float": 0.1, "text": "ü", "bytes": b"\x00\xff",
        "list": [1, [2.5, "x"], ()], "tuple": ("task", 3), "keys": {("a", 1): 2, 5: "five", Status.ABORTED: 1},
        "dollar": {"$array": 0}, "array": np.arange(6, dtype=np.int16).reshape(2, 3), "empty": np.empty(0, bool),
        "scalar": np.float32(0.5), "status": Status.EXPIRED, "params": SampleParams(max_tokens=3),
    }  # fmt: skip
    checkpoints.save_state(tmp_path, "mixed", state)
    back = checkpoints.load_state(tmp_path, "mixed")
    for name in ("array", "empty"):
        assert back[name].dtype == state[name].dtype and np.array_equal(back.pop(name), state.pop(name))
    assert back == state
    assert type(back["status"]) is Status and type(back["tuple"]) is tuple and type(back["flag"]) is bool


def test_packed_groups_are_state(tmp_path):
    made = RolloutState(task="t", group_id=1, sample_index=0, prompt_ids=np.arange(3, dtype=np.int32),
                        sample_params=SampleParams(max_tokens=9, stop_token_ids=(1, 2)), metadata={"answer": "4"},
                        status=Status.ABORTED)  # fmt: skip
    made.append_segment(np.arange(2), np.zeros(2), np.ones(2))
    packed = pack_groups([Group(task="t", group_id=1, states=[made])])
    CheckpointDir.save_state(tmp_path, "buffer", {"groups": [packed]})
    (back,) = CheckpointDir.load_state(tmp_path, "buffer")["groups"]
    assert back.header == packed.header
    for mine, theirs in zip(back.columns + back.offsets, packed.columns + packed.offsets, strict=True):
        assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs)


@pytest.mark.parametrize("thing", [object(), {1, 2}, np.asarray([object()]), lambda: 0])
def test_what_is_not_plain_is_refused_with_its_place(tmp_path, thing):
    with pytest.raises(CheckpointError, match=r"run\.tasks\[1\]"):
        CheckpointDir.save_state(tmp_path, "run", {"tasks": [1, thing]})


def test_state_never_builds_what_is_not_a_record_of_ours(tmp_path):
    CheckpointDir.save_state(tmp_path, "evil", {})
    for name in (
        "os:system",
        "raypost.checkpoint:CheckpointDir",
        "raypost.checkpoint:shutil",
        "builtins:eval",
    ):
        (tmp_path / "evil.json").write_text(json.dumps({"$class": name, "fields": {}}))
        with pytest.raises(CheckpointError, match="'evil'"):
            CheckpointDir.load_state(tmp_path, "evil")


@pytest.mark.parametrize(
    "text", ["", "[", '{"$array": 3}', '{"$enum": "raypost.types:Status", "value": "x"}']
)
def test_damaged_state_is_refused_by_name(tmp_path, text):
    CheckpointDir.save_state(tmp_path, "producer", {"a": np.arange(3)})
    (tmp_path / "producer.json").write_text(text)
    with pytest.raises(CheckpointError, match="state 'producer'"):
        CheckpointDir.load_state(tmp_path, "producer")


def test_nonsense_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="keep must be >= 1, got 0"):
        make_dir(tmp_path, keep=0)
    with pytest.raises(ValueError, match="step must be >= 0, got -1"):
        make_dir(tmp_path).begin(-1)
