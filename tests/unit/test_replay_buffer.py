"""The buffer: order, ageing, what is handed out, leases, bounds, restore. Rows N3, N5 to N7, N16 to N19; traps
36 to 39, 44, 90 to 99.
"""

from __future__ import annotations

import asyncio
import math
import os
import pickle
from collections import OrderedDict
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from raypost.buffer.encoding import from_buffer, to_buffers
from raypost.buffer.replay_buffer import ReplayBuffer
from raypost.checkpoint import CheckpointDir
from raypost.errors import CheckpointError, ConfigError, LedgerError
from raypost.types import NO_VERSION, BufferBounds, Group, RolloutState, Status, TaskLimits
from raypost.types.packed import (
    PackedGroups,
    group_statuses,
    join_groups,
    pack_groups,
    slice_groups,
    unpack_groups,
)
from raypost.types.staleness import NEVER
from tests.unit.buffer_groups import counts, group, ids, lease_ids, now, only, put, same_bytes

COMPLETED, ABORTED, EXPIRED, ARCHIVED = Status.COMPLETED, Status.ABORTED, Status.EXPIRED, Status.ARCHIVED


def make(
    threshold: int | None = 4,
    retry: bool = False,
    tokens: int | None = None,
    max_tries: int | None = None,
    **bounds: float | None,
) -> ReplayBuffer:
    limits = TaskLimits(threshold, tokens, retry, max_tries)
    return ReplayBuffer({"default": limits, "other": limits}, BufferBounds(**bounds))  # type: ignore[arg-type]


def pop(buffer: ReplayBuffer, *sources: Status, limit: int = 1, claim: int) -> PackedGroups | None:
    return now(buffer.pop("default", sources, limit, claim))


# ---------------------------------------------------------------- order


def test_stalest_first_and_first_in_first_out_among_equals() -> None:
    """N19: staleness 0, 2, 1, 2 inserted in that order."""
    buffer = make()
    put(buffer, *(group(n, [version]) for n, version in enumerate([4, 2, 3, 2])), train_step=5)
    assert lease_ids(buffer, 5, default=1) == [1]
    assert ids(pop(buffer, COMPLETED, limit=9, claim=1)) == [3, 2, 0]


def test_of_equals_the_one_that_was_put_first_goes_first_whatever_its_number() -> None:
    buffer = make()
    for n in (7, 3, 5):
        put(buffer, group(n, [2]), train_step=5)
    put(buffer, group(7, [2]), train_step=5)
    assert ids(pop(buffer, COMPLETED, limit=9, claim=1)) == [7, 3, 5], "one that is put again keeps its place"


def test_equal_batches_are_identical_however_their_groups_arrived() -> None:
    orders = []
    for arrival in ([0, 1, 2], [2, 0, 1]):
        buffer = make()
        put(buffer, *(group(n, [0]) for n in arrival))
        orders.append(lease_ids(buffer, 1, default=3))
    assert orders == [[0, 1, 2], [0, 1, 2]]


def test_refresh_keeps_the_order_among_equals() -> None:
    """N18."""
    buffer = make()
    put(buffer, *(group(n, [0]) for n in range(4)))
    for step in (2, 3, 3):
        assert now(buffer.refresh(step)) == []
    assert ids(pop(buffer, COMPLETED, limit=9, claim=1)) == [0, 1, 2, 3]


def test_second_put_replaces_and_keeps_the_place() -> None:
    buffer = make()
    put(buffer, group(0, [0]), group(1, [0]))
    put(buffer, group(0, [0, 0, 0]))
    assert counts(buffer) == {COMPLETED: 2}
    assert only(pop(buffer, COMPLETED, claim=1)).num_tokens == 3


def test_replacing_one_leaves_its_neighbours_where_they_are() -> None:
    buffer = make()
    put(buffer, *(group(n, [0]) for n in range(4)))
    put(buffer, group(2, [0, 0]))
    put(buffer, group(1, [0], status=ABORTED))
    assert ids(pop(buffer, COMPLETED, limit=9, claim=1)) == [0, 2, 3]
    assert ids(pop(buffer, ABORTED, limit=9, claim=2)) == [1]


def test_popped_group_that_comes_back_keeps_its_place() -> None:
    buffer = make()
    put(buffer, group(0, [0], status=ABORTED), group(1, [0]))
    pop(buffer, ABORTED, claim=1)
    put(buffer, group(0, [0, 0]))
    assert lease_ids(buffer, 1, default=1) == [0]


# ---------------------------------------------------------------- ageing


