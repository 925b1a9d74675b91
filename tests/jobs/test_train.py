"""The main job end to end: real vLLM, real DeepSpeed, real Ray, the quickstart's model with a short warm-up."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
import yaml

from jobs.private_cluster import PrivateCluster
from raypost.checkpoint import verify_files
from raypost.report.files import ABANDONED
from raypost.report.samples import kept_samples
from tests.jobs.job import (
    DEADLINE_S,
    ROOT,
    Job,
    assert_adds_up,
    assert_audited,
    assert_never_older,
    processes,
)

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def short(private_cluster: PrivateCluster, folder: Path) -> Job:
    """The quickstart, ended soon. With the entropy each step has a gradient, whatever rewards its groups got."""
    job = Job(private_cluster, folder, "short", "train.num_steps=6", "train.loss.entropy_coefficient=0.001")
    assert job.wait() == 0, job.output()
    return job


def test_quickstart_trains_syncs_and_accounts_for_every_group(
    private_cluster: PrivateCluster, folder: Path, short: Job
) -> None:
    job = short
    report, steps = job.report(), job.steps()
    assert report["status"] == "finished" and report["steps"] == 6
    assert_adds_up(report)
    assert report["groups"]["trained"] == 6 * 4 and report["groups"]["in_flight"] == 0
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    syncs = job.syncs()
    assert [sync["version"] for sync in syncs] == [0, 1, 2, 3, 4, 5, 6]
    digests = [sync["digest"] for sync in syncs]
    assert len(set(digests)) == 7, "every step moved the weights"
    assert all(record["grad_norm"] > 0 for record in steps)
    assert all(sync["canary_difference"] < 1e-3 for sync in syncs)
    assert report["logprob_mismatch_max"] < 1e-3
    assert report["staleness_max"] <= 1
    for name in ("eval_before", "eval_after"):
        assert 0 <= report[name] <= 1
    for name in ("config.yaml", "report.html", "ledger.jsonl"):
        assert (job.run_dir / name).stat().st_size > 0
    assert_its_best_checkpoint_scores_the_same_again(private_cluster, folder, job)


def assert_its_best_checkpoint_scores_the_same_again(
    private_cluster: PrivateCluster, folder: Path, job: Job
) -> None:
    """Evaluated by a job of its own, from the Hugging Face folder alone: the same weights, the same score."""
    best = job.run_dir / "checkpoints" / "best"
    again = Job(private_cluster, folder, "short", "--checkpoint", str(best), module="jobs.evaluate")
    assert again.wait() == 0, again.output()
    record = json.loads((job.run_dir / "evaluation-step-6.json").read_text())
    assert record["step"] == 6 and record["weights_digest"] == job.syncs()[-1]["digest"]
    # Rounding depends on which requests share a batch, and may turn one of 16 greedy answers.
    assert record["scores"]["held_out"] == pytest.approx(job.report()["eval_after"], abs=1 / 16)
    assert record["scores"]["held_out_low"] <= record["scores"]["held_out"]
    assert "sums" in again.output() and "mean@1" in again.output()


def test_two_workers_two_ranks_and_six_killed_roles_lose_no_group(
    private_cluster: PrivateCluster, folder: Path, short: Job
) -> None:
    """It begins with the weights of another run, as do the ranks that come back."""
    job = Job(
        private_cluster,
        folder,
        "killed",
        "train.num_steps=14",
        "eval.num_prompts=8",
        "eval.interval=7",
        "rollout.num_workers=2",
        "train.num_workers=2",
        "train.zero_stage=2",
        "sync.transport=gloo",
        "--from",
        str(short.run_dir / "checkpoints" / "latest"),
    )
    names = (
        "RolloutWorker",
        "ReplayBufferActor",
        "WeightBroadcaster",
        "Evaluator",
        "Telemetry",
        "TrainerWorker",
    )
    before = {name: processes(name) for name in names}
    job.until_step(2)
    made = {name: processes(name) - before[name] for name in names}
    assert [len(made[name]) for name in names] == [2, 1, 1, 1, 1, 2]
    os.kill(min(made["RolloutWorker"]), signal.SIGKILL)
    job.until_step(4)
    for name in names[1:5]:
        os.kill(min(made[name]), signal.SIGKILL)
    job.until_step(8)
    served = re.search(r"metrics for Prometheus at (\S+)", job.output())
    assert served is not None
    with urllib.request.urlopen(served[1], timeout=60) as answer:
        assert b"ray_raypost_" in answer.read()
    os.kill(min(made["TrainerWorker"]), signal.SIGKILL)
    assert job.wait() == 0, job.output()
    report = job.report()
    assert any("telemetry died and was started again" in problem for problem in report["problems"])
    assert report["eval_before"] is not None and report["eval_after"] is not None
    syncs = job.syncs()
    assert all(sync["transport"] == "gloo" or sync["transport_failed"] for sync in syncs)
    assert syncs[0]["transport"] == "gloo" and all(sync["read_back"] for sync in syncs)
    assert report["status"] == "finished" and report["steps"] == 14
    assert_adds_up(report)
    assert report["groups"]["trained"] == 14 * 4
    # A telemetry that dies before it has answered is told the step again, and marks the first line.
    steps = [record["step"] for record in job.steps() if not record.get(ABANDONED)]
    assert steps == list(range(1, 15)), "no step twice, none left out"
    (died,), (back,) = job.events("role_died"), job.events("role_restarted")
    assert died["actor"].startswith("trainer-") and died["pid"] == min(made["TrainerWorker"])
    assert back["same_bits"] and "version_republished" not in report["incidents"]
    assert_audited(job)
    assert report["incidents"]["batches_trained_again"] == back["step"] >= 8, "there was no checkpoint yet"
    assert "may fail to restart" not in job.output() and "constructor arguments" not in job.output()
    assert job.syncs()[0]["digest"] == short.syncs()[-1]["digest"], "the weights it began with"
    assert verify_files(job.run_dir / "checkpoints" / "step-14") == 14
    assert "restarts and catches up" in job.output() or report["groups"]["failed"] == 0


def test_two_tasks_at_their_own_pace_one_of_them_in_an_environment(
    private_cluster: PrivateCluster, folder: Path
) -> None:
    """Admission by capacity beside a synchronous task, a schedule of weights, a sync that waits, a bounded buffer.

    Adapters are merged into two matrices a layer: the rest of the weights does not travel again.
    """
    recipe = yaml.safe_load((ROOT / "jobs/recipes/quickstart.yaml").read_text())
    [sums] = recipe["tasks"]
    sums |= {"group_size": 4, "weight_schedule": {3: 3.0}}
    loop = {
        "kind": "environment",
        "environment": "tests.jobs.playground:AskTwice",
        "params": {"reward": 0.5},
        "isolation": "process",
        "max_turn_tokens": 8,
    }
    recipe["tasks"] = [sums, {**sums, "name": "game", "agent_loop": loop, "strategy": {"kind": "sync"}}]
    recipe["tasks"][1]["weight_schedule"] = {}
    path = folder / "two-tasks.yaml"
    path.write_text(yaml.safe_dump(recipe))
    job = Job(
        private_cluster,
        folder,
        "two-tasks",
        "train.num_steps=5",
        "sync.pause_mode=wait",
        "buffer.max_groups=10",
        "train.lora={rank: 4, sync: merged, target_modules: [q_proj, v_proj]}",
        config=str(path),
    )
    assert job.wait() == 0, job.output()
    assert_adds_up(job.report())
    spared = [sync["spared_nbytes"] for sync in job.syncs()]
    assert len(spared) >= 6 and spared[0] == 0 < sum(spared) == job.report()["sync_spared_bytes"]
    assert "sent to each worker" in job.output() and "sync_spared_bytes" in job.steps()[-1]
    lines = [json.loads(line) for line in (job.run_dir / "ledger.jsonl").read_text().splitlines()]
    trained = Counter((line["task"], line["step"]) for line in lines if line["event"] == "trained")
    assert [trained["sums", step] for step in range(1, 6)] == [2, 2, 3, 3, 3]
    assert [trained["game", step] for step in range(1, 6)] == [2, 2, 1, 1, 1]
    rewards = {r for line in lines if line.get("task") == "game" for r in line.get("rewards", [])}
    assert rewards <= {0.0, 0.5}
    ages = {line["staleness"] for line in lines if line["event"] == "leased" and line["task"] == "game"}
    assert ages == {0}
    assert_each_task_is_told_apart(job)


def assert_each_task_is_told_apart(job: Job) -> None:
    """By the metrics of steps and report, on the terminal, and in the samples that were kept."""
    tasks = job.report()["tasks"]
    for task, trained in (("sums", 13), ("game", 7)):
        assert tasks[task]["samples_trained"] == 4 * trained
        assert tasks[task]["staleness_max"] <= 1 and tasks[task]["group_s"]["p50"] > 0
        means = [step[f"raw_reward_mean/{task}"] for step in job.steps() if f"raw_reward_mean/{task}" in step]
        assert means and all(0 <= mean <= 1 for mean in means)
        assert re.search(rf"^  {task} +reward ", job.output(), re.MULTILINE)
    for step in range(1, 6):
        kept = kept_samples(job.run_dir, step).samples
        assert Counter(sample["task"] for sample in kept) == {"sums": 4, "game": 4}
        for sample in kept:
            assert sample["prompt"] and len(sample["logprobs"]) == len(sample["response_ids"])
            assert max(sample["policy_versions"]) < step
            assert sample["segments"]
        # One that has learnt nothing may answer with a line break alone; not all of them do.
        assert any(segment["text"].strip() for sample in kept for segment in sample["segments"])
    assert any(len(sample["segments"]) > 1 for sample in kept if sample["task"] == "game"), "observed tokens"


def test_stopped_job_saves_and_is_continued_on_other_ranks_within_the_staleness_bound(
    private_cluster: PrivateCluster, folder: Path
) -> None:
    """Two steps ahead, with more groups begun than are needed, and requests that syncs freeze."""
    options = [
        "train.num_steps=12",
        "tasks.0.strategy.max_staleness=2",
        "tasks.0.strategy.over_sample_threshold=1.0",
        "sync.pause_mode=keep",
        "train.zero_stage=0",
    ]
    first = Job(private_cluster, folder, "stopped", *options)
    first.until_step(3)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 0, first.output()
    stopped = first.report()
    assert stopped["status"] == "stopped" and 3 <= stopped["steps"] < 12
    assert_adds_up(stopped)

    # Half as many tokens a micro-batch, another ZeRO stage, another learning rate, and twice the ranks.
    other = [
        "train.micro_batch_tokens=1024",
        "train.zero_stage=2",
        "train.learning_rate=1e-4",
        "train.num_workers=2",
    ]
    second = Job(private_cluster, folder, "stopped", *options, *other)
    assert second.wait() == 0, second.output()
    report = second.report()
    assert len(report["changed_settings"]) == 4
    assert "train.learning_rate: 0.0002 there, 0.0001 here" in report["changed_settings"]
    assert report["status"] == "finished" and report["steps"] == 12
    assert_adds_up(report)
    assert report["groups"]["trained"] == 12 * 4
    assert [record["step"] for record in second.steps()] == list(range(1, 13))
    assert_never_older(second, 2)
    assert_audited(second)
    assert f"continuing after step {stopped['steps']}" in second.output()


def test_job_stopped_while_it_starts_ends_soon_and_leaves_nothing(
    private_cluster: PrivateCluster, folder: Path
) -> None:
    job = Job(private_cluster, folder, "early", "train.num_steps=3")
    end = time.monotonic() + DEADLINE_S
    while "preparing model" not in job.output() and time.monotonic() < end:
        time.sleep(0.1)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0, job.output()
    assert "stopped before training began" in job.output()


def test_refused_configuration_starts_and_writes_nothing(
    private_cluster: PrivateCluster, folder: Path
) -> None:
    job = Job(private_cluster, folder, "refused", "tasks.0.group_size=1", "train.num_workers=3")
    assert job.wait() == 2
    assert "group_size is 1" in job.output() and "not divisible by train.num_workers 3" in job.output()
    assert not job.run_dir.exists() and "preparing model" not in job.output()
