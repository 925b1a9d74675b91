"""The private head: reachable, alone, and gone afterwards, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from jobs.keeper import processes_with
from jobs.private_cluster import ClusterStartError, PrivateCluster

ROOT = Path(__file__).resolve().parents[2]
SMALL = 128 * 1024**2

DRIVER = """
import json, os, ray
ray.init(log_to_driver=False, logging_level="ERROR")
raylet = ray.get(ray.remote(lambda: os.getppid()).remote())
address = ray.get_runtime_context().gcs_address
nice = ray.get(ray.remote(lambda: os.nice(0)).remote())
print(json.dumps({"address": address, "raylet": raylet, "nice": nice, **ray.cluster_resources()}))
"""

# Starts a cluster and then waits to be ended; prints its folder and the pids.
HOLDER = """
import signal, sys, time
# A shell that starts tests in the background makes them, and what they start, ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
from jobs.private_cluster import PrivateCluster
with PrivateCluster(num_cpus=1, object_store_memory=2**27, extra_env={"HELD": sys.argv[1]}) as cluster:
    print(cluster.logs_dir.parents[2], *cluster.pids, flush=True)
    time.sleep(600)
"""


def drive(cluster: PrivateCluster) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], env=cluster.env(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_driver_with_its_env_reaches_the_cluster_and_no_other(private_cluster: PrivateCluster) -> None:
    found = drive(private_cluster)
    assert found["address"] == private_cluster.address
    assert found["rollout"] == 8
    assert found["raylet"] in private_cluster.pids


def assert_refused_without_the_token(cluster: PrivateCluster) -> None:
    env = cluster.env() | {"RAY_AUTH_MODE": "disabled"}
    code = f"from ray._raylet import GcsClient; GcsClient({cluster.address!r}).internal_kv_keys(b'', b'')"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode != 0
    assert "auth" in done.stderr.lower()


def test_settings_of_ray_are_passed_on_and_nothing_that_belongs_to_another_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = {"RAY_worker_niceness": "3", "RAY_health_check_period_ms": "500", "NOT_RAYS": "x"}
    dropped = (
        *(
            "RAY_ADDRESS",
            "RAY_AUTH_TOKEN",
            "RAY_JOB_ID",
            "RAY_RAYLET_PID",
            "RAY_NODE_ID",
            "RAY_worker_NICENESS-",
        ),
        *(
            "RAY_enable_cluster_auth",
            "RAY_external_storage_namespace",
            "RAY_gcs_storage_path",
            "RAY_redis_db_retries",
        ),
    )
    for name, value in (passed | dict.fromkeys(dropped, "another's")).items():
        monkeypatch.setenv(name, value)
    cluster = PrivateCluster(num_cpus=1)
    monkeypatch.setattr(cluster, "_folder", tmp_path)
    env = cluster.env()
    assert passed.items() <= env.items() and not env.keys() & set(dropped)


def test_two_clusters_started_at_once_are_separate_ask_for_their_token_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_worker_niceness", "7")  # as a user of `make run` does
    clusters = [PrivateCluster(num_cpus=count, object_store_memory=SMALL) for count in (1, 3)]
    threads = [threading.Thread(target=cluster.__enter__) for cluster in clusters]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)
        first, second = clusters
        assert first.address != second.address
        assert not set(first.pids) & set(second.pids)
        found = [drive(cluster) for cluster in clusters]
        assert [(one["CPU"], one["nice"]) for one in found] == [(1.0, 7), (3.0, 7)]
        assert_refused_without_the_token(first)
        folders = [cluster.logs_dir.parents[2] for cluster in clusters]
    finally:
        for cluster in clusters:
            cluster.stop()
    assert [cluster.pids for cluster in clusters] == [[], []]
    assert not any(folder.exists() for folder in folders)


def test_head_that_cannot_start_names_the_cause_and_leaves_nothing(tmp_path: Path) -> None:
    cluster = PrivateCluster(num_cpus=-1, temp_dir=Path("/tmp"))
    with pytest.raises(ClusterStartError, match="ended with code"), cluster:
        raise AssertionError("unreachable")
    assert cluster.pids == []


def test_head_that_is_too_slow_is_ended() -> None:
    cluster = PrivateCluster(num_cpus=1, start_timeout_s=0.5)
    with (
        pytest.raises(ClusterStartError, match=r"did not answer within 0\.5 s"),
        cluster,
    ):
        raise AssertionError("unreachable")
    assert cluster.pids == []


def test_temp_dir_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 80)
    folder.mkdir()
    with (
        pytest.raises(ClusterStartError, match="too long"),
        PrivateCluster(num_cpus=1, temp_dir=folder),
    ):
        raise AssertionError("unreachable")
    assert list(folder.iterdir()) == []


def test_cluster_ends_with_its_owner() -> None:
    endings = signal.SIGINT, signal.SIGKILL
    with ThreadPoolExecutor() as pool:
        owners = list(pool.map(hold, map(str, endings)))
    for ending, (owner, folder, pids) in zip(endings, owners, strict=True):
        owner.send_signal(ending)
        ends(owner)
        processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        _, left = psutil.wait_procs(processes, timeout=60)
        for process in left:
            process.kill()
        assert left == [], ending
        assert not folder.exists(), ending


# A cluster with something that looks like a job, which takes a second to save.
JOB = """
import signal, sys, time
def save(*_):
    time.sleep(1)
    open(sys.argv[1], "w").write("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""
LAUNCHER = """
import os, signal, subprocess, sys
from jobs.private_cluster import PrivateCluster
with PrivateCluster(num_cpus=1, object_store_memory=2**27) as cluster:
    environment = {**cluster.env(), "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
    job = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], env=environment, stdout=subprocess.PIPE)
    job.stdout.readline()
    print(cluster.logs_dir.parents[2], job.pid, *cluster.pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_jobs_of_a_launcher_that_was_killed_save_before_the_cluster_ends(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    command = [sys.executable, "-c", LAUNCHER, JOB, str(saved)]
    launcher = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert launcher.returncode == -signal.SIGKILL, launcher.stderr
    folder, *pids = launcher.stdout.split()
    processes = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
    _, left = psutil.wait_procs(processes, timeout=240)
    for process in left:
        process.kill()
    assert left == [] and saved.read_text() == "saved"
    assert not Path(folder).exists()


@pytest.mark.parametrize("delay_s", [0.3, 1.5], ids=["at-once", "half-way"])
def test_interrupt_while_starting_leaves_nothing(delay_s: float) -> None:
    mark = f"starting-{os.getpid()}-{delay_s}"
    owner = subprocess.Popen([sys.executable, "-c", HOLDER, mark], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not heads_of(owner.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(delay_s)
    owner.send_signal(signal.SIGINT)
    assert ends(owner) != 0
    assert processes_with("HELD", mark) == []


def hold(mark: str) -> tuple[subprocess.Popen[str], Path, list[int]]:
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLDER, mark],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert owner.stdout is not None
    first = owner.stdout.readline()
    if not first.startswith("/"):
        raise AssertionError(
            f"the owner's cluster did not start:\n{first}{owner.communicate(timeout=240)[0]}"
        )
    folder, *pids = first.split()
    return owner, Path(folder), [int(pid) for pid in pids]


def ends(owner: subprocess.Popen[str] | subprocess.Popen[bytes]) -> int:
    """Exit code of an owner that was told to end; one that does not is killed, and its cluster ends with it."""
    try:
        return owner.wait(240)
    except subprocess.TimeoutExpired:
        owner.kill()
        raise


def heads_of(pid: int) -> list[psutil.Process]:
    children: list[psutil.Process] = psutil.Process(pid).children()
    return children
