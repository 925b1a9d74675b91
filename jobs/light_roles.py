"""What the driver does when a role died that comes back by itself: it takes note, and gives it what it lacks.

    the role's process dies -> Ray starts another one -> it makes itself what it was -> its calls are made again
                            -> noticed here -> recorded, bounded by the fault policy -> what it did is recorded

Owns the watch. How a producer rebuilds itself is raypost.production.restore's, how a pool is found again is
actors/rollout/rebuild.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Protocol

from actors.remote import ACTOR_ERRORS, remote
from jobs.census import Census
from jobs.recovery import Supervisor
from raypost.faults import Incident
from raypost.types import BroadcasterRole, ProducerRole, RolloutPool

NOTICED_S, NOTICED_IN = 3.0, 30
"""Time in which Ray knows of a death that a caller has seen, and how often it is asked meanwhile."""


class Living(Protocol):
    """A role whose deaths are waited for."""

    async def lives(self) -> None:
        """Never return; raise when its process ends."""
        ...


class LightRoles:
    """Watches the producer and the rollout controllers."""

    def __init__(self, supervisor: Supervisor, census: Census) -> None:
        """Nothing is watched before `watch_producer` and `watch_pool`."""
        self._supervisor = supervisor
        self._census = census

    async def watch_producer(self, name: str, producer: ProducerRole) -> NoReturn:
        """Take note of each death of the producer. Raises RoleLostError if it dies too often."""
        told = 0

        async def back() -> dict[str, Any]:
            nonlocal told
            rebuilt = await producer.rebuilt()
            if rebuilt.incarnation <= told:
                return {}  # of two that died at once, the second one was waited for twice
            told = rebuilt.incarnation
            count, after = rebuilt.continued + rebuilt.from_prompt, "the producer died"
            if rebuilt.cut:
                after = "the replay buffer came back without them"
                await self._supervisor.tell(Incident.BUFFER_CUT, cause=rebuilt.cut)
            if count:
                await self._supervisor.tell(
                    Incident.GROUPS_REGENERATED, count=count, after=after, **rebuilt._asdict()
                )
            return {"missing": "what was counted of production since the last batch"}

        await self._watch("producer", name, living(name), back)

    async def watch_pool(
        self, name: str, pool: RolloutPool, broadcaster: BroadcasterRole, producer: ProducerRole | None
    ) -> NoReturn:
        """Take note of each death of a pool's controller. Raises RoleLostError if it dies too often.

        `producer`: that produces with the pool, if any does.
        """

        async def back() -> dict[str, Any]:
            states = await pool.states()
            await broadcaster.restock()
            if producer is not None:
                await producer.go_on()
            return {"workers": states}

        await self._watch("rollout controller", name, living(name), back)

    async def _watch(
        self, role: str, actor: str, living: Living, back: Callable[[], Awaitable[dict[str, Any]]]
    ) -> NoReturn:
        """Wait for the role's deaths; `back` returns once it is back, with what to record of it."""
        clock, restarts = self._supervisor.clock, self._census.restarts(actor)
        while True:
            try:
                if self._census.restarts(actor) == restarts:  # else it died again while it came back
                    await living.lives()
            except ACTOR_ERRORS:
                if not await self._lost_its_process(actor, restarts):
                    continue
            restarts += 1
            begin = clock()
            await self._supervisor.died(self._census.failure(role, actor, "it died", begin))
            facts = await back()
            self._census.look()
            seconds = round(clock() - begin, 2)
            await self._supervisor.tell(
                Incident.ROLE_RESTARTED, role=role, actor=actor, seconds=seconds, **facts
            )

    async def _lost_its_process(self, actor: str, restarts: int) -> bool:
        """Return whether the actor was started again since it was so often; else a call to it was lost, and no more."""
        for _ in range(NOTICED_IN):
            if self._census.restarts(actor) != restarts:
                return True
            await asyncio.sleep(NOTICED_S / NOTICED_IN)
        return False


def living(name: str) -> Living:
    """Return the actor `name` as something that lives."""
    return remote(name, Living, timeout_s=0.0, timeouts_s={"lives": None})
