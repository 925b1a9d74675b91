"""Telemetry as an actor: it records what the others did, and none of them can hold it up."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.actor import ActorHandle

from actors.telemetry import memory
from actors.telemetry.memory import MemoryWatch, memory_of, rough_bytes
from actors.telemetry.recorder import Telemetry
from raypost.config import Config
from raypost.files.jsonl import read_lines
from raypost.observe.metrics import JudgeFigures
from raypost.observe.spans import Span, SpanLog
from raypost.report import files
from raypost.report.samples import kept_samples
from raypost.types import GroupCounts, WorkerStats
from tests import synthetic_run as run
from tests.unit.test_samples import batch_of
from tests.unit.tokenizers import write_tokenizer


class Source:
    """Has spans, statistics and counts, and can be told not to answer."""

    def __init__(self, name: str) -> None:
        self._name, self._tokens = name, 100
        self._free = asyncio.Event()
        self._free.set()
        self._spans = SpanLog(name, merge_gap_s=0.0)

    async def add(self, count: int) -> None:
        start = time.time()
        for n in range(count):
            self._spans.add("rollout", start + n, start + n + 0.5)

    async def hold(self, is_held: bool) -> None:
        (self._free.clear if is_held else self._free.set)()

    async def set_tokens(self, tokens: int) -> None:
        self._tokens = tokens

    async def drain_spans(self) -> list[Span]:
        spans = self._spans.drain()
        await self._free.wait()
        return spans

    async def stats(self) -> list[WorkerStats]:
        return [WorkerStats(worker=self._name, version=1, running=2, generated_tokens=self._tokens)]

    async def counts(self) -> GroupCounts:
        return GroupCounts(sampled=12, trained=10, in_flight=2)


class Judge:
    """Gives figures of two calls once, and then none."""

    def __init__(self) -> None:
        figures = JudgeFigures()
        figures.count(1.0)
        figures.count(2.0, num_failed=8)
        figures.count_retry()
        figures.count_parts({"right": 1.0})
        figures.count_parts({"right": 0.0})
        self.figures = {"default": figures}

    async def drain_figures(self) -> dict[str, JudgeFigures]:
        figures, self.figures = self.figures, {}
        return figures


class Silent:
    """Has nothing that telemetry asks for."""

    async def ping(self) -> None:
        return None


def make(config: Config, sources: dict[str, ActorHandle], deadline_s: float = 1.0) -> ActorHandle:
    options = {"poll_s": 0.1, "deadline_s": deadline_s, "sample_s": 0.2}
    return ray.remote(Telemetry).options(num_cpus=0).remote(config, sources, **options)


def source(name: str) -> ActorHandle:
    return ray.remote(Source).options(num_cpus=0).remote(name)


def get(ref: ray.ObjectRef, timeout_s: float = 30.0) -> Any:
    return ray.get(ref, timeout=timeout_s)


def recorded_spans(config: Config) -> list[Span]:
    return list(files.read_spans(config.run_dir / files.SPANS))


def recorded_usage(config: Config) -> dict[str, Any]:
    """The session's totals so far."""
    usage: dict[str, Any] = {"unreachable": {}, "tokens_generated": None}
    for line in read_lines(config.run_dir / files.EVENTS):
        if line["event"] == "usage":
            usage = line
    return usage


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return run.config(runs_dir=str(tmp_path))


@pytest.mark.usefixtures("local_ray")
def test_a_run_is_recorded_and_its_report_returned(config: Config) -> None:
    worker = source("rollout-worker-0")
    recorder = make(config, {"rollout": worker, "silent": ray.remote(Silent).options(num_cpus=0).remote()})
    get(worker.add.remote(7))
    get(recorder.log_eval.remote(0, {"held_out": 0.2}))
    get(recorder.log_sync.remote(run.sync_report(0)))
    for step in (1, 2):
        get(recorder.log.remote(step, run.metrics(step)))
    get(recorder.log_eval.remote(2, {"held_out": 0.5}))
    report = get(recorder.finish.remote("finished", None, GroupCounts(sampled=32, trained=32)))
    assert (report["status"], report["steps"]) == ("finished", 2)
    assert (report["eval_before"], report["eval_after"]) == (0.2, 0.5)
    assert report["groups"]["trained"] == 32 and report["groups"]["lost"] == 0
    assert report["sync_s_median"] == 0.05
    assert report["tokens_generated"] == 100
    assert 50e6 < report["peak_memory_bytes"] < 50e9
    assert report["problems"] == []
    assert len(recorded_spans(config)) == 7
    assert (config.run_dir / files.REPORT_HTML).exists()
    again = get(recorder.finish.remote("failed", "asked twice", None))
    assert again == report == json.loads((config.run_dir / files.REPORT_JSON).read_text())


