"""Recovery: what the driver does when a role died.

    failure -> decide (raypost/faults.py) -> incident in the record -> the role is brought back, or RoleLostError

Owns the history of failures and what is said of them. Each role brings itself back: see its own class here.

The trainer's gang comes back as one: all ranks get new processes, load the last checkpoint, and train the batches since
then again, which the buffer kept on disk. Production goes on meanwhile, up to its bounds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from actors.remote import raised
from actors.training.group import Guard, TrainerGroup
from jobs.census import Census
from raypost.checkpoint import CheckpointDir
from raypost.config import Config
from raypost.errors import BatchMemoryError, RankLostError, RanksLateError, RaypostError, RoleLostError
from raypost.faults import End, Failure, FaultHistory, Incident, Limits, decide
from raypost.types import (
    BroadcasterRole,
    PoolHolds,
    ProducerRole,
    Ref,
    RolloutPool,
    SyncReport,
    TelemetryRole,
)
from raypost.types.packed import PackedGroups

T = TypeVar("T")
TrainStep = Callable[[Ref[PackedGroups], int], Awaitable[dict[str, float]]]
log = logging.getLogger(__name__)

REPEATS = 10
"""How often a call whose answer was lost is made again while all ranks are well."""
BROKEN = ("gloo", "NCCL", "CUDA error", "closed by peer", "reset by peer", "Broken pipe", "ProcessGroup")
"""In errors that a rank cannot get over: of its device, or of the network between ranks."""


class Supervisor:
    """Decides what is done about each failure of a role, and records it."""

    def __init__(
        self, limits: Limits, telemetry: TelemetryRole, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock`: what `Failure.at_s` is told by."""
        self._limits = limits
        self._telemetry = telemetry
        self.clock = clock
        self.history = FaultHistory()

    async def died(self, failure: Failure) -> None:
        """Record a failure of a role that is brought back. Raises RoleLostError if it is not."""
        decision = decide(failure, self.history, self._limits)
        self.history.add(failure)
        log.error("%s", failure.story)
        await self.tell(
            Incident.ROLE_DIED,
            role=failure.role, actor=failure.actor, cause=failure.cause, node=failure.node, pid=failure.pid,
            exit_cause=failure.exit_cause, last_words=list(failure.last_words),
        )  # fmt: skip
        if isinstance(decision, End):
            raise RoleLostError(decision.reason)

    async def tell(self, incident: Incident, **fields: Any) -> None:
        """Record an incident; `count`: how often it happened at once, if not once. Never ends the run."""
        log.warning("%s: %s", incident.replace("_", " "), ", ".join(f"{k} {v}" for k, v in fields.items()))
        try:
            await self._telemetry.log_incident(incident, fields)
        # A supervision boundary: a record that cannot be written must not end what is being brought back.
        except Exception as error:
            log.warning("%s is missing in the record: %s", incident, error)


# ---------------------------------------------------------------- the trainer


class BatchKeeper(Protocol):
    """Where batches that were trained since the last checkpoint are: the replay buffer's actor."""

    async def kept_batch(self, step: int) -> Ref[PackedGroups]:
        """Return the batch of `step`, unopened. Raises CheckpointError if it is gone."""
        ...

    async def forget_batches(self, upto: int) -> None:
        """Delete those of the steps up to `upto`."""
        ...


@dataclass(slots=True)
class Pool:
    """A pool of engines, and the way of the weights into it."""

    engines: RolloutPool
    broadcaster: BroadcasterRole


_INSIDE: ContextVar[bool] = ContextVar("inside a recovery", default=False)


