"""What is said of each task of a run: in a step's record, in the report, on the terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

from actors.telemetry import gauges
from raypost.config import Config
from raypost.faults import Incident
from raypost.observe.metrics import JudgeFigures
from raypost.observe.spans import Span
from raypost.report import files, page, plots, writer
from raypost.report.formatting import steps_of
from raypost.report.record import load_record
from raypost.report.step_record import production_record
from raypost.report.terminal import RunDisplay, report_text
from raypost.report.timeline import joined, whole_run
from raypost.report.writer import RunWriter
from raypost.types import BatchMetrics, ProduceBatchStatus, ProductionMetrics, TakeStatus
from tests import synthetic_run as run
from tests.unit.production import World, producing, task_config, virtual

CHAIN_SUM = {"kind": "reasoning_gym", "dataset": "chain_sum"}
TWO = [{"name": "sums", "source": CHAIN_SUM}, {"name": "words", "source": CHAIN_SUM}]


def two_tasks(**overrides: object) -> Config:
    return run.config(tasks=TWO, **overrides)


def status_of(*, failures: bool = False) -> TakeStatus:
    produced = ProductionMetrics()
    produced.of_task("sums").count([1.0, 0.0], False, 1.0)
    produced.of_task("sums").count([1.0, 1.0], True, 3.0)
    produced.of_task("words").count([0.5], False, 10.0)
    if failures:
        produced.count_failures("sums", {"judge": 2, "engine": 1}, 2)
    batch = {
        "sums": BatchMetrics(
            staleness=[0, 2], num_samples=4, response_tokens=40, rewards_sum=3.0, rewards_count=4
        ),
        "words": BatchMetrics(
            staleness=[1], num_samples=1, response_tokens=7, rewards_sum=0.5, rewards_count=1
        ),
    }
    return TakeStatus(
        status=ProduceBatchStatus.NORMAL,
        step=1,
        num_groups=3,
        staleness=(0, 2, 1),
        metrics=produced,
        tasks=batch,
    )


def test_a_step_says_of_each_task_what_it_says_of_all() -> None:
    record = production_record(status_of(), num_tasks=2)
    assert (record["produced_samples"], record["filtered_samples"]) == (5, 2)
    assert record["raw_reward_mean"] == pytest.approx(3.5 / 5)
    assert record["group_s"] == [1.0, 3.0, 10.0] and record["group_s_p50"] == 3.0
    assert {
        name.removesuffix("/sums"): value for name, value in record.items() if name.endswith("/sums")
    } == {
        "num_samples": 4,
        "reward_mean": 0.75,
        "response_tokens_mean": 10.0,
        "staleness_max": 2,
        "staleness_mean": 1.0,
        "produced_samples": 4,
        "filtered_samples": 2,
        "raw_reward_mean": 0.75,
        "group_s": [1.0, 3.0],
        "group_s_p50": 2.0,
        "group_s_p90": pytest.approx(2.8),
        "group_s_p99": pytest.approx(2.98),
    }
    assert (record["reward_mean/words"], record["staleness_max/words"]) == (0.5, 1)


def test_a_run_of_one_task_says_nothing_twice() -> None:
    assert not any("/" in name for name in production_record(status_of(), num_tasks=1))


def test_what_the_world_failed_is_said_by_task_and_boundary_where_it_happened() -> None:
    record = production_record(status_of(failures=True), num_tasks=1)
    assert {name: value for name, value in record.items() if "/" in name} == {
        "failures/sums/judge": 2,
        "failures/sums/engine": 1,
        "retries/sums": 2,
    }


def test_production_counts_each_task_by_itself() -> None:
    async def main() -> None:
        world = World(task_config("a", group_size=2), task_config("b", group_size=3), batch_size=4)
        world.pool.seconds = lambda one: 5 if one.task == "a" else 7
        async with producing(world):
            status, _ = await world.take(1)
            produced = status.metrics.tasks
            assert set(produced["a"].group_s) == {5.0} and set(produced["b"].group_s) == {7.0}
            assert status.metrics.produced_samples == sum(one.produced_samples for one in produced.values())
            assert {task: (len(one.staleness), one.num_samples) for task, one in status.tasks.items()} == {
                "a": (2, 4),
                "b": (2, 6),
            }
            assert all(one.response_tokens > 0 for one in status.tasks.values())
            assert all(one.rewards_count == one.num_samples for one in status.tasks.values())

    virtual(main())


# ---------------------------------------------------------------- the report


def step_of(step: int) -> dict[str, Any]:
    """A task that learns, one that does not, and slow groups of the second in the last steps."""
    slow = [1.0] * 9 + [100.0 if step > 10 else 1.0]
    record: dict[str, Any] = {**run.metrics(step), "group_s": [0.5] * 10 + slow}
    for task, reward, seconds in (("sums", 0.1 + 0.04 * step, [0.5] * 10), ("words", 0.3, slow)):
        record |= {
            f"raw_reward_mean/{task}": reward,
            f"reward_mean/{task}": reward,
            f"response_tokens_mean/{task}": 5.0 if task == "sums" else 40.0,
            f"num_samples/{task}": 64,
            f"staleness_mean/{task}": 0.5,
            f"staleness_max/{task}": 1,
            f"produced_samples/{task}": 80,
            f"filtered_samples/{task}": 8,
            f"group_s/{task}": seconds,
        }
    return record | ({"failures/words/judge": 3, "retries/words": 3} if step == 4 else {})


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """All plots of a page cost a second."""
    monkeypatch.setattr(writer, "_draw", lambda *_: None)


def write_run(folder: Path, config: Config, steps: int = 20) -> dict[str, Any]:
    recorder = RunWriter(folder, config, run.START_S)
    recorder.write_eval(0, {"held_out": 0.2, "held_out/sums": 0.1, "held_out/words": 0.3})
    for step in range(1, steps + 1):
        recorder.write_step(step, step_of(step))
    recorder.write_eval(steps, {"held_out": 0.6, "held_out/sums": 0.9, "held_out/words": 0.3})
    return recorder.finish("finished", None, run.counts())


def test_the_report_tells_which_task_learns(tmp_path: Path) -> None:
    report = write_run(tmp_path, two_tasks())
    sums, words = report["tasks"]["sums"], report["tasks"]["words"]
    assert (sums["raw_reward_first"], sums["raw_reward_last"]) == (pytest.approx(0.16), pytest.approx(0.88))
    assert (words["raw_reward_first"], words["raw_reward_last"]) == (pytest.approx(0.3), pytest.approx(0.3))
    assert (sums["eval_before"], sums["eval_after"]) == (0.1, 0.9)
    assert (sums["samples_produced"], sums["samples_filtered"], sums["samples_trained"]) == (1600, 160, 1280)
    assert (words["failures"], words["retries"], sums["failures"]) == ({"judge": 3}, 3, {})
    assert (sums["staleness_mean"], sums["staleness_max"]) == (0.5, 1)
    every = [*[1.0] * 190, *[100.0] * 10]
    assert words["group_s"] == pytest.approx(
        {"p50": 1.0, "p90": np.percentile(every, 90), "p99": np.percentile(every, 99)}
    ), "of all groups, not the mean of the steps' percentiles"
    html = page.render(report, {}, {})
    assert "Which task learns?" in html and "0.16 → 0.88" in html and "3 judge" in html
    drawn = plots._plots(load_record(tmp_path), report)
    assert {"tasks reward", "tasks length"} < drawn.keys()
    with matplotlib.rc_context(plots._STYLE):
        assert ">Reward by task</text>" in plots._svg(plots._single(drawn["tasks reward"]))
    text = report_text(report, tmp_path)
    assert "task sums" in text and "reward 0.30 → 0.30" in text
    assert json.loads((tmp_path / files.REPORT_JSON).read_text()) == report


def test_a_run_of_one_task_has_no_section_of_tasks(tmp_path: Path) -> None:
    report = write_run(tmp_path, run.config())
    (only,) = report["tasks"].values()
    assert only["samples_produced"] == 20 * run.GROUPS * 8 and only["group_s"] == report["group_s"]
    assert "Which task learns?" not in page.render(report, {}, {})
    assert "tasks reward" not in plots._plots(load_record(tmp_path), report)
    assert "task " not in report_text(report, tmp_path)


def test_the_terminal_has_a_line_for_each_of_several_tasks() -> None:
    out = io.StringIO()
    RunDisplay(two_tasks(), out=out).step(4, step_of(4) | production_record(status_of(), 2))
    lines = out.getvalue().splitlines()
    (sums,) = (line for line in lines if line.startswith("  sums "))
    (words,) = (line for line in lines if line.startswith("  words"))
    assert "reward 0.75" in sums and "staleness  1.0" in sums and "p99 2.98 s" in sums
    assert "failures 3" in words and "reward 0.50" in words
    out = io.StringIO()
    RunDisplay(run.config(), out=out).step(4, run.metrics(4))
    assert sum(line.startswith("step") for line in out.getvalue().splitlines()) == 1
    assert out.getvalue().splitlines()[-1].startswith("step")


@pytest.mark.parametrize(
    ("steps", "num_steps", "text"), [(4, 8, "4 of 8"), (8, 8, "8 of 8"), (8, 4, "8 (4 are asked for)")]
)
def test_a_run_that_was_longer_before_is_not_eight_of_four(steps: int, num_steps: int, text: str) -> None:
    assert steps_of(steps, num_steps) == text


# ---------------------------------------------------------------- after a resume


def test_the_whole_run_is_all_of_its_sessions_without_the_time_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        now = run.START_S

        def time(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(writer, "time", clock)
    for session in range(3):
        start = clock.now = run.START_S + 10_000 * session
        recorder = RunWriter(tmp_path, run.config(), start)
        recorder.write_spans([Span(actor="trainer-0", kind="train", start_s=start + 2, end_s=start + 5)])
        clock.now = start + 6
        recorder.write_step(session + 1, run.metrics(session + 1))
        recorder.close()
    whole, restarts = joined(load_record(tmp_path))
    assert np.subtract(whole_run(whole), run.START_S).tolist() == [0.0, 18.0]
    assert np.subtract(restarts, run.START_S).tolist() == [6.0, 12.0]
    trained = whole.spans["trainer-0", "train"] - run.START_S
    assert trained.tolist() == [[2.0, 5.0], [8.0, 11.0], [14.0, 17.0]]


# ---------------------------------------------------------------- gauges


class Instrument:
    """Stands in for Ray's gauges and counters: what was set, in order."""

    made: dict[str, Instrument]

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        assert text and "run" in labels
        self.labels = labels
        self.values: list[tuple[dict[str, str], float]] = []
        self.made[name] = self

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert sorted(tags) == sorted(self.labels)
        self.values.append((tags, value))

    inc = set


