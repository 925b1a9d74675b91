"""Which pause overrules which, how the deadlines of a pause nest, and what counts as running."""

from __future__ import annotations

import pytest

from actors.rollout.gate import OpenRequests
from raypost.types.pause import PauseDeadlines, PauseMode, stricter


@pytest.mark.parametrize(
    ("held", "asked", "then"),
    [
        (None, "wait", "wait"),
        ("wait", "wait", "wait"),
        ("wait", "keep", "keep"),
        ("wait", "abort", "abort"),
        ("keep", "wait", "keep"),
        ("keep", "abort", "abort"),
        ("abort", "wait", "abort"),
        ("abort", "keep", "abort"),
    ],
)
def test_a_pause_is_overruled_by_a_stricter_one_and_never_softened(
    held: PauseMode | None, asked: PauseMode, then: PauseMode
) -> None:
    assert stricter(held, asked) == then


@pytest.mark.parametrize("timeout_s", [0.5, 60.0, 3600.0])
def test_an_inner_wait_of_a_pause_ends_before_the_one_around_it(timeout_s: float) -> None:
    waits = PauseDeadlines(timeout_s)
    nested = [waits.judge_grace_s, waits.resend_s, waits.run_out_s, waits.worker_s, waits.pool_s, timeout_s]
    assert nested == sorted(set(nested)) and nested[0] > 0
    assert waits.run_out_s + waits.resend_s + waits.judge_grace_s < timeout_s


def test_frozen_requests_are_open_but_not_running() -> None:
    requests = OpenRequests("rollout-0")
    first, second = requests.enter("a"), requests.enter("a")
    assert (len(requests), requests.running) == (2, 2)
    requests.frozen = True
    assert (len(requests), requests.running, requests.idle.is_set()) == (2, 0, False)
    requests.leave(first)
    assert (len(requests), requests.running, requests.idle.is_set()) == (1, 0, False)
    requests.frozen = False
    assert requests.running == 1
    requests.leave(second)
    assert (requests.running, requests.idle.is_set()) == (0, True)
    requests.leave(requests.enter("b"))
    assert requests.idle.is_set()


def test_an_engine_is_busy_while_it_works_on_requests_and_not_while_they_are_frozen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("actors.rollout.gate.time.time", lambda: now)
    requests = OpenRequests("rollout-0")
    first = requests.enter("a")
    now = 101.0
    second = requests.enter("b")
    now = 102.0
    requests.frozen = True
    now = 105.0
    requests.leave(first)
    now = 106.0
    requests.frozen = False
    now = 107.0
    spans = requests.drain_spans()
    now = 109.0
    requests.leave(second)
    now = 120.0
    spans += requests.drain_spans()
    assert [(s.actor, s.kind, s.start_s, s.end_s) for s in spans] == [
        ("rollout-0", "rollout", 100.0, 102.0),
        ("rollout-0", "rollout", 106.0, 107.0),
        ("rollout-0", "rollout", 107.0, 109.0),
    ]


def test_open_requests_are_named_in_what_is_logged() -> None:
    requests = OpenRequests("rollout-0")
    for n in range(9):
        requests.enter(f"r{n}")
    assert str(requests) == "9 requests: r0, r1, r2, r3, r4"
