"""The other compositions end to end: colocated, with a critic, with several pools, evaluated beside production."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from jobs.private_cluster import PrivateCluster
from tests.jobs.job import Job, assert_adds_up, assert_never_older, processes

pytestmark = pytest.mark.timeout(1800)

ENTROPY = "train.loss.entropy_coefficient=0.001"
"""So that a step has a gradient also where all rewards of each group are equal, which is chance."""


def test_critic_reference_engine_two_pools_and_evaluation_beside_production(
    private_cluster: PrivateCluster, folder: Path
) -> None:
    job = Job(
        private_cluster,
        folder,
        "critic",
        "train.num_steps=5",
        "train.advantage.kind=gae",
        "train.critic={zero_stage: 2}",
        "train.loss.kl={coefficient: 0.01, pool: {name: frozen}}",
        "rollout.pools=[{name: far}]",
        "eval.pool={name: exam}",
        "eval.interval=2",
        "tasks.0.strategy.max_staleness=0",
        "tasks.0.strategy.over_sample_threshold=1.0",
    )
    assert job.wait() == 0, job.output()
    assert_adds_up(job.report())
    assert_never_older(job, 0)
    assert all(record["value_loss"] >= 0 for record in job.steps())
    # At the first step the policy is its reference, but for rounding; five steps move it away.
    divergence = [record.get("reference_kl", 0.0) for record in job.steps()]
    assert divergence[0] < 1e-9 and divergence[-1] > 1e-7, divergence
    assert {sync["num_workers"] for sync in job.syncs()} == {2}
    evaluated = [event["step"] for event in job.events("eval")]
    assert evaluated == [0, 2, 4, 5]


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (
            "jobs.colocate",
            ["train.num_epochs=2", "train.loss.kl.coefficient=0.01", ENTROPY, "train.zero_stage=2"],
        ),
        (
            "jobs.colocate_lowlevel",
            ["train.advantage.kind=gae", "train.critic={}", "train.num_minibatches=2"],
        ),
    ],
)
def test_engines_and_ranks_take_turns(
    private_cluster: PrivateCluster, folder: Path, module: str, options: list[str]
) -> None:
    job = Job(
        private_cluster,
        folder,
        module.partition(".")[2],
        "train.num_steps=4",
        "sync.sync_weights_interval=2",
        *options,
        config="jobs/recipes/colocate.yaml",
        module=module,
    )
    killed = module == "jobs.colocate_lowlevel"
    if killed:  # one of policy and critic: both come back, and the step that is spelt out is replayed by its own calls
        before = processes("TrainerWorker")
        job.until_step(2)
        os.kill(min(processes("TrainerWorker") - before), signal.SIGKILL)
    assert job.wait() == 0, job.output()
    report = job.report()
    assert report["incidents"].get("role_restarted", 0) == killed
    assert all(event["same_bits"] for event in job.events("role_restarted")), "what engines hold, bit for bit"
    assert_adds_up(report)
    assert report["groups"]["trained"] == 4 * 4
    assert [record["staleness_max"] for record in job.steps()] == [0, 1, 0, 1]
    syncs = job.syncs()
    assert [sync["version"] for sync in syncs] == [0, 2, 4]
    assert len({sync["digest"] for sync in syncs}) == 3
    assert all(sync["canary_difference"] < 1e-3 for sync in syncs)
    generated, trained = job.spans("rollout"), job.spans("train")
    assert generated and trained
    for one in trained:
        assert not any(
            other["start_s"] < one["end_s"] and one["start_s"] < other["end_s"] for other in generated
        )