def test_expired_group_without_retry_is_dropped_at_put_and_at_refresh() -> None:
    """N17, and N3: the threshold itself is too old."""
    buffer = make(threshold=1)
    old, fresh = put(buffer, group(0, [3], [1]), group(1, [3], [3, 3]), train_step=4)
    assert (old.status, old.stored, old.staleness, old.too_old) == (EXPIRED, False, 2, True)
    assert fresh.stored and not fresh.too_old
    assert now(buffer.refresh(4)) == []
    (gone,) = now(buffer.refresh(5))
    assert (gone.key, gone.stored, gone.mean_tokens) == (("default", 1), False, 1.5)
    assert counts(buffer) == {}


def test_expired_group_with_retry_keeps_its_fresh_members() -> None:
    """N16."""
    buffer = make(threshold=1, retry=True)
    (result,) = put(buffer, group(0, [3, 3], [2]), train_step=4)
    assert (result.status, result.stored, result.too_old) == (EXPIRED, True, True)
    fresh, stale = only(pop(buffer, EXPIRED, claim=1)).states
    assert (fresh.status, fresh.reward, fresh.num_tokens) == (COMPLETED, 1.0, 2)
    assert (stale.status, stale.reward, stale.num_tokens) == (EXPIRED, None, 0)
    assert stale.metadata == fresh.metadata and stale.sample_params == fresh.sample_params


def test_fresh_members_of_an_expired_group_age_too_and_are_reported_once() -> None:
    """Trap 36."""
    buffer = make(threshold=2, retry=True)
    put(buffer, group(0, [3], [2]), train_step=4)
    (first,) = now(buffer.refresh(5))
    assert (first.key, first.stored, first.mean_tokens) == (("default", 0), True, 1.0)
    assert now(buffer.refresh(6)) == []
    states = only(pop(buffer, EXPIRED, claim=1)).states
    assert [(one.status, one.num_tokens) for one in states] == [(EXPIRED, 0), (EXPIRED, 0)]


def test_aborted_groups_age_as_well() -> None:
    """Trap 36."""
    buffer = make(threshold=1)
    put(buffer, group(0, [0], status=ABORTED))
    assert [one.key for one in now(buffer.refresh(2))] == [("default", 0)]


def test_without_a_threshold_nothing_ever_expires() -> None:
    buffer = make(threshold=None)
    put(buffer, group(0, [0]), train_step=10**6)
    assert now(buffer.refresh(10**9)) == []
    lease = now(buffer.lease(10**9, {"default": 1}))
    assert lease is not None and lease.staleness == (10**9 - 1,)


def test_each_task_has_its_own_threshold() -> None:
    """Trap 39: one task's threshold of 1 does not expire another's groups."""
    buffer = ReplayBuffer({"default": TaskLimits(1), "other": TaskLimits(3)})
    put(buffer, group(0, [0]), group(0, [0], task="other"))
    assert [one.key for one in now(buffer.refresh(2))] == [("default", 0)]
    assert lease_ids(buffer, 3, other=1) == [0]


def test_tokens_without_a_policy_have_no_age() -> None:
    buffer = make(threshold=1)
    (result,) = put(buffer, group(0, [NO_VERSION, 3], [NO_VERSION], []), train_step=4)
    assert (result.stored, result.staleness) == (True, 0)


@pytest.mark.parametrize("call", [0, 7])
def test_refresh_repeated_with_its_claim_gives_the_same_answer(call: int) -> None:
    buffer = make(threshold=1)
    put(buffer, group(0, [0]))
    first = now(buffer.refresh(2, call))
    assert [one.key for one in first] == [("default", 0)]
    assert now(buffer.refresh(2, call)) == (first if call else [])
    assert now(buffer.refresh(2, call + 1)) == []


# ---------------------------------------------------------------- token staleness


def test_stale_tokens_are_masked_in_the_lease_and_only_there() -> None:
    """N5, traps 37 and 38: the semantic mask is intersected, and what is stored stays as it is."""
    buffer = make(threshold=9, tokens=2)
    put(buffer, group(0, [1, 1, 3, 3], masks=[[1, 0, 1, 1]]), train_step=5)
    lease = now(buffer.lease(5, {"default": 1}))
    assert lease is not None and lease.batch.masks.tolist() == [False, False, True, True]
    restored = make(threshold=9, tokens=2)
    now(restored.load_state_dict(now(buffer.state_dict())))
    assert only(pop(restored, COMPLETED, claim=1)).states[0].response_mask.tolist() == [
        True,
        False,
        True,
        True,
    ]


def test_fresh_tokens_that_are_not_trained_stay_masked() -> None:
    """Trap 37: intersect, not replace."""
    buffer = make(threshold=9, tokens=2)
    put(buffer, group(0, [1, 3, 3, NO_VERSION], masks=[[1, 0, 1, 0]]), train_step=5)
    lease = now(buffer.lease(5, {"default": 1}))
    assert lease is not None and lease.batch.masks.tolist() == [False, False, True, False]


