"""A schedule that would starve, deadlock or never expire is refused with the inequality it breaks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypost.config.imports import load_function
from raypost.plan.schedule import bound, schedule_problems, started_at_once, strategy_warnings
from raypost.production.build import buffer_bounds, task_limits
from tests.factories import SMALLEST, make_config


def no_weights(step: int, weights: dict[str, float]) -> dict[str, float]:
    """What a broken `task_weights` may return."""
    return dict.fromkeys(weights, 0.0) if step > 1 else weights


def broken(step: int, weights: dict[str, float]) -> dict[str, float]:
    raise KeyError("reward")


def accept(group: object) -> bool:
    return True


def strategy(**fields: Any) -> dict[str, Any]:
    return {"tasks__0__strategy": fields}


HERE = "tests.unit.test_schedule"

REFUSED = {
    "early rounds": (strategy(should_continue=f"{HERE}:accept"), "would starve"),
    "a mask that never masks": (
        strategy(max_staleness=2, max_token_staleness=2),
        "max_token_staleness 2 >= max_staleness 2",
    ),
    "a mask in a synchronous task": (
        strategy(kind="sync", max_token_staleness=0),
        "max_token_staleness 0 >= max_staleness 0",
    ),
    "tries without a tail batch": (
        strategy(tail_batch_max_tries=3, tail_batch_trigger_size=-1),
        "no tail batch to wait for",
    ),
    "buffer below two batches": ({"buffer__max_groups": 15}, "buffer.max_groups 15 < 2 x train.batch_size 8"),
    "tail batch that fills the buffer": (
        {**strategy(tail_batch_trigger_size=9), "buffer__max_groups": 24},
        "tail_batch_trigger_size 9 (default) + 2 x train.batch_size 8 > buffer.max_groups 24",
    ),
    "no weight at some step": ({"tasks__0__weight_schedule": {5: 0.0}}, "step 5: task weights must be >= 0"),
    "function without weights": ({"task_weights": f"{HERE}:no_weights"}, "task weights must be >= 0"),
    "function that raises": ({"task_weights": f"{HERE}:broken"}, "raised KeyError: 'reward'"),
    "function that does not exist": ({"task_weights": f"{HERE}:nothing"}, "has no 'nothing'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_with_its_numbers(name: str) -> None:
    places, part = REFUSED[name]
    problems = list(schedule_problems(make_config(**places)))
    assert any(part in problem for problem in problems), problems


@pytest.mark.parametrize(
    "places",
    [
        {},
        strategy(max_staleness=3, max_token_staleness=2, tail_batch_max_tries=4),
        {"sync__pause_mode": "keep"},
        {**strategy(max_staleness=0), "sync__pause_mode": "keep"},
        strategy(is_valid=f"{HERE}:accept"),
        {**strategy(tail_batch_trigger_size=8), "buffer__max_groups": 24},
    ],
)
def test_what_works_is_not_refused(places: dict[str, Any]) -> None:
    assert list(schedule_problems(make_config(**places))) == []


def test_the_bound_says_how_old_data_may_be_and_how_much_may_be_in_flight() -> None:
    config = make_config(**strategy(max_staleness=2), sync__sync_weights_interval=2)
    shown = bound(config.tasks[0], config)
    assert (shown.threshold, shown.oldest) == (6, "staleness 5: 5 steps old")
    assert started_at_once(config.tasks[0], 8, config) == 48
    nearer = make_config(**strategy(max_staleness=2, max_token_staleness=0), sync__sync_weights_interval=2)
    assert started_at_once(nearer.tasks[0], 8, nearer) == 16


STRATEGIES = st.fixed_dictionaries({
    "kind": st.sampled_from(["async", "sync"]),
    "max_staleness": st.integers(0, 4),
})  # fmt: skip


def naive_threshold(strategy: dict[str, Any], interval: int) -> int:
    """Staleness from which a group is expired, as docs/production.md says."""
    return interval if strategy["kind"] == "sync" else int(strategy["max_staleness"] + 1) * interval


@settings(max_examples=200, deadline=None)
@given(strategies=st.lists(STRATEGIES, min_size=1, max_size=3), interval=st.integers(1, 4))
def test_plan_buffer_and_report_have_one_staleness_bound(
    strategies: list[dict[str, Any]], interval: int
) -> None:
    tasks = [SMALLEST["tasks"][0] | {"name": f"t{n}", "strategy": one} for n, one in enumerate(strategies)]
    config = make_config(tasks=tasks, sync__sync_weights_interval=interval)
    expected = [naive_threshold(one, interval) for one in strategies]
    shown = [bound(task, config) for task in config.tasks]
    assert [one.threshold for one in shown] == expected
    assert [limits.stale_threshold for limits in task_limits(config).values()] == expected
    for one, threshold in zip(shown, expected, strict=True):
        assert one.oldest.startswith(f"staleness {threshold - 1}:")
        assert f" {threshold // interval - 1} + 1) x" in one.rule
    assert config.staleness_bound == max(expected) - 1


def test_a_limit_of_groups_in_flight_is_what_is_started_at_once() -> None:
    config = make_config(**strategy(over_sample_threshold=1.0, max_pending=5))
    assert started_at_once(config.tasks[0], 8, config) == 5


def test_the_buffers_bounds_are_in_groups_and_bytes() -> None:
    bounds = buffer_bounds(make_config(buffer__max_gb=0.5, buffer__max_groups=100))
    assert (bounds.max_groups, bounds.max_bytes, bounds.low_water) == (100, 2**29, 0.8)


@pytest.mark.parametrize(
    ("places", "part"),
    [
        (strategy(tail_batch_trigger_size=-1), "biased towards short ones"),
        (strategy(max_staleness=0), "starts again"),
    ],
)
def test_what_surprises_is_warned_of(places: dict[str, Any], part: str) -> None:
    config = make_config(**places)
    assert any(part in warning for warning in strategy_warnings(config.tasks[0], config))


def test_functions_are_found_by_import_path() -> None:
    assert load_function(f"{HERE}:accept", "is_valid") is accept
