"""Records: the status machine, alignment, and the columnar form."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypost.errors import AlignmentError
from raypost.types import (
    GenerateRequest,
    GenerateResult,
    Group,
    GroupCounts,
    RolloutState,
    SampleParams,
    Status,
    Work,
    group_status,
    status_of_finish,
)
from raypost.types.packed import pack_groups, unpack_groups
from tests.unit.production import group, state


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("stop", Status.COMPLETED),
        ("STOP", Status.COMPLETED),
        ("length", Status.COMPLETED),
        ("tool_calls", Status.COMPLETED),
        ("Abort", Status.ABORTED),
        ("error", Status.FAILED),
        (None, Status.FAILED),
        ("", Status.FAILED),
        ("something new", Status.FAILED),
    ],
)
def test_finish_reason_means_a_status_in_any_case(reason: str | None, status: Status) -> None:
    assert status_of_finish(reason) is status


@pytest.mark.parametrize(
    ("members", "status"),
    [
        ([Status.COMPLETED, Status.ABORTED], Status.ABORTED),
        ([Status.COMPLETED, Status.FAILED, Status.ABORTED], Status.FAILED),
        ([Status.EXPIRED, Status.ABORTED], Status.ABORTED),
        ([Status.FILTERED, Status.EXPIRED], Status.EXPIRED),
        ([Status.FILTERED, Status.COMPLETED], Status.FILTERED),
        ([Status.COMPLETED, Status.COMPLETED], Status.COMPLETED),
        ([Status.INIT, Status.INIT], Status.INIT),
        ([Status.INIT, Status.COMPLETED], Status.INIT),
    ],
)
def test_group_has_the_worst_status_of_its_members(members: list[Status], status: Status) -> None:
    """N15, and an all-INIT group is INIT, not COMPLETED."""
    assert group_status([state([], status=member) for member in members]) is status


def test_an_empty_group_has_no_status() -> None:
    with pytest.raises(ValueError, match="at least one"):
        group_status([])


def test_misaligned_fields_are_refused_where_they_enter() -> None:
    with pytest.raises(AlignmentError, match="'logprobs': 1"):
        dataclasses.replace(state([1, 1]), logprobs=np.zeros(1, np.float32))


def test_misaligned_segment_is_refused_and_changes_nothing() -> None:
    one = state([1, 1])
    with pytest.raises(AlignmentError, match="logprobs 1"):
        one.append_segment(np.ones(2, np.int32), np.ones(1, np.float32), np.ones(2, np.int32))
    assert one.num_tokens == 2
    one.check_aligned()


def test_misaligned_group_is_not_packed() -> None:
    one = group(0, [1, 2])
    one.states[0].policy_versions = np.ones(1, np.int32)
    with pytest.raises(AlignmentError):
        pack_groups([one])


def test_reset_restores_what_a_rerun_needs() -> None:
    one = state([1, 2, 3], max_tokens=10)
    one.error, one.worker, one.response_text, one.finish_reason = "e", "w", "t", "stop"
    one.reset()
    fresh = state([], max_tokens=10, status=Status.INIT)
    assert one.status is Status.INIT
    assert one.remaining_tokens == 10
    for name in RolloutState.__slots__:
        assert np.array_equal(getattr(one, name), getattr(fresh, name)), name


def test_lost_is_what_no_count_explains() -> None:
    counts = GroupCounts(sampled=10, trained=3, filtered=1, failed=1, expired=1, buffered=2, in_flight=1)
    assert counts.lost == 1
    assert counts.as_dict()["lost"] == 1


def _equal(left: Group, right: Group) -> bool:
    names = RolloutState.__slots__
    return left.key == right.key and all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b in zip(left.states, right.states, strict=True)
        for name in names
    )


versions = st.lists(st.integers(-1, 9), max_size=5)
groups = st.lists(st.lists(versions, min_size=1, max_size=4), max_size=4)


@settings(deadline=None)
@given(groups)
def test_packing_keeps_every_field_of_every_member(shapes: list[list[list[int]]]) -> None:
    before = [group(group_id, *members) for group_id, members in enumerate(shapes)]
    after = unpack_groups(pack_groups(before))
    assert len(after) == len(before)
    assert all(_equal(a, b) for a, b in zip(before, after, strict=True))


def travelling() -> list[Any]:
    ids = np.arange(3, dtype=np.int32)
    one = group(7, [1]).states[0]
    one.append_segment(ids, -ids.astype(np.float32), ids + 1, np.asarray([True, False, True]))
    one.metadata, one.error, one.reward_parts = {"answer": [4]}, "why", {"format": 1.0}
    request = GenerateRequest(
        request_id="a/1/2/b",
        token_ids=ids,
        sample_params=SampleParams(max_tokens=9),
        priority=-1,
        group="a/1",
    )
    result = GenerateResult(
        response_ids=ids, logprobs=-ids.astype(np.float32), policy_versions=ids + 1, finish_reason="stop",
        worker="rollout-0", error="why", left=Work(3, 40),
    )  # fmt: skip
    return [one, request, result]


@pytest.mark.parametrize("one", travelling(), ids=lambda one: type(one).__name__)
def test_what_travels_keeps_every_field_and_sends_no_array_by_itself(one: Any) -> None:
    by_itself: list[pickle.PickleBuffer] = []
    there = pickle.loads(pickle.dumps(one, 5, buffer_callback=by_itself.append))
    assert by_itself == [] and type(there) is type(one)
    for copied in (there, copy.deepcopy(one)):
        for field in dataclasses.fields(one):
            mine, theirs = getattr(one, field.name), getattr(copied, field.name)
            np.testing.assert_equal(theirs, mine)
            assert type(theirs) is type(mine)
            assert not isinstance(mine, np.ndarray) or theirs.dtype == mine.dtype
    arrays = [
        value for value in (getattr(copied, name) for name in one.__slots__) if isinstance(value, np.ndarray)
    ]
    assert arrays and all(array.flags.writeable for array in arrays), "a copy may be changed"