@pytest.fixture
def instruments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Instrument]:
    Instrument.made = {}
    monkeypatch.setattr(gauges, "Gauge", Instrument)
    monkeypatch.setattr(gauges, "Counter", Instrument)
    return Instrument.made


def test_gauges_have_the_task_as_a_label(instruments: dict[str, Instrument]) -> None:
    shown = gauges.RunGauges("r", ["sums", "words"])
    shown.step(1, production_record(status_of(failures=True), 2))
    assert instruments["raypost_task_reward_mean"].values == [
        ({"run": "r", "task": "sums"}, 0.75),
        ({"run": "r", "task": "words"}, 0.5),
    ]
    assert instruments["raypost_task_failures_total"].values == [
        ({"run": "r", "task": "sums", "boundary": "judge"}, 2.0),
        ({"run": "r", "task": "sums", "boundary": "engine"}, 1.0),
    ]
    alone = gauges.RunGauges("r", ["sums"])
    alone.step(1, production_record(status_of(), 1))
    assert instruments["raypost_task_group_seconds_p50"].values == [({"run": "r", "task": "sums"}, 3.0)]


def test_the_size_of_a_pool_is_shown_once_it_is_another(instruments: dict[str, Instrument]) -> None:
    shown = gauges.RunGauges("r", ["sums"])
    shown.incident(Incident.POOL_RESIZED, {"pool": "far", "before": 1, "target": 3, "cause": "x"})
    shown.incident(Incident.WORKER_LEFT, {"actor": "rollout-far-0"})
    assert instruments["raypost_pool_target"].values == [({"run": "r", "pool": "far"}, 3)]


def test_gauges_are_set_again_while_they_hold_and_counters_are_not(
    instruments: dict[str, Instrument],
) -> None:
    shown = gauges.RunGauges("r", ["sums"])
    shown.set("held_out_score", 0.5)
    shown.set("held_out_score", None)
    shown.count("tokens_total", 7)
    shown.judge("sums", JudgeFigures(calls=1, seconds=2.0))
    for _ in range(2):
        shown.hold()
    assert instruments["raypost_held_out_score"].values == [({"run": "r"}, 0.5)] * 3
    assert instruments["raypost_judge_seconds"].values == [({"run": "r", "task": "sums"}, 2.0)] * 3
    assert instruments["raypost_tokens_total"].values == [({"run": "r"}, 7)]
    assert not instruments["raypost_step"].values, "what is not known is not shown"
