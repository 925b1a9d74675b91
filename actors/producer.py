"""ProducerActor: hosts raypost.production.producer with its samplers and the ledger, and talks to the other roles.

`take_batch` gives a small status, which the driver reads, and the ref of the batch, which the driver passes on
unopened, as this actor does. `save` and `load` write and read the checkpoint here, so that nothing large passes
the driver.

Its process may die at any time. Ray starts it again with the same arguments, and before it answers its first call it
has made itself what it was (raypost.production.restore), from the ledger's journal in the run folder and the buffer.
Every method is idempotent, so a call that met the death is made again. Where the buffer came back without all that it
held, the process ends itself, to do the same.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

from actors.remote import ACTOR_ERRORS, Watched, deaths
from raypost.checkpoint import EncodedState, encode_state, load_state
from raypost.config import Config
from raypost.data.prompt import render
from raypost.data.sampler import Sampler
from raypost.data.task_source import build_source
from raypost.data.tokenizer import Tokenizer
from raypost.errors import BufferCutError
from raypost.ledger.ledger import LEDGER_FILE, Ledger
from raypost.ledger.replay import continued
from raypost.observe.spans import Span, SpanLog
from raypost.production.build import allocation_of, strategy_of
from raypost.production.producer import Producer, TaskRuntime
from raypost.types import AgentLoop, Buffer, GroupCounts, GroupKey, Rebuilt, Ref, SwapControl, TakeStatus
from raypost.types.packed import PackedGroups
from raypost.types.pause import PauseMode

STATE_FILE = "producer"
log = logging.getLogger(__name__)


class CutBuffer:
    """The replay buffer, whose loss of a part of what it held ends this process."""

    def __init__(self, buffer: Buffer[Ref[PackedGroups]]) -> None:
        """Pass all calls on to `buffer`."""
        self._buffer = buffer

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return the buffer's method."""
        call = getattr(self._buffer, method)

        async def called(*args: Any) -> Any:
            try:
                return await call(*args)
            except BufferCutError as error:
                log.error("the producer starts again, to make the replay buffer whole: %s", error)
                os._exit(1)

        return called


