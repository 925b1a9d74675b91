"""ReplayBufferActor: hosts the replay buffer and its journal.

Groups arrive by value, so they outlive who made them; with a journal they outlive this process too: Ray starts
it again with the same arguments, and the same attempt's journal makes it what it was. A caller that sees it die
(ActorUnavailableError, ActorDiedError) asks again with the same arguments until it answers: every method is
idempotent, and what was answered was on disk before.

The buffer never waits for anything, so its actor is a synchronous one: a call costs it half of what it would
with an event loop beside it.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import ray

from actors.remote import RemotePool
from raypost.buffer.journal import BufferJournal
from raypost.buffer.replay_buffer import ReplayBuffer
from raypost.errors import CheckpointError
from raypost.packed import PackedGroups
from raypost.protocols import Buffer, BufferBounds, BufferCounts, ExpiredGroup, Lease, PutResult, TaskLimits
from raypost.types import GroupKey, Ref, Status

T = TypeVar("T")
KEPT_BYTES = 256 << 20
"""Freed memory that the process keeps at most."""
GC_ALLOCATIONS = 100_000


class ReplayBufferActor:
    """`protocols.Buffer` as seen through a handle."""

    def __init__(
        self,
        limits: dict[str, TaskLimits],
        bounds: BufferBounds | None = None,
        folder: str | None = None,
        attempt: str = "",
    ) -> None:
        """Begin, or continue after a death, with the journal in `folder`; None keeps none.

        `attempt` names this start of the job: the journal of another one is not continued. Raises CheckpointError if
        a restarted buffer finds no journal of its own.
        """
        journal = BufferJournal(Path(folder), attempt) if folder is not None else None
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        if restarted and (journal is None or not journal.recovered):
            raise CheckpointError(
                f"the replay buffer died and attempt {attempt!r} has no journal in {folder}: its groups are "
                "lost; continue from the last checkpoint, with buffer.journal on and the run folder on storage "
                "that every node shares"
            )
        _keep_freed_memory()
        # Groups are many, live long and make no cycles: to search them for some takes a tenth of the time.
        gc.freeze()
        gc.set_threshold(GC_ALLOCATIONS)
        self._buffer = ReplayBuffer(limits, bounds, journal)

    def __repr__(self) -> str:
        """Name the actor in logs."""
        return "replay-buffer"

    def put(self, packed: PackedGroups, train_step: int) -> list[PutResult]:
        """See ReplayBuffer.put."""
        return _now(self._buffer.put(packed, train_step))

    def refresh(self, train_step: int, claim: int = 0) -> list[ExpiredGroup]:
        """See ReplayBuffer.refresh."""
        return _now(self._buffer.refresh(train_step, claim))

    def pop(self, task: str, sources: Sequence[Status], limit: int, claim: int) -> PackedGroups | None:
        """See ReplayBuffer.pop."""
        return _now(self._buffer.pop(task, sources, limit, claim))

    def drop(self, keys: Sequence[GroupKey]) -> None:
        """See ReplayBuffer.drop."""
        _now(self._buffer.drop(keys))

    def reclaim(self) -> tuple[GroupKey, ...]:
        """See ReplayBuffer.reclaim."""
        return _now(self._buffer.reclaim())

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]  # Ray's decorators have no types
    def lease(self, step: int, per_task: dict[str, int]) -> tuple[Lease[None] | None, PackedGroups | None]:
        """Return the lease and its batch as two objects, so that the caller need not fetch the batch."""
        lease = _now(self._buffer.lease(step, per_task))
        return (None, None) if lease is None else (lease.with_batch(None), lease.batch)

    def acknowledge(self, step: int) -> tuple[GroupKey, ...]:
        """See ReplayBuffer.acknowledge."""
        return _now(self._buffer.acknowledge(step))

    def counts(self) -> BufferCounts:
        """See ReplayBuffer.counts."""
        return _now(self._buffer.counts())

    def state_dict(self) -> dict[str, Any]:
        """See ReplayBuffer.state_dict."""
        return _now(self._buffer.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ReplayBuffer.load_state_dict."""
        _now(self._buffer.load_state_dict(state))


class RemoteBuffer(RemotePool):
    """The actor as a `protocols.Buffer` whose batches are refs.

    A batch is an object of its own that belongs to the process that leased it; if that process dies, the lease
    is still open and asked for again.
    """

    async def lease(self, step: int, per_task: dict[str, int]) -> Lease[Ref[PackedGroups]] | None:
        """See ReplayBuffer.lease; the batch stays in the object store."""
        lease, batch_ref = await self._call("lease", step, per_task)
        return None if lease is None else lease.with_batch(batch_ref)


def remote_buffer(name: str, *, timeout_s: float, tries: int) -> Buffer[Ref[PackedGroups]]:
    """Return the replay buffer called `name`; the other arguments are those of RemotePool."""
    return cast(Buffer[Ref[PackedGroups]], RemoteBuffer([name], timeout_s, tries))


def _keep_freed_memory() -> None:
    """Let malloc fill freed memory again: to give it back after every batch costs more than to copy the batch."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES // 4)
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def _now(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("the buffer waited for something")
