"""What a run prints, with and without a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raypost.report import formatting, terminal
from raypost.report.terminal import RunDisplay, report_text
from tests import synthetic_run as run

REPORT: dict[str, Any] = {
    "status": "finished", "error": None, "name": "quickstart", "steps": 80, "num_steps": 80, "wall_s": 192.0,
    "eval_before": 0.31, "eval_before_interval": None, "eval_after": 0.87, "eval_after_interval": (0.82, 0.914),
    "step_s_median": 0.75, "staleness_max": 1, "staleness_bound": 1,
    "staleness_mean": 0.74, "trainer_idle_fraction": 0.34, "rollout_idle_fraction": 0.13, "overlap_s": 40.0,
    "window_s": 60.75, "sync_s_median": 0.045, "num_syncs": 81, "logprob_mismatch_max": 9e-6,
    "peak_memory_bytes": 4_120_000_000, "problems": [], "groups": run.counts().as_dict(), "length_bias": None,
    "tasks": {}, "incidents": {},
}  # fmt: skip


class Clock:
    """Stands in for the time module."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(terminal, "time", clock)
    return clock


def plain() -> tuple[RunDisplay, io.StringIO]:
    out = io.StringIO()
    return RunDisplay(run.config(), out=out), out


def record(step: int, **more: object) -> dict[str, object]:
    return {**run.metrics(step), "held_out": 0.35, "sync_s": 0.045, "buffer_groups": 6, **more}


def test_without_a_terminal_every_step_is_one_aligned_line(clock: Clock) -> None:
    progress, out = plain()
    for step in (1, 2, 80):
        clock.now += 0.5
        progress.step(step, record(step, raw_reward_mean=0.41))
    lines = [line for line in out.getvalue().splitlines() if line.startswith("step")]
    assert lines[1] == (
        "step  2/80  reward 0.41  held-out 0.35  buffer  6  staleness 0.8/1  tokens/s  2600  sync  45 ms  left 00:39"
    )
    assert len({len(line) for line in lines}) == 1
    assert "\x1b" not in out.getvalue()


def test_the_first_step_has_no_pace_yet_and_does_not_invent_one(clock: Clock) -> None:
    progress, out = plain()
    progress.step(1, record(1))
    assert re.search(r"tokens/s +– .*left +–", out.getvalue())


def test_a_step_that_lacks_metrics_is_shown_all_the_same(clock: Clock) -> None:
    progress, out = plain()
    progress.step(1, {})
    assert re.search(r"step  1/80  reward +–  held-out +–  buffer +–  staleness +–/1", out.getvalue())


def test_an_evaluation_is_no_part_of_a_steps_pace(clock: Clock) -> None:
    progress, out = plain()
    for step in (1, 2):
        clock.now += 1.0
        progress.step(step, record(step))
    clock.now += 60.0
    progress.evaluated(2, {"held_out": 0.5})
    clock.now += 1.0
    progress.step(3, record(3))
    assert "tokens/s  1300" in out.getvalue().splitlines()[-1]


def test_an_evaluation_says_how_far_it_is_from_the_first_and_what_failed(clock: Clock) -> None:
    progress, out = plain()
    progress.evaluated(0, {"held_out": 0.31, "eval_failed": 0.0})
    progress.evaluated(40, {"held_out": 0.62, "eval_failed": 2.0})
    lines = out.getvalue().splitlines()
    assert lines[-2].strip() == "held-out 0.31 before training"
    assert lines[-1].strip() == "held-out 0.62 after step 40 (+0.31 since the first), 2 responses failed"


def test_an_evaluation_shows_its_intervals_and_the_pass_rates_there_are(clock: Clock) -> None:
    out = io.StringIO()
    options = {"samples": 4, "temperature": 1.0}
    scores = {"held_out": 0.62, "held_out_low": 0.55, "held_out_high": 0.694, "pass@1": 0.62, "pass@4": 0.8}
    RunDisplay(run.config(eval=options), out=out).evaluated(0, scores)
    assert (
        out.getvalue().splitlines()[-1].strip() == "held-out 0.62 [0.55, 0.69] before training, pass@4 0.80"
    )


def test_the_table_of_an_evaluation_has_a_line_a_task_and_one_for_all() -> None:
    options = run.config(eval={"samples": 4, "temperature": 0.7}).eval
    scores = {
        "held_out": 0.5, "held_out_low": 0.4, "held_out_high": 0.6, "held_out/sums": 0.25, "pass@1": 0.5,
        "pass@4/sums": 1.0, "pass@4_low/sums": 0.9, "pass@4_high/sums": 1.0, "eval_failed": 3.0,
    }  # fmt: skip
    shown = io.StringIO()
    Console(file=shown, width=120).print(terminal.scores_table(scores, ["sums", "words"], options))
    cells = [[c.strip() for c in re.split("[│┃]", line)[1:-1]] for line in shown.getvalue().splitlines()]
    assert [row for row in cells if row] == [
        ["task", "mean@4", "pass@1", "pass@2", "pass@4"],
        ["sums", "0.25", "–", "–", "1.00 [0.90, 1.00]"],
        ["words", "–", "–", "–", "–"],
        ["all", "0.50 [0.40, 0.60]", "0.50", "–", "–"],
    ]
    assert "95 % intervals over prompts; 3 responses failed" in " ".join(shown.getvalue().split())


