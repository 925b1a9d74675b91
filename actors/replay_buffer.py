"""ReplayBufferActor: hosts the replay buffer and its journal.

Groups arrive by value, so they outlive who made them; with a journal they outlive this process too: Ray starts
it again with the same arguments, and the same attempt's journal makes it what it was. Where that is damaged it is cut
there, and the producer mends the buffer (raypost.production.restore). A caller that sees it die
(ActorUnavailableError, ActorDiedError) asks again with the same arguments until it answers: every method is
idempotent, and what was answered was on disk before.

The buffer never waits for anything, so its actor is a synchronous one: a call costs it half of what it would
with an event loop beside it.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import ray

from actors.remote import RemotePool
from raypost.buffer.journal import BufferJournal
from raypost.buffer.kept import KeptBatches
from raypost.buffer.replay_buffer import ReplayBuffer
from raypost.errors import CheckpointError
from raypost.files.disk import Fsync
from raypost.types import (
    Buffer,
    BufferBounds,
    BufferContents,
    BufferCounts,
    ExpiredGroup,
    GroupKey,
    Lease,
    OpenLease,
    PutResult,
    Ref,
    Status,
    TaskLimits,
)
from raypost.types.packed import PackedGroups

T = TypeVar("T")
KEPT_BYTES = 256 << 20
"""Freed memory that the process keeps at most."""
GC_ALLOCATIONS = 100_000


class ReplayBufferActor:
    """`types.buffer.Buffer` as seen through a handle."""

    def __init__(
        self,
        limits: dict[str, TaskLimits],
        bounds: BufferBounds | None = None,
        folder: str | None = None,
        attempt: str = "",
        batches: str | None = None,
        patience_s: float = 0.0,
        fsync: Fsync = "off",
    ) -> None:
        """Begin, or continue after a death, with the journal in `folder`; None keeps none.

        `attempt` names this start of the job: the journal of another one is not continued. `batches`: folder in which
        batches that were handed out are kept until `forget_batches`; None keeps none. `patience_s`: how long a call
        waits for a disk that refuses what the journal says of it. `fsync`: when that goes to the disk itself. Raises
        CheckpointError if a restarted buffer keeps no journal.
        """
        journal = (
            BufferJournal(Path(folder), attempt, patience_s=patience_s, fsync=fsync)
            if folder is not None
            else None
        )
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        if restarted and journal is None:
            raise CheckpointError(
                "the replay buffer died and keeps no journal: its groups are lost; continue from the last checkpoint, "
                "with buffer.journal on"
            )
        _keep_freed_memory()
        # Groups are many, live long and make no cycles: to search them for some takes a tenth of the time.
        gc.freeze()
        gc.set_threshold(GC_ALLOCATIONS)
        self._buffer = ReplayBuffer(limits, bounds, journal)
        if restarted and journal is not None and not journal.recovered:
            self._buffer.lose(f"its journal in {folder} is gone, or its beginning cannot be read")
        self._kept = KeptBatches(Path(batches)) if batches is not None else None
        if self._kept is not None and not restarted:
            self._kept.clear()

    def __repr__(self) -> str:
        """Name the actor in logs."""
        return "replay-buffer"

    def put(self, packed: PackedGroups, train_step: int, claim: int = 0) -> list[PutResult]:
        """See ReplayBuffer.put."""
        return _now(self._buffer.put(packed, train_step, claim))

    def refresh(self, train_step: int, claim: int = 0) -> list[ExpiredGroup]:
        """See ReplayBuffer.refresh."""
        return _now(self._buffer.refresh(train_step, claim))

    def pop(self, task: str, sources: Sequence[Status], limit: int, claim: int) -> PackedGroups | None:
        """See ReplayBuffer.pop."""
        return _now(self._buffer.pop(task, sources, limit, claim))

    def drop(self, keys: Sequence[GroupKey]) -> None:
        """See ReplayBuffer.drop."""
        _now(self._buffer.drop(keys))

    def reclaim(self, claim: int) -> BufferContents:
        """See ReplayBuffer.reclaim."""
        return _now(self._buffer.reclaim(claim))

    def mend(
        self, claim: int, living: Collection[GroupKey], leases: Mapping[int, OpenLease], acknowledged: int
    ) -> BufferContents:
        """See ReplayBuffer.mend. Open leases are made again of the batches that are kept."""
        kept = self._kept
        batches = {step: kept.read(step) for step in leases if kept.settle(step)} if kept is not None else {}
        return _now(self._buffer.mend(claim, living, leases, acknowledged, batches))

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]  # Ray's decorators have no types
    def lease(self, step: int, per_task: dict[str, int]) -> tuple[Lease[None] | None, PackedGroups | None]:
        """Return the lease and its batch as two objects, so that the caller need not fetch the batch."""
        lease = self._leased(step, per_task)
        return (None, None) if lease is None else (lease.with_batch(None), lease.batch)

    def then_counts(self, method: str, *args: Any) -> tuple[Any, BufferCounts]:
        """See ReplayBuffer.then_counts."""
        return getattr(self, method)(*args), self.counts()

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]  # Ray's decorators have no types
    def lease_then_counts(
        self, step: int, per_task: dict[str, int]
    ) -> tuple[tuple[Lease[None] | None, BufferCounts], PackedGroups | None]:
        """Return the lease with the counts after it, and its batch as an object of its own."""
        lease = self._leased(step, per_task)
        if lease is None:
            return (None, self.counts()), None
        return (lease.with_batch(None), self.counts()), lease.batch

    def _leased(self, step: int, per_task: dict[str, int]) -> Lease[PackedGroups] | None:
        lease = _now(self._buffer.lease(step, per_task))
        if lease is not None and self._kept is not None:
            self._kept.keep(step, lease.batch)
        return lease

    def acknowledge(self, step: int) -> tuple[GroupKey, ...]:
        """See ReplayBuffer.acknowledge. Its batch is on disk then."""
        if self._kept is not None:
            for open_step in [one for one in self._buffer.state.leases if one <= step]:
                self._keep_leased(self._kept, open_step)
        return _now(self._buffer.acknowledge(step))

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]  # Ray's decorators have no types
    def kept_batch(self, step: int) -> tuple[None, PackedGroups]:
        """Return the batch that was handed out for `step`, as a second object. Raises CheckpointError without it."""
        if self._kept is None:
            raise CheckpointError(
                f"the batch of step {step} is not kept: the buffer has no folder for batches"
            )
        if step in self._buffer.state.leases:
            self._keep_leased(self._kept, step)
        return None, self._kept.read(step)

    def forget_batches(self, upto: int) -> None:
        """Delete the batches kept of the steps up to `upto`, of which a checkpoint is durable."""
        if self._kept is not None:
            self._kept.forget(upto)

    def _keep_leased(self, kept: KeptBatches, step: int) -> None:
        """Have the batch of a step that is leased on disk, also if this process died while it was written."""
        if not kept.settle(step):
            lease = _now(self._buffer.lease(step, {}))
            if lease is not None:
                kept.keep(step, lease.batch)
                kept.settle(step)

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
    """The actor as a `types.buffer.Buffer` whose batches are refs.

    A batch is an object of its own that belongs to the process that leased it; if that process dies, the lease
    is still open and asked for again.
    """

    async def lease(self, step: int, per_task: dict[str, int]) -> Lease[Ref[PackedGroups]] | None:
        """See ReplayBuffer.lease; the batch stays in the object store."""
        lease, batch_ref = await self._call("lease", step, per_task)
        return None if lease is None else lease.with_batch(batch_ref)

    async def then_counts(self, method: str, *args: Any) -> tuple[Any, BufferCounts]:
        """See ReplayBuffer.then_counts; a lease's batch stays in the object store."""
        if method != "lease":
            answer: tuple[Any, BufferCounts] = await self._call("then_counts", method, *args)
            return answer
        (lease, counts), batch_ref = await self._call("lease_then_counts", *args)
        return (None if lease is None else lease.with_batch(batch_ref)), counts

    def as_role(self) -> Buffer[Ref[PackedGroups]]:
        """Return it as what it is to production."""
        return cast(Buffer[Ref[PackedGroups]], self)

    async def forget_batches(self, upto: int) -> None:
        """Have the batches kept of the steps up to `upto` deleted."""
        await self._call("forget_batches", upto)

    async def kept_batch(self, step: int) -> Ref[PackedGroups]:
        """Return the batch that was handed out for `step`; it stays in the object store."""
        _, batch_ref = await self._call("kept_batch", step)
        found: Ref[PackedGroups] = batch_ref
        return found


def remote_buffer(name: str, *, timeout_s: float, tries: int) -> Buffer[Ref[PackedGroups]]:
    """Return the replay buffer called `name`; the other arguments are those of RemotePool."""
    return RemoteBuffer([name], timeout_s, tries).as_role()


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