def test_masking_counts_from_the_step_of_the_lease() -> None:
    buffer = make(threshold=9, tokens=2)
    put(buffer, group(0, [3, 4]), group(1, [4]), train_step=5)
    lease = now(buffer.lease(6, {"default": 2}))
    assert lease is not None and lease.batch.masks.tolist() == [False, True, True]


def test_tasks_without_a_token_threshold_are_not_masked() -> None:
    buffer = ReplayBuffer({"default": TaskLimits(9, 1), "other": TaskLimits(9)})
    put(buffer, group(0, [1, 4]), group(0, [1, 4], task="other"), train_step=5)
    lease = now(buffer.lease(5, {"default": 1, "other": 1}))
    assert lease is not None
    masks = {one.task: one.states[0].response_mask.tolist() for one in unpack_groups(lease.batch)}
    assert masks == {"default": [False, True], "other": [True, True]}


@pytest.mark.parametrize("retry", [False, True])
def test_member_whose_trained_tokens_are_all_stale_is_expired(retry: bool) -> None:
    """N6: its one fresh token is not trained."""
    buffer = make(threshold=9, tokens=2, retry=retry)
    one = group(0, [1, 1, 4], [4, 4], masks=[[1, 1, 0], [1, 1]])
    (result,) = put(buffer, one, train_step=5)
    assert (result.status, result.stored, result.staleness) == (EXPIRED, retry, 3)
    if retry:
        old, young = only(pop(buffer, EXPIRED, claim=1)).states
        assert (old.status, old.num_tokens) == (EXPIRED, 0)
        assert (young.status, young.num_tokens) == (COMPLETED, 2)


def test_token_staleness_expires_at_refresh_too() -> None:
    buffer = make(threshold=9, tokens=2)
    put(buffer, group(0, [2, 3]), train_step=5)
    assert now(buffer.refresh(5)) == []
    assert [one.key for one in now(buffer.refresh(6))] == [("default", 0)]


def test_member_that_trained_nothing_anyway_is_not_expired_by_it() -> None:
    """N7, trap 37."""
    buffer = make(threshold=9, tokens=1)
    (result,) = put(buffer, group(0, [1, 1], [], masks=[[0, 0], []]), train_step=5)
    assert (result.status, result.stored) == (COMPLETED, True)


# ---------------------------------------------------------------- tries


def test_group_interrupted_too_often_waits_with_the_expired_ones_and_keeps_its_tokens() -> None:
    buffer = make(retry=True, max_tries=2)
    results = put(
        buffer, group(0, [0, 0], status=ABORTED, num_aborts=2), group(1, [0], status=ABORTED, num_aborts=1)
    )
    assert [(one.status, one.stored, one.too_old) for one in results] == [
        (EXPIRED, True, False),
        (ABORTED, True, False),
    ]
    (state,) = only(pop(buffer, EXPIRED, claim=1)).states
    assert (state.status, state.num_tokens, state.num_aborts) == (ABORTED, 2, 2)


def test_group_kept_for_its_tries_still_ages_and_is_then_reported() -> None:
    buffer = make(threshold=1, retry=True, max_tries=1)
    put(buffer, group(0, [0, 0], status=ABORTED, num_aborts=1))
    (expired,) = now(buffer.refresh(2))
    assert (expired.key, expired.mean_tokens) == (("default", 0), 2.0)
    assert now(buffer.refresh(3)) == []
    assert only(pop(buffer, EXPIRED, claim=1)).num_tokens == 0


def test_completed_group_is_trained_however_often_it_was_interrupted() -> None:
    buffer = make(retry=True, max_tries=1)
    (result,) = put(buffer, group(0, [0], num_aborts=5))
    assert result.status is COMPLETED


def test_tries_without_retry_are_refused() -> None:
    with pytest.raises(ConfigError, match="set retry"):
        make(max_tries=2)


# ---------------------------------------------------------------- what is never stored


@pytest.mark.parametrize("status", [Status.FAILED, Status.FILTERED])
def test_failed_and_filtered_groups_are_never_stored_and_end_what_was_out(status: Status) -> None:
    buffer = make()
    put(buffer, group(0, [0], status=ABORTED))
    pop(buffer, ABORTED, claim=1)
    results = put(buffer, group(0, [0], status=status), group(1, [0], status=status))
    assert [(one.status, one.stored) for one in results] == [(status, False)] * 2
    assert counts(buffer) == {} and now(buffer.reclaim(2)).groups == {}


def test_unknown_task_is_named_and_nothing_of_the_put_is_stored() -> None:
    buffer = make()
    with pytest.raises(ConfigError, match="knows no task 'x'"):
        put(buffer, group(0, [0]), group(0, [0], task="x"))
    assert counts(buffer) == {}


