"""Roles: the roles of one run as the driver's loop sees them, each by the Protocol that it fulfils.

Owns the calls that need more than one role. Owns no step logic (the job's own screen does), starts nothing (wiring.py
does) and keeps no record (records.py does). It holds handles and small numbers, never a batch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass, field, replace
from typing import NoReturn, TypeVar

from actors.training.group import TrainerGroup
from jobs.pool_load import PoolLoad
from jobs.records import Records
from jobs.recovery import GangRecovery
from jobs.saving import Saver
from jobs.space import Space
from jobs.stopping import LAST_CALL_S, last_call, production_ended, stopped, unless, watching
from raypost.checkpoint import CheckpointDir
from raypost.config import Config
from raypost.errors import StoppedError
from raypost.faults import Incident
from raypost.ledger.summary import sampled_before
from raypost.observe import metrics
from raypost.report.terminal import RunDisplay
from raypost.types import (
    BroadcasterRole,
    EvaluatorRole,
    ProduceBatchStatus,
    ProducerRole,
    Ref,
    RolloutPool,
    RunStatus,
    SyncReport,
    TakeStatus,
    TelemetryRole,
)
from raypost.types.packed import PackedGroups

T = TypeVar("T")
Batch = tuple[TakeStatus, Ref[PackedGroups] | None]
log = logging.getLogger(__name__)

CHECK_AFTER_S = 0.03
"""Requests that waited for a version go first: before them the canary would take a step of the engines for itself."""
STOPPED = TakeStatus(status=ProduceBatchStatus.NORMAL, step=0, num_groups=0)
"""Status of a take that a stop ended: there is no batch."""


@dataclass
class Roles:
    """Handles of all roles, and the few calls that need more than one of them."""

    cfg: Config
    stop: asyncio.Event
    display: RunDisplay
    checkpoints: CheckpointDir
    saver: Saver
    trainer: TrainerGroup
    pool: RolloutPool
    broadcaster: BroadcasterRole
    evaluation_broadcaster: BroadcasterRole | None
    """Brings weights to the engines that are evaluation's own; None: it uses production's."""
    producer: ProducerRole
    evaluator: EvaluatorRole | None
    """None: there is nothing to evaluate."""
    telemetry: TelemetryRole
    gang: GangRecovery
    """Brings the trainer's ranks back."""
    space: Space
    """Waits where the disk of the run refuses to be written."""
    load: PoolLoad = field(default_factory=PoolLoad)
    """What the rollout pool is sized by: the trainer's waits, outside of pauses."""
    _watching: asyncio.Task[None] | None = None
    _production: asyncio.Task[None] | None = None
    _deaths: list[asyncio.Task[NoReturn]] = field(default_factory=list)
    """For the deaths of roles that come back by themselves."""
    _evaluation: asyncio.Task[None] | None = None
    """The last evaluation; it may run while production goes on."""
    _asked_step: int = -1
    _late: bool = False
    """Whether a checkpoint was due by time when it was asked for `_asked_step`."""
    _served: int | None = None
    """Version that production goes on with; None: it is paused."""
    _left: bool = False
    """Whether ranks leave the devices that they share with engines as soon as their weights are published."""
    _preparing: asyncio.Task[None] | None = None
    """Of the version of the step that was trained last, where a sync follows it."""
    _loading: asyncio.Task[None] | None = None
    """Of a version that is not prepared yet, for which it waits."""
    _checking: asyncio.Task[None] | None = None
    """Of the version that is served; raises what is wrong with it."""
    _sync: SyncReport | None = None
    """The last sync, until it is recorded."""
    _batch_ref: Ref[PackedGroups] | None = None
    """The batch that is being trained, until samples of it are kept."""

    def __post_init__(self) -> None:
        """Nothing is recorded yet."""
        self.records = Records(self.cfg, self.display, self.telemetry)

    def finished(self, step: int) -> bool:
        """Whether the loop ends after `step`: all steps done, or a stop was asked for and nothing is lost by it."""
        return step >= self.cfg.train.num_steps or (self.stop.is_set() and self.saver.step == step)

    def watch(self, deaths: Coroutine[object, object, NoReturn]) -> None:
        """Have the deaths of a role watched; the next wait for a batch raises what cannot be recovered from."""
        self._deaths.append(asyncio.create_task(deaths, name="watch of a role"))

    def produce(self) -> None:
        """Start production in the background; the next wait for a batch raises what ends it."""
        self._production = asyncio.create_task(self._produce(), name="production")

    async def _produce(self) -> None:
        await self.producer.run()

    async def take_batch(self, step: int) -> Batch:
        """Return (status, ref of the batch) of `step`; the ref is None when there is no batch, also on a stop."""
        return await self._batch(self.producer.take_batch(step))

    async def produce_batch(self, step: int) -> Batch:
        """Return the same where nothing produces in the background: groups are generated until the batch is there."""
        return await self._batch(self.producer.produce_batch(step))

    async def _batch(self, taking: Awaitable[Batch]) -> Batch:
        try:
            status, batch_ref = await self.while_producing(self.load.take(taking))
            self.saver.check()
            if self._checking is not None:
                await self._checking
        except StoppedError:
            return STOPPED, None
        self._batch_ref = batch_ref if status.num_groups else None
        return status, self._batch_ref

    async def acknowledge(self, step: int) -> None:
        """Record that the batch of `step` is trained, but for what the trainer left out.

        Where a sync follows, it ends at once, and what needs the ranks or the version waits for the record and that.
        """
        acknowledged = self.producer.acknowledge(step, self.trainer.left_out)
        if not self.cfg.sync_due(step):
            return await acknowledged
        self._left = self.cfg.placement == "colocate" and self.swaps(step) and not self.save_due(step)

        async def both() -> None:
            await asyncio.gather(self.broadcaster.prepare(step, self._left), acknowledged)

        self._preparing = asyncio.create_task(both(), name=f"preparation of version {step}")

    async def while_producing(self, work: Awaitable[T]) -> T:
        """Return the result of `work`. Raises what ended production before it, and StoppedError on a stop."""
        ends: list[Awaitable[NoReturn]] = [stopped(self.stop, "stopped while production was waited for")]
        ends += [watching(one) for one in self._deaths]
        if self._production is not None:
            ends.append(production_ended(self._production))
        return await unless(work, *ends)

    async def restore(self) -> int:
        """Continue from the run folder's last checkpoint; the step it was saved after, 0 without one.

        A run without one begins with the weights that it is told to.
        """
        self.saver.pace.saved(took_s=0.0)
        self._watching = asyncio.create_task(self.space.watch(), name="space of the run folder")
        found = self.checkpoints.latest(verify=False)  # the driver did so before anything started
        if found is None:
            if (start := self.cfg.checkpoint.start_from) is not None:
                await self.trainer.begin_from(start, optimizer=self.cfg.checkpoint.start_optimizer)
                self.display.phase(f"beginning with the weights of {start}")
            return 0
        step, path = found
        before = sampled_before(self.cfg.run_dir)
        await asyncio.gather(self.trainer.load(path), self.producer.load(str(path)))
        await self._tell_regenerated(before, step)
        self.saver.step = step
        self.display.phase(f"continuing after step {step} from {path}")
        return step

    async def _tell_regenerated(self, before: int, step: int) -> None:
        """Record how many groups the run had sampled since the checkpoint of `step`: they are generated again."""
        again = before - (await self.producer.counts()).sampled
        if again > 0:
            facts = {"count": again, "after": f"the run was continued after step {step}"}
            await self.telemetry.log_incident(Incident.GROUPS_REGENERATED, facts)

    async def pause(self, step: int) -> None:
        """Stop production for the sync after `step`.

        An evaluation under way is waited for first, where another follows this pause.
        """
        if self.cfg.eval_due(step):
            await self.evaluated()
        self._served, self.load.paused = None, True
        await self.producer.pause(self.cfg.pause_mode(step, saving=self.save_due(step)))

    async def prepare(self, version: int) -> None:
        """Bring `version` close to the engines that will hold it. Production goes on, also if this fails."""
        if not await self._prepared():
            await self.broadcaster.prepare(version, self._left)
        # Not at the same time: publishing is a collective of the ranks.
        if self.evaluation_broadcaster is not None and self.cfg.eval_due(version):
            await self.evaluation_broadcaster.prepare(version)

    async def _prepared(self) -> bool:
        """Wait for the preparation under way; return whether there was one. Raises what it raised."""
        begun, self._preparing = self._preparing, None
        if begun is not None:
            await begun
        return begun is not None

    def save_due(self, step: int) -> bool:
        """Whether a checkpoint is written after `step`: as configured, for the time that has passed, or on a stop.

        Asked again for the same step, it gives the same answer, unless a stop came. Not while ranks have no devices.
        """
        if self._left:
            return False
        if step != self._asked_step:
            late = self.saver.pace.due() and not self.saver.is_writing
            self._asked_step, self._late = step, late
        is_new = step > self.saver.step
        return self.stop.is_set() or (is_new and (self._late or self.cfg.save_due(step)))

    def swaps(self, step: int) -> bool:
        """Whether `step` asks for newer weights and nothing else, and what is frozen meanwhile may stay."""
        if self.cfg.eval_due(step) or self.finished(step):
            return False
        # Where engines and ranks take turns, nothing is frozen, and a checkpoint is taken before.
        turns = self.cfg.placement == "colocate"
        return turns or self.cfg.pause_mode(step, saving=self.save_due(step)) == "keep"

    async def swap(self, version: int) -> None:
        """Bring `version` into every rollout worker; production stands still for the load alone.

        The workers' acknowledgements and logprobs are compared while they serve, before a batch is handed out.
        """
        start = time.monotonic()
        await self.gang.guard(lambda: self._swap(version))
        self._served, self.load.paused = version, False
        self.records.last[metrics.SYNC_S] = seconds = time.monotonic() - start
        checking = self._check(version, seconds)
        self._checking = asyncio.create_task(checking, name=f"check of version {version}")

    async def _swap(self, version: int) -> None:
        """Prepare a version and load it; where nothing is generated meanwhile, the load waits for it at the pool."""
        loading: asyncio.Task[None] | None = None
        stays = self.cfg.placement == "colocate" and not self._left
        if self.cfg.generates_in_turn and not stays:
            waits = self.producer.swap(version, self.cfg.publish_timeout_s)
            loading = self._loading = asyncio.create_task(waits, name=f"load of version {version}")
        try:
            await self.prepare(version)
            if stays:
                await self.trainer.offload()
            if loading is not None:
                await asyncio.wait({loading})
            if loading is None or loading.cancelled():
                await self.producer.swap(version)
            else:
                loading.result()
        finally:
            await self._load_no_more()

    async def _load_no_more(self) -> None:
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.cancel()
            await asyncio.wait({loading})

    async def settle(self) -> None:
        """End what waits for the ranks, which are being brought back, and wait for a checkpoint being written.

        A load that waits keeps production from being paused; it is begun again once its version is there.
        """
        await self._load_no_more()
        await self.saver.settle()

    async def broadcast(self, version: int) -> None:
        """Bring `version` into every rollout worker, verified. Production must be paused.

        Where it resumes at once, the workers answer the canary prompt while they serve, and no batch is handed out
        before their answers are compared.
        """
        await self._prepared()
        at_once = not (self.cfg.eval_due(version) or self.finished(version))
        self._sync = await self.broadcaster.broadcast(version, check=not at_once)
        self.records.last[metrics.SYNC_S] = self._sync.seconds

    async def resume(self, version: int) -> None:
        """Let production go on with `version`, unless it does; its sync is checked and recorded meanwhile."""
        if self._served == version:
            return
        begin = time.monotonic()
        await self.producer.resume(version)
        self._served, self.load.paused = version, False
        if self._sync is not None:
            self._sync = replace(self._sync, resume_s=time.monotonic() - begin)
        self._checking = asyncio.create_task(self._check(version), name=f"check of version {version}")

    async def _check(self, version: int, swapped_s: float | None = None) -> None:
        """Check and record the sync of a version that is served; `swapped_s`: how long it took, if it was a swap."""
        await asyncio.sleep(CHECK_AFTER_S)
        if swapped_s is not None:
            self._sync = replace(await self.broadcaster.check(version), seconds=swapped_s)
        elif self._sync is not None:
            self._sync = await self.broadcaster.check(version)
        # Taken now: when it is recorded, the next sync may be under way.
        report, self._sync = self._sync, None
        await self.records.served(report, self.pool.states())

    async def save(self, step: int) -> None:
        """Take one checkpoint of the whole run, which is written meanwhile. Production must be paused."""
        await self._prepared()  # not at the same time: both are collectives of the ranks
        await self.gang.guard(lambda: self.saver.save(step))

    async def saved(self) -> None:
        """Wait until the last checkpoint is durable; one that was given up is taken again. Raises CheckpointError."""
        await self.saver.written()
        if self.saver.given_up:
            await self.gang.guard(self.saver.take_again)

    async def engines_to_ranks(self, step: int) -> None:
        """Colocated: engines give the shared devices to the ranks. Production must be paused.

        `step` is the step to be trained now: where a sync follows it, engines need not keep their weights.
        """
        await self.pool.sleep(keep_weights=not self.cfg.sync_due(step))
        await self.trainer.reload()
        self._left = False

    async def evaluate(self, step: int) -> None:
        """Score held-out problems with the version of `step`, unless a stop was asked for.

        Production must be paused. Where evaluation has engines of its own, they take that version now and are asked
        while production goes on.
        """
        await self.evaluated()
        if self.evaluator is None or self.cfg.eval.num_prompts == 0 or self.stop.is_set():
            return
        if self.evaluation_broadcaster is not None:
            self.checkpoints.await_score(step)
            await self.evaluation_broadcaster.broadcast(step)
        scoring = self._score(self.evaluator, step)
        self._evaluation = asyncio.create_task(scoring, name=f"evaluation of step {step}")
        if self.evaluation_broadcaster is None:
            await self.evaluated()

    async def evaluated(self) -> None:
        """Wait for the evaluation under way, if there is one; a stop cancels it. Raises what it raised."""
        if self._evaluation is None:
            return
        try:
            await unless(
                self._evaluation, stopped(self.stop, f"the {self._evaluation.get_name()} has no scores")
            )
        except StoppedError as stop:
            log.warning("a stop was asked for: %s", stop)
        self._evaluation = None

    async def _score(self, evaluator: EvaluatorRole, step: int) -> None:
        scores = await evaluator.evaluate(step)
        self.checkpoints.record_score(step, scores.get(metrics.HELD_OUT))
        await self.records.evaluation(step, scores)

    async def log(self, step: int, status: TakeStatus, trained: dict[str, float]) -> None:
        """Record one train step and show it. Raises what an evaluation under way raised meanwhile."""
        if self._evaluation is not None and self._evaluation.done():
            self._evaluation.result()
        batch_ref, self._batch_ref = self._batch_ref, None
        # Engines and ranks wait for what is prepared, and for the record nobody does.
        await self.records.step(step, status, trained, batch_ref, after=self._preparing)

    async def finish(self, status: RunStatus, error: str | None) -> None:
        """Stop waiting for production and evaluation, write the report and show it, in whatever state the roles are."""
        tasks = (
            self._production,
            self._evaluation,
            self._preparing,
            self._checking,
            self._watching,
            *self._deaths,
        )
        background = [task for task in tasks if task is not None]
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await self.saver.settle()
        # The run is over: what it measured must reach the disk, with or without the others.
        counts = await last_call("the producer gave no final counts", self.producer.counts())
        await self.records.settle(LAST_CALL_S)
        await last_call("the last sync is not recorded", self.records.sync(self._sync))
        if counts is not None and not counts.sampled:
            counts = None  # nothing was restored or begun: what the run counted before stands
        report = await self.telemetry.finish(status, error, counts)
        self.display.finish(report, self.cfg.run_dir)
