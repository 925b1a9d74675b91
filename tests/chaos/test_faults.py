"""Faults that are no kills of a role: damage, lost calls, a full object store, a lost node; and a gate that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from jobs.chaos import Victim
from jobs.private_cluster import PrivateCluster
from raypost.audit.audit import audit
from raypost.audit.findings import Check
from raypost.doctor.examine import examine
from tests.chaos.conftest import Private
from tests.chaos.harness import ChaosRun, config_of
from tests.chaos.scripted import MEMORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS, PACE_S = 24, 0.3
LOST_STEPS, LOST_S = 4, 300.0
"""Of a run that loses calls: its length, and the longest time it may take, and its start may. With 15 % of the requests
and of the answers, 28 of 100 calls are lost, and each costs the 1 to 2 s after which Ray says so: some 30 s a step."""


def started(
    cluster: PrivateCluster,
    folder: Path,
    *,
    kind: str = "sync",
    module: str = "tests.chaos.job",
    steps: int = STEPS,
    start_s: float = 120.0,
    **changed: Any,
) -> ChaosRun:
    """A run whose ranks have begun a step."""
    config = config_of(folder, steps=steps, kind=kind, **changed)
    run = ChaosRun(cluster, folder, "run", config, module, start_s=start_s)
    run.set_pace(PACE_S)
    run._until_it_trains()
    return run


def undisturbed(run: ChaosRun) -> bytes:
    """Return the weights of the same run, which nothing disturbs."""
    quiet = ChaosRun(run.cluster, run.folder, "quiet", run.config)
    quiet.finish(120)
    return quiet.weights


def kill(run: ChaosRun, role: str) -> Victim:
    """Kill an actor of that role."""
    victim = next(one for one in run.actors() if one.role == role)
    assert run.kill(victim, role)
    return victim


def back(run: ChaosRun, victim: Victim, timeout_s: float = 30.0) -> None:
    """Wait until an actor has another process."""
    end = time.monotonic() + timeout_s
    while not is_back(run, victim):
        assert time.monotonic() < end and run.exit_code is None, run.words()
        time.sleep(0.05)


def is_back(run: ChaosRun, victim: Victim) -> bool:
    return any(one.name == victim.name and one.pid != victim.pid for one in run.actors())


def events(run: ChaosRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.run_dir / "events.jsonl").read_text().splitlines()]


def test_a_buffer_that_comes_back_to_a_damaged_journal_loses_nothing_that_counts(
    cluster: PrivateCluster, folder: Path
) -> None:
    run = started(cluster, folder)
    try:
        # With a batch in training, and with groups on their way.
        for phase, part in (("fit", 0.3), ("resume", 0.7)):
            run._until_phase(phase)
            victim, log = kill(run, "buffer"), run.run_dir / "buffer" / "log"
            data = bytearray(log.read_bytes())
            data[120 + int(part * (len(data) - 121))] ^= 1
            log.write_bytes(data)
            back(run, victim)
            run._until_phase("publish")
        run.finish(120)
        weights = undisturbed(run)
    finally:
        run.end()
    told = Counter(one["event"] for one in events(run))
    report = json.loads((run.run_dir / "report.json").read_text())
    print(told, run.attempts, [one for one in events(run) if one["event"] == "buffer_cut"])
    assert told["buffer_cut"] == 2 and told["groups_regenerated"] >= 1 and run.attempts == 1, run.ended_by
    assert audit(run.run_dir).num_contradictions == 0 and "buffer_cut" in json.dumps(report)
    assert run.weights == weights


@pytest.mark.parametrize(("kind", "percent"), [("sync", 5), ("sync", 15), ("async", 15)])
def test_lost_calls_and_lost_answers_lose_no_group(
    start: Private, folder: Path, kind: str, percent: int
) -> None:
    """So many of the requests, and as many of the answers, of calls to actors do not arrive."""
    lost = {"num_failures": -1, "req_failure_prob": percent, "resp_failure_prob": percent}
    env = {"RAY_testing_rpc_failure": json.dumps({"CoreWorkerService.grpc_client.PushTask": lost})}
    begin = time.monotonic()
    run = started(start(env), folder, kind=kind, steps=LOST_STEPS, start_s=LOST_S)
    try:
        run.finish(LOST_S)
        print(f"{time.monotonic() - begin:.0f} s for {LOST_STEPS} steps, {run.attempts} starts of the driver")
        print(Counter(one["event"] for one in events(run)), *run.ended_by, sep="\n")
        found = audit(run.run_dir)
        assert found.num_contradictions == 0, found.as_dict()
    finally:
        run.end()


def test_an_object_store_of_96_mb_that_others_fill_holds_the_run_up_and_does_not_end_it(
    start: Private, folder: Path
) -> None:
    import ray

    cluster = start(object_store_memory=96 * 1024**2)
    held = [ray.put(bytes(8 * 1024**2)) for _ in range(11)]
    run = started(cluster, folder)
    try:
        run.finish(120)
        assert audit(run.run_dir).num_contradictions == 0 and run.attempts == 1, run.ended_by
        assert run.weights == undisturbed(run)
    finally:
        run.end()
        del held


def node(cluster: PrivateCluster, log: Path) -> subprocess.Popen[bytes]:
    """Start a second node with room for one engine; it ends with the cluster."""
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        f"--address={cluster.address}",
        "--block",
    ]
    command += [
        "--num-cpus=4",
        "--resources",
        json.dumps({"rollout": 1}),
        "--object-store-memory",
        "80000000",
    ]
    command += [
        "--node-ip-address=127.0.0.3",
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--disable-usage-stats",
    ]
    with log.open("ab") as file:
        return subprocess.Popen(command, env=cluster.env(), stdout=file, stderr=file)


def test_a_lost_node_costs_no_group_and_its_engine_comes_back_on_another(
    start: Private, folder: Path
) -> None:
    import ray

    quick = {"period_ms": "500", "timeout_ms": "1000", "failure_threshold": "3", "initial_delay_ms": "1000"}
    env = {f"RAY_health_check_{name}": value for name, value in quick.items()}
    cluster = start(env, resources={"rollout": 1})

    def nodes() -> int:
        return sum(one["Alive"] for one in ray.nodes())

    def joined(number: int) -> subprocess.Popen[bytes]:
        made, end = node(cluster, folder / "node.log"), time.monotonic() + 240
        while nodes() < number:
            assert time.monotonic() < end and made.poll() is None, (folder / "node.log").read_text()[-2000:]
            time.sleep(0.1)
        return made

    second = joined(2)
    rollout = config_of(folder, steps=STEPS, kind="async")["rollout"] | {"resources": {"rollout": 1}}
    run = started(cluster, folder, kind="async", rollout=rollout)
    try:
        away = [one for one in run.actors() if not one.is_here]
        assert [one.role for one in away if one.role == "engine"] == ["engine"]
        print("on the node that is lost:", [one.name for one in away])
        for process in psutil.Process(second.pid).children(recursive=True):
            process.kill()
        second.kill()
        begin = time.monotonic()
        assert any(run._until_phase("publish") for _ in range(10)), run.words()
        print(f"training goes on {time.monotonic() - begin:.1f} s after its loss")
        joined(2)
        run.finish(150)
        told = Counter(one["event"] for one in events(run))
        print(told, run.attempts, *run.ended_by)
        assert audit(run.run_dir).num_contradictions == 0 and run.attempts == 1, run.ended_by
    finally:
        run.end()


def test_a_micro_batch_beyond_memory_is_halved_and_the_run_goes_on(
    cluster: PrivateCluster, folder: Path
) -> None:
    run = started(cluster, folder)
    try:
        tokens = run.config["train"]["micro_batch_tokens"]
        (folder / MEMORY).write_text(str(tokens / 4))
        run._until_phase("publish")
        run.finish(120)
        told = [one for one in events(run) if one["event"] == "micro_batches_halved"]
        report = json.loads((run.run_dir / "report.json").read_text())
        assert [(one["before"], one["after"]) for one in told] == [
            (tokens, tokens // 2),
            (tokens // 2, tokens // 4),
        ]
        assert "micro_batches_halved" in json.dumps(report) and run.attempts == 1, run.ended_by
        assert audit(run.run_dir).num_contradictions == 0
        (folder / MEMORY).unlink()
        assert run.weights == undisturbed(run)
    finally:
        run.end()


@pytest.mark.parametrize(("process", "said"), [("gcs_server", "Ray's GCS"), ("raylet", "Ray's raylet")])
def test_a_part_of_ray_that_is_stopped_is_named(
    cluster: PrivateCluster, folder: Path, process: str, said: str
) -> None:
    run = started(cluster, folder, kind="async")
    (pid,) = (one for one in cluster.pids if psutil.Process(one).name() == process)
    try:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(3.0)
        headline = examine(run.run_dir).diagnosis.headline
    finally:
        os.kill(pid, signal.SIGCONT)
    try:
        print(headline)
        assert said in headline and "stopped" in headline
        run.finish(120)
        assert audit(run.run_dir).num_contradictions == 0 and run.attempts == 1, run.ended_by
    finally:
        run.end()


@pytest.mark.parametrize(
    ("module", "check"), [("forgetful_job", Check.LOST), ("forgetful_job_leases", Check.TWICE)]
)
def test_a_buffer_that_forgets_is_found_out(
    cluster: PrivateCluster, folder: Path, module: str, check: Check
) -> None:
    """The negative control: with journal or leases switched off behind everybody's back, the gate must not hold."""
    run = started(cluster, folder, kind="async", module=f"tests.chaos.{module}")
    try:
        for _ in range(3):
            if not run._until_phase("fit"):
                break
            victim = kill(run, "buffer")
            while run.exit_code is None and not is_back(run, victim):
                time.sleep(0.05)
        run.set_pace(0.0)
        end = time.monotonic() + 240
        while run.exit_code is None and time.monotonic() < end:
            time.sleep(0.1)
        found = audit(run.run_dir)
        print(run.exit_code, run.words()[-1500:], json.dumps(found.as_dict(), indent=1))
        assert found.findings.contradictions[check] > 0
    finally:
        run.end()
