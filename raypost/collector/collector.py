"""Collector: turns and trajectories as an iterator, or as what fills a buffer or a queue.

Owns the cut of groups into batches, the turn limits, and what policy versions are called outside. Owns no
production: groups come from a Producer of its own, which also pauses and resumes for new weights.

    Producer -> take -> groups -> trajectories | turns | last turns -> batches -> postproc -> caller, buffer, queue

Invariants: `total_dialog_turns` counts turns that were generated, also those that `yield_only_last_steps` keeps
back; a turn is delivered once; a failure of production reaches the caller; after the end nothing is pending.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Unpack

from raypost.agent_loop.threads import LoopThread, SideThread
from raypost.buffer.replay_buffer import ReplayBuffer
from raypost.collector.dialog_turn import DialogTurn, Item, PolicyVersion
from raypost.collector.options import DEFAULTS, CollectorOptions, check_options
from raypost.errors import ConfigError, ProductionError
from raypost.ledger.ledger import Ledger
from raypost.production.allocation import Allocation
from raypost.production.producer import Producer, TaskRuntime
from raypost.types import GroupCounts, RolloutControl, RolloutState
from raypost.types.packed import unpack_groups
from raypost.types.turns import Turn, turns_of

_END: Any = object()


class Collector:
    """Collects from tasks. Iterate over it with `async for`, or with `for`, which runs it in a thread.

    Every callable and sink may be plain or asynchronous; plain ones run in threads of their own. Outside a
    `with`, leaving the loop closes the collector.
    """

    def __init__(
        self,
        tasks: Sequence[TaskRuntime],
        control: RolloutControl,
        *,
        batch_size: int = 1,
        **options: Unpack[CollectorOptions],
    ) -> None:
        """Make a collector of `batch_size` groups a train step, over all tasks.

        Raises ConfigError for options that exclude each other.
        """
        options = DEFAULTS | options
        check_options(options)
        if batch_size < 1:
            raise ConfigError(f"batch_size must be >= 1 group, got {batch_size}")
        self._tasks = tasks
        self._options = options
        self._last_only = options["yield_only_last_steps"]
        self._whole = not self._last_only and bool(options.get("yield_completed_trajectories"))
        self._per_batch = options.get("dialog_turns_per_batch")
        self._total = options["total_dialog_turns"]
        self._buffer = options.get("replay_buffer")
        self._queue = options.get("queue")
        self._version = options["policy_version"]
        self._namespace = uuid.uuid4()
        ledger = options.get("ledger")
        self._ledger = Ledger() if ledger is None else ledger
        self.producer = Producer(
            tasks,
            ReplayBuffer({task.config.name: task.strategy.limits for task in tasks}),
            control,
            self._ledger,
            Allocation([task.config for task in tasks], batch_size),
            pause_timeout_s=options["pause_timeout_s"],
            take_timeout_s=options["take_timeout_s"],
            retryable=options["retryable"],
        )
        """What makes the groups."""
        self.num_turns = 0
        """Turns delivered; with `yield_only_last_steps` all turns of the trajectories delivered."""
        self._step = 0
        self._ready: deque[tuple[Item, int]] = deque()
        self._batch: list[Item] = []
        self._filled = 0
        self._running: asyncio.Task[None] | None = None
        self._updating = asyncio.Lock()
        self._side = SideThread("sink of a collector")
        # A sink that is full must not keep the weights waiting: whoever updates may be the one who empties it.
        self._updates = SideThread("weights of a collector")
        self._thread: LoopThread | None = None
        self._entered = self._closed = False

    # ---------------------------------------------------------------- iteration

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Batches, until `total_dialog_turns`. Raises what ended production."""
        try:
            while (delivered := await self._next()) is not _END:
                yield delivered
        finally:
            if not self._entered:
                await self.aclose()

    def __iter__(self) -> Iterator[Any]:
        """Iterate without an event loop: production goes on while they work on a batch."""
        try:
            while (delivered := self._own_thread().submit(self._next()).result()) is not _END:
                yield delivered
        finally:
            if not self._entered:
                self.close()

    async def fill(self) -> int:
        """Deliver everything to the buffer or queue; `num_turns` at the end. Raises what ended production."""
        if self._buffer is None and self._queue is None:
            raise ConfigError("fill needs a replay_buffer or a queue to deliver to: give one, or iterate")
        async for _ in self:
            pass
        return self.num_turns

    def start(self) -> Future[int]:
        """`fill` in the background of a caller without an event loop; its result, or what ended production."""
        return self._own_thread().submit(self.fill())

    async def _next(self) -> Any:
        """Return the next batch, delivered, or _END. Cancelled while it waits, it goes on when called again."""
        await self._begin()
        while not self._is_full():
            if not self._ready:
                if self._batch and self._per_batch is None:
                    break
                self._ready.extend(await self._take())
            item, turns = self._ready.popleft()
            self._batch.append(item)
            self._filled += 1 if self._last_only else turns
            self.num_turns += turns
        batch = self._batch
        self._batch = []
        self._filled = 0
        return await self._deliver(batch) if batch else _END

    def _is_full(self) -> bool:
        full = self._per_batch is not None and self._filled >= self._per_batch
        return full or 0 <= self._total <= self.num_turns

    async def _take(self) -> list[tuple[Item, int]]:
        """Return the items of the next step's groups, each with the number of turns it stands for."""
        if self._step:
            await self.producer.acknowledge(self._step)
        _, packed = await self.producer.take_batch(self._step + 1)
        if packed is None:
            raise ProductionError(
                f"step {self._step + 1} would be older than max_staleness allows with policy version "
                f"{self._version}: call update_policy after every batch, or give no batch_size"
            )
        self._step += 1
        states = [state for group in unpack_groups(packed) for state in group.states]
        return [entry for state in states for entry in self._items(state)]

    def _items(self, state: RolloutState) -> list[tuple[Item, int]]:
        turns = turns_of(state)
        if self._whole:
            return [(state, len(turns))]
        if self._last_only:
            return [(self._dialog_turn(state, turns, len(turns) - 1), len(turns))]
        return [(self._dialog_turn(state, turns, index), 1) for index in range(len(turns))]

    def _dialog_turn(self, state: RolloutState, turns: list[Turn], index: int) -> DialogTurn:
        versions = state.policy_versions[turns[index].start : turns[index].end]
        return DialogTurn(
            trajectory=state,
            index=index,
            turn=turns[index],
            is_last=index == len(turns) - 1,
            policy_version=self.version_id(int(versions.min())) if len(versions) else None,
        )

    async def _deliver(self, batch: list[Item]) -> Any:
        postproc = self._options.get("postproc")
        made = batch if postproc is None else await self._side.call(postproc, batch)
        if self._buffer is not None:
            await self._side.call(self._buffer.extend, made)
            return None
        if self._queue is not None:
            for item in made:
                await self._side.call(self._queue.put, item)
            return None
        return made

    # ---------------------------------------------------------------- policy

    @property
    def policy_version(self) -> PolicyVersion:
        """The version that production works with."""
        return self.version_id(self._version)

    def version_id(self, version: int) -> PolicyVersion:
        """Return the name that a version has outside of the collector."""
        if self._options["version_type"] == "int":
            return version
        return uuid.uuid5(self._namespace, str(version))

    async def update_policy(self, version: int | None = None) -> PolicyVersion:
        """Pause, bring the weights of `version` (None: the next) to the generator, go on. What it is called.

        Trajectories that are interrupted go on with the new weights. If `weight_updater` fails, production goes
        on with the old version and the error is raised.
        """
        await self._begin()
        updater = self._options.get("weight_updater")
        async with self._updating:
            version = self._version + 1 if version is None else version
            try:
                await self.producer.pause(self._options["pause_mode"])
                if updater is not None:
                    await self._updates.call(updater, version)
            except BaseException as error:
                await self._resume_after(error)
                raise
            await self.producer.resume(version)
            self._version = version
            return self.policy_version

    async def _resume_after(self, error: BaseException) -> None:
        try:
            await self.producer.resume(self._version)
        # The error that comes first is the one that is raised.
        except Exception as second:
            error.add_note(f"production could not go on with version {self._version} either: {second!r}")

    def update_policy_and_wait(self, version: int | None = None) -> PolicyVersion:
        """`update_policy` for callers without an event loop."""
        return self._own_thread().submit(self.update_policy(version)).result()

    async def counts(self) -> GroupCounts:
        """Where every group is; a delivered one counts as trained once the next is asked for."""
        return await self.producer.counts()

    # ---------------------------------------------------------------- begin and end

    async def _begin(self) -> None:
        if self._closed:
            raise ProductionError("this collector is closed: make a new one")
        if self._running is None:
            self._running = asyncio.create_task(self.producer.run(), name="production of a collector")
            await self.producer.resume(self._version)

    def _own_thread(self) -> LoopThread:
        if self._closed:
            raise ProductionError("this collector is closed: make a new one")
        if self._running is not None and self._thread is None:
            raise ProductionError(
                "this collector runs in an event loop: use async for, and await its methods"
            )
        if self._thread is None:
            self._thread = LoopThread("collector")
        return self._thread

    async def aclose(self) -> None:
        """Cancel what is in flight and end production. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self.producer.close()
        for task in self._tasks:
            task.sampler.close()
        self._ledger.flush()
        self._side.end()
        self._updates.end()

    def close(self) -> None:
        """`aclose` for callers without an event loop. Idempotent."""
        if self._closed and self._thread is None:
            return
        thread = self._thread or self._own_thread()
        thread.submit(self.aclose()).result()
        thread.stop()
        self._thread = None

    async def __aenter__(self) -> Collector:
        """Keep the collector open until the block ends."""
        self._entered = True
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the collector."""
        await self.aclose()

    def __enter__(self) -> Collector:
        """Keep the collector open until the block ends."""
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        """Close the collector."""
        self.close()