class GangRecovery:
    """Brings the ranks of policy and critic back as one.

    Its `guard` makes calls to them, and makes them again after it brought them back. A call that failed for another
    reason raises its error. Owns when that is; how ranks restart is TrainerGroup's.

    Invariants: the steps that were trained when the gang died are trained in the model that comes back, each once, from
    the same batches in the same order; the pools hold the bits that the gang published last for their version, or
    others under a new epoch, recorded.
    """

    def __init__(
        self,
        cfg: Config,
        supervisor: Supervisor,
        census: Census,
        trainer: TrainerGroup,
        checkpoints: CheckpointDir,
        batches: BatchKeeper,
        producer: ProducerRole,
        pools: Sequence[Pool],
    ) -> None:
        """`pools`: production's first. The trainer's calls pass the guard from now on."""
        self._cfg = cfg
        self._supervisor = supervisor
        self._census = census
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._batches = batches
        self._producer = producer
        self._pools = pools
        self._restarts = 0
        self._same_bits: bool | None = None
        """Whether the version that production's engines hold was made again bitwise, when it was last made again."""
        self._lock = asyncio.Lock()
        self.settle: Callable[[], Awaitable[None]] = _nothing
        """Waits for a checkpoint that is being written; afterwards none is until the ranks are back."""
        self.train_step: TrainStep = trainer.fit
        """Trains a batch again; a job that spells its step out puts its own here."""
        for group in self._groups:
            group.guard = self.guard

    async def start(self) -> list[dict[str, Any]]:
        """Bring the ranks up for the first time; return what each says about itself.

        Where one dies meanwhile, all begin again. Raises RoleLostError if that comes too often, and what a rank that
        lives cannot start for.
        """
        self._census.look()
        begin, failure = self._supervisor.clock(), None
        while True:
            try:
                infos = await (self._trainer.start() if failure is None else self._trainer.restart())
                break
            except Exception as error:
                if not isinstance(error, RankLostError | RanksLateError) and not is_broken(error):
                    raise
                actor = f"{error}".partition(" ")[0] if isinstance(error, RankLostError) else "all ranks"
                failure = self._census.failure("trainer", actor, f"{error}", self._supervisor.clock())
                await self._supervisor.died(failure)
        if failure is not None:
            seconds = round(self._supervisor.clock() - begin, 2)
            await self._supervisor.tell(
                Incident.ROLE_RESTARTED, role="trainer", actor=failure.actor, step=0, seconds=seconds
            )
        return infos

    async def guard(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a call that needs the ranks; it is made again after they were brought back.

        Raises RoleLostError if they are not, and what the call raised where the ranks are well.
        """
        if _INSIDE.get():
            return await call()
        repeats = 0
        while True:
            restarts = self._restarts
            try:
                return await call()
            except Exception as error:
                async with self._lock:
                    if restarts != self._restarts:
                        continue  # others brought them back
                    if await self._halved(error):
                        await self._recover(None)
                        continue
                    failure = await self._diagnosis(error)
                    if failure is not None:
                        await self._recover(failure)
                        continue
                repeats += 1
                if not isinstance(error, RankLostError) or repeats > REPEATS:
                    raise

    async def saved(self, step: int) -> None:
        """Forget the batches of the steps up to `step`: a checkpoint of it is durable."""
        await self._batches.forget_batches(step)

    async def _diagnosis(self, error: Exception) -> Failure | None:
        """Return who of the gang failed and how; None if all ranks are well."""
        lost = await self._trainer.lost()
        if lost:
            actor, cause = next(iter(lost.items()))
            others = [name for name in lost if name != actor]
            cause += f"; so did {', '.join(others)}" if others else ""
        elif isinstance(error, RanksLateError) or is_broken(error):
            actor, cause = "all ranks", str(raised(error))
        else:
            return None
        return self._census.failure("trainer", actor, cause, self._supervisor.clock())

    async def _halved(self, error: Exception) -> bool:
        """Where memory ran out, have the ranks come back with half the tokens a micro-batch; return whether they do.

        Not if one holds a single trajectory already. All ranks are new then, and halve alike: those that had memory
        are inside a collective that another one has left.
        """
        if not isinstance(error, BatchMemoryError):
            return False
        before = self._trainer.micro_batch_tokens
        after = max(self._cfg.max_model_len, before // 2)
        if after == before:
            return False
        for group in self._groups:
            group.micro_batch_tokens = min(after, group.micro_batch_tokens)
        await self._supervisor.tell(
            Incident.MICRO_BATCHES_HALVED, before=before, after=after, cause=f"{raised(error)!s:.500}"
        )
        return True

    @property
    def _groups(self) -> list[TrainerGroup]:
        return [group for group in (self._trainer, self._trainer.critic) if group is not None]

    async def _recover(self, failure: Failure | None) -> None:
        """Bring the ranks back to the last step that they trained. `failure` None: nobody failed."""
        begin, inside = self._supervisor.clock(), _INSIDE.set(True)
        done = max(group.step for group in self._groups)
        try:
            if failure is not None:
                await self._supervisor.died(failure)
            while True:
                try:
                    again = await self._bring_back(done)
                    break
                except Exception as error:
                    if await self._halved(error):
                        continue
                    found = await self._diagnosis(error)
                    if found is None:
                        raise
                    failure = found
                    await self._supervisor.died(failure)
        finally:
            _INSIDE.reset(inside)
        self._restarts += 1
        if failure is not None:
            seconds = round(self._supervisor.clock() - begin, 2)
            await self._supervisor.tell(
                Incident.ROLE_RESTARTED, role="trainer", actor=failure.actor, step=done, seconds=seconds,
                same_bits=self._same_bits,
            )  # fmt: skip
        if again:
            await self._supervisor.tell(
                Incident.BATCHES_TRAINED_AGAIN, count=again, first=done - again + 1, last=done
            )

    async def _bring_back(self, done: int) -> int:
        """Restart the ranks and train up to `done`, from the last checkpoint on; return how many steps that took."""
        held = [await pool.engines.holds() for pool in self._pools]
        # Else it might be the newest when the ranks have loaded another, and its batches gone.
        await self.settle()
        await self._trainer.restart()
        self._census.look()
        for pool in self._pools:
            await pool.broadcaster.forget()
        found = self._checkpoints.latest(verify=False)
        first = 0
        if found is not None:
            first = await self._trainer.load(found[1])
        elif self._trainer.begun_from is not None:
            path, optimizer = self._trainer.begun_from
            await self._trainer.begin_from(path, optimizer=optimizer)
        await self._renew(held, first)
        for step in range(first + 1, done + 1):
            await self.train_step(await self._batches.kept_batch(step), step)
            await self._renew(held, step)
        return done - first

    async def _renew(self, held: Sequence[PoolHolds | None], step: int) -> None:
        """Where a pool holds the version of `step`, put it within reach of engines that come back.

        If its bits are others, production's engines take them under a new epoch; while they sleep, they keep their own
        until the next sync.
        """
        for number, (pool, holds) in enumerate(zip(self._pools, held, strict=True)):
            if holds is None or holds.version != step:
                continue
            same = await pool.broadcaster.renew(step)
            if number == 0:
                self._same_bits = same
            if number == 0 and not same and not holds.asleep:
                report = await self._republish(pool, holds)
                await self._supervisor.tell(
                    Incident.VERSION_REPUBLISHED, version=step, before=holds.digest, after=report.digest
                )

    async def _republish(self, pool: Pool, holds: PoolHolds) -> SyncReport:
        if holds.serving:
            await self._producer.pause(self._cfg.pause_mode(holds.version))
        report = await pool.broadcaster.broadcast(holds.version, again=True)
        if holds.serving:
            await self._producer.resume(holds.version)
        return report


async def _nothing() -> None:
    """Stand for what there is nothing to wait for."""


def is_broken(error: BaseException) -> bool:
    """Return whether a rank raised what no further call to it can mend."""
    cause = raised(error)
    return not isinstance(cause, RaypostError) and any(one in f"{cause!r}" for one in BROKEN)


@dataclass(slots=True)
class GuardedBroadcaster:
    """A broadcaster whose calls are made again once the ranks, whose weights it brings, came back."""

    broadcaster: BroadcasterRole
    guard: Guard
    out: int | None = None
    """The version that was broadcast last."""

    async def prepare(self, version: int, leave: bool = False) -> None:
        """See BroadcasterRole."""
        await self.guard(lambda: self.broadcaster.prepare(version, leave))

    async def broadcast(self, version: int, check: bool = True, again: bool = False) -> SyncReport:
        """See BroadcasterRole."""
        report = await self.guard(lambda: self.broadcaster.broadcast(version, check, again))
        self.out = version
        return report

    async def forget(self) -> None:
        """See BroadcasterRole."""
        await self.broadcaster.forget()

    async def restock(self, version: int | None = None) -> None:
        """See BroadcasterRole; `version` is known here."""
        await self.guard(lambda: self.broadcaster.restock(self.out if version is None else version))

    async def renew(self, version: int) -> bool:
        """See BroadcasterRole."""
        return await self.guard(lambda: self.broadcaster.renew(version))

    async def check(self, version: int) -> SyncReport:
        """See BroadcasterRole."""
        self.out = version
        return await self.guard(lambda: self.broadcaster.check(version))
