"""A world for production without Ray: an event loop whose clock jumps, and a scripted rollout pool.

`virtual(main())` runs a coroutine under a virtual clock: as soon as nothing else can happen, time jumps to
the next timer, so a test that waits an hour takes no time, and a deadlock is an error at once.
"""

from __future__ import annotations

import asyncio
import functools
import math
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np

from raypost.buffer.journal import BufferJournal
from raypost.buffer.replay_buffer import ReplayBuffer
from raypost.config import AgentLoopConfig, JudgeConfig, SourceConfig, StrategyConfig, TaskConfig
from raypost.data.sampler import Sampler
from raypost.errors import NoWorkersError, StaleWeightsError
from raypost.ledger.ledger import Ledger
from raypost.production.allocation import Allocation, WeightFunction
from raypost.production.pending import PendingSet
from raypost.production.producer import Producer, TaskRuntime
from raypost.production.progress import ProduceProgress
from raypost.production.strategy import AsyncProduceStrategy, build_strategy
from raypost.types import (
    BufferBounds,
    BufferCounts,
    Group,
    GroupKey,
    Lease,
    RolloutState,
    SampleParams,
    Status,
    TakeStatus,
)
from raypost.types.packed import PackedGroups
from raypost.types.pause import PauseMode
from tests.unit.prompts import STOP, Numbers, encode

T = TypeVar("T")


class _JumpSelector(selectors.DefaultSelector):
    """Instead of waiting for a timer, makes it due."""

    loop: VirtualClockLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("deadlock: every task waits, and no timer is set")
        if not ready and timeout:
            # At large times a short wait may vanish in rounding, and its timer would never come.
            self.loop.now = max(self.loop.now + timeout, math.nextafter(self.loop.now, math.inf))
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop that never sleeps, and that does the same each time.

    It holds its tasks: asyncio does not, so one that waits for ever would end when the garbage collector comes by.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.alive: dict[asyncio.Task[Any], None] = {}
        """Tasks that have not ended, in the order in which they began."""
        selector = _JumpSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def create_task(self, *args: Any, **options: Any) -> asyncio.Task[Any]:
        task = super().create_task(*args, **options)
        self.alive[task] = None
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        del self.alive[task]


def virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` under a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)


class HostDied(Exception):
    """Stands for the error a caller sees when the actor that ran its call is gone."""


class Pool:
    """Rollout pool and agent loop in one: a member takes `seconds`, a token each; a pause interrupts it
    (abort), freezes it (keep), or waits for it. `member(state)` says whether the world fails it at its end, and
    how.

    `fate(group)` says what becomes of a group: "ok", "uniform", "failed", "died", "bug", "no workers", "hang" (does not
    react to a pause until cancelled) or "stubborn" (not even to the first cancellation).
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.paused = asyncio.Event()
        self.paused.set()
        self.mode: PauseMode | None = "abort"
        self.resumed = asyncio.Event()
        self.generating = 0
        self.pauses = 0
        self.lost_pauses = 0
        self.seconds: Callable[[Group], int] = lambda group: 1 + group.group_id % 3
        self.fate: Callable[[Group], str] = lambda group: "ok"
        self.swap_s = 0.0
        self.member: Callable[[RolloutState], str | None] = lambda state: None
        self.started: list[int] = []
        self.interrupts = 0
        self.forgotten: list[GroupKey] = []

    async def pause(self, mode: PauseMode = "abort") -> None:
        self.pauses += 1
        if self.pauses <= self.lost_pauses:
            return
        self.mode = mode
        if mode == "abort":
            self.resumed.set()  # what is frozen comes back
        else:
            self.resumed.clear()
        while mode == "wait" and self.generating and self.mode == "wait":
            await asyncio.sleep(0.5)
        self.paused.set()

    async def resume(self, version: int) -> None:
        if self.version is not None and version < self.version:
            raise StaleWeightsError(f"the pool holds {self.version}")
        self.version, self.mode = version, None
        self.paused.clear()
        self.resumed.set()

    async def swap(self, version: int) -> None:
        await self.pause("keep")
        await asyncio.sleep(self.swap_s)
        await self.resume(version)

    async def interrupt(self) -> None:
        self.interrupts += 1

    async def forget(self, keys: Sequence[GroupKey]) -> None:
        self.forgotten += keys

    async def run(self, group: Group) -> Group:
        self.started.append(group.group_id)
        self.generating += 1
        try:
            return await self._run(group)
        finally:
            self.generating -= 1

    async def _run(self, group: Group) -> Group:
        fate = self.fate(group)
        if fate in ("hang", "stubborn"):
            await self._hang(stubborn=fate == "stubborn")
        if fate == "died":
            raise HostDied(f"group {group.group_id}")
        if fate == "bug":
            raise ZeroDivisionError(f"group {group.group_id}")
        if fate == "no workers":
            raise NoWorkersError(f"group {group.group_id}")
        todo = [state for state in group.states if state.status is not Status.COMPLETED]
        await asyncio.gather(*(self._generate(state, self.seconds(group), fate) for state in todo))
        return group

    async def _hang(self, *, stubborn: bool) -> None:
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            if not stubborn:
                raise
            await asyncio.sleep(1e6)

    async def _generate(self, state: RolloutState, length: int, fate: str) -> None:
        if state.status is Status.EXPIRED:
            state.reset()
        clock = asyncio.get_running_loop().time
        while state.num_tokens < length:
            if self.mode == "keep" and self.paused.is_set():
                await self.resumed.wait()
            if self.paused.is_set():
                state.status, state.finish_reason = Status.ABORTED, "abort"
                state.num_aborts += 1
                return
            version, began = self.version, clock()
            missing = length - state.num_tokens
            try:
                async with asyncio.timeout(missing):
                    await self.paused.wait()
            except TimeoutError:
                pass
            finally:
                # One timer for all of them; a token that is due within the clock's rounding is there.
                made = min(int(clock() - began + 1e-6), missing)
                assert version is not None
                ones = np.ones(made, np.int32)
                state.append_segment(ones, -ones.astype(np.float32), ones * version)
        failure = "scripted" if fate == "failed" else self.member(state)
        if failure is not None:
            state.status, state.error = Status.FAILED, failure
            return
        state.status, state.finish_reason = Status.COMPLETED, "stop"
        state.reward = 1.0 if fate == "uniform" else float(state.sample_index % 2)


class SlowBuffer:
    """A buffer behind a slow call: its work is done half way between the request and the answer."""

    def __init__(self, buffer: ReplayBuffer, seconds: float) -> None:
        self._buffer, self._seconds = buffer, seconds

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*args: Any) -> Any:
            await asyncio.sleep(self._seconds / 2)
            answer = await getattr(self._buffer, method)(*args)
            await asyncio.sleep(self._seconds / 2)
            return answer

        return call


class Killed(BaseException):
    """A call that ends since its process was killed."""


class Mortal:
    """A process that is killed after so many of its calls; what it called then was carried out, or was not.

    Nothing that it does afterwards is heard of: its calls never return, and its journal stays as it was.
    """

    def __init__(self, calls: int | None = None, *, carried_out: bool = False) -> None:
        self.calls, self.carried_out = calls, carried_out
        self.died = asyncio.Event()
        self.journal: list[Ledger] = []

    def kill(self) -> None:
        self.died.set()
        for ledger in self.journal:
            ledger._journal = ledger._closed = None

    def _is_last(self) -> bool:
        if self.calls is None:
            return False
        self.calls -= 1
        return self.calls < 0

    async def call(self, method: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
        if not self.died.is_set():
            if not self._is_last():
                answer = await method(*args)
                if not self.died.is_set():
                    return answer
            else:
                if self.carried_out:
                    await method(*args)
                self.kill()
        await asyncio.Event().wait()

    def of(self, role: Any) -> Any:
        """Return the role as the process calls it."""
        return _Called(self, role)

    def writes(self, ledger: Ledger) -> None:
        """Have the process die while it writes its journal too."""
        self.journal.append(ledger)
        flush = ledger.flush

        def flushed() -> None:
            if self.died.is_set():
                raise Killed
            last = self._is_last()
            if not last or self.carried_out:
                flush()
            if last:
                self.kill()
                raise Killed

        ledger.flush = flushed  # type: ignore[method-assign]


class _Called:
    def __init__(self, mortal: Mortal, role: Any) -> None:
        self._mortal, self._role = mortal, role

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        return functools.partial(self._mortal.call, getattr(self._role, method))


class Sealed:
    """A batch that must not be opened: neither awaited nor looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"the batch was opened: {name}")

    def __await__(self) -> Generator[Any, None, Any]:
        raise AssertionError("the batch was opened")


class SealedBuffer(SlowBuffer):
    """A buffer that hands its batches out sealed."""

    async def lease(self, step: int, per_task: dict[str, int]) -> Lease[Sealed] | None:
        lease = await self._buffer.lease(step, per_task)
        return None if lease is None else lease.with_batch(Sealed())

    async def then_counts(self, method: str, *args: Any) -> tuple[Any, BufferCounts]:
        return await getattr(self, method)(*args), await self.counts()


def task_config(
    name: str = "default",
    *,
    weight: float = 1.0,
    weight_schedule: dict[int, float] | None = None,
    group_size: int = 2,
    agent_loop: AgentLoopConfig | None = None,
    **strategy: Any,
) -> TaskConfig:
    # Off unless a test asks for it: a group that expires is dropped, and so is one that fails.
    strategy.setdefault("tail_batch_trigger_size", -1)
    strategy.setdefault("max_retries", 0)
    return TaskConfig(
        name=name,
        weight=weight,
        weight_schedule=weight_schedule or {},
        group_size=group_size,
        source=SourceConfig(kind="jsonl", dataset="numbers"),
        judge=JudgeConfig(kind="exact"),
        agent_loop=agent_loop or AgentLoopConfig(),
        strategy=StrategyConfig(**strategy),
    )


class World:
    """A producer with everything around it; must be made inside a running loop."""

    def __init__(
        self,
        *tasks: TaskConfig,
        batch_size: int = 2,
        interval: int = 1,
        pause_timeout_s: float = 60.0,
        size: int = 50,
        ledger: Ledger | None = None,
        journal: BufferJournal | None = None,
        pool: Pool | None = None,
        is_valid: Callable[[Group], bool] | None = None,
        should_continue: Callable[[int, int], bool] | None = None,
        buffer_call_s: float = 0.0,
        sealed: bool = False,
        bounds: BufferBounds | None = None,
        weights: WeightFunction | None = None,
        take_timeout_s: float = 3600.0,
        num_slots: int | None = None,
        buffer: ReplayBuffer | None = None,
        mortal: Mortal | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        configs = tasks or (task_config(),)
        self.pool = pool or Pool()
        self.strategies = {
            one.name: build_strategy(one.strategy, interval, is_valid, should_continue) for one in configs
        }
        limits = {name: one.limits for name, one in self.strategies.items()}
        self.buffer = buffer or ReplayBuffer(limits, bounds or BufferBounds(), journal)
        called: Any = SlowBuffer(self.buffer, buffer_call_s) if buffer_call_s else self.buffer
        if sealed:
            called = SealedBuffer(self.buffer, 0.0)
        self.ledger = ledger or Ledger()
        control: Any = self.pool
        if mortal is not None:
            called, control = mortal.of(called), mortal.of(control)
            mortal.writes(self.ledger)
        self.samplers = {one.name: Sampler(one, Numbers(size), encode, (STOP,), 0) for one in configs}
        runtimes = [
            TaskRuntime(one, self.samplers[one.name], self.pool, self.strategies[one.name]) for one in configs
        ]
        self.producer = Producer(
            runtimes,
            called,
            control,
            self.ledger,
            Allocation(configs, batch_size, weights),
            pause_timeout_s=pause_timeout_s,
            retryable=(HostDied,),
            clock=loop.time,
            take_timeout_s=take_timeout_s,
            num_slots=num_slots,
        )

    async def take(self, step: int) -> tuple[TakeStatus, PackedGroups]:
        """Take a batch that must be there."""
        status, packed = await self.producer.take_batch(step)
        assert packed is not None
        return status, packed

    def start(self) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(self.producer.run(), name="run")


def state(
    versions: list[int] | None = None,
    *,
    group_id: int = 0,
    sample_index: int = 0,
    status: Status = Status.COMPLETED,
    reward: float | None = 1.0,
    task: str = "default",
    max_tokens: int = 16,
    min_tokens: int = 0,
    prompt_ids: list[int] | None = None,
) -> RolloutState:
    """A trajectory with one token a version."""
    ids = np.arange(10, 10 + len(versions or []), dtype=np.int32)
    return RolloutState(
        task=task,
        group_id=group_id,
        sample_index=sample_index,
        prompt_ids=np.asarray(prompt_ids or [5, 6], np.int32),
        sample_params=SampleParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=(STOP,)),
        metadata={"answer": "4"},
        status=status,
        reward=reward if status is Status.COMPLETED else None,
        response_ids=ids,
        logprobs=-ids.astype(np.float32),
        policy_versions=np.asarray(versions or [], np.int32),
        response_mask=np.ones(len(ids), np.bool_),
    )


def group(
    group_id: int,
    *members: list[int],
    status: Status = Status.COMPLETED,
    task: str = "default",
    rewards: tuple[float, ...] = (),
) -> Group:
    """A group with a member for each list of versions."""
    states = [
        state(
            versions,
            group_id=group_id,
            sample_index=index,
            status=status,
            task=task,
            reward=rewards[index] if rewards else 1.0,
        )
        for index, versions in enumerate(members)
    ]
    return Group(task=task, group_id=group_id, states=states)


@asynccontextmanager
async def producing(world: World, version: int | None = 0) -> AsyncIterator[asyncio.Task[None]]:
    """Production at `version`, ended and accounted for on exit."""
    if version is not None:
        await world.producer.resume(version)
    running = world.start()
    try:
        yield running
    finally:
        assert (await world.producer.counts()).lost == 0
        running.cancel()
        await asyncio.wait([running])
        await world.producer.close()


def fate(**fates: set[int]) -> Callable[[Group], str]:
    """ "ok" but for the groups named: `fate(failed={1, 2})`."""
    return lambda one: next((name for name, ids in fates.items() if one.group_id in ids), "ok")


async def train_step(world: World, step: int) -> tuple[TakeStatus, PackedGroups]:
    """Take, acknowledge and sync, as the main loop does."""
    status, packed = await world.take(step)
    await world.producer.acknowledge(step)
    await world.producer.pause()
    await world.producer.resume(step)
    return status, packed


async def take_after_sync(world: World, step: int) -> tuple[TakeStatus, PackedGroups]:
    """Take; if production wants newer weights first, give it those of the step before."""
    status, packed = await world.producer.take_batch(step)
    if packed is None:
        await world.producer.acknowledge(step - 1)
        await world.producer.pause()
        await world.producer.resume(step - 1)
        return await world.take(step)
    return status, packed


def strategy(interval: int = 1, **fields: Any) -> AsyncProduceStrategy:
    return build_strategy(StrategyConfig(**fields), interval)


def progress_of(batch: int) -> ProduceProgress:
    return ProduceProgress(["default"], lambda step: {"default": batch})


async def finish(one: Group, seconds: float) -> Group:
    await asyncio.sleep(seconds)
    return one


async def opened(*seconds: float) -> PendingSet:
    pending = PendingSet()
    await pending.open_gate()
    async with pending.lock:
        for group_id, wait_s in enumerate(seconds):
            one = group(group_id, [])
            pending.spawn(one, finish(one, wait_s), 0.0)
    return pending