def test_the_first_thing_shown_is_what_runs(clock: Clock) -> None:
    progress, out = plain()
    progress.phase("model tiny ready in 3.2 s")
    progress.phase("1 rollout worker ready in 12.3 s")
    assert out.getvalue().splitlines() == [
        "raypost synthetic: tiny on basic_arithmetic, 80 steps of 16 groups x 8",
        "  1 rollout worker, 1 trainer rank, cpu, staleness at most 1",
        "  model tiny ready in 3.2 s",
        "  1 rollout worker ready in 12.3 s",
    ]


def test_only_a_changed_worker_state_is_worth_a_line(clock: Clock) -> None:
    progress, out = plain()
    for state in ("up", "up", "down", "up"):
        progress.workers({"rollout-worker-0": state})
    assert [line.strip() for line in out.getvalue().splitlines() if "worker-0" in line] == [
        "rollout-worker-0 is down",
        "rollout-worker-0 is up",
    ]


def test_on_a_terminal_a_panel_shows_everything_and_is_left_clean() -> None:
    out = io.StringIO()
    progress = RunDisplay(run.config(), tty=True, out=out)
    progress.workers({"rollout-worker-0": "up"})
    for step in range(1, 4):
        progress.step(step, record(step))
    progress.phase("held-out 0.5 after step 3")
    progress.finish(REPORT, Path("runs/quickstart"))
    progress.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    for expected in (
        "step 3/80",
        "reward",
        "held-out",
        "staleness 0.8/1",
        "loss",
        "left",
        "rollout-worker-0 up",
    ):
        assert expected in shown, expected
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l"), "the cursor is back"


def test_the_summary_has_the_figures_that_matter_and_the_path() -> None:
    text = report_text(REPORT, Path("runs/quickstart"))
    for expected in (
        "finished: quickstart",
        "0.31 -> 0.87 [0.82, 0.91]  (+0.56)",
        "80 of 80 in 3 min 12 s, 0.75 s each",
        "1294 sampled = 1280 trained + 2 failed + 4 expired + 5 buffered + 3 in flight; 0 lost",
        "at most 1 (bound 1), mean 0.74",
        "trainer 34 %, rollout 13 %; both busy 40.0 s of 60.8 s",
        "45 ms (median of 81)",
        "9.0e-6",
        "4.12 GB",
        "runs/quickstart/report.html",
    ):
        assert expected in text, expected


def test_a_failed_run_leads_with_its_error_and_lists_its_problems() -> None:
    none = dict.fromkeys(REPORT) | {
        "groups": REPORT["groups"],
        "problems": ["3 groups are lost"],
        "name": "x",
        "num_steps": 80,
        "tasks": {},
    }
    text = report_text(
        none | {"status": "failed", "error": "ClusterError: no cores", "steps": 0}, Path("runs/x")
    )
    assert text.splitlines()[:2] == ["failed: x", "  ClusterError: no cores"]
    assert "3 groups are lost" in text


def test_what_the_display_keeps_does_not_grow_with_steps(clock: Clock) -> None:
    progress, _ = plain()
    for step in range(1, 2000):
        progress.step(step, record(step))
    assert len(progress._ends) <= terminal.PACE_STEPS + 1


@pytest.mark.parametrize(("value", "text"), [
    (None, "–"), (float("nan"), "–"), (0, "0"), (0.74, "0.740"), (9e-6, "9.00e-6"), (104_000, "1.04e5"),
    (1711.9, "1,712"), (-0.5, "-0.500"),
])  # fmt: skip
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert formatting.number(value) == text


@pytest.mark.parametrize(("value", "text"), [
    (0.045, "45 ms"), (0.0996, "0.10 s"), (0.71, "0.71 s"), (12.34, "12.3 s"), (99.6, "1 min 40 s"),
    (192, "3 min 12 s"), (7500, "2 h 05 min"),
])  # fmt: skip
def test_durations_read_as_people_say_them(value: float, text: str) -> None:
    assert formatting.seconds(value) == text
    assert formatting.clock(7500) == "2:05:00" and formatting.clock(5) == "00:05"


def test_the_summary_names_a_length_bias_only_where_groups_grew_too_old() -> None:
    def kind(groups: int, mean: float | None) -> dict[str, object]:
        return {"groups": groups, "tokens_mean": mean}

    bias = {"trained": kind(30, 10.0), "dropped": kind(0, None), "regenerated": kind(0, None)}
    fresh = {**REPORT, "length_bias": {**bias, "ratio": None, "share": 0.0}}
    assert "length bias" not in report_text(fresh, Path("runs/x"))
    old = {**REPORT, "length_bias": {**bias, "dropped": kind(10, 15.0), "ratio": 1.5, "share": 0.25}}
    assert (
        "length bias       25 % of the groups grew too old, 1.50 times as long as trained ones: "
        "10 dropped (15.0 tokens), 30 trained (10.0 tokens)"
    ) in report_text(old, Path("runs/x"))