def test_the_same_group_twice_in_one_put_is_refused() -> None:
    with pytest.raises(LedgerError, match="twice"):
        put(make(), group(0, [0]), group(0, [0]))


def test_stored_groups_do_not_share_memory_with_the_sender() -> None:
    buffer, packed = make(), pack_groups([group(0, [0, 0])])
    now(buffer.put(packed, 1))
    packed.columns[1][:] = 99
    popped = pop(buffer, COMPLETED, claim=1)
    assert popped is not None and 99 not in popped.columns[1]


def test_what_is_leased_does_not_share_memory_with_what_is_stored() -> None:
    buffer = make()
    put(buffer, group(0, [0, 0]))
    first = now(buffer.lease(1, {"default": 1}))
    assert first is not None
    first.batch.columns[1][:] = 99
    again = now(buffer.lease(1, {"default": 1}))
    assert again is not None and 99 not in again.batch.columns[1]


# ---------------------------------------------------------------- handed out


def test_pop_takes_all_of_the_first_status_before_the_next() -> None:
    buffer = make(threshold=1, retry=True)
    put(buffer, *(group(n, [4], status=ABORTED) for n in range(2)), group(2, [0]), train_step=5)
    assert ids(pop(buffer, EXPIRED, ABORTED, limit=2, claim=1)) == [2, 0]
    assert ids(pop(buffer, EXPIRED, ABORTED, limit=9, claim=2)) == [1]
    assert pop(buffer, EXPIRED, ABORTED, limit=9, claim=3) is None


def test_the_last_claim_asked_again_gives_the_same_groups() -> None:
    buffer = make()
    put(buffer, *(group(n, [0], status=ABORTED) for n in range(4)))
    for _ in range(2):
        assert ids(pop(buffer, ABORTED, limit=2, claim=5)) == [0, 1]
    assert ids(pop(buffer, ABORTED, limit=1, claim=6)) == [2]
    with pytest.raises(LedgerError, match="claim 5 came after claim 6"):
        pop(buffer, ABORTED, limit=2, claim=5)
    assert counts(buffer) == {ABORTED: 1}


def test_a_claim_that_got_nothing_gets_nothing_again() -> None:
    buffer = make()
    assert pop(buffer, ABORTED, claim=1) is None
    put(buffer, group(0, [0], status=ABORTED))
    assert pop(buffer, ABORTED, claim=1) is None
    assert ids(pop(buffer, ABORTED, claim=2)) == [0]


def test_popped_groups_are_not_counted_but_still_pin_their_bytes() -> None:
    buffer = make()
    put(buffer, group(0, [0], status=ABORTED))
    stored = now(buffer.counts())
    pop(buffer, ABORTED, claim=1)
    out = now(buffer.counts())
    assert stored.groups["default"] == {ABORTED: 1} and out.groups["default"] == {}
    assert out.nbytes["default"] == {Status.INIT: stored.nbytes["default"][ABORTED]}
    assert set(out.groups) == set(out.nbytes) == {"default", "other"}


def test_dropped_groups_are_forgotten_and_others_are_left_alone() -> None:
    buffer = make()
    put(buffer, *(group(n, [0], status=ABORTED) for n in range(3)))
    pop(buffer, ABORTED, limit=2, claim=1)
    for _ in range(2):
        now(buffer.drop([("default", 0), ("default", 2), ("x", 9)]))
    assert now(buffer.reclaim(2)).groups == {("default", 1): ABORTED, ("default", 2): ABORTED}
    assert counts(buffer) == {ABORTED: 2}


def test_reclaim_takes_everything_back_as_it_was_and_can_be_repeated() -> None:
    buffer = make(threshold=1, retry=True)
    put(buffer, group(0, [4], status=ABORTED), group(1, [0], [4]), train_step=5)
    pop(buffer, EXPIRED, ABORTED, limit=2, claim=9)
    contents = now(buffer.reclaim(100))
    assert contents == now(buffer.reclaim(100))
    assert contents.groups == {("default", 0): ABORTED, ("default", 1): EXPIRED} and not contents.leases
    assert counts(buffer) == {ABORTED: 1, EXPIRED: 1}
    assert ids(pop(buffer, EXPIRED, claim=101)) == [1]
    put(buffer, group(1, [4], [4]), train_step=5)
    assert now(buffer.reclaim(200)).groups == {("default", 0): ABORTED, ("default", 1): COMPLETED}


