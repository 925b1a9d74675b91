"""jobs.run with tiny jobs in place of training: what it shows, how it stops, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from jobs.keeper import processes_with

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
model: {name: tiny}
tasks: [{source: {kind: reasoning_gym, dataset: chain_sum}}]
train: {num_steps: 2, batch_size: 3}
"""

# Runs `job.py ARGS...` of the working directory as jobs.run runs training.
RUN = """
import sys
from pathlib import Path
from jobs.run import run_on_private_cluster
folder = Path(sys.argv[1])
sys.exit(run_on_private_cluster(
    [sys.executable, "job.py", *sys.argv[2:]], working_dir=folder, submission_id="tiny-job",
    resources={"CPU": 1, "rollout": 2}, logs_dir=folder / "run", stop_wait_s=30,
))
"""

SUCCEEDS = """
import ray, sys
ray.init(log_to_driver=False, logging_level="ERROR")
print("resources", ray.cluster_resources()["CPU"], ray.cluster_resources()["rollout"])
print("address", ray.get_runtime_context().gcs_address)
"""

FAILS = """
import pathlib, sys
pathlib.Path(sys.argv[1]).mkdir()
raise RuntimeError("the cause of it")
"""

STOPS = """
import pathlib, signal, sys, time
def stop(*_):
    print("saving", flush=True)
    time.sleep(4.0)  # longer than Ray waits by default
    pathlib.Path(sys.argv[1]).write_text("saved")
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("working", flush=True)
time.sleep(120)
"""


@contextmanager
def running(folder: Path, code: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A run of `code`, with everything it prints in one stream; afterwards nothing of it may be left."""
    folder.mkdir(exist_ok=True)
    (folder / "job.py").write_text(code)
    mark = f"{folder.name}-{os.getpid()}"
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder), *args],
        cwd=ROOT,
        env=os.environ | {"TEST_RUN": mark, "RAY_ADDRESS": "127.0.0.1:1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield run
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(240)
    # Ray's watcher of a job looks once a second whether it still has something to watch.
    _, left = psutil.wait_procs(processes_with("TEST_RUN", mark), 60)
    assert left == []


def read_until(run: subprocess.Popen[str], text: str) -> str:
    """Output up to the line that contains `text`."""
    assert run.stdout is not None
    shown = ""
    for line in run.stdout:
        shown += line
        if text in line:
            return shown
    raise AssertionError(f"{text!r} was never shown:\n{shown}")


def test_two_runs_side_by_side_use_their_own_clusters(tmp_path: Path) -> None:
    with (
        running(tmp_path / "first", SUCCEEDS) as first,
        running(tmp_path / "second", SUCCEEDS) as second,
    ):
        shown = [run.communicate(timeout=240)[0] for run in (first, second)]
        assert [first.returncode, second.returncode] == [0, 0], shown
    assert all("resources 1.0 2.0" in text for text in shown)
    addresses = {line for text in shown for line in text.splitlines() if line.startswith("address")}
    assert len(addresses) == 2


def test_failure_ends_with_its_cause_its_code_and_the_logs(tmp_path: Path) -> None:
    with running(tmp_path / "job", FAILS, str(tmp_path / "job" / "run")) as run:
        shown, _ = run.communicate(timeout=240)
    assert run.returncode == 1
    assert shown.splitlines()[-1] == "failed (exit code 1): RuntimeError: the cause of it"
    assert (tmp_path / "job" / "run" / "ray_logs" / "raylet.out").exists()
    assert "Traceback" in shown


def test_signal_lets_the_job_save_first(tmp_path: Path) -> None:
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143}
    with ExitStack() as stack:
        runs = {
            number: stack.enter_context(running(tmp_path / number.name, STOPS, str(tmp_path / f"{number:d}")))
            for number in codes
        }
        for number, run in runs.items():
            read_until(run, "working")
            run.send_signal(number)
        shown = [run.communicate(timeout=240)[0] for run in runs.values()]
    assert {number: run.returncode for number, run in runs.items()} == codes
    assert [(tmp_path / f"{number:d}").read_text() for number in codes] == ["saved", "saved"]
    assert all("saved" in text.splitlines() for text in shown)


def test_run_whose_terminal_closes_saves_first_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(STOPS)
    mark, saved = f"terminal-{os.getpid()}", tmp_path / "saved"
    pid, terminal = os.forkpty()
    if pid == 0:
        os.chdir(ROOT)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored below `nohup`
        environment = os.environ | {"TEST_RUN": mark, "RAY_ADDRESS": "127.0.0.1:1", "PYTHONUNBUFFERED": "1"}
        os.execve(sys.executable, [sys.executable, "-c", RUN, str(tmp_path), str(saved)], environment)
    shown = b""
    while b"working" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    assert saved.read_text() == "saved"
    _, left = psutil.wait_procs(processes_with("TEST_RUN", mark), 60)
    assert left == []


def test_second_signal_ends_the_job_at_once(tmp_path: Path) -> None:
    slow = STOPS.replace("time.sleep(4.0)", "time.sleep(29.0)")
    with running(tmp_path / "job", slow, str(tmp_path / "file")) as run:
        read_until(run, "working")
        run.send_signal(signal.SIGINT)
        read_until(run, "saving")
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=240)
    assert run.returncode == 130
    assert not (tmp_path / "file").exists()


def test_recipe_that_cannot_work_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(RECIPE + "no_such_key: 1\n")
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "jobs.run",
            "--config",
            str(tmp_path / "bad.yaml"),
            "--runs-dir",
            str(tmp_path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 2
    assert "no_such_key" in run.stderr
    assert run.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]
