"""PoolMembers: who is in one rollout pool, who comes and who goes, and how many there are to be.

Owns the pool's target, its names, how long whoever comes is waited for, those that leave, and those that stand by. What
is wanted is compared with what is there again and again, so whatever dies in between is made up for later.

    standby      its engine is started, it holds no weights and is not in the pool: it takes the place of one that dies,
                 or is the next that comes, and serves once it has loaded the pool's version

Invariants: no name is used twice; an actor that was added is a member of the pool, stands by, or is ended; the target
is one that `raypost scale` would accept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol

from actors.remote import ACTOR_ERRORS
from jobs.nodes import draining_nodes, nodes_of, shortage
from jobs.pool_load import PoolLoad
from raypost.config import Config
from raypost.errors import WaitTimeoutError
from raypost.faults import Incident
from raypost.plan.cluster import bundles
from raypost.production.scaling import Resize, decide
from raypost.report.pool import Size, size_problem
from raypost.types import WorkerStats

log = logging.getLogger(__name__)

POLL_S = 1.0
LACKING_S = 5.0
"""A worker without a process for so long lacks something."""
DOWN_S = 30.0
"""So does one that died and has none for so long."""
REQUESTED, STARTING, UP, DOWN = "requested", "starting", "up", "down"
"""States of workers in the pool: see actors/rollout/member.py."""
LEAVE_FIRST = (REQUESTED, DOWN, STARTING, "catching up")


class ElasticPool(Protocol):
    """The pools' controller, as far as it is asked here."""

    async def join(self, name: str) -> None:
        """Take the actor `name` into the pool."""
        ...

    async def leave(self, name: str, drain: Literal["abort", "wait"], timeout_s: float) -> None:
        """Give a worker nothing more, and forget it once its requests are over."""
        ...

    async def states(self) -> dict[str, str]:
        """Return the state of every worker by name."""
        ...

    async def stats(self) -> list[WorkerStats]:
        """Return the statistics of the workers that serve."""
        ...


class Cluster:
    """What is asked of the cluster."""

    def __init__(self, cfg: Config) -> None:
        """Know what a worker of each pool needs."""
        workers = [one for one in bundles(cfg) if one.role == "rollout_worker"]
        self._each = {one.pool: one for one in workers}

    def draining(self) -> set[str]:
        """Return the names of the actors on nodes that are about to go."""
        return nodes_of(draining_nodes())

    def shortage(self, names: Collection[str], pool: str) -> str:
        """Say why workers of a pool get no process."""
        return shortage(self._each[pool], names)


class Owner(Protocol):
    """Whoever owns the workers' actors: the launcher."""

    def add_worker(self, number: int, pool: str) -> str:
        """Start the actor of one more worker of a pool; return its name."""
        ...

    async def start_worker(self, name: str, timeout_s: float) -> None:
        """Start the engine of a worker that is in no pool."""
        ...

    def end_worker(self, name: str) -> None:
        """End it for good."""
        ...


Tell = Callable[..., Coroutine[Any, Any, None]]
"""Supervisor.tell."""


