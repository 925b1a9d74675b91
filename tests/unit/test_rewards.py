"""The overlong penalty, and the choice among over-sampled members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypost.trainer.algorithm.rewards import overlong_penalties
from raypost.trainer.batch.selection import select_members, within_bounds
from tests.present import present


def naive_penalty(length: int, limit: int, buffer: int, penalty: float) -> float:
    """DAPO's three cases."""
    if length <= limit - buffer:
        return 0.0
    if length <= limit:
        return ((limit - buffer) - length) / buffer * penalty
    return -penalty


@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=20), buffer=st.integers(1, 30),
       penalty=st.floats(0.1, 3))  # fmt: skip
def test_overlong_penalty_is_dapos(lengths: Sequence[int], buffer: int, penalty: float) -> None:
    expected = [naive_penalty(length, 40, buffer, penalty) for length in lengths]
    assert np.allclose(overlong_penalties(lengths, [40] * len(lengths), buffer, penalty), expected)


def test_overlong_penalty_of_e_tokens_too_many_is_e_over_the_buffer() -> None:
    exceeded, buffer, factor = 3, 8, 0.5
    assert overlong_penalties([40 - buffer + exceeded], [40], buffer, factor).tolist() == [-3 / 8 * 0.5]
    assert overlong_penalties([40], [40], 0, 1.0).tolist() == [0.0]
    with pytest.raises(ValueError, match="buffer of 41 tokens does not fit a limit of 40"):
        overlong_penalties([1], [40], 41, 1.0)


def test_groups_whose_mean_return_lies_outside_the_bounds_are_dropped() -> None:
    written = [group for group in ([0, 0], [1, 1], [0, 1]) if within_bounds(group, (0.1, 0.9))]
    assert written == [[0, 1]]
    # The bounds themselves are outside.
    assert not within_bounds([0.1, 0.1], (0.1, 0.9)) and not within_bounds([0.9], (0.1, 0.9))


def test_a_balanced_choice_has_the_mean_nearest_the_middle_and_the_widest_spread() -> None:
    assert present(select_members([0, 0, 0, 1], 2, "balanced", (0.1, 0.9))).tolist() == [0, 3]
    # Both pairs have mean 0.5; 0 and 1 spread more.
    assert present(select_members([0.5, 0.5, 0, 1], 2, "balanced", (0.1, 0.9))).tolist() == [2, 3]
    assert select_members([0, 0, 0], 2, "balanced", (0.1, 0.9)) is None


@settings(max_examples=50, deadline=None)
@given(returns=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=9), data=st.data())
def test_exchanging_members_finds_a_mean_about_as_good_as_the_exact_search(
    returns: Any, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, len(returns)))
    exact = select_members(returns, size, "balanced", (-1, 2))
    greedy = present(select_members(returns, size, "balanced", (-1, 2), max_exact=0))
    values = np.asarray(returns)
    assert len(set(greedy.tolist())) == size
    assert abs(values[greedy].mean() - 0.5) <= abs(values[exact].mean() - 0.5) + 0.5 / size


def test_first_and_uniform_choices() -> None:
    returns = [0.0, 0.1, 0.9, 1.0, 0.5]
    assert present(select_members(returns, 2, "first", (0, 1))).tolist() == [0, 1]
    assert select_members(returns, 2, "first", (0.1, 1)) is None
    assert present(select_members(returns, 3, "uniform", (0, 1))).tolist() == [0, 3, 4]


@pytest.mark.parametrize("returns, size, how, text", [
    ([0.0], 2, "first", "size is 2, but there are 1 candidates"), ([0.0], 0, "first", "size is 0"),
    ([], 1, "first", "one or more finite"), ([np.nan], 1, "first", "one or more finite"),
    ([0.0], 1, "last", "unknown selector 'last'"),
])  # fmt: skip
def test_what_cannot_be_chosen_from_is_refused(returns: Any, size: int, how: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        select_members(returns, size, how, (0, 1))
