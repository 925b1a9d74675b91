"""Which pause overrules which, how the deadlines of a pause nest, and what counts as running."""

from __future__ import annotations

import pytest

from actors.rollout.gate import OpenRequests
from raypost.pause import PauseDeadlines, PauseMode, stricter


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


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_frozen_requests_are_open_but_neither_running_nor_busy() -> None:
    clock = Clock()
    requests = OpenRequests(clock)
    first, second = requests.enter("a"), requests.enter("a")
    clock.now = 3
    requests.freeze()
    assert (len(requests), requests.running, requests.busy_s) == (2, 0, 3)
    assert not requests.idle.is_set()
    clock.now = 10
    requests.leave(first)
    requests.freeze()
    requests.freeze(False)
    clock.now = 11
    assert (len(requests), requests.running, requests.busy_s) == (1, 1, 4)
    requests.leave(second)
    clock.now = 20
    assert (requests.running, requests.busy_s, requests.idle.is_set()) == (0, 4, True)
    requests.leave(requests.enter("b"))
    assert requests.idle.is_set()


def test_open_requests_are_named_in_what_is_logged() -> None:
    requests = OpenRequests()
    for n in range(9):
        requests.enter(f"r{n}")
    assert str(requests) == "9 requests: r0, r1, r2, r3, r4"
