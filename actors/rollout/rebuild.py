"""How a rollout controller that was started again finds its pool: it asks every worker what it is.

Owns the question and what follows from the answers, as a function of plain data. What a worker answers is the truth: a
controller has no state of its own but refs of the weights. A call that met the controller's death is made again by who
made it, so a pool that was found half way through one is left as it is, and new requests are kept out until then.

    any engine serves                          the pool serves, also where a swap has reached some engines only
    none does                                  paused, or a pause, a load or a resume was under way
    some hold another version                  the pool's is the oldest: what was under way brings the others
    closed while others serve, no engine,      started again, if it must be, and caught up before it serves
    no whole weights, no answer
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import ray
from ray._private.state import state

from actors.rollout.member import PoolWorker
from actors.rollout.routing import GONE
from actors.rollout.status import Held, WorkerStatus
from raypost.errors import WaitTimeoutError
from raypost.types.pause import PauseMode


class Knowing(Protocol):
    """What may have been started again, and then has to find its workers."""

    async def know(self) -> None:
        """Find them, unless they are known."""
        ...


P = ParamSpec("P")
R = TypeVar("R")
PoolT = TypeVar("PoolT", bound=Knowing)


def once_known(
    method: Callable[Concatenate[PoolT, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[PoolT, P], Coroutine[Any, Any, R]]:
    """Have a method wait until a controller that was started again knows its workers."""

    @functools.wraps(method)
    async def known(self: PoolT, *args: P.args, **kwargs: P.kwargs) -> R:
        await self.know()
        return await method(self, *args, **kwargs)

    return cast(Callable[Concatenate[PoolT, P], Coroutine[Any, Any, R]], known)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPool:
    """What the answers of the workers come to."""

    up: frozenset[str]
    """Workers that may serve."""
    held: Held | None
    paused: bool
    mode: PauseMode | None
    """Of the pause in force."""
    asleep: bool


def pool_of(statuses: Mapping[str, WorkerStatus | None]) -> FoundPool:
    """Return what the pool is by the answers of its workers, None of those that gave none."""
    whole = {
        name: one for name, one in statuses.items() if one is not None and one.has_engine and one.is_whole
    }
    holding = [one.held for one in whole.values() if one.held is not None]
    up = {name: one for name, one in whole.items() if one.serving}
    paused = not up
    if paused:
        up = {name: one for name, one in whole.items() if one.held is not None or one.asleep or not holding}
    modes = [one.mode for one in up.values() if one.mode is not None]
    mode: PauseMode | None = "keep" if "keep" in modes else next(iter(modes), "abort")
    return FoundPool(
        up=frozenset(up),
        held=min(holding, key=lambda one: (one.version, one.epoch), default=None),
        paused=paused,
        mode=mode if paused else None,
        asleep=any(one.asleep for one in whole.values()),
    )


async def ask_all(workers: Sequence[PoolWorker], timeout_s: float) -> dict[str, WorkerStatus | None]:
    """Ask all workers at once; None for one that is gone, or does not answer in time."""

    async def ask(worker: PoolWorker) -> WorkerStatus | None:
        try:
            await worker.answer(timeout_s)
            answer: WorkerStatus = await worker.call("status", timeout_s, "to say what it is")
        except (*GONE, WaitTimeoutError):
            return None
        return answer

    answers = await asyncio.gather(*(ask(worker) for worker in workers))
    return {worker.name: answer for worker, answer in zip(workers, answers, strict=True)}


def living_kin(names: Collection[str]) -> dict[str, bool]:
    """Return the living actors of this job that are called like these but for their number, such as rollout-2.

    By name whether they have a process already. They may have joined a pool that a controller knew before it died.
    """
    if not ray.is_initialized():
        return {}
    kinds, job = {name.rstrip("0123456789") for name in names}, ray.get_runtime_context().get_job_id()
    return {
        row["Name"]: bool(row["Pid"])
        for row in state.actor_table(None).values()
        if row["JobID"] == job and row["State"] != "DEAD" and row["Name"].rstrip("0123456789") in kinds
    }
