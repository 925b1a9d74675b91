"""The run folder: what is written, what is computed from it, and that it survives kills and resumes."""

from __future__ import annotations

import io
import json
import os
import re
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from raypost.config import load_config
from raypost.config.identity import recipe_digest
from raypost.faults import Incident
from raypost.files.jsonl import read_lines, sealed
from raypost.ledger.ledger import LEDGER_FILE, Ledger
from raypost.observe.spans import Span
from raypost.plan import schedule
from raypost.report import files, writer
from raypost.report.record import load_record
from raypost.report.status import run_figures
from raypost.report.terminal import RunDisplay, report_text
from raypost.report.timeline import draw_timeline, joined, whole_run
from raypost.report.writer import RunWriter, rebuild
from raypost.types import GroupCounts, Status
from tests import synthetic_run as run

REQUIRED = {
    *("status", "steps", "wall_s", "eval_before", "eval_after", "groups", "staleness_max", "staleness_mean"),
    *("sync_s_median", "trainer_idle_fraction", "rollout_idle_fraction", "logprob_mismatch_max", "versions"),
}
"""What every report has, whatever else it has."""


class Clock:
    """Stands in for the time module: every record is written at the time the test says."""

    def __init__(self) -> None:
        self.now = run.START_S

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(writer, "time", clock)
    return clock


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots cost a second, and most tests are about figures."""
    monkeypatch.setattr(writer, "_draw", lambda *_: None)


def open_run(folder: Path, clock: Clock, **overrides: Any) -> RunWriter:
    return RunWriter(folder, run.config(**overrides), started_s=clock.now)


def write_steps(recorder: RunWriter, clock: Clock, first: int, last: int) -> None:
    """Steps `first` to `last`, each with its spans and its sync."""
    for step in range(first, last + 1):
        clock.now = run.train_start_s(step) + run.TRAIN_S
        recorder.write_step(step, run.metrics(step))
        recorder.write_spans(run.step_spans(step))
        clock.now += run.PAUSE_S + run.SYNC_S
        recorder.write_sync(run.sync_report(step))


def write_whole_run(folder: Path, clock: Clock, steps: int = run.STEPS, **overrides: Any) -> RunWriter:
    recorder = open_run(folder, clock, **overrides)
    recorder.write_spans(run.first_spans())
    recorder.write_sync(run.sync_report(0))
    recorder.write_eval(0, {"held_out": 0.23, "eval_failed": 0.0})
    write_steps(recorder, clock, 1, steps)
    recorder.write_spans(run.last_spans(steps))
    clock.now = run.train_start_s(steps + 1) + run.FIRST_EVAL_S
    interval = {
        "held_out_low": 0.79,
        "held_out_high": 0.88,
        "pass@16": 0.9,
        "pass@16_low": 0.851,
        "pass@16_high": 1.0,
    }
    recorder.write_eval(steps, {"held_out": 0.84, "eval_failed": 0.0} | interval)
    recorder.write_usage(4_000_000_000, 123_456, {})
    return recorder


@pytest.mark.usefixtures("no_plots")
def test_every_figure_equals_what_is_computed_by_hand(tmp_path: Path, clock: Clock) -> None:
    recorder = write_whole_run(tmp_path, clock)
    report = recorder.finish("finished", None, run.counts())
    window_s = run.FIRST_BATCH_S + 79 * 0.75 + 0.5
    assert report.keys() >= REQUIRED
    assert report["status"] == "finished" and report["error"] is None and report["problems"] == []
    assert (report["steps"], report["num_steps"]) == (80, 80)
    assert report["wall_s"] == pytest.approx(20 + 2 + 1 + 80 * 0.75 + 2, abs=1e-3)
    assert (report["eval_before"], report["eval_after"]) == (0.23, 0.84)
    assert (report["eval_before_interval"], report["eval_after_interval"]) == (None, [0.79, 0.88])
    assert report["groups"] == {
        "sampled": 1294, "trained": 1280, "filtered": 0, "failed": 2, "expired": 4, "buffered": 5,
        "in_flight": 3, "lost": 0,
    }  # fmt: skip
    assert (report["staleness_max"], report["staleness_bound"]) == (1, 1)
    assert report["staleness_mean"] == pytest.approx(79 * 12 / 1280)
    assert report["staleness_histogram"] == {"0": 16 + 79 * 4, "1": 79 * 12}
    assert report["window_s"] == pytest.approx(window_s, abs=1e-3)
    assert report["trainer_idle_fraction"] == pytest.approx(1 - 80 * 0.5 / window_s, abs=1e-5)
    assert report["rollout_idle_fraction"] == pytest.approx(79 * 0.1 / window_s, abs=1e-5)
    assert report["overlap_s"] == pytest.approx(80 * 0.5, abs=1e-3)
    assert sum(report["time_shares_s"].values()) == pytest.approx(window_s, abs=1e-3)
    assert report["time_shares_s"]["sync"] == pytest.approx(79 * 0.05, abs=1e-3)
    assert (report["num_syncs"], report["sync_s_median"]) == (81, 0.05)
    assert report["step_s_median"] == pytest.approx(0.75, abs=1e-6)
    assert report["logprob_mismatch_max"] == 9e-6
    assert report["canary_difference_max"] == 1.5e-6
    assert (report["tokens_produced"], report["tokens_generated"]) == (104_000, 123_456)
    assert report["tokens_per_s"] == pytest.approx(104_000 / window_s, rel=1e-5)
    assert report["expired_tokens_mean"] == 14.0
    assert report["length_bias"] is None, "there is no ledger to measure it from"
    assert report["peak_memory_bytes"] == 4_000_000_000
    assert json.loads((tmp_path / files.REPORT_JSON).read_text()) == report


@pytest.mark.usefixtures("no_plots")
def test_a_killed_run_is_rebuilt_from_its_files_and_says_that_it_was_killed(
    tmp_path: Path, clock: Clock
) -> None:
    recorder = open_run(tmp_path, clock)
    recorder.write_eval(0, {"held_out": 0.23})
    write_steps(recorder, clock, 1, 30)
    recorder.write_counts(GroupCounts(sampled=500, trained=480, in_flight=20))
    recorder.write_usage(3_000_000_000, 1000, {"judge-0": 2})
    del recorder  # no finish, no close: the process is gone
    report = rebuild(tmp_path)
    assert report["status"] == "failed" and "killed" in report["error"]
    assert (report["steps"], report["eval_before"], report["eval_after"]) == (30, 0.23, None)
    assert report["groups"]["trained"] == 480 and report["groups"]["lost"] == 0
    assert report["peak_memory_bytes"] == 3_000_000_000
    assert report["wall_s"] == pytest.approx(run.train_start_s(30) + 0.6 - run.START_S, abs=1e-3)
    assert any("judge-0" in problem for problem in report["problems"])


@pytest.mark.usefixtures("no_plots")
def test_a_line_cut_off_by_a_kill_is_ignored_and_removed_by_the_next_writer(
    tmp_path: Path, clock: Clock
) -> None:
    recorder = open_run(tmp_path, clock)
    write_steps(recorder, clock, 1, 3)
    recorder.close()
    for name in (files.METRICS, files.EVENTS, files.SPANS):
        with open(tmp_path / name, "a") as file:
            file.write('{"step": 4, "loss": 0.')
    assert rebuild(tmp_path)["steps"] == 3
    again = open_run(tmp_path, clock)
    again.write_step(4, {"loss": 0.5})
    again.close()
    lines = [json.loads(line) for line in (tmp_path / files.METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


@pytest.mark.usefixtures("no_plots")
def test_damage_in_the_middle_of_a_file_is_named_and_not_skipped(tmp_path: Path, clock: Clock) -> None:
    recorder = open_run(tmp_path, clock)
    write_steps(recorder, clock, 1, 2)
    recorder.close()
    metrics = tmp_path / files.METRICS
    metrics.write_text("{broken\n" + metrics.read_text())
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged: line 1, at byte 0: it has no checksum"):
        rebuild(tmp_path)


@pytest.mark.usefixtures("no_plots")
def test_a_file_of_metrics_has_one_line_a_step_that_counts_and_the_others_are_marked(
    tmp_path: Path, clock: Clock
) -> None:
    for first, last in ((1, 7), (5, 6), (3, 8)):
        session = open_run(tmp_path, clock)
        write_steps(session, clock, first, last)
        session.write_step(last, {"loss": 0.25})  # told twice in a session, as after a call that was lost
        session.close()
        clock.now += 100
    lines = list(read_lines(tmp_path / files.METRICS))
    kept = [line["step"] for line in lines if not line.get("abandoned")]
    assert kept == list(range(1, 9)) and len(lines) == 7 + 2 + 6 + 3
    assert rebuild(tmp_path)["steps"] == 8 and files.read_last_line(tmp_path / files.METRICS)["step"] == 8


def test_spans_are_short_on_disk_and_come_back_to_a_tenth_of_a_millisecond(tmp_path: Path) -> None:
    spans = [
        Span(actor=actor, kind="rollout", start_s=1.8e9 + n / 7, end_s=1.8e9 + n / 7 + 0.05)
        for actor in ("rollout-worker-0", "rollout-worker-1")
        for n in range(100)
    ]
    files.LineWriter(tmp_path / files.SPANS).write(files.spans_line(spans))
    found = list(files.read_spans(tmp_path / files.SPANS))
    assert [(one.actor, one.kind) for one in found] == [(one.actor, one.kind) for one in spans]
    for one, back in zip(spans, found, strict=True):
        assert abs(one.start_s - back.start_s) < 1e-4 and abs(one.end_s - back.end_s) < 1.6e-4
    assert (tmp_path / files.SPANS).stat().st_size < 15 * len(spans)


@pytest.mark.usefixtures("no_plots")
def test_a_resumed_run_reports_the_steps_of_the_model_that_survived(tmp_path: Path, clock: Clock) -> None:
    first = open_run(tmp_path, clock)
    first.write_eval(0, {"held_out": 0.1})
    for step in range(1, 8):
        first.write_step(step, {"staleness": [9], "raw_reward_mean": 0.0})
    first.write_eval(6, {"held_out": 0.9})
    first.close()
    clock.now += 1000
    second = open_run(tmp_path, clock)  # continues from a checkpoint after step 4
    for step in (5, 6):
        clock.now += 1
        second.write_step(step, {"staleness": [1], "raw_reward_mean": 1.0})
    second.write_eval(6, {"held_out": 0.3})
    report = second.finish("stopped", None, run.counts())
    assert (report["steps"], report["sessions"], report["status"]) == (6, 2, "stopped")
    assert report["staleness_histogram"] == {"0": 0, "1": 2, **{str(n): 0 for n in range(2, 9)}, "9": 4}
    assert (report["eval_before"], report["eval_after"]) == (0.1, 0.3)
    assert report["wall_s"] == pytest.approx(2.0)


@pytest.mark.usefixtures("no_plots")
def test_the_time_between_two_sessions_is_no_step(tmp_path: Path, clock: Clock) -> None:
    for steps in ((1,), (2, 3)):
        clock.now += 1000
        recorder = open_run(tmp_path, clock)
        for step in steps:
            clock.now += 1
            recorder.write_step(step, {})
        recorder.close()
    report = rebuild(tmp_path)
    assert report["step_s_median"] == pytest.approx(1.0)
    assert report["wall_s"] == pytest.approx(3.0)


@pytest.mark.usefixtures("no_plots")
def test_a_writer_that_died_within_a_session_goes_on_and_says_so_and_so_do_other_settings(
    tmp_path: Path, clock: Clock, no_plots: None
) -> None:
    start_s = clock.now
    write_steps(open_run(tmp_path, clock), clock, 1, 2)
    clock.now += 5.0
    again = RunWriter(tmp_path, run.config(), started_s=start_s)
    write_steps(again, clock, 3, 4)
    report = again.finish("finished", None, None)
    assert (report["sessions"], report["steps"], report["changed_settings"]) == (2, 4, [])
    assert any("telemetry died and was started again" in problem for problem in report["problems"])

    other = open_run(tmp_path, clock, train__learning_rate=0.5)
    report = other.finish("finished", None, None)
    assert [one.partition(":")[0] for one in report["changed_settings"]] == ["train.learning_rate"]


@pytest.mark.usefixtures("no_plots")
def test_what_happened_and_did_not_end_the_run_is_counted_over_all_sessions(
    tmp_path: Path, clock: Clock
) -> None:
    first = open_run(tmp_path, clock)
    first.write_incident(Incident.ROLE_DIED, {"actor": "trainer-1"})
    first.write_incident(Incident.BATCHES_TRAINED_AGAIN, {"count": 4})
    first.close()
    second = open_run(tmp_path, clock)
    second.write_incident(Incident.ROLE_DIED, {"actor": "producer"})
    assert run_figures(tmp_path)["incident role_died"] == 2, "also while it runs"
    report = second.finish("finished", None, None)
    assert report["incidents"] == {"role_died": 2, "batches_trained_again": 4}
    assert "2 role died, 4 batches trained again" in report_text(report, tmp_path)
    assert run_figures(tmp_path)["incident role_died"] == 2


def test_an_evaluation_of_an_abandoned_step_is_not_reported(tmp_path: Path, clock: Clock) -> None:
    first = open_run(tmp_path, clock)
    first.write_eval(0, {"held_out": 0.1})
    for step in range(1, 6):
        first.write_step(step, {})
    first.write_eval(5, {"held_out": 0.9})
    first.close()
    second = open_run(tmp_path, clock)  # continues from a checkpoint after step 2
    second.write_step(3, {})
    report = second.finish("stopped", None, None)
    assert [scores["step"] for scores in report["evals"]] == [0]
    assert report["eval_after"] is None


@pytest.mark.usefixtures("no_plots")
def test_finishing_a_resumed_run_replaces_how_the_first_session_ended(tmp_path: Path, clock: Clock) -> None:
    open_run(tmp_path, clock).finish("failed", "boom", None)
    running = open_run(tmp_path, clock)
    assert "killed" in rebuild(tmp_path)["error"], "while it runs, the old end does not count"
    assert running.finish("finished", None, None)["status"] == "finished"


@pytest.mark.usefixtures("no_plots")
def test_what_a_reader_must_know_first_is_listed_as_problems(tmp_path: Path, clock: Clock) -> None:
    judge = {"kind": "code", "unsafe_no_sandbox": True}
    recorder = open_run(tmp_path, clock, tasks__0__judge=judge)
    recorder.write_step(1, {"loss": float("nan"), "staleness": [0, 5], "skipped_steps": 1.0})
    recorder.write_eval(1, {"held_out": 0.5, "eval_failed": 3.0})
    report = recorder.finish("failed", "RuntimeError: boom", GroupCounts(sampled=10, trained=8))
    text = "\n".join(report["problems"])
    for expected in ("2 groups are lost", "staleness 5 was trained, the bound is 1", "not finite in some step: loss",
                     "1 optimizer steps were skipped", "had responses that failed",
                     "judge runs programs of the policy with the rights of this run (unsafe_no_sandbox)"):  # fmt: skip
        assert expected in text
    assert report["groups"]["lost"] == 2


@pytest.mark.usefixtures("no_plots")
def test_a_run_that_failed_before_its_first_step_has_a_report_without_figures(
    tmp_path: Path, clock: Clock
) -> None:
    report = open_run(tmp_path, clock).finish("failed", "ClusterError: no cores", None)
    assert (report["status"], report["error"], report["steps"]) == ("failed", "ClusterError: no cores", 0)
    for name in ("eval_before", "eval_after", "staleness_max", "trainer_idle_fraction", "sync_s_median"):
        assert report[name] is None


BOUND_4 = {
    "source": {"kind": "reasoning_gym", "dataset": "basic_arithmetic"},
    "strategy": {"max_staleness": 4},
}
"""A task of another bound than the default."""


@pytest.mark.usefixtures("no_plots")
def test_one_bound_judges_a_run_everywhere(tmp_path: Path, clock: Clock) -> None:
    config = run.config(tasks=[BOUND_4])
    assert schedule.bound(config.tasks[0], config).threshold == 5, "what plan says"
    recorder = RunWriter(tmp_path, config, started_s=clock.now)
    write_steps(recorder, clock, 1, 2)
    recorder.write_step(3, run.metrics(3) | {"staleness": [0, 3], "staleness_max": 3, "staleness_mean": 1.5})
    report = recorder.finish("finished", None, run.counts())
    assert (report["staleness_max"], report["staleness_bound"], report["problems"]) == (3, 4, [])
    assert "at most 3 (bound 4)" in report_text(report, tmp_path)
    shown = io.StringIO()
    RunDisplay(config, out=shown).step(3, run.metrics(3) | {"staleness_mean": 1.5})
    assert "staleness at most 4" in shown.getvalue() and "1.5/4" in shown.getvalue()


def write_ledger(folder: Path, trained: list[int], expired: list[int]) -> None:
    """Groups of one trajectory of so many tokens each, trained one a step, or dropped by age."""
    ledger = Ledger(folder / LEDGER_FILE)
    for n, tokens in enumerate([*trained, *expired]):
        key = ("sums", n)
        ledger.sampled(key)
        ledger.stored(key, Status.COMPLETED, staleness=0, tokens=[tokens])
        if n < len(trained):
            ledger.leased([key], n + 1, [0])
            ledger.trained(n + 1)
        else:
            ledger.dropped(key, Status.EXPIRED)
    ledger.flush()


@pytest.mark.parametrize(
    ("expired", "ratio", "named"),
    [([], None, False), ([30, 20], 2.5, True), ([10, 11], 1.05, False), ([5], 0.5, False)],
)
def test_a_length_bias_is_reported_and_named_as_a_problem_where_it_matters(
    tmp_path: Path, clock: Clock, expired: list[int], ratio: float | None, named: bool
) -> None:
    recorder = open_run(tmp_path, clock)
    write_ledger(tmp_path, [10] * 20, expired)
    report = recorder.finish("finished", None, run.counts())
    bias = report["length_bias"]
    assert bias["ratio"] == pytest.approx(ratio)
    assert bias["dropped"]["groups"] == len(expired)
    assert bias["trained"] == {"groups": 20, "tokens_mean": 10.0}
    assert any("biased towards short answers" in problem for problem in report["problems"]) is named
    html = (tmp_path / files.REPORT_HTML).read_text()
    assert "<b>Length bias.</b>" in html
    assert ("no group grew too old" in html) is not bool(expired)


@pytest.mark.usefixtures("no_plots")
def test_one_group_that_aged_among_thousands_is_no_bias(tmp_path: Path, clock: Clock) -> None:
    recorder = open_run(tmp_path, clock)
    write_ledger(tmp_path, [10] * 200, [90])
    report = recorder.finish("finished", None, run.counts())
    assert report["length_bias"]["ratio"] == 9.0
    assert not any("biased" in problem for problem in report["problems"])


@pytest.mark.usefixtures("no_plots")
def test_a_ledger_that_does_not_add_up_is_a_problem(tmp_path: Path, clock: Clock) -> None:
    recorder = open_run(tmp_path, clock)
    write_ledger(tmp_path, [10], [])
    with open(tmp_path / LEDGER_FILE, "a") as file:
        file.write(sealed('{"time": 1, "event": "sampled", "task": "sums", "group": 0}'))
    report = recorder.finish("finished", None, run.counts())
    assert any("the ledger does not add up: sampled" in problem for problem in report["problems"])


def test_a_number_that_is_not_finite_becomes_null_and_is_named(tmp_path: Path, clock: Clock) -> None:
    recorder = open_run(tmp_path, clock)
    recorder.write_step(1, {"loss": float("nan"), "grad_norm": float("inf"), "reward_mean": 0.5})
    recorder.close()
    (line,) = read_lines(tmp_path / files.METRICS)
    assert line["loss"] is None and line["reward_mean"] == 0.5
    assert line["not_finite"] == ["loss", "grad_norm"]


def test_the_configuration_on_disk_is_the_resolved_one(tmp_path: Path, clock: Clock) -> None:
    config = run.config(seed=7)
    RunWriter(tmp_path, config).close()
    assert load_config(tmp_path / files.CONFIG) == config


def test_runs_of_one_recipe_share_a_digest_whatever_their_name_seed_and_folder() -> None:
    digest = recipe_digest(run.config())
    same = run.config(name="other", seed=3, runs_dir="elsewhere", model={"name": "tiny", "cache_dir": "x"})
    assert recipe_digest(same) == digest
    assert recipe_digest(run.config(train={"num_steps": 81, "batch_size": 16})) != digest


def test_tensorboard_shows_steps_and_evaluations_and_forgets_abandoned_steps(
    tmp_path: Path, clock: Clock
) -> None:
    first = open_run(tmp_path, clock)
    for step in (1, 2, 3):
        first.write_step(step, {"loss": 1.0, "staleness": [0, 1]})
    first.close()
    second = open_run(tmp_path, clock)
    second.write_step(2, {"loss": 5.0})
    second.write_eval(2, {"held_out": 0.5})
    second.close()
    events = EventAccumulator(str(tmp_path / files.TENSORBOARD))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 5.0)]
    assert [(event.step, event.value) for event in events.Scalars("eval/held_out")] == [(2, 0.5)]


def test_the_memory_of_a_writer_does_not_grow_with_what_it_wrote(tmp_path: Path) -> None:
    recorder = RunWriter(tmp_path, run.config())

    def write(count: int) -> None:
        for n in range(count):
            recorder.write_spans(
                [Span(actor="a", kind="rollout", start_s=n, end_s=n + 0.5) for n in range(20)]
            )
            recorder.write_step(n + 1, {"loss": 0.1, "staleness": [0] * 16})

    write(50)
    tracemalloc.start()
    try:
        write(50)
        before, _ = tracemalloc.get_traced_memory()
        write(400)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    recorder.close()
    assert after - before < 200_000


def test_a_plot_that_cannot_be_drawn_does_not_lose_the_report(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr(writer, "_draw", fail)
    recorder = write_whole_run(tmp_path, clock, steps=2)
    report = recorder.finish("finished", None, run.counts(2))
    assert report["problems"] == ["report.html could not be drawn: RuntimeError: no font"]
    assert json.loads((tmp_path / files.REPORT_JSON).read_text())["steps"] == 2


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    files.write_atomically(path, "old")

    def crash(_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="disk full"):
        files.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


class _Page(HTMLParser):
    """Collects what a browser would load, and checks that tags are closed."""

    VOID = ("meta", "br", "img", "link", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in ("script", "link", "img", "iframe"):
            self.loaded.append(tag)
        self.loaded += [
            v for k, v in attrs if k in ("src", "href", "xlink:href") and v and not v.startswith("#")
        ]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def test_the_page_is_self_contained_and_shows_figures_and_plots(tmp_path: Path, clock: Clock) -> None:
    recorder = write_whole_run(tmp_path, clock, tasks=[BOUND_4])
    report = recorder.finish("finished", None, run.counts())
    assert report["problems"] == []
    html = (tmp_path / files.REPORT_HTML).read_text()
    page = _Page()
    page.feed(html)
    assert page.open == [] and page.loaded == []
    assert not re.search(r"@import|url\((?!#)", html)
    for expected in ("0.23 → 0.84", "95 % interval [0.79, 0.88]", "0.900 [0.85, 1.00]",
                     "1,280", "both at once", "rollout-worker-0", "trainer-0", "weight-broadcaster",
                     "Held-out score", "Reward", "Loss", "Staleness of trained groups", "Logprob"):  # fmt: skip
        assert expected in page.text, expected
    assert "held out low" not in page.text, "bounds stand beside what they bound"
    assert ", bound 4</div>" in html
    assert ">bound</text>" in html, "the line in the plot of staleness"
    for name in (files.TIMELINE_PNG, files.CURVES_PNG):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_timeline_marks_who_joined_and_left_the_pool_also_of_a_run_that_was_started_again(
    tmp_path: Path, clock: Clock
) -> None:
    recorder = open_run(tmp_path, clock)
    for seconds, incident in ((2, Incident.WORKER_JOINED), (3, Incident.WORKER_LEFT)):
        clock.now += seconds
        recorder.write_incident(incident, {"actor": "rollout-1"})
        resized = {
            "pool": ("rollout", "far")[seconds - 2],
            "before": seconds,
            "target": 5 - seconds,
            "cause": "x",
        }
        recorder.write_incident(Incident.POOL_RESIZED, resized)
        begin = clock.now - 1
        recorder.write_spans([Span(actor="rollout-1", kind="rollout", start_s=begin, end_s=clock.now)])
    recorder.close()
    start = clock.now - 5
    clock.now += 1000
    again = open_run(tmp_path, clock)
    clock.now += 1
    again.write_incident(Incident.WORKER_JOINED, {"actor": "rollout-1"})
    record, restarts = joined(load_record(tmp_path))
    moves = [(round(at - start, 3), actor, came) for at, actor, came in record.moves]
    assert moves == [(2, "rollout-1", True), (5, "rollout-1", False), (6, "rollout-1", True)]
    figure = draw_timeline(record, whole_run(record), restarts=restarts)
    marks = [line.get_marker() for line in figure.axes[0].lines if line.get_marker() in ("<", ">")]
    assert marks == [">", "<", ">"]
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert {"2 to 3", "far 3 to 2"} <= set(texts), "sizes that were wanted, of which pool"
    assert [round(at - start, 3) for at, _ in record.targets] == [2, 5]
    assert "< it had left it" in " ".join(texts)


def test_what_a_run_is_called_and_why_it_failed_cannot_break_the_page(tmp_path: Path, clock: Clock) -> None:
    report = open_run(tmp_path, clock).finish("failed", "<script>alert('$x')</script>", None)
    assert report["problems"] and not any("drawn" in problem for problem in report["problems"])
    html = (tmp_path / files.REPORT_HTML).read_text()
    assert "<script" not in html and "&lt;script&gt;" in html
    assert "No train step was recorded" in html


@pytest.mark.parametrize("torn", [b"", b'{"step": 9'])
@pytest.mark.parametrize("width", [1, 70_000, 200_000])
def test_the_last_line_is_read_without_those_before_it(tmp_path: Path, width: int, torn: bytes) -> None:
    path = tmp_path / "lines"
    assert files.read_last_line(path) == {}
    path.write_bytes(torn)
    assert files.read_last_line(path) == {}
    for step in range(3):
        path.write_bytes(
            b"".join(sealed(json.dumps({"step": n, "text": "x" * width})).encode() for n in range(step + 1))
            + torn
        )
        assert files.read_last_line(path)["step"] == step