@pytest.mark.usefixtures("local_ray")
def test_samples_of_a_batch_are_kept_and_what_prevents_it_is_a_problem(config: Config) -> None:
    model = write_tokenizer(config.run_dir.parent / "model")
    telemetry = ray.remote(Telemetry).options(num_cpus=0).remote(config, {}, None, str(model))
    batch = batch_of(("default", 4))
    get(telemetry.log.remote(1, run.metrics(1)))
    get(telemetry.log_samples.remote(1, [ray.put(batch)]))
    assert len(kept_samples(config.run_dir, 1).samples) == 4
    get(telemetry.log_samples.remote(2, [ray.put("no batch")]))
    report = get(telemetry.finish.remote("finished", None, GroupCounts(sampled=32, trained=32)))
    (problem,) = report["problems"]
    assert problem.startswith("samples were not kept: AttributeError")


@pytest.mark.usefixtures("local_ray")
def test_what_judges_did_is_in_the_next_step_and_in_the_report(config: Config) -> None:
    telemetry = make(config, {"judge-0": ray.remote(Judge).options(num_cpus=0).remote()})
    deadline = time.monotonic() + 240
    while "default" not in recorded_usage(config).get("judges", {}) and time.monotonic() < deadline:
        time.sleep(0.1)
    for step in (1, 2):
        get(telemetry.log.remote(step, run.metrics(step)))
    report = get(telemetry.finish.remote("finished", None, GroupCounts(sampled=32, trained=32)))
    first, second = read_lines(config.run_dir / files.METRICS)
    assert {name: value for name, value in first.items() if "/" in name} == {
        "judge_s/default": 1.5,
        "judge_s_max/default": 2.0,
        "judge_failed/default": 8,
        "judge_retries/default": 1,
        "reward_part/default/right": 0.5,
    }
    assert not any("/" in name for name in second)
    assert report["judges"] == {
        "default": {
            "calls": 2,
            "failed": 8,
            "retries": 1,
            "seconds_max": 2.0,
            "seconds_mean": 1.5,
            "parts": {"right": {"mean": 0.5, "first": 0.5, "last": None}},
        }
    }
    assert report["problems"] == ["task 'default': the judge gave no score for 8 responses, in 2 calls"]


@pytest.mark.usefixtures("local_ray")
def test_a_slow_actor_delays_nobody_and_none_of_its_spans_is_lost_or_written_twice(config: Config) -> None:
    slow, fast = source("slow"), source("fast")
    get(slow.hold.remote(True))
    get(slow.add.remote(5))
    recorder = make(config, {"slow": slow, "fast": fast}, deadline_s=0.2)
    get(fast.add.remote(3))
    get(recorder.log.remote(1, {"loss": 0.1}))
    deadline = time.monotonic() + 240
    while "slow" not in recorded_usage(config)["unreachable"] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert {span.actor for span in recorded_spans(config)} <= {"fast"}
    get(slow.hold.remote(False))
    while len(recorded_spans(config)) < 8 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "slow" in recorded_usage(config)["unreachable"]
    get(recorder.finish.remote("finished", None, None))
    actors = sorted(span.actor for span in recorded_spans(config))
    assert actors == ["fast"] * 3 + ["slow"] * 5


@pytest.mark.usefixtures("local_ray")
def test_a_dead_actor_is_counted_by_name_and_the_report_is_written(config: Config) -> None:
    dead, alive = source("dead"), source("alive")
    get(dead.counts.remote())
    get(alive.counts.remote())
    recorder = make(config, {"dead": dead, "alive": alive})
    get(recorder.log.remote(1, {}))
    ray.kill(dead)
    get(alive.add.remote(2))
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        usage = recorded_usage(config)
        if usage["unreachable"].get("dead", 0) > 3 and len(recorded_spans(config)) == 2:
            break
        time.sleep(0.1)
    assert usage["unreachable"].get("dead", 0) > 3
    report = get(recorder.finish.remote("failed", "a rank died", None))
    assert report["groups"]["sampled"] == 12, "the last counts seen stand"
    assert any("dead" in problem for problem in report["problems"])