def test_calls_of_a_holder_that_was_replaced_are_refused_however_late_they_come() -> None:
    buffer = make()
    put(buffer, group(0, [0], status=ABORTED), group(1, [0]))
    pop(buffer, ABORTED, claim=3)
    now(buffer.reclaim(100))
    late = pack_groups([group(0, [0])])
    for call in (
        buffer.put(late, 1, 3),
        buffer.pop("default", [ABORTED], 1, 4),
        buffer.refresh(9, 5),
        buffer.reclaim(50),
    ):
        with pytest.raises(LedgerError, match=r"replaced|after claim 100"):
            now(call)
    assert counts(buffer) == {ABORTED: 1, COMPLETED: 1}
    # Who holds them now is not disturbed.
    assert ids(pop(buffer, ABORTED, claim=101)) == [0]
    assert [one.stored for one in now(buffer.put(late, 1, 101))] == [True]


def test_expired_group_is_never_dropped_in_silence_where_its_task_retries_no_more() -> None:
    buffer = make(threshold=1, retry=True, max_tries=1)
    tried = group(0, [0])
    for state in tried.states:
        state.status, state.num_aborts = ABORTED, 1
    (result,) = put(buffer, tried)
    assert (result.status, result.too_old) == (EXPIRED, False)
    other = make(threshold=1, retry=False)
    now(other.load_state_dict(now(buffer.state_dict())))
    (gone,) = now(other.refresh(9))
    assert (gone.key, gone.stored) == (("default", 0), False) and counts(other) == {}


# ---------------------------------------------------------------- leases


def test_lease_is_all_or_nothing() -> None:
    buffer = make()
    put(buffer, group(0, [0]), group(1, [0], status=ABORTED))
    assert now(buffer.lease(1, {"default": 2})) is None
    assert now(buffer.lease(1, {"default": 1, "other": 1})) is None
    assert counts(buffer) == {COMPLETED: 1, ABORTED: 1}


def test_lease_of_a_step_is_the_same_until_acknowledged() -> None:
    buffer = make()
    put(buffer, *(group(n, [0]) for n in range(3)))
    first, again = now(buffer.lease(1, {"default": 2})), now(buffer.lease(1, {"default": 1}))
    assert first is not None and again is not None
    assert first.keys == again.keys and first.staleness == again.staleness == (0, 0)
    assert same_bytes(first.batch, again.batch)
    assert counts(buffer) == {COMPLETED: 1, ARCHIVED: 2}
    assert now(buffer.acknowledge(1)) == first.keys
    assert now(buffer.acknowledge(1)) == ()
    with pytest.raises(LedgerError, match="train twice"):
        now(buffer.lease(1, {"default": 1}))


def test_acknowledging_a_step_ends_all_leases_up_to_it() -> None:
    buffer = make()
    put(buffer, *(group(n, [0]) for n in range(3)))
    for step in (1, 2, 3):
        lease_ids(buffer, step, default=1)
    assert now(buffer.acknowledge(2)) == (("default", 0), ("default", 1))
    assert counts(buffer) == {ARCHIVED: 1}


def test_lease_never_holds_expired_groups_even_unrefreshed() -> None:
    buffer = make(threshold=2)
    put(buffer, group(0, [0]))
    put(buffer, group(1, [1]), train_step=2)
    assert now(buffer.lease(3, {"default": 2})) is None
    assert lease_ids(buffer, 3, default=1) == [1]


def test_repeated_put_of_a_leased_or_trained_group_changes_nothing() -> None:
    buffer = make()
    put(buffer, group(0, [0]))
    lease_ids(buffer, 1, default=1)
    (result,) = put(buffer, group(0, [0]))
    assert result.stored and counts(buffer) == {ARCHIVED: 1}
    now(buffer.acknowledge(1))
    (result, other) = put(buffer, group(0, [0]), group(1, [0]))
    assert result.stored and other.stored and counts(buffer) == {COMPLETED: 1}


# ---------------------------------------------------------------- bounds


def test_full_from_the_high_mark_until_below_the_low_mark_every_time() -> None:
    buffer = make(max_groups=10, low_water=0.5)
    seen = []
    for n in range(10):
        seen.append(now(buffer.counts()).is_full)
        put(buffer, group(n, [0]))
    assert not any(seen)
    for step in (1, 2):
        assert now(buffer.counts()).is_full
        lease_ids(buffer, step, default=5)
        now(buffer.acknowledge(step))
        full = now(buffer.counts()).is_full
        assert full is (step == 1)
    put(buffer, *(group(100 + n, [0]) for n in range(9)))
    assert not now(buffer.counts()).is_full
    put(buffer, group(110, [0]))
    assert now(buffer.counts()).is_full


