"""`raypost run --resume` on the real stack, with what else is rare: the policy as its own judge, and a tracker."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raypost.report import files
from tests.jobs.job import DEADLINE_S, ROOT, SMALL, assert_adds_up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

JUDGE = r"""tasks.0.judge={kind: composed, parts: {
    right: {kind: reasoning_gym, answer_pattern: '(-?\d+)\s*$', weight: 1.0},
    says: {kind: generative, reward_model: policy, context_tokens: 128, verdict_tokens: 60, weight: 0.0,
           template: '{response}{prompt}', answer_pattern: '(-?\d+)\s*$'}}}"""
"""The model can read nothing but sums: what it says last is an answer of its own."""


def test_a_run_that_was_interrupted_is_resumed_with_its_tracker_and_the_policy_judges(tmp_path: Path) -> None:
    tracked = ["tensorboard", *(["wandb"] if importlib.util.find_spec("wandb") else [])]
    command = [sys.executable, "-m", "raypost", "run", "--config", "jobs/recipes/quickstart.yaml"]
    command += ["--runs-dir", str(tmp_path), *SMALL, JUDGE, f"trackers=[{','.join(tracked)}]"]
    # After SMALL's warm-up so few verdicts are numbers that the run ends for it.
    command += ["train.num_steps=60", "model.options.steps=300"]
    environment = os.environ | {"WANDB_MODE": "offline", "PYTHONUNBUFFERED": "1"}
    with (tmp_path / "first.log").open("w") as log:
        first = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    end = time.monotonic() + DEADLINE_S
    while not (saved := list(tmp_path.glob("*/samples/step-000004.jsonl"))) and time.monotonic() < end:
        assert first.poll() is None, (tmp_path / "first.log").read_text()
        time.sleep(0.1)
    assert saved
    first.send_signal(signal.SIGINT)
    assert first.wait(DEADLINE_S) == 128 + signal.SIGINT, (tmp_path / "first.log").read_text()
    (run_dir,) = (path for path in tmp_path.iterdir() if path.is_dir())
    again = subprocess.run(
        [*command, "--resume"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [run_dir], "the same run, not another"
    report = json.loads((run_dir / files.REPORT_JSON).read_text())
    assert (report["status"], report["steps"]) == ("finished", 60)
    # Many of the verdicts of so small a model are no number, which is a failure and no score.
    failures = "the judge gave no score for", "had responses that failed"
    assert all(any(one in problem for one in failures) for problem in report["problems"])
    assert_adds_up(report)
    judged = report["judges"]["sums"]
    assert set(judged["parts"]) == {"right", "says"}
    # A call has a group of 4, and each of its members may fail.
    assert 0 <= judged["failed"] < 4 * judged["calls"]
    if "wandb" in tracked:
        run_id = json.loads((run_dir / files.TRACKERS).read_text())["wandb"]
        sessions = sorted((run_dir / "wandb").glob(f"offline-run-*-{run_id}"))
        assert len(sessions) == 2 and (sessions[-1] / "files" / files.REPORT_HTML).exists()
