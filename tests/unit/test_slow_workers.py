"""A worker that is slow beside its siblings is found by its rate, and given less."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import numpy as np
import pytest

from actors.rollout.rates import ENOUGH, TIMES, Rates
from actors.rollout.routing import Route, Router, RoutingTable
from raypost.types import GenerateRequest, SampleParams, WorkerStats


class Pool:
    """Workers that answer requests of 100 tokens, each at its own speed, with 8 requests at a time."""

    def __init__(self, *tokens_s: float) -> None:
        self.tokens_s = list(tokens_s)
        self.seconds = [0.0] * len(tokens_s)
        self.answered = [0] * len(tokens_s)

    def after(self, seconds: float) -> list[WorkerStats]:
        stats = []
        for n, speed in enumerate(self.tokens_s):
            self.seconds[n] += 8 * seconds
            self.answered[n] += int(8 * seconds * speed / 100)
            stats.append(
                WorkerStats(
                    worker=f"rollout-{n}",
                    version=1,
                    running=8,
                    generated_tokens=100 * self.answered[n],
                    answered=self.answered[n],
                    request_s=self.seconds[n],
                )
            )
        return stats


def looks(rates: Rates, pool: Pool, times: int, seconds: float = 15.0) -> list[str]:
    return [name for _ in range(times) for name in rates.look(pool.after(seconds))]


def test_one_engine_twenty_times_slower_is_found_and_no_other() -> None:
    rates = Rates()
    pool = Pool(100, 100, 5, 120)
    assert looks(rates, pool, TIMES) == []
    assert looks(rates, pool, 1) == ["rollout-2"], "after the first look, which only begins, three in a row"
    assert rates.shares == {"rollout-2": pytest.approx(0.05, rel=0.3)}
    assert looks(rates, pool, 5) == [], "it is named once"


def test_ordinary_differences_and_a_single_worker_are_not_slow() -> None:
    for pool in (Pool(100, 60, 140), Pool(100, 30), Pool(5)):
        assert looks(rates := Rates(), pool, 10) == []
        assert rates.shares == {}


def test_nothing_is_compared_before_enough_was_answered() -> None:
    rates, pool = Rates(), Pool(100, 5)
    few = (ENOUGH - 1) / 8
    assert looks(rates, pool, 2, seconds=few) == []
    assert rates._times == {}


def test_one_slow_look_is_forgiven_and_a_worker_that_recovered_is_slow_no_more() -> None:
    rates, pool = Rates(), Pool(100, 5)
    looks(rates, pool, TIMES)
    pool.tokens_s[1] = 90
    looks(rates, pool, 1)
    pool.tokens_s[1] = 5
    assert looks(rates, pool, TIMES - 1) == []
    assert looks(rates, pool, 1) == ["rollout-1"]
    pool.tokens_s[1] = 90
    looks(rates, pool, 1)
    assert rates.shares == {}


def test_a_restarted_worker_begins_anew() -> None:
    rates, pool = Rates(), Pool(100, 5)
    looks(rates, pool, TIMES + 1)
    pool.seconds[1], pool.answered[1], pool.tokens_s[1] = 0.0, 0, 100
    assert looks(rates, pool, 1) == []
    assert rates.shares == {}


async def test_a_slow_worker_is_given_requests_for_its_speed() -> None:
    routes = [Route("rollout-0", 0, None), Route("rollout-1", 0, None, share=0.05)]
    table = RoutingTable(epoch=1, paused=False, up=tuple(routes), states="")
    router = Router(cast(Any, None), 60.0)
    router._table = table
    router._follow = lambda: None  # type: ignore[method-assign]
    given: Counter[str] = Counter()
    asked = GenerateRequest(
        request_id="r", token_ids=np.zeros(1, np.int32), sample_params=SampleParams(max_tokens=1)
    )
    for _ in range(105):
        route = await router._pick(1e12, asked)
        assert route is not None
        given[route.worker] += 1
        router._loads.begin(route.worker, 2)
    assert given == {"rollout-0": 100, "rollout-1": 5}
