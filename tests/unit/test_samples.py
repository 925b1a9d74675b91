"""Samples: what is kept of a batch, and what `raypost samples` shows of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from raypost import cli
from raypost.config.identity import run_digest
from raypost.errors import ConfigError, RunFilesError
from raypost.files.jsonl import sealed
from raypost.ledger.ledger import LEDGER_FILE, Ledger
from raypost.report.samples import FOLDER, SampleWriter, chosen, kept_samples, ranked
from raypost.types import SESSION, Group, IntArray, RolloutState, SampleParams, Score, Status
from raypost.types.packed import PackedGroups, pack_groups
from raypost.types.turns import Turn, record_turns
from tests.factories import make_config


def decode(ids: IntArray) -> str:
    return "".join(chr(one) for one in ids)


def state_of(task: str, group: int, sample: int, reward: float) -> RolloutState:
    """A response of three tokens of version 3, an observed one and two of version 5."""
    text = f"abc?{group % 10}{sample}"
    state = RolloutState(
        task=task,
        group_id=group,
        sample_index=sample,
        prompt_ids=np.asarray([ord(one) for one in "1+1="], np.int32),
        sample_params=SampleParams(max_tokens=8),
        metadata={"answer": 2, "entry": {"much": "more"}},
        status=Status.COMPLETED,
        response_ids=np.asarray([ord(one) for one in text], np.int32),
        logprobs=np.asarray([-0.5, -0.25, -0.125, 0.0, -1.0, -2.0], np.float32),
        policy_versions=np.asarray([3, 3, 3, -1, 5, 5], np.int32),
        response_mask=np.asarray([True, True, True, False, True, True]),
        response_text=text,
        finish_reason="stop",
        worker="rollout-worker-0",
    )
    score = Score(reward, {"right": reward, "short": 1.0}, "as [bold]expected[/bold]")
    score.seconds, score.retries = 0.25, 1
    state.set_reward(score)
    return state


def batch_of(*tasks: tuple[str, int], size: int = 2) -> PackedGroups:
    """Groups of these tasks; member n of group g has the reward (g + n) / 10."""
    groups = []
    for task, count in tasks:
        for group in range(count):
            states = [state_of(task, group, n, (group + n) / 10) for n in range(size)]
            groups.append(Group(task=task, group_id=group, states=states))
    return pack_groups(groups)


def run_with(folder: Path, *steps: int, groups: int = 2, task: str = "sums") -> Path:
    """A run folder with samples of these steps."""
    ledger = Ledger(folder / LEDGER_FILE)
    ledger.sampled((task, 0))
    ledger.flush()
    writer = SampleWriter(folder, groups, decode)
    for step in steps:
        writer.write(step, batch_of((task, 4)))
    return folder


def show(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["samples", *map(str, arguments)])


def test_a_sample_has_what_the_trainer_and_the_judge_saw(tmp_path: Path) -> None:
    kept = kept_samples(run_with(tmp_path, 6))
    assert len(kept.samples) == 4, "two groups of two"
    sample = kept.samples[0]
    assert sample["prompt"] == "1+1=" and sample["response"].startswith("abc?")
    assert (sample["step"], sample["task"], sample["answer"]) == (6, "sums", "2")
    assert sample["staleness"] == 2, "of the oldest token, version 3, at step 6"
    assert sample["prompt_ids"] == [ord(one) for one in "1+1="]
    assert decode(np.asarray(sample["response_ids"])) == sample["response"]
    assert sample["logprobs"] == [-0.5, -0.25, -0.125, 0.0, -1.0, -2.0]
    assert sample["policy_versions"] == [3, 3, 3, -1, 5, 5]
    assert sample["response_mask"] == [True, True, True, False, True, True]
    assert sample["reward_parts"] == {"right": sample["reward"], "short": 1.0}
    assert (sample["judge_words"], sample["judge_s"], sample["judge_retries"]) == (
        "as [bold]expected[/bold]",
        0.25,
        1,
    )
    assert [(one["version"], one["trained"], one["text"]) for one in sample["segments"]] == [
        (3, True, "abc"),
        (-1, False, "?"),
        (5, True, sample["response"][4:]),
    ]


def test_so_many_groups_are_kept_of_each_task_in_turn_and_the_same_ones_again() -> None:
    batch = batch_of(("sums", 6), ("words", 2))
    for step in range(20):
        groups = chosen(batch, step, 4)
        assert sorted(group.task for group in groups) == ["sums", "sums", "words", "words"]
        assert [group.key for group in chosen(batch, step, 4)] == [group.key for group in groups]
    assert len({chosen(batch_of(("sums", 6)), step, 1)[0].group_id for step in range(30)}) > 3, (
        "not always the first"
    )
    assert len(chosen(batch, 1, 100)) == 8


def test_a_step_that_is_trained_again_replaces_its_samples_and_those_after_it(tmp_path: Path) -> None:
    run_with(tmp_path, 1, 2, 3, 4)
    again = SampleWriter(tmp_path, 1, decode)  # continued after step 1
    again.write(2, batch_of(("sums", 3)))
    again.write(3, batch_of(("sums", 3)))
    assert kept_samples(tmp_path).steps == (1, 2, 3)
    assert len(kept_samples(tmp_path, 2).samples) == 2
    assert len(kept_samples(tmp_path, 1).samples) == 4


def test_figures_that_are_not_finite_do_not_keep_a_sample_from_being_written(tmp_path: Path) -> None:
    state = state_of("sums", 0, 0, 0.5)
    state.reward_parts, state.logprobs = {"odd": float("nan")}, np.full(6, -np.inf, np.float32)
    SampleWriter(tmp_path, 1, decode).write(1, pack_groups([Group(task="sums", group_id=0, states=[state])]))
    (sample,) = kept_samples(tmp_path).samples
    assert sample["reward_parts"] == {} and sample["logprobs"] == [None] * 6


def test_best_and_worst_are_by_reward_and_none_is_both() -> None:
    samples = [{"reward": reward, "n": n} for n, reward in enumerate((0.5, None, 1.0, 0.0, 0.25))]
    assert [one["n"] for one in ranked(samples, 1, 2)] == [2, 4, 3]
    assert [one["n"] for one in ranked(samples, 0, 1)] == [3]
    assert [one["n"] for one in ranked(samples, 3, 3)] == [2, 0, 4, 3]


def test_the_command_shows_prompt_response_versions_reward_and_words(tmp_path: Path) -> None:
    result = show(run_with(tmp_path, 5, 6), "--step", 5, "--worst", 1)
    assert result.exit_code == 0, result.output
    (worst,) = ranked(kept_samples(tmp_path, 5).samples, 0, 1)
    for part in ("step 5", f"sums/{worst['group']}", "1+1=", "[v3]abc[observed]?[v5]", "reward 0", "right 0",
                 "answer 2", "as [bold]expected[/bold]", "staleness 1", "version 3 to 5", "judged in 0.25 s",
                 "1 of 4 samples; kept of steps 5 to 6"):  # fmt: skip
        assert part in result.stdout, part
    assert result.stdout.count("response") == 1
    best = show(tmp_path, "--best", 2, "--json")
    rewards = [json.loads(line)["reward"] for line in best.stdout.splitlines()]
    assert len(rewards) == 2 and rewards == sorted(rewards, reverse=True)
    every = show(tmp_path, "--task", "sums")
    assert every.stdout.count("reward ") == 4


def test_what_is_not_there_is_refused_with_what_is(tmp_path: Path) -> None:
    run_with(tmp_path, 5, 6, 40)
    for arguments, text in (
        (("--step", 7), "step 7 has no samples; 3 steps have, the nearest [5, 6, 40]"),
        (("--task", "words"), "no sample of task 'words' was kept of step 40: there are some of sums"),
    ):
        result = show(tmp_path, *arguments)
        assert result.exit_code == 2 and text in result.stderr
    empty = tmp_path / "empty"
    Ledger(empty / LEDGER_FILE).flush()
    with pytest.raises(ConfigError, match="keep_samples is 0, or no step was trained yet"):
        kept_samples(empty)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"task": 3', "line 1, at byte 0: it has no checksum"),
        (b"\xff\xfe\x00", "line 1, at byte 0: it has no checksum"),
        (b'{"task": "sums", "crc": "00000000"}', "line 1, at byte 0: its checksum differs"),
        (sealed('{"task": "sums"}').encode()[:-1], "group is None"),
    ],
)
def test_a_damaged_file_is_a_sentence(tmp_path: Path, line: bytes, text: str) -> None:
    run_with(tmp_path, 5)
    (path,) = (tmp_path / FOLDER).iterdir()
    path.write_bytes(line + b"\n" + path.read_bytes())
    result = show(tmp_path)
    assert result.exit_code == 2 and text in result.stderr and "Traceback" not in result.output
    with pytest.raises(RunFilesError):
        kept_samples(tmp_path)


def test_what_is_kept_of_a_run_does_not_make_it_another() -> None:
    assert run_digest(make_config(keep_samples=0, trackers=[])) == run_digest(make_config())


def test_explain_shows_turns_calls_branches_and_parts_of_the_reward_of_what_was_kept(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER_FILE)
    for group in (0, 1):
        ledger.sampled(("sums", group))
        ledger.stored(("sums", group), Status.COMPLETED, staleness=0)
    ledger.leased([("sums", 0), ("sums", 1)], 7, [0, 0])
    ledger.flush()
    states = [state_of("sums", 0, sample, 0.5) for sample in (0, 0, 1)]
    calls = [
        {"name": "add", "end": "returned", "seconds": 0.25},
        {"name": "", "end": "no call", "seconds": 0.0},
    ]
    for state in states:
        record_turns(state, [Turn(0, 3, 4, 0.25, False, calls, "lives 2"), Turn(4, 6, 6, 0.0, True)])
    for state in states[:2]:
        state.metadata = {**state.metadata, SESSION: "s"}
    states[1].response_mask[:3] = False
    SampleWriter(tmp_path, 2, decode).write(7, pack_groups([Group(task="sums", group_id=0, states=states)]))
    shown = CliRunner().invoke(cli.app, ["explain", str(tmp_path), "0"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.output.split())
    assert "leased for step 7" in text
    assert "member 0: reward 0.5000, right 0.5000, short 1.000; branches 2; ended by stop" in text
    assert "member 1: reward 0.5000" in text and text.count("turn 2") == 3
    assert "lives 2" in text and "add: returned, 0.250 s" in text and "?: no call" in text
    assert text.count("trained in a branch before") == 1 and "reward 0.2500" in text
    found = json.loads(CliRunner().invoke(cli.app, ["explain", str(tmp_path), "0", "--json"]).stdout)
    assert [one["session"] for one in found["members"]] == ["s", "s", None]
    assert found["members"][0]["turns"][0] == {
        "said": "abc", "observed": "?", "reward": 0.25, "done": False, "calls": calls, "info": "lives 2",
        "trained": True,
    }  # fmt: skip
    assert (
        json.loads(CliRunner().invoke(cli.app, ["explain", str(tmp_path), "1", "--json"]).stdout)["members"]
        == []
    )
