"""Calls that travel together: each ends, fails, is cancelled and is lost alone. The last tests use real actors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from actors import many_calls, remote
from actors.many_calls import CallBatches, ManyCalls
from actors.placement import spawn
from actors.remote import Remote, RemotePool, deaths, within
from raypost.errors import JudgeError, RaypostError, WaitTimeoutError


class Worker(CallBatches):
    """Waits, fails or dies as it is told."""

    def __init__(self, name: str = "worker") -> None:
        super().__init__()
        self.name = name
        self.running: set[float] = set()
        self.calls = 0

    def __repr__(self) -> str:
        return self.name

    async def work(self, seconds: float, value: Any = None) -> Any:
        self.calls += 1
        self.running.add(seconds)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.running.discard(seconds)
        if isinstance(value, Exception):
            raise value
        return value

    async def cancelled(self) -> None:
        raise asyncio.CancelledError

    async def state(self) -> tuple[int, set[float], int]:
        """(calls, what runs now, batches remembered)"""
        return self.calls, self.running, len(self._batches)

    async def die(self, seconds: float = 0.0) -> None:
        await asyncio.sleep(seconds)
        os._exit(1)


class LocalHandle:
    """An actor handle to an object in this process; counts the calls that would have crossed the border."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.calls = worker, 0
        self.lose: Callable[[str], bool] = lambda method: False

    def __getattr__(self, method: str) -> LocalMethod:
        return LocalMethod(self, method)


class LocalMethod:
    def __init__(self, handle: LocalHandle, method: str) -> None:
        self.handle, self.method = handle, method

    def remote(self, *args: Any) -> asyncio.Task[Any]:
        self.handle.calls += 1
        return asyncio.create_task(self._run(*args))

    async def _run(self, *args: Any) -> Any:
        answer = await getattr(self.handle.worker, self.method)(*args)
        if self.handle.lose(self.method):
            raise RayActorError
        return answer


class Stubborn(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("cannot be made from its message alone")


@pytest.fixture
def handle() -> LocalHandle:
    return LocalHandle(Worker())


def many(handle: LocalHandle, batch_size: int = 64, method: str = "work") -> ManyCalls:
    return ManyCalls(handle, method, batch_size)


async def test_calls_of_one_turn_travel_together_and_come_back_together(handle: LocalHandle) -> None:
    call = many(handle)
    assert await asyncio.gather(*(call(0.0, n) for n in range(50))) == list(range(50))
    assert handle.calls == 1
    assert await handle.worker.state() == (50, set(), 0)


async def test_more_calls_than_a_batch_holds_go_in_several(handle: LocalHandle) -> None:
    call = many(handle, batch_size=8)
    assert await asyncio.gather(*(call(0.0, n) for n in range(20))) == list(range(20))
    assert (handle.calls, handle.worker.calls) == (3, 20)


async def test_slow_call_holds_up_no_other(handle: LocalHandle) -> None:
    call = many(handle)
    slow = asyncio.create_task(call(0.5, "slow"))
    fast = [asyncio.create_task(call(0.01 * n, n)) for n in range(1, 4)]
    assert await asyncio.gather(*fast) == [1, 2, 3]
    assert not slow.done()
    assert await slow == "slow"


async def test_calls_of_a_set_are_answered_when_the_last_of_them_ends_and_others_at_once(
    handle: LocalHandle,
) -> None:
    call = many(handle)
    began = asyncio.get_running_loop().time()
    made = [(0.01, "a"), (0.05, "a"), (0.3, "a"), (0.1, "b"), (0.15, "b"), (0.02, None)]
    done: dict[str | None, float] = {}

    async def one(seconds: float, together: str | None) -> None:
        assert await call(seconds, together, together=together) == together
        done[together] = min(done.get(together, 9.0), asyncio.get_running_loop().time() - began)

    await asyncio.gather(*(one(*arguments) for arguments in made))
    # An answer that is due takes with it what waits: set a's first two go with the one that belongs to none.
    assert list(done) == ["a", None, "b"] and done["b"] >= 0.15
    assert handle.calls == 3, "for None, for b, for the end of a"


async def test_answer_waits_for_its_set_no_longer_than_it_may(
    handle: LocalHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_calls, "HOLD_S", 0.05)
    call = many(handle)
    slow = asyncio.create_task(call(10.0, "slow", together="set"))
    fast = [asyncio.create_task(call(0.0, n, together="set")) for n in range(3)]
    assert await asyncio.wait_for(asyncio.gather(*fast), 60) == [0, 1, 2]
    assert not slow.done()
    slow.cancel()


async def test_call_that_is_called_off_or_fails_holds_up_no_answer_of_its_set(handle: LocalHandle) -> None:
    call = many(handle)
    first, second = (asyncio.create_task(call(s, s, together="set")) for s in (0.01, 10.0))
    await asyncio.sleep(0.05)
    assert not first.done()
    second.cancel()
    assert await asyncio.wait_for(first, 60) == 0.01
    outcomes = await asyncio.wait_for(
        asyncio.gather(
            call(0.0, 1, together="set"),
            call(0.01, JudgeError("no score"), together="set"),
            return_exceptions=True,
        ),
        5,
    )
    assert outcomes[0] == 1 and isinstance(outcomes[1], JudgeError)
    assert (await handle.worker.state())[1:] == (set(), 0)


async def test_error_reaches_its_own_call_alone_with_its_kind_and_its_traceback(handle: LocalHandle) -> None:
    call = many(handle)
    outcomes = await asyncio.gather(
        call(0.0, 1), call(0.0, JudgeError("no score")), call(0.0, 3), return_exceptions=True
    )
    assert (outcomes[0], outcomes[2]) == (1, 3)
    assert isinstance(outcomes[1], JudgeError) and str(outcomes[1]) == "no score"
    assert "in work" in outcomes[1].__notes__[0]


async def test_error_that_cannot_travel_arrives_with_what_it_said(handle: LocalHandle) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Stubborn.*cannot be made.*in work") as caught:
        await many(handle)(0.0, Stubborn(1, 2))
    assert not isinstance(caught.value, Stubborn)


async def test_cancelled_call_is_called_off_and_the_others_go_on(handle: LocalHandle) -> None:
    call = many(handle)
    tasks = [asyncio.create_task(call(seconds, seconds)) for seconds in (10.0, 0.2, 20.0)]
    await asyncio.sleep(0.05)
    tasks[0].cancel()
    tasks[2].cancel()
    await asyncio.sleep(0.05)
    assert (await handle.worker.state())[1] == {0.2}
    assert await tasks[1] == 0.2
    assert (await handle.worker.state())[2] == 0
    assert tasks[0].cancelled() and tasks[2].cancelled()


async def test_batch_whose_calls_are_all_cancelled_is_forgotten(handle: LocalHandle) -> None:
    call = many(handle)
    for _ in range(2):
        tasks = [asyncio.create_task(call(10.0 + n)) for n in range(3)]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0.02)
        assert (await handle.worker.state())[1:] == (set(), 0)
    assert not call._exchanges