class ProducerActor(Watched):
    """Continuous production of groups, and the consumer's side of it."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        agent_loop: AgentLoop,
        buffer: Buffer[Ref[PackedGroups]],
        control: SwapControl,
        attempt: str,
    ) -> None:
        """Read the tokenizer and the sources; production starts with `run` and the first `resume`.

        `attempt` names this start of the job.
        """
        self._config = config
        self._attempt = attempt
        self._buffer = cast(Buffer[Ref[PackedGroups]], CutBuffer(buffer))
        self._spans = SpanLog("producer")
        self._control = control
        self._taken: tuple[str, EncodedState | None] = "", None
        """What a checkpoint holds of production, and for which folder; None once it is written."""
        tokenizer = Tokenizer.load(model_path)
        tasks: list[TaskRuntime] = []
        for task in config.tasks:
            sampler = Sampler(
                task,
                build_source(task, config.seed, tokenizer),
                functools.partial(render, tokenizer=tokenizer, task=task),
                tokenizer.eos_ids,
                config.seed,
            )
            tasks.append(TaskRuntime(task, sampler, agent_loop, strategy_of(task, config)))
        self._tasks = tasks
        self._producer: Producer[Ref[PackedGroups]] | None = None
        self._making = asyncio.Lock()
        self._rebuilt = Rebuilt()

    def __repr__(self) -> str:
        """Return the name in logs."""
        return "producer"

    async def _ready(self) -> Producer[Ref[PackedGroups]]:
        """Return the producer, once it is what it was if its process died."""
        async with self._making:
            if self._producer is None:
                self._producer = await self._made(deaths())
            return self._producer

    async def _made(self, deaths: int) -> Producer[Ref[PackedGroups]]:
        config = self._config
        journal = config.run_dir / LEDGER_FILE
        patience_s = config.checkpoint.retry_s
        if deaths:
            ledger = continued(journal, self._attempt, patience_s=patience_s, fsync=config.checkpoint.fsync)
        else:
            ledger = Ledger(
                journal, attempt=self._attempt, patience_s=patience_s, fsync=config.checkpoint.fsync
            )
        producer = Producer(
            self._tasks,
            self._buffer,
            self._control,
            ledger,
            allocation_of(config),
            pause_timeout_s=config.rollout.pause_timeout_s,
            take_timeout_s=config.take_timeout_s,
            num_slots=config.rollout.num_slots,
            retryable=ACTOR_ERRORS,
        )
        if deaths:
            self._rebuilt = await producer.rebuild(deaths)
        return producer

    async def rebuilt(self) -> Rebuilt:
        """Return what was done with the groups that were in flight when the process before this one died."""
        await self._ready()
        return self._rebuilt

    async def run(self) -> None:
        """Produce for ever. Returns only by raising what made production impossible."""
        await (await self._ready()).run()

    async def take_batch(self, step: int) -> tuple[TakeStatus, Ref[PackedGroups] | None]:
        """Lease the batch of `step`: (status, its ref or None). Asked twice, the same batch."""
        return await (await self._ready()).take_batch(step)

    async def produce_batch(self, step: int) -> tuple[TakeStatus, Ref[PackedGroups] | None]:
        """Produce until the batch of `step` is there, then lease it. For jobs that do not call `run`."""
        producer = await self._ready()
        await producer.produce_batch(step)
        return await producer.take_batch(step)

    async def acknowledge(self, step: int, left_out: dict[GroupKey, str] | None = None) -> None:
        """Record that the batch of `step` is trained, but for the groups that the trainer left out."""
        await (await self._ready()).acknowledge(step, left_out)

    async def pause(self, mode: PauseMode) -> float:
        """Stop production as `mode` says; returns the seconds it took."""
        with self._spans.span("pause"):
            return await (await self._ready()).pause(mode)

    async def resume(self, version: int) -> None:
        """Produce with `version`."""
        producer = await self._ready()
        for task in self._tasks:
            # Processes that read ahead take seconds to start, which must not hold up this actor's other calls.
            await asyncio.to_thread(task.sampler.start)
        await producer.resume(version)

    async def go_on(self) -> None:
        """Have the rollout pool serve again, if production is not paused."""
        await (await self._ready()).go_on()

    async def swap(self, version: int, wait_s: float = 0.0) -> None:
        """Go on with `version`, which the pool has staged, or will have after `wait_s` at most."""
        with self._spans.span("pause"):
            await (await self._ready()).swap(version, lambda one: self._control.swap(one, wait_s))

    async def resize(self, num_slots: int) -> None:
        """Have so many groups in flight as `num_slots` sequences of all engines need."""
        (await self._ready()).resize(num_slots)

    async def counts(self) -> GroupCounts:
        """Return where every group is."""
        return await (await self._ready()).counts()

    async def save(self, folder: str, step: int) -> None:
        """Take progress, samplers, buffer and ledger as of `step`, for `write_saved`. Production must be paused."""
        state = await (await self._ready()).state_dict(step)
        self._taken = folder, encode_state(STATE_FILE, state)

    async def write_saved(self, folder: str) -> bool:
        """Write what `save` took for `folder`, durably, while production goes on; False if nothing was taken for it.

        Repeated after a success, it writes nothing.
        """
        taken_for, state = self._taken
        if taken_for != folder:
            return False
        if state is not None:
            await asyncio.to_thread(state.write, Path(folder))
            self._taken = folder, None
        return True

    async def load(self, folder: str) -> None:
        """Restore what `save` wrote; production stays paused until `resume`."""
        producer = await self._ready()
        await producer.load_state_dict(load_state(Path(folder), STATE_FILE))

    async def drain_spans(self) -> list[Span]:
        """Return the pauses since the last call."""
        return self._spans.drain()
