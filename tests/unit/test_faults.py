"""What is done about failures, on a virtual clock."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypost.config import FaultsConfig
from raypost.faults import Decision, End, Failure, FaultHistory, Restart, decide

KILLED = Failure(
    role="trainer", actor="trainer-1", cause="it died during fit", at_s=0.0, node="10.0.0.7", pid=4711,
    exit_cause="SIGKILL", last_words=("step 7 begins", "Killed"),
)  # fmt: skip


def carried_out(failures: list[Failure], limits: FaultsConfig) -> list[Decision]:
    """Return what is decided about failures that come one after the other, up to the end of the run."""
    history, decisions = FaultHistory(), []
    for failure in failures:
        decisions.append(decide(failure, history, limits))
        history.add(failure)
        if isinstance(decisions[-1], End):
            break
    return decisions


@given(
    gaps=st.lists(st.tuples(st.sampled_from(["trainer", "producer"]), st.floats(0, 400)), max_size=30),
    max_failures=st.integers(0, 5),
    window_s=st.floats(1, 1000),
)
def test_a_role_comes_back_at_most_so_often_within_any_window_and_no_other_role_counts(
    gaps: list[tuple[str, float]], max_failures: int, window_s: float
) -> None:
    limits = FaultsConfig(max_failures=max_failures, window_s=window_s)
    times = accumulate(gap for _, gap in gaps)
    failures = [replace(KILLED, role=role, at_s=at_s) for (role, _), at_s in zip(gaps, times, strict=True)]
    decisions = carried_out(failures, limits)
    for number, decision in enumerate(decisions):
        failure = failures[number]
        recent = [
            one
            for one in failures[: number + 1]
            if one.role == failure.role and (one is failure or one.at_s > failure.at_s - window_s)
        ]
        assert isinstance(decision, End) == (len(recent) > max_failures)


def test_failures_far_apart_never_end_a_run() -> None:
    failures = [replace(KILLED, at_s=600.0 * n) for n in range(100)]
    assert carried_out(failures, FaultsConfig(max_failures=1, window_s=600)) == [Restart()] * 100


def test_a_crash_loop_ends_with_cause_and_history() -> None:
    failures = [
        replace(KILLED, at_s=0.0, pid=1),
        replace(KILLED, role="producer", actor="producer", at_s=3.0),
        replace(KILLED, at_s=30.0, pid=2, cause="it ran out of luck"),
    ]
    *_, end = carried_out(failures, FaultsConfig(max_failures=1, window_s=60))
    assert isinstance(end, End)
    for text in ("trainer failed 2 times within 60 s", "max_failures 1", "process 1", "process 2", "30 s before",
                 "it ran out of luck", "SIGKILL", "node 10.0.0.7", "step 7 begins", "same command"):  # fmt: skip
        assert text in end.reason
    assert "producer" not in end.reason


@pytest.mark.parametrize("known", [True, False])
def test_a_failure_says_all_that_is_known(known: bool) -> None:
    failure = KILLED if known else Failure(role="trainer", actor="trainer-1", cause="it is late", at_s=1.0)
    assert str(failure) == (
        "trainer: trainer-1 (process 4711, node 10.0.0.7) failed: it died during fit; its process ended: SIGKILL"
        if known
        else "trainer: trainer-1 failed: it is late"
    )
    assert ("Killed" in failure.story) == known
