"""Samplers whose prompts are read by DataLoader worker processes: real ones, so these tests take seconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import pytest

from raypost.errors import ConfigError, ProductionError, WaitTimeoutError
from tests.unit.prompts import Broken, Deadly, Numbers, NumberStream, Slow, Unsendable, answers, of


def children() -> set[Any]:
    return set(multiprocessing.active_children())


@pytest.mark.parametrize("source", [Numbers(50), NumberStream(50)])
def test_workers_give_the_same_order_and_resume_with_any_number_of_them(source: Any) -> None:
    before = children()
    expected = answers(of(source), 160)
    sampler = of(source, num_workers=2)
    assert children() == before, "workers start with the first sample"
    assert answers(sampler, 61) == expected[:61]
    assert len(children() - before) == 2
    state = sampler.state_dict()
    sampler.close()
    assert children() == before
    assert answers(sampler, 3) == expected[61:64], "it goes on after it was closed"
    sampler.load_state_dict(state)
    assert children() == before
    for num_workers in (0, 1):
        other = of(source, num_workers=num_workers)
        other.load_state_dict(state)
        assert other.position == 61
        assert answers(other, 99) == expected[61:]
        other.close()
        other.close()
    assert children() == before


def test_a_worker_that_dies_is_an_error_with_its_cause_and_loses_nothing() -> None:
    before = children()
    expected = answers(of(Numbers(1000)), 400)
    sampler = of(Numbers(1000), num_workers=2)
    assert answers(sampler, 5) == expected[:5]
    victim = (children() - before).pop()
    os.kill(victim.pid, signal.SIGKILL)
    taken = 5
    with pytest.raises(ProductionError, match=rf"'default' lost its worker process {victim.pid} .*code -9"):
        while taken < 400:
            taken += len(answers(sampler, 1))
    assert children() == before
    assert answers(sampler, 9) == expected[taken : taken + 9]
    sampler.close()


def test_a_source_that_kills_its_worker_is_an_error() -> None:
    sampler = of(Deadly(9, 4), num_workers=1)
    with pytest.raises(ProductionError, match=r"exit code -9"):
        answers(sampler, 9)
    sampler.close()


def test_an_error_in_a_worker_is_raised_as_it_is() -> None:
    sampler = of(Broken(9, 4), num_workers=1)
    with pytest.raises(ZeroDivisionError, match="number 4"):
        answers(sampler, 9)
    sampler.close()


def test_a_source_that_hangs_in_a_worker_is_an_error_within_the_deadline() -> None:
    before = children()
    sampler = of(Slow(9, seconds=1e6), num_workers=1, timeout_s=1.5)
    with pytest.raises(WaitTimeoutError, match=r"'default' waited 1.5 s for its 1 worker"):
        sampler.sample()
    assert children() == before


def test_a_source_that_cannot_be_sent_to_a_worker_is_refused() -> None:
    sampler = of(Unsendable(9), num_workers=1)
    with pytest.raises(ConfigError, match=r"cannot send its source .*set source.num_workers to 0"):
        sampler.sample()


def test_what_start_read_ahead_is_sampled_without_the_worker() -> None:
    before = children()
    sampler = of(Numbers(99), num_workers=1)
    sampler.start()
    sampler.start()
    (worker,) = children() - before
    os.kill(worker.pid, signal.SIGSTOP)
    assert answers(sampler, 8) == answers(of(Numbers(99)), 8)
    sampler.close()
    assert children() == before
