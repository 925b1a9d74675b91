"""A pool that grows and shrinks while the run goes on: real engines, `raypost scale` as a user types it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from jobs.nodes import autoscaler_says, live_cluster, node_types
from jobs.private_cluster import PrivateCluster
from raypost.audit.audit import audit
from raypost.doctor.presence import PROCESSES
from raypost.observe.spans import ROLLOUT, Span
from raypost.report.files import read_spans
from raypost.report.pool import ask_for_size, pool_record
from tests.chaos.harness import ChaosRun, config_of
from tests.jobs.autoscaling import (
    autoscaling_cluster,
    drain,
    kill_raylet,
    node_of,
    nodes_of_living,
    rollout_nodes,
)
from tests.jobs.job import DEADLINE_S, Job, assert_adds_up, assert_audited, assert_never_older

pytestmark = pytest.mark.timeout(1800)


def scale(job: Job, workers: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "raypost", "scale", str(job.run_dir), "--workers", workers]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


def until_workers(job: Job, expected: dict[str, str]) -> None:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        assert job.process.poll() is None, f"the job ended early:\n{job.output()}"
        record = pool_record(job.run_dir)
        if record is not None and record.workers == expected:
            return
        time.sleep(0.2)
    raise AssertionError(f"{record} is not {expected}:\n{job.output()}")


@pytest.mark.slow
def test_the_quickstart_grows_by_raypost_scale_and_shrinks_again_with_nothing_lost(
    private_cluster: PrivateCluster, folder: Path
) -> None:
    job = Job(private_cluster, folder, "elastic", "train.num_steps=100000", "rollout.num_workers=1")
    try:
        job.until_step(2)
        assert scale(job, "2").returncode == 0
        until_workers(job, {"rollout-0": "up", "rollout-1": "up"})
        grown = max(record["step"] for record in job.steps())
        job.until_step(grown + 6)
        shown = status(job)
        assert "2 wanted (raypost scale)" in shown and "rollout-1" in shown
        until_shown(job, r'raypost_pool_target{[^}]*pool="rollout"[^}]*} 2\.0')
        assert scale(job, "1").returncode == 0
        until_workers(job, {"rollout-0": "up"})
        job.until_step(max(record["step"] for record in job.steps()) + 3)
    finally:
        job.process.terminate()
    assert job.wait() == 0, job.output()
    (joined,) = job.events("worker_joined")
    (left,) = job.events("worker_left")
    assert joined["actor"] == left["actor"] == "rollout-1"
    served = [span for span in job.spans("rollout") if span["actor"] == "rollout-1"]
    assert served and min(span["start_s"] for span in served) >= joined["time_s"] - joined["seconds"]
    assert max(span["end_s"] for span in served) <= left["time_s"]
    counts = {sync["num_workers"] for sync in job.syncs()}
    assert counts == {1, 2}, "syncs reached both sizes of the pool"
    assert_adds_up(job.report())
    assert_audited(job)
    assert_never_older(job, 1)
    refused = scale(job, "2")
    assert refused.returncode == 2 and "no run goes on" in refused.stderr


def until_shown(job: Job, pattern: str) -> None:
    """Wait until Prometheus would read it where the job says that it may."""
    served = re.search(r"metrics for Prometheus at (\S+)", job.output())
    assert served is not None
    end, text = time.monotonic() + DEADLINE_S, ""
    while not re.search(pattern, text):
        assert time.monotonic() < end and job.process.poll() is None, f"no {pattern} in\n{text[-3000:]}"
        time.sleep(0.5)
        with urllib.request.urlopen(served[1], timeout=60) as answer:
            text = answer.read().decode()


@pytest.mark.slow
def test_a_run_that_starves_gets_nodes_from_the_autoscaler_and_gives_them_back(tmp_path: Path) -> None:
    """Scripted engines and ranks on the real autoscaler: 1 node, then 3, then 1 again."""
    config = config_of(tmp_path, steps=100_000, kind="async")
    config["autoscaling"] = True
    config["tasks"][0] |= {"max_tokens": 120, "min_tokens": 100}
    config["eval"]["num_prompts"] = 0
    config["checkpoint"] = {"interval": 0, "every_s": None}
    config["rollout"] |= {
        "num_workers": 1, "max_num_seqs": 2, "resources": {"rollout": 1}, "start_timeout_s": 90,
        "autoscale": {"min": 1, "max": 3, "window_s": 6, "cooldown_s": 5},
    }  # fmt: skip
    with autoscaling_cluster(tmp_path) as cluster:
        assert rollout_nodes() == 0
        run = ChaosRun(cluster, tmp_path, "elastic", config)
        run.start()
        try:
            until(run, "1 node", lambda: rollout_nodes() == 1)
            until(run, "3 workers that serve", lambda: up(run) == 3 and rollout_nodes() == 3)
            run.set_pace(4.0)
            until(run, "1 worker", lambda: up(run) == 1)
            until(run, "1 node", lambda: rollout_nodes() == 1)
            run.set_pace(0.0)
            assert run._driver is not None
            run._driver.terminate()
            assert run._driver.wait(240) == 0, run.words()
        finally:
            run.end()
    kinds = Counter(event["event"] for event in events(run))
    assert kinds["worker_joined"] >= 2 and kinds["worker_left"] >= 2 and not kinds["pool_short"], kinds
    sizes = [(one["before"], one["target"]) for one in events(run) if one["event"] == "pool_resized"]
    assert sizes[0][0] == sizes[-1][1] == 1 and max(size for _, size in sizes) == 3, sizes
    report = json.loads((run.run_dir / "report.json").read_text())
    assert_adds_up(report)
    assert audit(run.run_dir).num_contradictions == 0
    spans = read_spans(run.run_dir / "spans.jsonl")
    assert len({span.actor for span in spans if span.kind == "rollout"}) >= 3


@pytest.mark.slow
def test_what_the_autoscaler_may_add_is_planned_and_what_it_never_will_is_said(tmp_path: Path) -> None:
    """`raypost plan` and a job as a user types them, and what is said of actors that wait."""
    config = config_of(tmp_path, steps=1, kind="async")
    config["autoscaling"] = True
    config["rollout"] |= {"num_workers": 2, "num_cpus": 1, "resources": {"rollout": 1}}
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    with autoscaling_cluster(tmp_path, dashboard=True) as cluster:
        assert cluster._folder is not None
        file = str(cluster._folder / "autoscaling.yaml")
        found = node_types()
        assert found is not None and found.left([""] * len(ray.nodes())) == {
            "ray.head.default": 0, "rollout": 3,
        }  # fmt: skip

        def typed(*words: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", *words[:1], "--config", str(tmp_path / "run.yaml"), *words[1:]]
            if words[0] == "raypost":
                command[3:3] = ["plan"]
            env = {**cluster.env(), "RAY_ADDRESS": cluster.address}
            return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=120)

        both = ("--cluster", cluster.dashboard_url, "--cluster", file)
        shown = typed("raypost", *both)
        assert shown.returncode == 0 and "the autoscaler may add 3" in shown.stdout, shown.stderr
        for refused in (
            typed("raypost", *both, "rollout.num_workers=4"),
            typed("jobs.train", "rollout.num_workers=4"),
        ):
            assert refused.returncode == 2, refused.stderr
            assert (
                "with all nodes that the autoscaler may add: the placement needs 4 rollout" in refused.stderr
            )
        twice = typed("raypost", *both, "--cluster", "none")
        assert twice.returncode == 2 and "give one, or the dashboard" in twice.stderr

        large, small = (ray.remote(num_cpus=0, resources={"rollout": each})(Waiting) for each in (2, 1))
        asked = [large.remote()]
        until_said(
            autoscaler_says, {"rollout": 2}, "no node type has that (ray.head.default: ", "rollout: 1 CPU"
        )
        until_said(unknown_types, {"rollout": 2}, "no node of any type is there")
        del asked[0]
        asked += [small.remote() for _ in range(4)]
        until_said(
            autoscaler_says,
            {"rollout": 1},
            "all node types that have that are at their maximum (rollout 3 of 3)",
        )
        until_said(
            unknown_types, {"rollout": 1}, "at their maximum, or the cluster is (rollout has 3 node(s))"
        )


class Waiting:
    """Asks for a node."""


def unknown_types(wanted: dict[str, float]) -> str:
    """Say the same as one who is not on the head."""
    return autoscaler_says(wanted, [{}], replace(live_cluster(elastic=True), addable=None))


def until_said(say: Callable[[dict[str, float]], str], wanted: dict[str, float], *words: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not all(one in (said := say(wanted)) for one in words):
        assert time.monotonic() < end, f"{words} is never said, but {said!r}"
        time.sleep(0.5)
    print(said, flush=True)


@pytest.mark.slow
def test_each_pool_grows_on_nodes_of_its_own_and_gives_them_back_beside_another_run(tmp_path: Path) -> None:
    config = config_of(tmp_path, steps=100_000, kind="async")
    config["autoscaling"] = True
    config["eval"]["num_prompts"] = 0
    config["checkpoint"] = {"interval": 0, "every_s": None}
    (tmp_path / "beside").mkdir()
    beside = config_of(tmp_path / "beside", steps=6, kind="sync")
    far = {"name": "far", "num_workers": 1, "resources": {"rollout": 1}, "max_num_seqs": 2}
    config["rollout"] |= {"num_workers": 1, "pools": [far], "start_timeout_s": 90}
    with autoscaling_cluster(tmp_path) as cluster:
        run = ChaosRun(cluster, tmp_path, "pools", config)
        other = ChaosRun(cluster, tmp_path / "beside", "beside", beside)
        run.start()
        other.start()
        try:
            until(run, "2 workers", lambda: up(run) == 2)
            assert other._driver is not None and other._driver.wait(240) == 0, other.words()
            assert set(states(other)) == {"rollout-0", "rollout-1"}, "both runs have a worker of that name"
            ask_for_size(run.run_dir, "3", "far")
            until(run, "4 workers", lambda: up(run) == 4 and rollout_nodes() == 3)
            record = pool_record(run.run_dir)
            assert record is not None and record.pools == {"far": "3 wanted (raypost scale)"}
            ask_for_size(run.run_dir, "4", "far")
            until(run, "what lacks", lambda: "at their maximum (rollout 3 of 3)" in status(run))
            assert "rollout: 1 asked, 0 free of 3" in status(run)
            ask_for_size(run.run_dir, "1", "far")
            until(run, "1 node", lambda: rollout_nodes() == 1)
            assert states(run) == {"rollout-0": "up", "rollout-far-0": "up"}
            assert run._driver is not None
            run._driver.terminate()
            assert run._driver.wait(240) == 0, run.words()
        finally:
            run.end()
            other.end()
    for one in (run, other):
        assert_adds_up(json.loads((one.run_dir / "report.json").read_text()))
        assert audit(one.run_dir).num_contradictions == 0


@pytest.mark.slow
@pytest.mark.parametrize("standby", [0, 1])
def test_one_that_stands_by_takes_the_place_of_a_worker_that_is_killed(
    private_cluster: PrivateCluster, folder: Path, standby: int
) -> None:
    """Without one the same worker starts again; both print how long nothing served."""
    job = Job(
        private_cluster, folder, f"standby-{standby}", "train.num_steps=100000", "eval.interval=0",
        "rollout.num_workers=1", "rollout.num_cpus=0.5", f"rollout.standby={standby}",
    )  # fmt: skip
    heir = "rollout-1" if standby else "rollout-0"
    try:
        job.until_step(2)
        until_workers(job, {"rollout-0": "up", **({heir: "standby"} if standby else {})})
        begin, pid = time.time(), json.loads((job.run_dir / PROCESSES / "rollout-0.json").read_text())["pid"]
        os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + DEADLINE_S
        while not any(one["actor"] == heir and one["start_s"] > begin for one in job.spans("rollout")):
            assert time.monotonic() < end and job.process.poll() is None, job.output()
            time.sleep(0.1)
        served = min(one["start_s"] for one in job.spans("rollout") if one["start_s"] > begin)
        print(f"standby {standby}: {heir} serves {served - begin:.1f} s after the kill", flush=True)
        job.until_step(max(record["step"] for record in job.steps()) + 3)
    finally:
        job.process.terminate()
    assert job.wait() == 0, job.output()
    assert [one["actor"] for one in job.events("worker_joined")] == ["rollout-1"] * standby
    assert [one["actor"] for one in job.events("worker_left")] == ["rollout-0"] * standby
    assert_adds_up(job.report())
    assert_audited(job)


def status(run: ChaosRun | Job) -> str:
    """What the user is shown, in one line."""
    command = [sys.executable, "-m", "raypost", "status", str(run.run_dir)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
    return " ".join(re.sub("[│|]", " ", shown).split())


def busy(run: ChaosRun) -> list[Span]:
    """When engines had requests, as far as it is recorded."""
    path = run.run_dir / "spans.jsonl"
    return [one for one in read_spans(path) if one.kind == ROLLOUT] if path.exists() else []


def up(run: ChaosRun) -> int:
    return sum(state == "up" for state in states(run).values())


def until(run: ChaosRun, what: str, there: Callable[[], bool], deadline_s: float = 150) -> None:
    begin = time.monotonic()
    while not there():
        assert run.exit_code is None, f"the run ended before {what}:\n{run.words()}"
        assert time.monotonic() < begin + deadline_s, f"no {what}: {pool_record(run.run_dir)}\n{run.words()}"
        time.sleep(0.5)
    print(f"{what} after {time.monotonic() - begin:.1f} s: {pool_record(run.run_dir)}", flush=True)


@pytest.mark.slow
def test_nodes_that_go_with_and_without_notice_lose_nothing(tmp_path: Path) -> None:
    """Two rollout nodes: one is told to go, one is killed; their workers come back on others."""
    config = config_of(tmp_path, steps=100_000, kind="async")
    config["autoscaling"] = True
    config["eval"]["num_prompts"] = 0
    config["checkpoint"] = {"interval": 0, "every_s": None}
    config["rollout"] |= {
        "num_workers": 2, "resources": {"rollout": 1}, "start_timeout_s": 90, "liveness_timeout_s": 6,
    }  # fmt: skip
    with autoscaling_cluster(tmp_path) as cluster:
        run = ChaosRun(cluster, tmp_path, "nodes", config)
        run.start()
        try:
            until(run, "2 workers", lambda: up(run) == 2)
            until(
                run, "work for both", lambda: {one.actor for one in busy(run)} == {"rollout-0", "rollout-1"}
            )
            drained = drain(node_of("rollout-1"), seconds=15)
            told = time.time()
            until(run, "another worker", lambda: states(run).get("rollout-2") == "up" and up(run) == 2)
            left = next(one for one in events(run) if one["event"] == "worker_left")
            assert left["cause"] == "its node is drained" and left["time_s"] - told < 15
            print(f"it had left {left['time_s'] - told:.1f} s after the notice", flush=True)
            assert node_of("rollout-2") != drained
            lost = node_of("rollout-0")
            kill_raylet(lost)
            until(
                run,
                "its return",
                lambda: nodes_of_living("rollout-0") - {lost, drained} != set() and up(run) == 2,
            )
            assert run._driver is not None
            run._driver.terminate()
            assert run._driver.wait(240) == 0, run.words()
        finally:
            run.end()
    until_s = max(one.end_s for one in busy(run) if one.actor == "rollout-1")
    assert until_s <= left["time_s"], "a worker that has left generates nothing"
    report = json.loads((run.run_dir / "report.json").read_text())
    assert_adds_up(report)
    assert audit(run.run_dir).num_contradictions == 0


@pytest.mark.slow
def test_ranks_whose_node_is_lost_come_back_on_another_and_train_what_they_had(tmp_path: Path) -> None:
    """Two ranks on nodes of their own; one node is killed, and the autoscaler brings another."""
    config = config_of(tmp_path, steps=100_000, kind="async")
    config["autoscaling"] = True
    config["eval"]["num_prompts"] = 0
    config["train"]["resources"] = {"rollout": 1}
    config["rollout"]["resources"] = {"trainer": 1}
    with autoscaling_cluster(tmp_path) as cluster:
        run = ChaosRun(cluster, tmp_path, "ranks", config)
        run.start()
        try:
            until(run, "3 steps", lambda: last_step(run) >= 3)
            lost, kept = node_of("trainer-1"), node_of("trainer-0")
            assert lost != kept
            kill_raylet(lost)
            until(run, "the gang", lambda: any(one["event"] == "role_restarted" for one in events(run)))
            again = last_step(run)
            until(run, "3 more steps", lambda: last_step(run) >= again + 3)
            assert lost not in (node_of("trainer-0"), node_of("trainer-1"))
            assert run._driver is not None
            run._driver.terminate()
            assert run._driver.wait(240) == 0, run.words()
        finally:
            run.end()
    assert run.attempts == 1
    died = [one for one in events(run) if one["event"] == "role_died"]
    assert "trainer" in {one["role"] for one in died}, "and whoever else was on that node"
    assert_adds_up(json.loads((run.run_dir / "report.json").read_text()))
    assert audit(run.run_dir).num_contradictions == 0


def last_step(run: ChaosRun) -> int:
    path = run.run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line).get("step", 0) for line in lines), default=0)


@pytest.mark.slow
def test_a_real_engine_whose_node_is_lost_serves_on_another_and_the_run_finishes(tmp_path: Path) -> None:
    """Engine and rank on nodes of their own; the engine's is killed, and the autoscaler brings another."""
    with autoscaling_cluster(tmp_path) as cluster:
        job = Job(
            cluster, tmp_path, "lost-node", "train.num_steps=12", "eval.num_prompts=0", "autoscaling=true",
            "rollout.num_workers=1", "rollout.resources={rollout: 1}", "train.resources={trainer: 1}",
        )  # fmt: skip
        try:
            job.until_step(3)
            lost = node_of("rollout-0")
            assert node_of("trainer-0") != lost
            kill_raylet(lost)
            killed = time.time()
            assert job.wait() == 0, job.output()
        finally:
            job.process.kill()
        served = [span for span in job.spans("rollout") if span["start_s"] > killed]
        begin = min(span["start_s"] for span in served)
        print(f"rollout-0 serves {begin - killed:.1f} s after its node was lost", flush=True)
        assert job.report()["steps"] == 12
        assert_adds_up(job.report())
        assert_audited(job)


def states(run: ChaosRun) -> dict[str, str]:
    record = pool_record(run.run_dir)
    return {} if record is None else record.workers


def events(run: ChaosRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.run_dir / "events.jsonl").read_text().splitlines()]
