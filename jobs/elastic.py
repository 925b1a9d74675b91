"""PoolKeeper: keeps the rollout pools at their sizes while the run goes on.

    raypost scale -> RUN/scale.json --.                               .-> an actor, owned by the driver -> pool.join
    pool's load, trainer's waits ------+-> targets -> what lacks -----+
    a node that is drained ----------'                                '-> pool.leave -> the actor ends

The driver owns the workers' actors, since an actor dies with its owner: a controller may die and come back, and engines
serve on meanwhile; when the driver dies the run does. So the driver decides who is there, the controller who serves.

Owns the looks, what the producer is told of the engines' slots, and the record. What becomes of the workers of each
pool is PoolMembers' (members.py), how many there are to be raypost/production/scaling.py's, and the way of a worker
into the pool actors/rollout/pool.py's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import NoReturn, Protocol

from jobs.members import POLL_S, Cluster, ElasticPool, Owner, PoolMembers, Tell
from jobs.pool_load import PoolLoad
from raypost.config import Config
from raypost.faults import Incident
from raypost.report.pool import PoolRecord, asked_sizes

log = logging.getLogger(__name__)


class Slots(Protocol):
    """Whoever has to know how many sequences all engines run at once: the producer."""

    async def resize(self, num_slots: int) -> None:
        """Have so many groups in flight as they need."""
        ...


class PoolKeeper:
    """Keeps the number of workers of each rollout pool at what is wanted."""

    def __init__(
        self,
        cfg: Config,
        owner: Owner,
        pool: ElasticPool,
        slots: Slots,
        load: PoolLoad,
        tell: Tell,
        cluster: Cluster | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`load`: of the pool that `rollout` describes; those of the others begin beside it."""
        self._cfg = cfg
        self._pool = pool
        self._slots = slots
        self._tell = tell
        self._cluster = Cluster(cfg) if cluster is None else cluster
        self._pools = {
            name: PoolMembers(
                cfg, name, owner, pool, PoolLoad.of(own, load) if name else load, tell, self._cluster, clock
            )
            for name, own in cfg.rollout.by_pool().items()
        }
        self._slots_told: int | None = None
        self._record: PoolRecord | None = None

    async def run(self) -> NoReturn:
        """Look again and again."""
        told = ""
        try:
            while True:
                try:
                    await self.look()
                # A supervision boundary: whatever prevents a change of size, the run goes on with the pools it has.
                except Exception as error:
                    if told != (told := f"{type(error).__name__}: {error}"):
                        log.warning("the rollout pool keeps its size: %s", told, exc_info=error)
                        asked = sum(one.target for one in self._pools.values())
                        await self._tell(Incident.POOL_SHORT, asked=asked, cause=f"{told:.500}")
                await asyncio.sleep(POLL_S)
        finally:
            for one in self._pools.values():
                one.stop()

    async def look(self) -> None:
        """Compare what is there with what is wanted, and see to the difference."""
        states = await self._pool.states()
        asked = asked_sizes(self._cfg.run_dir)
        for name, members in self._pools.items():
            members.ask(asked.get(name))
        chosen = any(one.chooses for one in self._pools.values())
        stats = await self._pool.stats() if chosen else []
        draining = self._cluster.draining()
        for members in self._pools.values():
            await members.look(states, stats, draining)
        num_slots = sum(one.slots(states) for one in self._pools.values())
        if num_slots and num_slots != self._slots_told:
            await self._slots.resize(num_slots)
            self._slots_told = num_slots
        self._write(states)

    def _write(self, states: Mapping[str, str]) -> None:
        own, workers = self._pools[""], dict(states)
        for one in self._pools.values():
            workers |= one.standby
        record = PoolRecord(
            target=own.target,
            why=own.why,
            pools={name: f"{one.target} wanted ({one.why})" for name, one in self._pools.items() if name},
            workers=workers,
            lacking="; ".join(one.lacking for one in self._pools.values() if one.lacking),
        )
        if record != self._record:
            record.write(self._cfg.run_dir)
            if record.lacking and (self._record is None or self._record.lacking != record.lacking):
                log.warning("the rollout pool lacks something: %s", record.lacking)
            self._record = record