def test_bytes_bound_counts_leased_and_popped_groups() -> None:
    one = pack_groups([group(0, [0] * 50, status=ABORTED)]).nbytes
    buffer = make(max_bytes=3 * one)
    put(buffer, group(0, [0] * 50), *(group(n, [0] * 50, status=ABORTED) for n in (1, 2)))
    lease_ids(buffer, 1, default=1)
    pop(buffer, ABORTED, claim=1)
    assert now(buffer.counts()).is_full
    now(buffer.acknowledge(1))
    assert not now(buffer.counts()).is_full


def test_leased_groups_count_towards_the_bound_in_groups() -> None:
    buffer = make(max_groups=2)
    put(buffer, group(0, [0]), group(1, [0]))
    lease_ids(buffer, 1, default=2)
    assert now(buffer.counts()).is_full
    now(buffer.acknowledge(1))
    assert not now(buffer.counts()).is_full


# ---------------------------------------------------------------- checkpoint


def test_restored_buffer_gives_the_same_groups_in_the_same_order(tmp_path: Path) -> None:
    buffer, other = make(), make()
    put(buffer, *(group(n, [v], [v, 3]) for n, v in enumerate([2, 0, 1, 0])), train_step=3)
    put(buffer, group(4, [2], status=ABORTED), train_step=3)
    CheckpointDir.save_state(tmp_path, "buffer", now(buffer.state_dict()))
    now(other.load_state_dict(CheckpointDir.load_state(tmp_path, "buffer")))
    mine, theirs = (pop(one, COMPLETED, ABORTED, limit=9, claim=1) for one in (buffer, other))
    assert mine is not None and theirs is not None
    assert ids(mine) == [1, 3, 2, 0, 4] and same_bytes(mine, theirs)


def test_empty_buffer_can_be_saved_and_restored() -> None:
    buffer, other = make(), make()
    put(buffer, group(0, [0]))
    lease_ids(buffer, 1, default=1)
    now(buffer.acknowledge(1))
    now(other.load_state_dict(now(buffer.state_dict())))
    put(other, group(0, [0]))
    assert counts(other) == {}


def test_open_lease_is_completed_again_after_restore_and_an_acknowledged_one_is_gone() -> None:
    """Trap 96."""
    buffer, other = make(), make()
    put(buffer, *(group(n, [0]) for n in range(3)))
    lease_ids(buffer, 1, default=1)
    now(buffer.acknowledge(1))
    lease_ids(buffer, 2, default=1)
    now(other.load_state_dict(now(buffer.state_dict())))
    assert counts(other) == {COMPLETED: 2}
    assert lease_ids(other, 2, default=2) == [1, 2]
    with pytest.raises(LedgerError):
        now(other.lease(1, {"default": 1}))


def test_popped_and_tail_batch_groups_are_restored_as_they_were() -> None:
    buffer = make(retry=True, max_tries=1)
    other = make(retry=True, max_tries=1)
    put(buffer, group(0, [0], status=ABORTED), group(1, [0], status=ABORTED, num_aborts=1))
    pop(buffer, ABORTED, claim=1)
    now(other.load_state_dict(now(buffer.state_dict())))
    assert counts(other) == {ABORTED: 1, EXPIRED: 1}


def test_restored_groups_are_as_old_as_before() -> None:
    """Traps 44 and 95: age is counted from the step of the call under this run's limits, not stored."""
    buffer, other = make(threshold=9), make(threshold=2)
    put(buffer, group(0, [0]), group(1, [4]), train_step=5)
    now(other.load_state_dict(now(buffer.state_dict())))
    assert [one.key for one in now(other.refresh(5))] == [("default", 0)]
    assert lease_ids(other, 5, default=1) == [1]


def test_restore_can_be_repeated_until_something_happens() -> None:
    buffer, other = make(), make()
    put(buffer, group(0, [0]))
    lease_ids(buffer, 1, default=1)
    state = now(buffer.state_dict())
    for _ in range(2):
        now(other.load_state_dict(state))
    assert counts(other) == {COMPLETED: 1}
    put(other, group(1, [0]))
    with pytest.raises(CheckpointError, match="with 2 groups cannot be restored over"):
        now(other.load_state_dict(state))


