"""Span logs, interval arithmetic and the figures made of them."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

from raypost.observe.spans import Span, SpanKind, SpanLog
from raypost.report import busy_time
from raypost.report.record import weighted_mean
from raypost.report.report_json import median, staleness_histogram
from tests import synthetic_run as run


def spans(kind: SpanKind, *intervals: tuple[float, float], actor: str = "a") -> list[Span]:
    return [Span(actor=actor, kind=kind, start_s=start, end_s=end) for start, end in intervals]


def random_intervals(rng: np.random.Generator, count: int) -> np.ndarray:
    starts = rng.integers(0, 100, count)
    return np.stack([starts, starts + rng.integers(0, 12, count)], axis=1).astype(float)


def covered(intervals: np.ndarray) -> np.ndarray:
    """Which of the slots [n, n + 1) the intervals with whole bounds cover."""
    slots = np.zeros(120, bool)
    for start, end in intervals:
        slots[int(start) : int(end)] = True
    return slots


def test_short_requests_in_a_row_become_one_span() -> None:
    log = SpanLog("worker", merge_gap_s=0.01)
    for n in range(5):
        log.add("rollout", n * 0.1, n * 0.1 + 0.095)
    log.add("rollout", 2.0, 2.5)
    assert log.drain() == spans("rollout", (0.0, 0.495), (2.0, 2.5), actor="worker")


def test_a_span_of_another_kind_in_between_does_not_split_a_merge() -> None:
    log = SpanLog("a", merge_gap_s=0.01)
    log.add("rollout", 0.0, 1.0)
    log.add("sync", 0.2, 0.3)
    log.add("rollout", 1.0, 2.0)
    assert log.drain() == spans("rollout", (0.0, 2.0)) + spans("sync", (0.2, 0.3))


def test_an_overlapping_span_extends_and_never_shortens() -> None:
    log = SpanLog("a")
    log.add("rollout", 0.0, 5.0)
    log.add("rollout", 1.0, 2.0)
    assert log.drain() == spans("rollout", (0.0, 5.0))


def test_drained_spans_are_gone_and_are_not_extended_afterwards() -> None:
    log = SpanLog("a")
    log.add("train", 0.0, 1.0)
    first = log.drain()
    log.add("train", 1.0, 2.0)
    assert first == spans("train", (0.0, 1.0))
    assert log.drain() == spans("train", (1.0, 2.0))
    assert log.drain() == []


def test_a_log_nobody_drains_stays_bounded_and_counts_what_it_lost() -> None:
    log = SpanLog("a", max_spans=10)
    for n in range(1000):
        log.add("train", n, n + 0.5)
    assert (len(log), log.dropped) == (10, 990)
    assert [span.start_s for span in log.drain()] == list(range(990, 1000))
    for n in range(25):
        log.add("train", n, n + 0.5)
    assert (len(log), log.dropped) == (10, 1005)


def test_a_span_evicted_by_the_bound_is_not_extended_in_the_dark() -> None:
    log = SpanLog("a", merge_gap_s=10.0, max_spans=1)
    log.add("train", 0.0, 1.0)
    log.add("sync", 1.0, 2.0)
    log.add("train", 1.0, 3.0)
    assert log.drain() == spans("train", (1.0, 3.0))


def test_a_block_that_raises_is_recorded_too() -> None:
    log = SpanLog("a")
    with pytest.raises(KeyError), log.span("train"):
        raise KeyError
    (span,) = log.drain()
    assert span.kind == "train" and span.end_s >= span.start_s


def test_a_clock_that_was_set_back_gives_an_empty_span_and_no_negative_time() -> None:
    log = SpanLog("a")
    log.add("train", 10.0, 4.0)
    assert log.drain() == spans("train", (10.0, 10.0))


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'trian' is unknown, use one of rollout, train"):
        SpanLog("a").add("trian", 0.0, 1.0)  # type: ignore[arg-type]  # what the check is for


def test_threads_lose_no_span() -> None:
    log = SpanLog("a", merge_gap_s=0.0, max_spans=10_000)

    def add(offset: int) -> None:
        for i in range(500):
            log.add("train", 10 * i + offset, 10 * i + offset + 0.5)

    threads = [threading.Thread(target=add, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    drained = {span.start_s for span in log.drain()}
    assert len(drained) == 2000


@pytest.mark.parametrize("seed", range(20))
def test_interval_arithmetic_agrees_with_counting_slots(seed: int) -> None:
    rng = np.random.default_rng(seed)
    raw_a, raw_b = (
        random_intervals(rng, int(rng.integers(0, 15))),
        random_intervals(rng, int(rng.integers(0, 15))),
    )
    a, b = busy_time.union(raw_a), busy_time.union(raw_b)
    assert (covered(a) == covered(raw_a)).all()
    for made, slots in (
        (a, covered(raw_a)),
        (busy_time.intersect(a, b), covered(raw_a) & covered(raw_b)),
        (busy_time.subtract(a, b), covered(raw_a) & ~covered(raw_b)),
    ):
        assert (covered(made) == slots).all()
        assert busy_time.length_s(made) == slots.sum()
        assert (made[1:, 0] > made[:-1, 1]).all(), "a union is sorted and disjoint"


def test_idle_fraction_counts_overlapping_spans_of_an_actor_once() -> None:
    table = busy_time.span_table(spans("rollout", (0, 4), (2, 5)))
    assert busy_time.idle_fraction(table, "rollout", np.array([[0.0, 10.0]])) == pytest.approx(0.5)


def test_idle_fraction_is_the_mean_over_actors_also_over_those_that_never_worked() -> None:
    table = busy_time.span_table(spans("train", (0, 10)) + spans("train", (0, 5), actor="b"))
    windows = np.array([[0.0, 10.0]])
    assert busy_time.idle_fraction(table, "train", windows) == pytest.approx(0.25)
    assert busy_time.idle_fraction(table, "train", windows, num_actors=3) == pytest.approx(0.5)


def test_nothing_measured_is_none_and_not_zero() -> None:
    empty = np.empty((0, 2))
    assert busy_time.idle_fraction({}, "train", np.array([[0.0, 1.0]])) is None
    assert busy_time.idle_fraction(busy_time.span_table(spans("train", (0, 1))), "train", empty) is None


def test_the_window_opens_with_production_and_closes_with_the_last_train_span() -> None:
    table = busy_time.span_table(
        [*run.first_spans(), *run.step_spans(1), *run.step_spans(2), *run.last_spans(2)]
    )
    windows = busy_time.training_windows(table, [(run.START_S, run.START_S + 1000)])
    assert windows - run.START_S == pytest.approx(np.array([[22.0, 22.0 + 1.0 + 0.75 + 0.5]]))


def test_the_time_between_two_sessions_is_no_idle_time() -> None:
    table = busy_time.span_table(
        spans("train", (10, 20), (1000, 1010)) + spans("rollout", (8, 20), (999, 1010))
    )
    windows = busy_time.training_windows(table, [(0.0, 50.0), (990.0, 1020.0)])
    assert windows.tolist() == [[8.0, 20.0], [999.0, 1010.0]]
    assert busy_time.idle_fraction(table, "train", windows) == pytest.approx(3 / 23)


def test_time_shares_add_up_to_the_window_and_count_nothing_twice() -> None:
    table = busy_time.span_table(
        spans("train", (0, 4))
        + spans("rollout", (2, 7), (8, 9), actor="b")
        + spans("sync", (3, 8), actor="c")
        + spans("evaluate", (8, 9), actor="d")
    )
    shares = busy_time.time_shares_s(table, np.array([[0.0, 10.0]]))
    assert shares == {"both": 2, "train": 2, "evaluate": 1, "sync": 4, "rollout": 0, "neither": 1}


def test_staleness_histogram_names_empty_values_too() -> None:
    assert staleness_histogram([[0, 3], [0]]) == {0: 2, 1: 0, 2: 0, 3: 1}
    assert staleness_histogram([]) == {}


def test_median_and_weighted_mean_leave_out_what_is_not_finite() -> None:
    assert median([1.0, float("nan"), 3.0]) == 2.0
    assert median([]) is None
    assert weighted_mean([(10.0, 1.0), (20.0, 3.0), (float("nan"), 5.0)]) == 17.5
    assert weighted_mean([(10.0, 0.0)]) is None


@pytest.mark.parametrize(("kind", "max_staleness", "interval", "bound"), [
    ("async", 0, 1, 0), ("async", 1, 1, 1), ("async", 1, 4, 7), ("sync", 5, 1, 0), ("sync", 5, 4, 3),
])  # fmt: skip
def test_staleness_bound_counts_steps(kind: str, max_staleness: int, interval: int, bound: int) -> None:
    task = {
        "source": {"kind": "reasoning_gym", "dataset": "basic_arithmetic"},
        "strategy": {"kind": kind, "max_staleness": max_staleness},
    }
    config = run.config(tasks=[task], sync={"sync_weights_interval": interval})
    assert config.staleness_bound == bound


def test_metrics_and_display_import_no_heavy_library() -> None:
    heavy = ["torch", "transformers", "ray", "vllm", "matplotlib", "tensorboard"]
    modules = "raypost.observe.spans, raypost.types, raypost.report.terminal"
    code = f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
