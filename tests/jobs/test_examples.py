"""The folders of examples/ run, as their READMEs say; and what a user is told whose reward function is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.private_cluster import PrivateCluster
from raypost.config import ModelConfig
from raypost.models.resolve import resolve_model
from tests.jobs.job import ROOT, Job, assert_adds_up
from tests.unit.sandboxes import needs_sandbox

pytestmark = pytest.mark.timeout(1800)

EXAMPLES = ROOT / "examples"
OWN_REWARD = EXAMPLES / "own-reward"


def example(
    cluster: PrivateCluster,
    folder: Path,
    name: str,
    *overrides: str,
    of: str = "own-reward",
    module: str = "jobs.train",
) -> Job:
    # Started by hand, a job has no working directory that travels to its actors.
    data = f"tasks.0.source.dataset={OWN_REWARD / 'data.jsonl'}"
    problems = f"eval.source.dataset={OWN_REWARD / 'eval.jsonl'}"
    config = str(EXAMPLES / of / "config.yaml")
    return Job(cluster, folder, name, data, problems, *overrides, config=config, module=module)


def finished(job: Job, steps: int) -> dict[str, Any]:
    """Return the report of a job that has ended well."""
    assert job.wait() == 0, job.output()
    report = job.report()
    assert (report["status"], report["steps"]) == ("finished", steps)
    assert_adds_up(report)
    return report


def test_own_data_reward_and_model_folder_train_and_the_parts_are_in_the_report(
    private_cluster: PrivateCluster, folder: Path
) -> None:
    recipe = ModelConfig(name="tiny", options={"steps": 60})
    model = [f"model.name={resolve_model(recipe, 0, folder / 'cache')}", "model.options={}"]
    steps = ["train.num_steps=3", "train.batch_size=8"]
    job = example(private_cluster, folder, "own-reward", *steps, *model)
    report = finished(job, steps=3)
    judged = report["judges"]["sums"]
    # Three batches of eight groups, and evaluations before and after.
    assert judged["calls"] >= 3 * 8 + 2 * 16 and judged["failed"] == judged["retries"] == 0
    assert 0 < judged["seconds_mean"] <= judged["seconds_max"]
    assert set(judged["parts"]) == {"right", "lines"} and 0 <= judged["parts"]["right"]["mean"] <= 1
    # Evaluated on problems of its own, and nothing is held out: all 200 rows are trained.
    record = yaml.safe_load((job.run_dir / "config.yaml").read_text())
    assert record["eval"]["source"]["dataset"].endswith("eval.jsonl")
    assert record["tasks"][0]["source"]["hold_out"] is False
    assert record["tasks"][0]["judge"]["function_source"] == (OWN_REWARD / "reward.py").read_text()


@pytest.mark.slow
def test_reward_functions_of_trl_train_unchanged(private_cluster: PrivateCluster, folder: Path) -> None:
    steps = ["train.num_steps=3", "train.batch_size=8"]
    job = example(private_cluster, folder, "trl-reward", *steps, of="trl-reward")
    report = finished(job, steps=3)
    parts = report["judges"]["sums"]["parts"]
    assert set(parts) == {"accuracy", "length"} and 0 < parts["length"]["mean"] < 1


@pytest.mark.slow
def test_an_environment_of_ones_own_trains_over_several_turns(
    private_cluster: PrivateCluster, folder: Path
) -> None:
    steps = ["train.num_steps=3", "train.batch_size=8", "eval.num_prompts=8"]
    config = str(EXAMPLES / "environment" / "config.yaml")
    job = Job(private_cluster, folder, "environment", *steps, config=config)
    finished(job, steps=3)
    record = yaml.safe_load((job.run_dir / "config.yaml").read_text())
    source = record["tasks"][0]["agent_loop"]["file_source"]
    assert source == (EXAMPLES / "environment" / "game.py").read_text()


@needs_sandbox
def test_programs_are_judged_in_the_sandbox(private_cluster: PrivateCluster, folder: Path) -> None:
    data = f"tasks.0.source.dataset={EXAMPLES / 'code-judge' / 'data.jsonl'}"
    config = str(EXAMPLES / "code-judge" / "config.yaml")
    steps = ["train.num_steps=2", "model.options.steps=150", "train.batch_size=4", "eval.num_prompts=8"]
    job = Job(private_cluster, folder, "code-judge", data, *steps, config=config)
    report = finished(job, steps=2)
    assert report["problems"] == []
    judged = report["judges"]["programs"]
    assert judged["calls"] >= 2 * 4 + 2 * 8 and judged["failed"] == 0
    passed, solved = (judged["parts"][name]["mean"] for name in ("passed", "solved"))
    assert 0 <= solved <= passed <= 1


@pytest.mark.slow
def test_a_language_model_judges_beside_a_rule(private_cluster: PrivateCluster, folder: Path) -> None:
    sizes = ["train.num_steps=2", "train.batch_size=2", "tasks.0.group_size=4", "eval.num_prompts=0"]
    config = str(EXAMPLES / "generative-judge" / "config.yaml")
    job = Job(private_cluster, folder, "generative-judge", *sizes, config=config)
    report = finished(job, steps=2)
    parts = report["judges"]["sums"]["parts"]
    assert set(parts) == {"right", "plain"} and 0 <= parts["plain"]["mean"] <= 1


def test_a_reward_function_that_always_raises_ends_the_run_with_its_words(
    private_cluster: PrivateCluster, folder: Path
) -> None:
    # What engines say is the same to it: they are scripted. It passes the trial, whose responses are right or empty.
    reward = folder / "broken.py"
    reward.write_text("def score(response, answer):\n    return 1.0 / (response in ('', answer))\n")
    judge = f"tasks.0.judge={{kind: function, function: '{reward}:score'}}"
    options = [judge, "train.num_steps=3", "eval.num_prompts=0"]
    job = example(private_cluster, folder, "broken", *options, module="tests.chaos.job")
    assert job.wait() == 1
    ending = job.output().splitlines()[-1]
    for part in (
        "32 groups in a row failed (bound 32)",
        "judge: task 'sums'",
        "raised ZeroDivisionError",
        "line 2",
    ):
        assert part in ending, job.output()
    report = job.report()
    assert report["status"] == "failed" and "ZeroDivisionError" in report["error"]
    groups = report["groups"]
    assert groups["trained"] == groups["lost"] == 0 and groups["failed"] > 0
    # Those that were judged again count each time; few groups had used up their retries.
    assert report["judges"]["sums"]["failed"] >= 32 * 4
    ends = [json.loads(line) for line in (job.run_dir / "ledger.jsonl").read_text().splitlines()]
    assert any("ZeroDivisionError" in str(event) for event in ends)
