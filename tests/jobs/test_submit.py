"""The commands of README and cluster.yaml as a user types them, on a cluster with token authentication."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.private_cluster import PrivateCluster
from tests.conftest import EQUAL_TERMS
from tests.jobs.job import DEADLINE_S, ROOT, SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
RECIPE = "jobs/recipes/quickstart.yaml"


@pytest.fixture(scope="module")
def cluster() -> Iterator[PrivateCluster]:
    """One with a dashboard and a token, whose jobs find this environment's Python."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    made = PrivateCluster(num_cpus=4, dashboard=True, extra_env={"PATH": path, **EQUAL_TERMS})
    with made:
        yield made
    assert made.pids == []


def call(
    cluster: PrivateCluster, *command: str, token: bool = True, code: int = 0, timeout_s: float = DEADLINE_S
) -> str:
    """Run a command in the user's shell, from which the cluster is known by its dashboard alone."""
    env = {key: value for key, value in cluster.env().items() if key != "RAY_ADDRESS"}
    if not token:
        env = {key: value for key, value in env.items() if not key.startswith("RAY_AUTH")}
    tool, *rest = command
    module = {"ray": "ray.scripts.scripts", "raypost": "raypost"}[tool]
    done = subprocess.run(
        [sys.executable, "-m", module, *rest],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_a_job_is_planned_submitted_stopped_and_continued_with_the_users_token(
    cluster: PrivateCluster, folder: Path
) -> None:
    url, runs = cluster.dashboard_url, folder / "runs"
    small = [f"model.cache_dir={folder / 'cache'}", *SMALL, "eval.num_prompts=0"]
    planned = call(cluster, "raypost", "plan", "--config", RECIPE, "--cluster", url)
    assert "Nodes by type" in planned and "4 CPU each; free: 4 CPU" in " ".join(planned.split())
    refused = call(cluster, "raypost", "plan", "--config", RECIPE, "--cluster", url, token=False, code=2)
    assert "401" in refused and "RAY_AUTH_TOKEN" in refused

    job = ["python", "-m", "jobs.train", "--config", RECIPE, "--runs-dir", str(runs), "--name", "submitted"]
    options = ["--working-dir", ".", "--submission-id", "first", "--no-wait"]
    env = ["--runtime-env-json", json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}})]
    call(cluster, "ray", "job", "submit", *options, *env, "--", *job, *small, "train.num_steps=100000")
    until_step(cluster, runs / "submitted", 2)
    call(cluster, "ray", "job", "stop", "first")
    report = json.loads((runs / "submitted" / "report.json").read_text())
    assert report["status"] == "stopped" and report["steps"] >= 2

    steps = f"train.num_steps={report['steps'] + 3}"
    again = ["--address", url, "--config", RECIPE, "--submission-id", "second"]
    own = ["name=submitted", f"runs_dir={runs}", *small, steps]
    said = call(cluster, "raypost", "submit", *again, *own)
    assert "job submit" in said
    continued = json.loads((runs / "submitted" / "report.json").read_text())
    assert (continued["status"], continued["sessions"]) == ("finished", 2)
    assert continued["steps"] == report["steps"] + 3
    listed = call(cluster, "ray", "job", "list")
    assert "'job_name': 'submitted'" in listed and "jobs/recipes/quickstart.yaml" in listed


def until_step(cluster: PrivateCluster, run_dir: Path, step: int) -> None:
    end = time.monotonic() + DEADLINE_S
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or sum('"loss"' in one for one in metrics.read_text().splitlines()) < step:
        if time.monotonic() > end:
            raise AssertionError(call(cluster, "ray", "job", "logs", "first"))
        time.sleep(0.5)