async def test_call_cancelled_before_it_left_is_never_made(handle: LocalHandle) -> None:
    call = many(handle)
    gone, stays = asyncio.create_task(call(0.0, 1)), asyncio.create_task(call(0.0, 2))
    asyncio.get_running_loop().call_soon(gone.cancel)
    assert await stays == 2
    assert gone.cancelled() and handle.worker.calls == 1


async def test_call_cancelled_on_the_other_side_is_cancelled_here(handle: LocalHandle) -> None:
    with pytest.raises(asyncio.CancelledError):
        await many(handle, method="cancelled")()


async def test_lost_answer_loses_only_what_had_not_come_back_and_ends_it_there(handle: LocalHandle) -> None:
    call = many(handle)
    handle.lose = lambda method: method == "call_more"
    tasks = [asyncio.create_task(call(seconds, seconds)) for seconds in (0.01, 0.1, 10.0)]
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert outcomes[0] == 0.01
    assert isinstance(outcomes[1], RayActorError) and isinstance(outcomes[2], RayActorError)
    await asyncio.sleep(0.01)
    assert (await handle.worker.state())[1:] == (set(), 0)


async def test_batch_nobody_asks_for_is_ended_by_a_later_one(
    handle: LocalHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = handle.worker
    assert await worker.call_many("lost", "work", [(0.0, 1), (10.0, 2)]) == ([(0, 1)], [])
    monkeypatch.setattr(many_calls, "FORGOTTEN_S", 0.02)
    waiting = asyncio.create_task(many(handle)(0.1, "asked for"))
    await asyncio.sleep(0.05)
    assert await many(handle)(0.0, "later") == "later"
    await asyncio.sleep(0)
    assert worker.running == {0.1}
    assert await waiting == "asked for"
    with pytest.raises(RaypostError, match="batch lost is not known"):
        await worker.call_more("lost")


async def test_deadline_is_each_waits_own_and_names_what_was_waited_for() -> None:
    with pytest.raises(WaitTimeoutError, match="waited 0 s for the sun"):
        await within(asyncio.sleep(5), 0.01, "the sun")

    async def raises() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own") as caught:
        await within(raises(), 5, "another's deadline")
    assert not isinstance(caught.value, WaitTimeoutError)
    assert await within(asyncio.sleep(0, "done"), 5, "nothing") == "done"


# ---------------------------------------------------------------- real actors


@pytest.fixture(scope="module")
def worker(local_ray: None) -> Iterator[str]:
    handle = spawn(Worker, "real", name="real-worker", max_restarts=-1)
    ray.get(handle.state.remote(), timeout=240)  # its process runs: the deadlines below are those of calls
    yield "real-worker"
    ray.kill(handle)


async def test_real_actor_answers_refuses_and_calls_off(worker: str) -> None:
    actor = Remote(worker, 10.0, many={"work": 16})
    outcomes = await asyncio.gather(
        *(actor.work(0.0, n) for n in range(40)), actor.work(0.0, JudgeError("no")), return_exceptions=True
    )
    assert outcomes[:40] == list(range(40)) and isinstance(outcomes[40], JudgeError)
    with pytest.raises(WaitTimeoutError, match=r"waited 10 s for real-worker\.work"):
        await actor.work(90.0)
    async with asyncio.timeout(60):
        while await actor.state() != (42, set(), 0):
            await asyncio.sleep(0.01)


async def test_death_of_a_real_actor_is_an_actor_error_for_what_was_open_and_a_pool_sends_it_again(
    worker: str,
) -> None:
    actor = Remote(worker, 30.0, many={"work": 16})
    calls = [asyncio.create_task(actor.work(seconds, seconds)) for seconds in (0.1, 20.0)]
    assert await calls[0] == 0.1
    with contextlib.suppress(RayActorError):
        await actor.die()
    with pytest.raises(RayActorError):
        await calls[1]
    pool = RemotePool([worker], 30.0, many={"work": 16})
    assert await pool.work(0.0, "again") == "again"
    slow = asyncio.create_task(pool.work(1.0, "sent twice"))
    await asyncio.sleep(0.2)
    ray.get_actor(worker).die.remote()
    assert await slow == "sent twice"


async def test_pool_sends_a_call_to_a_busy_member_rather_than_to_a_dead_one_again(worker: str) -> None:
    mortal = spawn(Worker, "mortal", name="mortal")
    pool = RemotePool(["mortal", worker], 30.0, many={"work": 16})
    short, long = (asyncio.create_task(pool.work(seconds)) for seconds in (0.1, 60.0))
    await short
    ray.kill(mortal)
    assert await asyncio.wait_for(pool.work(0.0, "elsewhere"), 60) == "elsewhere"
    long.cancel()


class SlowToComeBack:
    """Its process takes as long to start again as the test wants, as if the machine were slow."""

    def __init__(self, go_on: str) -> None:
        while deaths() and not os.path.exists(go_on):
            time.sleep(0.05)

    async def ping(self) -> str:
        return "here"

    async def die(self) -> None:
        os._exit(1)


@pytest.mark.parametrize("others", [0, 1])
async def test_pool_waits_for_a_member_that_restarts_however_long_that_takes(
    worker: str, tmp_path: Path, others: int
) -> None:
    names = [f"slow-{others}-{number}" for number in range(1 + others)]
    made = [spawn(SlowToComeBack, f"{tmp_path}/{name}", name=name, max_restarts=-1) for name in names]
    pool = RemotePool(names, 30.0, tries=2 + others)
    for handle in made:
        await handle.ping.remote()
        with contextlib.suppress(RayActorError):
            await handle.die.remote()
    call = asyncio.create_task(pool.ping())
    await asyncio.sleep(8.0)  # in which calls to it would have been refused more than twice
    assert not call.done(), call
    (tmp_path / names[-1]).touch()
    assert await call == "here"
    for name in names:
        (tmp_path / name).touch()


async def test_pool_does_not_wait_for_ever_for_a_member_that_does_not_come_back(
    worker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RESTART_S", 1.0)
    handle = spawn(SlowToComeBack, f"{tmp_path}/back", name="lost", max_restarts=-1)
    await handle.ping.remote()
    with contextlib.suppress(RayActorError):
        await handle.die.remote()
    with pytest.raises(RayActorError):
        await asyncio.wait_for(RemotePool(["lost"], 30.0, tries=3).ping(), 60)
    (tmp_path / "back").touch()
