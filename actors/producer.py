"""ProducerActor: hosts raypost.production.producer with its samplers and the ledger, and talks to the other roles.

`take_batch` gives a small status, which the driver reads, and the ref of the batch, which the driver passes on
unopened, as this actor does. `save` and `load` write and read the checkpoint here, so that nothing large passes
the driver.
"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

from actors.remote import ACTOR_ERRORS
from raypost.checkpoint import CheckpointDir
from raypost.config import Config
from raypost.data.prompt import render
from raypost.data.sampler import Sampler
from raypost.data.task_source import build_source
from raypost.data.tokenizer import Tokenizer
from raypost.ledger.ledger import LEDGER_FILE, Ledger
from raypost.packed import PackedGroups
from raypost.pause import PauseMode
from raypost.production.build import allocation_of, strategy_of
from raypost.production.producer import Producer, TaskRuntime
from raypost.protocols import AgentLoop, Buffer, SwapControl, TakeStatus
from raypost.spans import SpanLog
from raypost.types import GroupCounts, Ref, Span

STATE_FILE = "producer"


class ProducerActor:
    """Continuous production of groups, and the consumer's side of it."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        agent_loop: AgentLoop,
        buffer: Buffer[Ref[PackedGroups]],
        control: SwapControl,
    ) -> None:
        """Read the tokenizer and the sources; production starts with `run` and the first `resume`."""
        self._spans = SpanLog("producer")
        self._control = control
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
        self._samplers = [task.sampler for task in tasks]
        self._producer = Producer(
            tasks,
            buffer,
            control,
            Ledger(config.run_dir / LEDGER_FILE),
            allocation_of(config),
            pause_timeout_s=config.rollout.pause_timeout_s,
            take_timeout_s=config.take_timeout_s,
            num_slots=config.rollout.num_slots,
            retryable=ACTOR_ERRORS,
        )

    def __repr__(self) -> str:
        """Return the name in logs."""
        return "producer"

    async def run(self) -> None:
        """Produce for ever. Returns only by raising what made production impossible."""
        await self._producer.run()

    async def take_batch(self, step: int) -> tuple[TakeStatus, Ref[PackedGroups] | None]:
        """Lease the batch of `step`: (status, its ref or None). Asked twice, the same batch."""
        return await self._producer.take_batch(step)

    async def produce_batch(self, step: int) -> tuple[TakeStatus, Ref[PackedGroups] | None]:
        """Produce until the batch of `step` is there, then lease it. For jobs that do not call `run`."""
        await self._producer.produce_batch(step)
        return await self._producer.take_batch(step)

    async def acknowledge(self, step: int) -> None:
        """Record that the batch of `step` is trained."""
        await self._producer.acknowledge(step)

    async def pause(self, mode: PauseMode) -> float:
        """Stop production as `mode` says; returns the seconds it took."""
        with self._spans.span("pause"):
            return await self._producer.pause(mode)

    async def resume(self, version: int) -> None:
        """Produce with `version`."""
        for sampler in self._samplers:
            # Processes that read ahead take seconds to start, which must not hold up this actor's other calls.
            await asyncio.to_thread(sampler.start)
        await self._producer.resume(version)

    async def swap(self, version: int) -> None:
        """Go on with `version`, which the pool has staged."""
        with self._spans.span("pause"):
            await self._producer.swap(version, self._control.swap)

    async def counts(self) -> GroupCounts:
        """Return where every group is."""
        return await self._producer.counts()

    async def save(self, folder: str, step: int) -> None:
        """Write progress, samplers, buffer and ledger as of `step`. Production must be paused."""
        CheckpointDir.save_state(Path(folder), STATE_FILE, await self._producer.state_dict(step))

    async def load(self, folder: str) -> None:
        """Restore what `save` wrote; production stays paused until `resume`."""
        await self._producer.load_state_dict(CheckpointDir.load_state(Path(folder), STATE_FILE))

    async def drain_spans(self) -> list[Span]:
        """Return the pauses since the last call."""
        return self._spans.drain()
