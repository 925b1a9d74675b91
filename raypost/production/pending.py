"""The groups in flight: the pending set, its gate, and the signal that something changed.

Owns the tasks that generate groups until each is received. Owns neither what a finished group becomes (context.py)
nor when groups are started (scheduler.py).

Invariants: groups are started only under the set's lock while its gate is open, so nothing starts after
`close_gate` returned; a finished group is received exactly once, by the first call of `settle` that finds it,
and stays in the set until then, so that no failure in between loses it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from raypost.types import Group, GroupKey, RolloutState
from raypost.types.staleness import NEVER

log = logging.getLogger(__name__)
T = TypeVar("T")


class Signal:
    """Says that something changed: a counter, and those who wait for it to move. Needs no lock.

    Read `count`, look at the state, and if there is nothing to do `await wait(count)`: a change in between is
    never missed.
    """

    def __init__(self) -> None:
        """Start at 0."""
        self.count = 0
        self._moved = asyncio.Event()

    def notify(self) -> None:
        """Wake those who wait."""
        self.count += 1
        self._moved.set()
        self._moved = asyncio.Event()

    async def wait(self, seen: int) -> None:
        """Return as soon as `count` differs from `seen`."""
        if self.count == seen:
            await self._moved.wait()


@dataclass(slots=True, eq=False)
class PendingGroup:
    """A group in flight."""

    key: GroupKey
    last_known: list[RolloutState]
    """Its trajectories as they were when it started: what is put back if nothing better comes."""
    task: asyncio.Task[Group]
    started_s: float
    last_step: int = NEVER
    """Last train step that may train all of its tokens."""
    stored: bool = False
    """It came out of the buffer, which still knows it."""
    put_back: bool = False
    """A pause gave up on it and cancelled it."""

    @property
    def num_tokens(self) -> int:
        """Response tokens it started with."""
        return sum(state.num_tokens for state in self.last_known)

    def as_started(self) -> Group:
        """Return a copy of the group as it was when it started."""
        task, group_id = self.key
        return Group(task=task, group_id=group_id, states=[replace(state) for state in self.last_known])


class PendingSet:
    """The groups in flight, and the gate that lets new ones start."""

    def __init__(self) -> None:
        """Start empty, with the gate closed."""
        self.lock = asyncio.Lock()
        """Held by every step that moves a group."""
        self.changed = Signal()
        """Moves when a group ends, and whenever else production or consumption may go on."""
        self.gate_open = False
        """Whether groups may start; `open_gate` and `close_gate` change it."""
        self._pending: dict[GroupKey, PendingGroup] = {}

    def __len__(self) -> int:
        """Return the number of groups in flight."""
        return len(self._pending)

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is in flight and nothing can start."""
        return not self.gate_open and not self._pending

    def num_of(self, task: str) -> int:
        """Return how many groups of one task are in flight."""
        return self.num_by_task()[task]

    def num_by_task(self) -> Counter[str]:
        """Return how many groups of each task are in flight."""
        return Counter(key[0] for key in self._pending)

    def last_steps(self, task: str) -> Counter[int]:
        """Return how many groups of one task in flight may be trained by each step at the latest."""
        return Counter(entry.last_step for entry in self._pending.values() if entry.key[0] == task)

    def all(self) -> list[PendingGroup]:
        """Return the groups in flight, including those that ended and were not received yet."""
        return list(self._pending.values())

    def running(self) -> list[PendingGroup]:
        """Return the groups whose generation has not ended."""
        return [entry for entry in self._pending.values() if not entry.task.done()]

    async def open_gate(self) -> None:
        """Let groups start."""
        async with self.lock:
            self.gate_open = True
        self.changed.notify()

    async def close_gate(self) -> None:
        """Let none start: when this returns, none is half way through starting either."""
        async with self.lock:
            self.gate_open = False
        self.changed.notify()

    def spawn(
        self,
        group: Group,
        work: Coroutine[Any, Any, Group],
        now_s: float,
        *,
        last_step: int = NEVER,
        stored: bool = False,
    ) -> None:
        """Start a group. The caller holds the lock, and has held it since it saw the gate open."""
        assert self.lock.locked() and self.gate_open, "a group is started under the lock with the gate open"
        assert group.key not in self._pending, f"group {group.key} is in flight already"
        last_known = [replace(state) for state in group.states]
        task = asyncio.get_running_loop().create_task(work, name=f"group {group.task}/{group.group_id}")
        task.add_done_callback(lambda _: self.changed.notify())
        self._pending[group.key] = PendingGroup(group.key, last_known, task, now_s, last_step, stored)

    async def settle(self, receive: Callable[[list[PendingGroup]], Awaitable[None]]) -> int:
        """Hand all finished groups to `receive`, then forget them; returns how many. The caller holds the lock.

        If `receive` raises they stay, to be received the next time.
        """
        assert self.lock.locked(), "finished groups are claimed under the lock"
        finished = [entry for entry in self._pending.values() if entry.task.done()]
        if finished:
            await receive(finished)
        for entry in finished:
            del self._pending[entry.key]
        return len(finished)

    def forget(self, entry: PendingGroup) -> None:
        """Drop a group that does not end even when cancelled; the caller holds the lock and put it back."""
        self._pending.pop(entry.key, None)


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end even if the caller is cancelled meanwhile; its cancellation follows afterwards.

    A group on its way from one place to another would be lost if the step that moves it stopped half way.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is not None:
            log.error("a step failed while its caller was cancelled", exc_info=task.exception())
        raise