def test_bad_restores_are_refused() -> None:
    buffer = make()
    put(buffer, group(0, [0]))
    state = now(buffer.state_dict())
    with pytest.raises(CheckpointError, match="restored over"):
        now(buffer.load_state_dict(state))
    with pytest.raises(CheckpointError, match="has tasks"):
        now(ReplayBuffer({"x": TaskLimits(1)}).load_state_dict(state))
    groups = state["groups"]
    changes: tuple[dict[str, Any], ...] = (
        {"status": np.empty(0, np.int8)},
        {"groups": {"tasks": []}},
        {"groups": {**groups, "logprobs": groups["logprobs"].astype(np.float64)}},
        {"groups": {**groups, "logprobs": groups["logprobs"][1:]}},
        {"groups": {**groups, "response_offsets": groups["response_offsets"][::-1]}},
        {"groups": {**groups, "group_sizes": groups["group_sizes"] + 1}},
        {"groups": {**groups, "num_aborts": groups["num_aborts"][:0]}},
        {"groups": {**groups, "run_lengths": groups["run_lengths"] + 1}},
        {"groups": {**groups, "task_codes": groups["task_codes"] + 1}},
        {"groups": {**groups, "details": groups["details"][:-1]}},
        {"trained": 3},
    )
    for damaged in changes:
        with pytest.raises(CheckpointError, match="damaged"):
            now(make().load_state_dict({**state, **damaged}))
    with pytest.raises(CheckpointError, match="saved in format 1, this version reads format 4"):
        now(make().load_state_dict({name: value for name, value in state.items() if name != "format"}))


def test_saving_and_restoring_open_the_details_of_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, other = make(), make()
    put(buffer, group(0, [0]), group(1, [0]))

    def opened(_: object) -> Any:
        raise AssertionError("details were opened")

    monkeypatch.setattr("raypost.types.packed._decode_details", opened)
    monkeypatch.setattr("raypost.types.packed._encode_details", opened)
    CheckpointDir.save_state(tmp_path, "buffer", now(buffer.state_dict()))
    now(other.load_state_dict(CheckpointDir.load_state(tmp_path, "buffer")))
    assert lease_ids(other, 1, default=2) == [0, 1]


async def test_buffer_works_from_many_tasks_at_once() -> None:
    buffer = make()
    await asyncio.gather(*(buffer.put(pack_groups([group(n, [0])]), 1) for n in range(50)))
    assert len(lease_ids(buffer, 1, default=50)) == 50


# ---------------------------------------------------------------- columnar form


def test_statuses_of_groups_are_those_of_their_members() -> None:
    groups = []
    for n, statuses in enumerate(product(Status, repeat=2)):
        one = group(n, [0], [0])
        groups.append(
            replace(one, states=[replace(s, status=new) for s, new in zip(one.states, statuses, strict=True)])
        )
    assert group_statuses(pack_groups(groups)) == [one.status for one in groups]


def test_cut_and_joined_groups_are_the_same_and_own_their_arrays() -> None:
    groups: list[Group] = [group(0, [0, 1], []), group(1, [], [2], [3, 4, 5]), group(7, [1], task="other")]
    packed = pack_groups(groups)
    parts = [join_groups([slice_groups(packed, g, g + 1)]) for g in range(packed.num_groups)]
    assert [part.keys for part in parts] == [(one.key,) for one in groups]
    assert same_bytes(join_groups(parts), packed)
    assert same_bytes(from_buffer(b"".join(to_buffers(packed))), packed)
    for part in parts:
        assert not any(np.shares_memory(a, b) for a, b in zip(part.columns, packed.columns, strict=True))
    assert same_bytes(pickle.loads(pickle.dumps(packed)), packed)
    with pytest.raises(ValueError, match="no packed groups"):
        from_buffer(b"\x10" + bytes(30))


@pytest.mark.parametrize("tokens", [1, 5000])
def test_pickled_groups_are_the_same_and_their_long_columns_travel_beside_them(tokens: int) -> None:
    packed = pack_groups([group(0, [0] * tokens, []), group(1, [1])])
    beside: list[pickle.PickleBuffer] = []
    inside = pickle.dumps(packed, 5, buffer_callback=beside.append)
    assert same_bytes(pickle.loads(inside, buffers=beside), packed)
    assert len(beside) == (2 if tokens > 1 else 0) and len(inside) < 20_000


def test_what_expired_or_was_replaced_is_not_held_any_more() -> None:
    buffer = make(threshold=2)
    put(buffer, group(0, [0]), *(group(n, [4]) for n in range(1, 5)), train_step=2)
    assert len(now(buffer.refresh(3))) == 1
    put(buffer, group(1, [4, 4]), train_step=3)
    assert len(buffer.groups) == len(buffer.state.groups) == 4


def test_versions_and_masks_are_kept_as_runs() -> None:
    packed = pack_groups(
        [group(0, [1] * 500 + [2] * 500, masks=[[1] * 900 + [0] * 100]), group(1, [2] * 500)]
    )
    runs = [column.tolist() for column in packed.columns[3:]]
    assert runs == [[1, 2, 2, 2], [True, True, False, True], [500, 400, 100, 500]]
    assert packed.run_offsets.tolist() == [0, 3, 4]


