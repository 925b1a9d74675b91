"""A job as a process of its own: what tests of whole runs share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from jobs.keeper import processes_with
from jobs.private_cluster import PrivateCluster
from raypost.audit.audit import audit
from raypost.report.files import read_spans
from tests.conftest import OURS

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 800
SMALL = [
    "model.options.steps=60",
    "eval.num_prompts=16",
    "train.batch_size=4",
    "tasks.0.group_size=4",
    "rollout.kv_cache_gb=0.25",
    "checkpoint.every_s=null",
]


class Job:
    """One run of a job as a process of its own, on the given cluster."""

    def __init__(
        self,
        cluster: PrivateCluster,
        folder: Path,
        name: str,
        *overrides: str,
        config: str = "jobs/recipes/quickstart.yaml",
        module: str = "jobs.train",
    ) -> None:
        self.run_dir = folder / "runs" / name
        self.log = folder / f"{name}-{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", module, "--config", config]
        command += ["--name", name, "--runs-dir", str(folder / "runs")]
        command += [f"model.cache_dir={folder / 'cache'}", *SMALL, *overrides]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=cluster.env(), stdout=output, stderr=subprocess.STDOUT
            )

    def wait(self) -> int:
        """Exit code."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the job did not end within {DEADLINE_S} s:\n{self.output()}") from None

    def output(self) -> str:
        return self.log.read_text()

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.run_dir / "report.json").read_text())
        return report

    def steps(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [record for record in map(json.loads, lines) if "loss" in record]

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.run_dir / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def spans(self, kind: str) -> list[dict[str, Any]]:
        return [asdict(span) for span in read_spans(self.run_dir / "spans.jsonl") if span.kind == kind]

    def syncs(self) -> list[dict[str, Any]]:
        return self.events("sync")

    def until_step(self, step: int) -> None:
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            assert self.process.poll() is None, f"the job ended early:\n{self.output()}"
            if any(record["step"] >= step for record in self.steps()):
                return
            time.sleep(0.1)
        raise AssertionError(f"step {step} was not reached:\n{self.output()}")


def engines() -> set[int]:
    """Processes of rollout workers, trainer ranks and engines that these tests started."""
    return _running("ray::RolloutWorker", "ray::TrainerWorker", "VLLM::", "EngineCore")


def processes(role: str) -> set[int]:
    """Processes of a role that these tests started."""
    return _running(f"ray::{role}")


def _running(*names: str) -> set[int]:
    found = set()
    for process in processes_with(OURS, os.environ[OURS]):
        with suppress(psutil.Error):
            if any(name in " ".join(process.cmdline()) for name in names):
                found.add(process.pid)
    return found


def assert_adds_up(report: dict[str, Any]) -> None:
    groups = report["groups"]
    rest = {name: count for name, count in groups.items() if name != "sampled"}
    assert groups["sampled"] == sum(rest.values())
    assert groups["lost"] == 0


def assert_audited(job: Job) -> None:
    """Nothing that the run left contradicts anything else."""
    found = audit(job.run_dir)
    assert found.num_contradictions == 0, found.as_dict()


def assert_never_older(job: Job, max_staleness: int) -> None:
    """No group was trained beyond the bound, and the report says so."""
    ages = [age for record in job.steps() for age in record["staleness"]]
    assert len(ages) == job.report()["groups"]["trained"] > 0
    assert job.report()["staleness_max"] == max(ages) <= max_staleness