class PoolMembers:
    """Keeps the number of workers of one pool at what is wanted."""

    def __init__(
        self,
        cfg: Config,
        name: str,
        owner: Owner,
        pool: ElasticPool,
        load: PoolLoad,
        tell: Tell,
        cluster: Cluster,
        clock: Callable[[], float],
    ) -> None:
        """Begin with the configured number. `name`: of one of `rollout.pools`; empty: that of `rollout` itself."""
        self._cfg = cfg
        self._name = name
        self._rollout = cfg.rollout.by_pool()[name]
        self._owner = owner
        self._pool = pool
        self._load = load
        self._tell = tell
        self._cluster = cluster
        self._clock = clock
        self._next = self._rollout.num_workers
        bundled = [one.name for one in bundles(cfg) if (one.role, one.pool) == ("rollout_worker", name)]
        self._members = set(bundled)
        self._asked: Size | None = None
        self.target, self.why = self._next, "as configured"
        self._target_told = self.target
        self._coming: dict[str, float] = {}
        """Since when workers that were added are waited for."""
        self._down: dict[str, float] = {}
        """Since when workers that died have no process."""
        self.leaving: dict[str, asyncio.Task[None]] = {}
        self._standby: dict[str, asyncio.Task[None]] = {}
        """Workers that stand by; the task starts the engine."""
        self._no_standby_until_s = 0.0
        self.lacking = ""

    @property
    def chooses(self) -> bool:
        """Whether the run chooses the size."""
        return self._asked in ("auto", None) and self._rollout.autoscale is not None

    @property
    def standby(self) -> dict[str, str]:
        """What those that stand by do, by name."""
        return {name: "standby" if one.done() else "standby, starting" for name, one in self._standby.items()}

    def slots(self, states: Mapping[str, str]) -> int:
        """Return how many sequences the workers that serve run at once."""
        return len(self._up(states)) * self._rollout.max_num_seqs

    def _up(self, states: Mapping[str, str]) -> list[str]:
        return [name for name in self._members if states.get(name, "").startswith(UP)]

    async def look(self, states: Mapping[str, str], stats: Sequence[WorkerStats], draining: set[str]) -> None:
        """Compare what is there with what is wanted, and see to the difference. `stats`: of all that serve."""
        await self._see(states)
        if self.chooses:
            self._measure(states, stats)
        for name in sorted(self._members & draining):
            self._leave(name, "its node is drained")
        await self._fill(states)
        self._stand_by(draining)
        if self.target != self._target_told:
            before, self._target_told = self._target_told, self.target
            pool = self._name or "rollout"
            await self._tell(
                Incident.POOL_RESIZED, pool=pool, before=before, target=self.target, cause=self.why
            )

    def stop(self) -> None:
        """Look no more."""
        for task in (*self.leaving.values(), *self._standby.values()):
            task.cancel()

    # ---------------------------------------------------------------- what is wanted

    def ask(self, asked: Size | None) -> None:
        """Take note of the size that was asked for last."""
        if asked is None or asked == self._asked:
            return
        self._asked = asked
        problem = size_problem(self._cfg, asked, self._name)
        if problem:
            log.warning("the pool keeps its size: %s", problem)
        elif asked == "auto":
            self.why = "chosen by the run"
        else:
            self._want(asked, "raypost scale")

    def _want(self, target: int, why: str) -> None:
        if target != self.target:
            self._load.changed(self._clock(), grew=target > self.target)
        self.target, self.why = target, why

    def _measure(self, states: Mapping[str, str], stats: Sequence[WorkerStats]) -> None:
        autoscale = self._rollout.autoscale
        assert autoscale is not None
        up = self._up(states)
        moving = len(self._coming) + len(self.leaving)
        self._load.look([one for one in stats if one.worker in up], self._clock())
        measured = self._load.stats(len(up), moving, self._rollout.max_num_seqs, self._clock())
        decision = decide(measured, autoscale, self._clock())
        if isinstance(decision, Resize):
            self._want(decision.target, decision.reason)

    # ---------------------------------------------------------------- what is there

    async def _see(self, states: Mapping[str, str]) -> None:
        """Take note of workers that came, and of those that did not."""
        for name in self._standby.keys() & states.keys():
            # A controller that was started again took it for one that had joined.
            self._members.add(name)
            self._standby.pop(name).cancel()
        for name, since_s in list(self._coming.items()):
            state, waited_s = states.get(name), self._clock() - since_s
            if state is not None and state.startswith(UP):
                del self._coming[name]
                self._load.start_s = waited_s
                await self._tell(Incident.WORKER_JOINED, actor=name, seconds=round(waited_s, 2))
            elif state == REQUESTED and waited_s > self._rollout.start_timeout_s:
                await self._give_up(name, f"no node had its resources for {waited_s:.0f} s: {self.lacking}")
            elif state is None and waited_s > POLL_S:
                await self._give_up(name, "it did not start, its log says why")
        self._see_dead(states)
        requested = [name for name, since in self._coming.items() if states.get(name) == REQUESTED]
        waited = [name for name in requested if self._clock() - self._coming[name] > LACKING_S]
        lost = [name for name in self._down if states.get(name, "").startswith(DOWN)]
        waited += [name for name in lost if self._clock() - self._down[name] > DOWN_S]
        shortage_of = self._cluster.shortage
        self.lacking = await asyncio.to_thread(shortage_of, waited, self._name) if waited else ""

    def _see_dead(self, states: Mapping[str, str]) -> None:
        """Replace workers that died: by one that stands by, or when they had no process for longer than it may take."""
        settled = self._members - self._coming.keys()
        down = [name for name in settled if states.get(name, "").startswith((DOWN, STARTING))]
        self._down = {name: self._down.get(name, self._clock()) for name in down}
        ready = sum(one.done() for one in self._standby.values())
        for name, since_s in list(self._down.items()):
            if ready:
                ready -= 1
                self._leave(name, "it died, and one that stood by takes its place")
            elif self._clock() - since_s > 2 * self._rollout.start_timeout_s:
                self._leave(name, "it died and did not come back")

    async def _give_up(self, name: str, why: str) -> None:
        """End a worker that does not come, and want one less, until another number is asked for."""
        asked = self.target
        self._want(max(1, self.target - 1), f"{name} did not come")
        del self._coming[name]
        self._members.discard(name)
        self.leaving[name] = asyncio.create_task(self._end(name), name=f"give up {name}")
        await self._tell(Incident.POOL_SHORT, actor=name, asked=asked, given=self.target, cause=why)

    async def _fill(self, states: Mapping[str, str]) -> None:
        """Add what lacks, or have some leave."""
        self.leaving = {name: task for name, task in self.leaving.items() if not task.done()}
        for _ in range(self.target - len(self._members)):
            name = next((name for name, one in self._standby.items() if one.done()), None)
            if name is None:
                name = self._new_worker()
            else:
                del self._standby[name]
            self._members.add(name)
            self._coming[name] = self._clock()
            await self._pool.join(name)
        surplus = len(self._members) - self.target
        for name in sorted(self._members, key=lambda one: _worth(one, states))[: max(0, surplus)]:
            self._leave(name, self.why)

    def _new_worker(self) -> str:
        self._next += 1
        return self._owner.add_worker(self._next - 1, self._name)

    def _leave(self, name: str, why: str) -> None:
        self._members.discard(name)
        self._coming.pop(name, None)
        self._down.pop(name, None)
        self.leaving[name] = asyncio.create_task(self._say_goodbye(name, why), name=f"{name} leaves")

    async def _say_goodbye(self, name: str, why: str) -> None:
        begin, drain = self._clock(), self._rollout.drain
        await self._end(name)
        seconds = round(self._clock() - begin, 2)
        await self._tell(Incident.WORKER_LEFT, actor=name, seconds=seconds, drain=drain, cause=why)

    async def _end(self, name: str) -> None:
        """Have a worker leave the pool, then end its actor, whatever becomes of the call."""
        try:
            await self._pool.leave(name, self._rollout.drain, self._rollout.drain_timeout_s)
        except (*ACTOR_ERRORS, WaitTimeoutError) as error:
            log.warning("%s is ended although the pool does not answer: %s", name, error)
        self._owner.end_worker(name)

    # ---------------------------------------------------------------- those that stand by

    def _stand_by(self, draining: set[str]) -> None:
        """Have so many workers stand by as are configured, once all that are wanted serve or come."""
        failed = [name for name, one in self._standby.items() if one.done() and one.exception() is not None]
        for name in failed:
            log.warning("%s does not stand by: %s", name, self._standby[name].exception())
            self._no_standby_until_s = self._clock() + self._rollout.start_timeout_s
        for name in {*failed, *(draining & self._standby.keys())}:
            self._standby.pop(name).cancel()
            self._owner.end_worker(name)
        if self._clock() < self._no_standby_until_s or self._coming:
            return
        while len(self._standby) < self._rollout.standby:
            name = self._new_worker()
            starting = self._owner.start_worker(name, self._rollout.start_timeout_s)
            self._standby[name] = asyncio.create_task(starting, name=f"{name} stands by")


def _worth(name: str, states: Mapping[str, str]) -> tuple[bool, int]:
    """Order workers by who leaves first: those that do not serve, then those that came last."""
    return not states.get(name, REQUESTED).startswith(LEAVE_FIRST), -int(name.rpartition("-")[2])
