"""Small groups for tests of the buffer, and a way to call what never waits without an event loop."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np

from raypost.buffer.replay_buffer import ReplayBuffer
from raypost.types import Group, PutResult, RolloutState, SampleParams, Status
from raypost.types.packed import PackedGroups, arrays_of, pack_groups, unpack_groups

T = TypeVar("T")


def member(
    versions: list[int],
    *,
    group_id: int = 0,
    sample_index: int = 0,
    status: Status = Status.COMPLETED,
    task: str = "default",
    mask: list[int] | None = None,
    num_aborts: int = 0,
) -> RolloutState:
    """A trajectory with one token a version; `mask` None trains all of them."""
    ids = np.arange(10, 10 + len(versions), dtype=np.int32)
    done = status is Status.COMPLETED
    return RolloutState(
        task=task,
        group_id=group_id,
        sample_index=sample_index,
        prompt_ids=np.asarray([5, 6], np.int32),
        sample_params=SampleParams(max_tokens=16, stop_token_ids=(2,)),
        metadata={"answer": "4", "entry": {"numbers": [1, 2]}},
        status=status,
        response_text="text" if done else "",
        reward=1.0 if done else None,
        finish_reason="stop" if done else "abort",
        num_aborts=num_aborts,
        worker="rollout-0",
        response_ids=ids,
        logprobs=-ids.astype(np.float32),
        policy_versions=np.asarray(versions, np.int32),
        response_mask=np.ones(len(ids), np.bool_) if mask is None else np.asarray(mask, np.bool_),
    )


def group(
    group_id: int,
    *members: list[int],
    status: Status = Status.COMPLETED,
    task: str = "default",
    masks: list[list[int]] | None = None,
    num_aborts: int = 0,
) -> Group:
    """A group with a member for each list of versions."""
    states = [
        member(
            versions,
            group_id=group_id,
            sample_index=index,
            status=status,
            task=task,
            mask=masks[index] if masks else None,
            num_aborts=num_aborts,
        )
        for index, versions in enumerate(members)
    ]
    return Group(task=task, group_id=group_id, states=states)


def now(work: Coroutine[Any, Any, T]) -> T:
    """What a coroutine that never waits returns."""
    try:
        work.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    work.close()
    raise AssertionError("the buffer waited for something")


def put(buffer: ReplayBuffer, *groups: Group, train_step: int = 1) -> list[PutResult]:
    """Put groups in one call."""
    return now(buffer.put(pack_groups(groups), train_step))


def ids(packed: PackedGroups | None) -> list[int]:
    """Group ids of a batch, [] for None."""
    return [] if packed is None else packed.group_ids.tolist()


def only(packed: PackedGroups | None) -> Group:
    """The one group of a batch."""
    assert packed is not None
    (one,) = unpack_groups(packed)
    return one


def lease_ids(buffer: ReplayBuffer, step: int, **per_task: int) -> list[int]:
    """Group ids of the lease of `step`, [] for None."""
    lease = now(buffer.lease(step, per_task))
    return [] if lease is None else [group_id for _, group_id in lease.keys]


def counts(buffer: ReplayBuffer, task: str = "default") -> dict[Status, int]:
    """Groups of one task by status."""
    return now(buffer.counts()).groups[task]


def same_bytes(left: PackedGroups, right: PackedGroups) -> bool:
    """Whether two batches are equal in every field."""
    pairs = zip(arrays_of(left), arrays_of(right), strict=True)
    return left.tasks == right.tasks and all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)