@pytest.mark.usefixtures("local_ray")
def test_tokens_of_a_restarted_worker_are_added_and_not_taken_back(config: Config) -> None:
    worker = source("rollout-worker-0")
    recorder = make(config, {"rollout": worker})
    for tokens, total in ((100, 100), (250, 250), (30, 280)):
        get(worker.set_tokens.remote(tokens))
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            usage = recorded_usage(config)
            if (usage["tokens_generated"] or 0) >= total:
                break
            time.sleep(0.05)
        assert usage["tokens_generated"] == total
    ray.kill(recorder)


@pytest.mark.usefixtures("local_ray")
def test_what_stops_the_watching_is_raised_to_whoever_logs_next(config: Config) -> None:
    class Broken:
        async def drain_spans(self) -> int:
            return 3

    recorder = make(config, {"broken": ray.remote(Broken).options(num_cpus=0).remote()})
    deadline = time.monotonic() + 240
    with pytest.raises(TypeError):
        while time.monotonic() < deadline:
            get(recorder.log.remote(1, {}))
            time.sleep(0.05)
    ray.kill(recorder)


def test_memory_is_measured_when_it_may_be_more_than_ever_and_not_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Process:
        def __init__(self, own: int, shared: int) -> None:
            self.own, self.shared, self.measured = own, shared, 0

        def memory_info(self) -> SimpleNamespace:
            return SimpleNamespace(rss=self.own + self.shared, shared=self.shared)

        def memory_full_info(self) -> SimpleNamespace:
            self.measured += 1
            return SimpleNamespace(pss=self.own + self.shared // 2)

    class Ended:
        def memory_info(self) -> SimpleNamespace:
            raise psutil.NoSuchProcess(1)

        memory_full_info = memory_info

    worker, store = Process(1000, 200), Process(500, 200)
    monkeypatch.setattr(memory, "node_processes", lambda: [worker, store, Ended()])
    watch = MemoryWatch()
    for own, shared, measured, peak in (
        (1000, 200, 1, 1700),
        (1010, 200, 1, 1700),  # not enough to matter
        (1500, 200, 2, 2200),
        (300, 200, 2, 2200),
        (1500, 800, 3, 2800),  # the object store grew, which is nobody's own
        (1500, 800, 3, 2800),
    ):
        worker.own, worker.shared, store.shared = own, shared, shared
        watch.look()
        assert (worker.measured, watch.peak_bytes) == (measured, peak)


def test_a_second_look_waits_for_the_first_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last look of a run comes while the thread of a cancelled one still measures."""
    measuring, measured = threading.Event(), threading.Event()

    class Slow:
        def memory_info(self) -> SimpleNamespace:
            return SimpleNamespace(rss=100, shared=0)

        def memory_full_info(self) -> SimpleNamespace:
            measuring.set()
            assert measured.wait(60)
            return SimpleNamespace(pss=100)

    monkeypatch.setattr(memory, "node_processes", lambda: [Slow()])
    watch, peaks = MemoryWatch(), list[int]()

    def look() -> None:
        watch.look()
        peaks.append(watch.peak_bytes)

    first, last = (threading.Thread(target=look) for _ in range(2))
    first.start()
    assert measuring.wait(60)
    last.start()
    last.join(0.2)
    measured.set()
    first.join()
    last.join()
    assert peaks == [100, 100]


def test_the_rough_figure_follows_this_process_and_its_measure_is_near_the_systems() -> None:
    me = psutil.Process()
    before = rough_bytes([me])
    block = np.ones(200 << 20, np.uint8)
    grown = rough_bytes([me]) - before
    assert 0.9 * block.nbytes < grown < 1.5 * block.nbytes
    assert 0.3 * me.memory_info().rss < memory_of(me) <= 1.05 * me.memory_info().rss


def test_the_name_in_the_dashboard_is_the_role() -> None:
    assert repr(object.__new__(Telemetry)) == "telemetry"
