"""Every role of a real run is stopped in turn, and named by what `raypost doctor` finds."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from jobs.private_cluster import PrivateCluster
from raypost.doctor.examine import examine
from raypost.doctor.presence import PROCESSES
from tests.jobs.job import Job

STALL_S = 5.0
ROLES = (
    "driver", "producer", "rollout-controller", "rollout-0", "agent-loop-0", "judge-0", "replay-buffer", "trainer-0",
    "weight-broadcaster", "telemetry",
)  # fmt: skip


def process_of(run_dir: Path, role: str) -> psutil.Process:
    record = json.loads((run_dir / PROCESSES / f"{role}.json").read_text())
    return psutil.Process(record["pid"])


def told(run_dir: Path, until_s: float, text: str) -> bool:
    """Whether the run itself writes this into a doctor file."""
    end = time.monotonic() + until_s
    while time.monotonic() < end:
        if any(text in file.read_text().split("\n\n")[0] for file in run_dir.glob("doctor-*.txt")):
            return True
        time.sleep(0.2)
    return False


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whoever_is_stopped_is_named_by_the_doctor_and_by_the_run(
    private_cluster: PrivateCluster, tmp_path: Path
) -> None:
    job = Job(
        private_cluster, tmp_path, "stopped", "train.num_steps=100000", f"stall_s={STALL_S}", "eval.num_prompts=0"
    )  # fmt: skip
    words = {}
    try:
        job.until_step(3)
        stopped = {role: process_of(job.run_dir, role) for role in ROLES}
        assert not (job.run_dir / PROCESSES / "evaluator.json").exists(), "there is nothing to evaluate"
        engine = max(stopped["rollout-0"].children(recursive=True), key=lambda one: one.memory_info().rss)
        stopped["the engine of rollout-0"] = engine
        for role, process in stopped.items():
            for old in job.run_dir.glob("doctor-*.txt"):
                old.unlink()
            last = len(job.steps())
            os.kill(process.pid, signal.SIGSTOP)
            try:
                time.sleep(STALL_S)
                words[role] = examine(job.run_dir).diagnosis
                by_itself = told(job.run_dir, STALL_S, f"{role} is stopped")
            finally:
                os.kill(process.pid, signal.SIGCONT)
            print(f"{role}: {words[role].headline}; by itself: {by_itself}")
            assert words[role].headline.startswith(f"{role} is stopped by a signal (process {process.pid}")
            assert by_itself or role.startswith("the engine"), role
            job.until_step(last + 1)
    finally:
        job.process.terminate()
        job.process.wait(240)
