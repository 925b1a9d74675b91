"""The split of a batch over tasks (N11, N12), weights that change, and room in the engines."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypost.errors import ConfigError
from raypost.production.allocation import Allocation, allocate
from raypost.production.slots import EngineSlots
from tests.unit.production import task_config


@pytest.mark.parametrize(
    ("batch_size", "weights", "shares"),
    [
        (10, [1, 1, 1], [4, 3, 3]),
        (1, [0.6, 0.4], [1, 0]),
        (4, [1, 0], [4, 0]),
        (0, [1, 2], [0, 0]),
        (3, [0.1, 0.1, 0.1], [1, 1, 1]),
    ],
)
def test_batch_is_split_by_largest_remainder(
    batch_size: int, weights: list[float], shares: list[int]
) -> None:
    """N11 and N12: ties by order, a task without weight is present with 0."""
    assert list(allocate(batch_size, {str(i): w for i, w in enumerate(weights)}).values()) == shares


@settings(deadline=None)
@given(
    st.integers(0, 500), st.lists(st.floats(0, 1e3), min_size=1, max_size=8).filter(lambda w: sum(w) > 1e-6)
)
def test_split_adds_up_and_is_off_by_less_than_one(batch_size: int, weights: list[float]) -> None:
    shares = allocate(batch_size, {str(i): w for i, w in enumerate(weights)})
    assert sum(shares.values()) == batch_size
    for share, weight in zip(shares.values(), weights, strict=True):
        assert abs(share - batch_size * weight / sum(weights)) < 1 + 1e-6


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": -1.0, "b": 2.0}])
def test_weights_that_cannot_be_split_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="task weights"):
        allocate(4, weights)
    with pytest.raises(ConfigError, match="batch_size"):
        allocate(-1, {"a": 1.0})


def test_a_schedule_changes_weights_from_its_steps_on() -> None:
    tasks = [task_config("a", weight=1.0, weight_schedule={10: 0.0, 20: 3.0}), task_config("b", weight=1.0)]
    allocation = Allocation(tasks, 8)
    shares = {step: allocation(step)["a"] for step in (1, 9, 10, 19, 20, 1000)}
    assert shares == {1: 4, 9: 4, 10: 0, 19: 0, 20: 6, 1000: 6}


def test_a_users_function_is_given_the_scheduled_weights_and_its_own_hold() -> None:
    seen = []

    def favour_b(step: int, weights: dict[str, float]) -> dict[str, float]:
        seen.append((step, dict(weights)))
        return {**weights, "b": weights["b"] * step}

    tasks = [task_config("a", weight_schedule={2: 2.0}), task_config("b")]
    allocation = Allocation(tasks, 9, favour_b)
    assert [allocation(step)["b"] for step in (1, 2, 7)] == [4, 4, 7]
    assert seen[1] == (2, {"a": 2.0, "b": 1.0})


@pytest.mark.parametrize(
    "answer", [{"a": 1.0}, {"a": 1.0, "c": 1.0}, {"a": 0.0, "b": 0.0}, {"a": float("nan"), "b": 1.0}]
)
def test_weights_a_batch_cannot_be_split_by_are_refused_with_the_step(answer: dict[str, float]) -> None:
    allocation = Allocation([task_config("a"), task_config("b")], 4, lambda step, weights: answer)
    with pytest.raises(ConfigError, match="step 3"):
        allocation(3)


# ---------------------------------------------------------------- room in the engines


def test_a_group_takes_as_many_slots_as_its_members_are_long_beside_the_longest() -> None:
    slots = EngineSlots(23, {"sums": 4})  # and a quarter more that wait in the engines: 28.75
    assert slots.room("sums", {}) == 15, "half of four, before anything is known"
    slots.observe("sums", [0, 0])
    assert slots.room("sums", {}) == 15, "nothing was generated: nothing is learned"
    for _ in range(300):
        slots.observe("sums", [5, 10])
    assert slots.room("sums", {}) == 10 and slots.room("sums", {"sums": 4}) == 6, "three of four"
    slots.resize(8)
    assert slots.room("sums", {"sums": 4}) == 0


def test_engines_without_a_number_of_slots_have_room_without_bound() -> None:
    assert EngineSlots(None, {"sums": 4}).room("sums", {"sums": 1000}) is None