def test_groups_that_stay_do_not_pin_those_that_came_with_them() -> None:
    """Invariant 9: what is counted is what is held, within a factor of two."""
    buffer = make(threshold=None)
    put(buffer, *(group(n, [0] * 100) for n in range(32)))
    for step in range(1, 32):
        lease_ids(buffer, step, default=1)
        now(buffer.acknowledge(step))
        assert buffer.groups.nbytes <= 2 * sum(one.nbytes for one in buffer.state.groups.values()) + 8
    assert ids(pop(buffer, COMPLETED, claim=1)) == [31]


# ---------------------------------------------------------------- details


def with_metadata(metadata: Any) -> PackedGroups:
    one = group(0, [0], [0])
    for state in one.states:
        state.metadata = metadata
    return pack_groups([one])


def test_details_come_back_with_their_types() -> None:
    metadata: dict[str, Any] = {
        "entry": {"values": [1, 2.5, None, True, "ü", b"\x00"], "pair": (1, (2, 3)), 5: {1, 2}, "big": 2**100},
        "when": datetime(2024, 5, 6, tzinfo=UTC), "money": Decimal("0.10"), "part": Fraction(1, 3),
        "scalar": np.float32(0.5), "$": {"$": "array", "v": 1}, "half": "\ud800", "ever": timedelta(2, 3, 4),
        "day": date(2024, 5, 6), "clock": time(1, 2, 3), "id": UUID(int=7), "order": OrderedDict(b=1, a=(2,)),
        "set": frozenset({"x"}), "bytes": bytearray(b"ab"), "complex": 1 + 2j, "infinite": -math.inf,
        "name": np.str_("x"), "array": np.arange(3), "status": Status.EXPIRED,
    }  # fmt: skip
    (back,) = unpack_groups(with_metadata(metadata))
    found = back.states[1].metadata
    assert np.array_equal(found.pop("array"), metadata.pop("array"))
    assert {name: type(one) for name, one in found.items()} == {
        name: type(one) for name, one in metadata.items()
    }
    assert found == metadata and type(found["scalar"]) is np.float32 and type(found["entry"]["pair"]) is tuple
    assert back.states[0].sample_params == only_state().sample_params


def only_state() -> RolloutState:
    return group(0, [0]).states[0]


def test_siblings_share_the_bytes_of_their_metadata() -> None:
    small, large = (with_metadata({"question": "x" * n}).details.nbytes for n in (10, 1010))
    assert large - small < 1010


@pytest.mark.parametrize("thing", [Path("x"), print, lambda: 0, only_state, object()])
def test_metadata_that_is_no_plain_data_is_refused_where_it_is_packed(thing: Any) -> None:
    with pytest.raises(ValueError, match=r"group \('default', 0\): .*must be plain data"):
        with_metadata({"entry": [thing]})


class Evil:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_details_from_a_file_run_no_code(tmp_path: Path) -> None:
    hostile = [pickle.dumps(Evil(tmp_path / "was-here"), protocol) for protocol in range(6)]
    framed = [len(raw).to_bytes(4, "little") + raw for raw in hostile]
    tagged = [
        b'[1,{"$":"mkdir","v":"x"}]', b'[1,{"$":"array","v":["|O",[1],8]},0]', b"[" * 100_000,
        b'[1,{"$":"array","v":["<f8",[1000000000000],8]}]', b'[1,{"$":"dict","v":[[[],1]]}]',
        b'[1,{"$":"bytes","v":-1}]', b'[1,{"$":"Decimal","v":"x"}]', b'[0,[{}],[{"max_tokens":1}]]', b"{}", b"",
    ]  # fmt: skip
    for raw in (*hostile, *framed, *(len(one).to_bytes(4, "little") + one for one in tagged)):
        details = np.frombuffer(raw, np.uint8)
        packed = replace(
            pack_groups([group(0, [0])]), details=details, detail_offsets=np.asarray([0, len(raw)])
        )
        with pytest.raises(ValueError, match="these bytes are no "):
            unpack_groups(packed)
    assert list(tmp_path.iterdir()) == []


async def test_counts_say_when_the_next_group_expires_that_is_neither_leased_nor_handed_out() -> None:
    buffer = ReplayBuffer({"default": TaskLimits(2)})

    async def expires_at() -> int:
        return (await buffer.counts()).expires_at

    assert await expires_at() == NEVER
    await buffer.put(pack_groups([group(0, [1]), group(1, [3]), group(2, [2], status=Status.ABORTED)]), 2)
    assert await expires_at() == 1 + 1 + 2
    assert await buffer.lease(2, {"default": 1}) is not None
    assert await expires_at() == 2 + 1 + 2
    assert await buffer.pop("default", [Status.ABORTED], 1, 1) is not None
    assert await expires_at() == 3 + 1 + 2
    assert await buffer.refresh(5) == [] and len(await buffer.refresh(6)) == 1
    assert await expires_at() == NEVER
