"""Functions and environments that a configuration names are tried before anything starts, in a process of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from raypost.config import Config, load_config
from raypost.errors import ConfigError
from raypost.plan import plan, user_code
from raypost.plan.surprises import surprises
from tests.factories import make_config

HERE = "tests.unit.user_functions:"
SUM = "State the final answer to the following arithmetic problem: 1 + 1 ="
"""What the tiny model can read."""


def configured(tmp_path: Path, **places: Any) -> Config:
    """A small run; a text that begins with ":" names something of user_functions."""
    for place, value in places.items():
        if isinstance(value, str) and value.startswith(":"):
            places[place] = HERE + value[1:]
    environment = places.pop("environment", None)
    if environment is not None:
        params = places.pop("params", {})
        loop = {"kind": "environment", "environment": environment, "params": params}
        places["tasks__0__agent_loop"] = loop
    return make_config(**{"runs_dir": str(tmp_path / "runs"), **places})


def from_file(tmp_path: Path) -> dict[str, Any]:
    """Prompts of a file, which a process of its own reads sooner than it imports reasoning-gym."""
    (tmp_path / "data.jsonl").write_text((json.dumps({"prompt": SUM, "answer": "2"}) + "\n") * 9)
    source = {"kind": "jsonl", "dataset": str(tmp_path / "data.jsonl"), "hold_out": False}
    return {"tasks__0__source": source, "eval__num_prompts": 0}


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        plan.check(config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({"train__loss": {"kind": "nomodule:x"}}, "train.loss.kind is 'nomodule:x', but importing nomodule"),
        ({"train__loss": {"kind": HERE + "nosuch"}}, "has no 'nosuch'"),
        ({"train__loss": {"kind": HERE + "no_arguments"}}, "no_arguments(LossTokens, LossConfig): too many"),
        ({"train__loss": {"kind": HERE + "detached"}}, "a finite loss with a gradient for each of 6 tokens"),
        ({"train__loss": {"kind": HERE + "summed"}}, "must return two tensors (loss_T, clipped_T)"),
        ({"train__loss": {"kind": HERE + "unclipped"}}, "a bool for each of 6 tokens as clipped_T"),
        ({"train__advantage": {"kind": "nomodule:x"}}, "train.advantage.kind is 'nomodule:x', but importing"),
        ({"train__advantage": {"kind": HERE + "too_few"}}, "must return 6 (trajectories) or 17 (tokens)"),
        ({"task_weights": ":other_tasks"}, "it must return one for each of ['default']"),
        ({"task_weights": ":no_arguments"}, "cannot be called as no_arguments(int, dict)"),
        ({"tasks__0__strategy__should_continue": ":says"}, "must return True or False, got 'yes'"),
        ({"tasks__0__strategy__is_valid": ":absent"}, "has no 'absent'"),
        ({"tasks__0__strategy__is_valid": __name__ + ":HERE"}, "is a str and no function"),
        ({"tasks__0__strategy__is_valid": "accept"}, "write it as module:name"),
        ({"tasks__0__strategy__is_valid": "no.such:filter"}, "importing no.such failed"),
        ({"tasks__0__strategy__is_valid": ":no_arguments"}, "cannot be called as no_arguments(Group)"),
        ({"tasks__0__strategy__is_valid": ":slowly"}, "a coroutine function: it must be a plain one"),
        ({"tasks__0__strategy__is_valid": ":exits"}, "raised SystemExit when it was tried: not today"),
        (
            {"environment": ":Good", "params": {"depth": 2}},
            "cannot be called as Good(depth=2): got an unexpected",
        ),
        ({"environment": ":WithoutStep"}, "whose WithoutStep has no method step"),
        ({"environment": ":WithoutMetadata"}, "cannot be called as reset(dict): too many"),
        ({"environment": ":SaysText"}, "reset must return an Observation, got str"),
    ],
)
def test_what_cannot_work_is_refused_by_its_place_in_the_configuration(
    tmp_path: Path, places: dict[str, Any], words: str
) -> None:
    config = configured(tmp_path, **places)
    (one,) = user_code.user_code(config)
    said = user_code.trial(one, config)
    assert said is not None and words in said[0] and said[1]


def test_what_works_is_accepted_and_every_problem_is_told_at_once(tmp_path: Path) -> None:
    good = {"train__loss": {"kind": HERE + "half"}, "train__advantage": {"kind": HERE + "centred"}}
    good |= from_file(tmp_path)
    made = plan.check(configured(tmp_path, environment=":Good", params={"size": 4}, **good))
    assert not any("tests.unit" in text for text in made.warnings)
    bad = {"tasks__0__strategy__is_valid": ":ends", **from_file(tmp_path)}
    text = refusal(configured(tmp_path, environment=":WithoutStep", **bad))
    assert "2 problem(s)" in text and "no method step" in text
    assert "is_valid is 'tests.unit.user_functions:ends', which ended its process (exit code 3)" in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "none of 4 made-up groups passed it"),
        ("reads_more", "it raised KeyError for a made-up group: 'difficulty'"),
    ],
)
def test_filter_that_passes_nothing_that_was_made_up_is_named(tmp_path: Path, name: str, words: str) -> None:
    for function, said in ((name, words), ("everything", None)):
        config = configured(tmp_path, tasks__0__strategy__is_valid=":" + function)
        (one,) = user_code.user_code(config)
        answer = user_code.trial(one, config)
        assert answer is None if said is None else answer is not None and said in answer[0] and not answer[1]


def test_what_hangs_is_left_after_its_time_and_the_rest_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code, "TRIAL_S", 0.2)
    hangs = {"environment": ":hangs", "tasks__0__strategy__is_valid": ":hangs"}
    config = configured(tmp_path, **hangs, **from_file(tmp_path))
    found = user_code.findings(config)
    assert [one.refused for one in found] == [True, False]
    assert all("did not return within 0 s" in one.text for one in found)
    assert not any("user_code" in " ".join(one.cmdline()) for one in psutil.Process().children())


def test_python_source_that_cannot_be_imported_does_not_take_the_plan_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quits_at_import.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    source = {"kind": "python", "dataset": "quits_at_import:rows"}
    config = configured(tmp_path, tasks__0__source=source, tasks__0__judge={"kind": "exact"})
    assert "source.dataset is 'quits_at_import:rows', which ended its process (exit code 7)" in refusal(
        config
    )


@pytest.mark.parametrize(
    ("places", "words"),
    [
        (
            {"tasks__0__agent_loop": {"max_turns": 3}},
            "agent_loop.max_turns is not used by kind 'single_turn'",
        ),
        ({"train__advantage": {"k": 3}}, "train.advantage.k is not used by kind 'grpo', but by pass_at_k"),
        ({"train__advantage": {"gae_lambda": 0.5}}, "train.advantage.gae_lambda is not used"),
        ({"train__loss": {"value_clip": 0.5}}, "train.loss.value_clip is not used: there is no train.critic"),
        ({"train__loss": {"kl": {"kind": "k1"}}}, "train.loss.kl.kind is not used: kl.coefficient is 0"),
        ({"rollout__pause_timeout_s": 0.001}, "rollout.pause_timeout_s is 0.001 s: what takes longer fails"),
        (
            {"rollout__kv_cache_gb": 4e6},
            "rollout.kv_cache_gb of 1 engine(s) comes to 4e+06 GiB, more than the",
        ),
        ({"checkpoint__every_s": None}, "nothing is saved before the end (checkpoint.interval is 0"),
        ({"train__logits_mb": 1_048_576}, "train.logits_mb 1048576 is more than the"),
        (
            {"environment": ":Good", "tasks__0__judge": {"kind": "exact"}},
            "judge (kind) is not used: agent_loop.kind is environment",
        ),
    ],
)
def test_setting_that_does_nothing_is_named(tmp_path: Path, places: dict[str, Any], words: str) -> None:
    assert any(words in text for text in surprises(configured(tmp_path, **places)))


def test_recipes_have_no_setting_that_does_nothing() -> None:
    for recipe in sorted((Path(__file__).parents[2] / "jobs" / "recipes").glob("*.yaml")):
        assert list(surprises(load_config(recipe))) == [], recipe.name


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({"train__warmup_steps": 50, "train__num_steps": 4}, "warmup_steps is 50, more than num_steps 4"),
        ({"train__bucket_mb": 10**9}, "65536"),
        ({"tasks__0__group_size": 10**9}, "65536"),
        (
            {"train__critic": {}, "train__advantage": {"kind": HERE + "centred"}},
            "gives it nothing to learn from: leave it out, or use gae",
        ),
    ],
)
def test_value_out_of_bounds_is_refused_by_the_configuration(
    tmp_path: Path, places: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match="problem") as caught:
        configured(tmp_path, **places)
    assert words in str(caught.value)


def test_run_folder_where_no_file_stays_is_refused(tmp_path: Path) -> None:
    assert "lies in /proc, which keeps no files" in refusal(configured(tmp_path, runs_dir="/proc/runs"))


def test_tail_batches_of_all_tasks_together_must_leave_room(tmp_path: Path) -> None:
    task = {"source": {"kind": "reasoning_gym", "dataset": "chain_sum"}, "judge": {"kind": "reasoning_gym"}}
    tasks = [{**task, "name": name, "strategy": {"tail_batch_trigger_size": 6}} for name in "ab"]
    config = configured(tmp_path, tasks=tasks, train__batch_size=4, buffer__max_groups=16)
    assert "6 (a) + 6 (b) + 2 x train.batch_size 4 > buffer.max_groups 16" in refusal(config)
    plan.check(configured(tmp_path, tasks=tasks, train__batch_size=4, buffer__max_groups=20))
