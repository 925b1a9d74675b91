"""The multi-turn loop: failures, environments that hang or block, cancellation. Traps 52, 73 and 75."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from raypost.agent_loop.environment import Observation
from raypost.config import AgentLoopConfig
from raypost.errors import NoWorkersError, WaitTimeoutError
from raypost.types import GenerateResult, Group, Status
from tests.unit.production import virtual
from tests.unit.prompts import STOP
from tests.unit.scripted_environments import (
    AnswersInTurn,
    AsyncEcho,
    Echo,
    environment,
    init,
    loop_of,
    really,
    run,
)
from tests.unit.scripted_generator import result

# ---------------------------------------------------------------- failures


def broken(method: str, error: Any) -> type[Echo]:
    """An environment whose first instance fails in `method`."""

    async def fails(self: Any, argument: Any) -> Any:
        if self is type(self).made[0]:
            if isinstance(error, BaseException):
                raise error
            return error
        return await getattr(AsyncEcho, method)(self, argument)

    attributes: dict[str, Any] = {method: fails}
    return environment(turns=1, **attributes)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (broken("step", ValueError("no such door")), "turn 1: ValueError('no such door')"),
        (broken("reset", OSError("no room")), "reset: OSError('no room')"),
        (broken("step", TimeoutError("upstream")), "upstream"),
        (broken("step", None), "must return an Observation, got NoneType"),
        (broken("step", Observation(reward=float("nan"))), "reward nan in turn 1"),
        (broken("reset", Observation(done=True)), "leaves no turn"),
        (broken("reset", Observation(text="1 " * 40)), "40 of max_tokens=32"),
    ],
)
def test_an_environments_failure_is_failed_with_its_reason_and_siblings_go_on(
    kind: type[Echo], error: str
) -> None:
    kind.made.clear()
    failed, fine = run(AnswersInTurn(result([STOP])), kind, init(2)).states
    assert (failed.status, failed.reward) == (Status.FAILED, None) and error in str(failed.error)
    assert (fine.status, fine.reward) == (Status.COMPLETED, 1.0)
    assert [one.closed for one in kind.made] == [1, 1]


def test_an_environment_that_cannot_be_made_fails_its_trajectory() -> None:
    def make() -> Any:
        raise RuntimeError("no licence")

    (one,) = run(AnswersInTurn(result([STOP])), make, init()).states
    assert one.status is Status.FAILED and "no licence" in str(one.error)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (result([], "error"), "finish reason 'error'"),
        (GenerateResult.nothing("error", "w", "engine said no"), "engine said no"),
        (result([9] * 33, "length"), "33 tokens came, 32 were left"),
        (WaitTimeoutError("too slow"), "too slow"),
        (None, "took longer than 600 s"),
    ],
)
def test_a_generators_failure_calls_no_environment(answer: Any, error: str) -> None:
    kind = environment()
    (one,) = run(AnswersInTurn(answer), kind, init()).states
    assert one.status is Status.FAILED and error in str(one.error)
    assert kind.made[0].actions == [] and kind.made[0].closed == 1


def test_what_is_no_members_fault_is_raised() -> None:
    with pytest.raises(NoWorkersError):
        run(AnswersInTurn(NoWorkersError("all gone")), environment(), init(2))
    with pytest.raises(ConnectionError):
        kind = broken("step", ConnectionError("host died"))
        run(AnswersInTurn(result([STOP])), kind, init(2), retryable=(ConnectionError,))


def test_what_is_raised_waits_for_the_siblings() -> None:
    async def main() -> None:
        kind = broken("step", ConnectionError("host died"))
        kind.seconds = 5.0
        with pytest.raises(ConnectionError):
            await loop_of(AnswersInTurn(result([STOP])), kind, retryable=(ConnectionError,)).run(init(2))
        assert kind.made[1].actions == ["2"] and [one.closed for one in kind.made] == [1, 1]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual(main())


def test_an_environment_that_hangs_is_failed_at_its_deadline() -> None:
    (one,) = run(
        AnswersInTurn(result([STOP])),
        environment(seconds=1e6),
        init(),
        options=AgentLoopConfig(step_timeout_s=30),
    ).states
    assert one.status is Status.FAILED and "longer than step_timeout_s=30" in str(one.error)


def test_plain_environments_block_neither_the_loop_nor_each_other() -> None:
    """Trap 73. Each has one thread of its own, which it does not see change."""
    together, released = threading.Barrier(8), threading.Event()

    def answer(self: Any, turn: int) -> Observation:
        together.wait(timeout=120)
        assert released.wait(timeout=120)
        return Observation(done=turn >= 2)

    kind = environment(Echo, answer=answer)

    async def main() -> Group:
        running = asyncio.create_task(loop_of(AnswersInTurn(result([STOP])), kind).run(init(8)))
        while sum(len(one.actions) for one in kind.made) < 8:
            await asyncio.sleep(0.001)
        released.set()
        return await running

    done = asyncio.run(asyncio.wait_for(main(), 120))
    assert {one.error for one in done.states} == {None}
    assert all(len(one.threads) == 1 for one in kind.made)
    assert len({thread for one in kind.made for thread in one.threads}) == 8


def test_a_plain_environment_that_runs_out_of_its_script_is_a_failure_not_a_hang() -> None:
    def answer(self: Any, turn: int) -> Observation:
        return next(iter(()))

    (one,) = really(AnswersInTurn(result([STOP])), environment(Echo, answer=answer), init()).states
    assert one.status is Status.FAILED and "StopIteration" in str(one.error)


def test_a_cancelled_step_has_ended_before_its_environment_is_closed() -> None:
    async def main() -> None:
        events = []

        class Careful(AsyncEcho):
            made: list[Echo] = []

            async def step(self, action: Any) -> Observation:  # type: ignore[override]
                try:
                    await asyncio.sleep(1e6)
                finally:
                    await asyncio.sleep(0.1)
                    events.append("ended")
                return Observation()

            async def close(self) -> None:  # type: ignore[override]
                events.append("closed")

        running = asyncio.create_task(loop_of(AnswersInTurn(result([STOP])), Careful).run(init()))
        await asyncio.sleep(1)
        running.cancel()
        await asyncio.wait([running])
        assert events == ["ended", "closed"]

    virtual(main())


def test_a_plain_environment_is_closed_in_its_own_thread_after_what_it_was_doing() -> None:
    events, closed, released = [], threading.Event(), threading.Event()

    def answer(self: Any, turn: int) -> Observation:
        released.wait(timeout=120)
        events.append(("step", threading.get_ident()))
        return Observation(done=True)

    def close(self: Any) -> None:
        events.append(("close", threading.get_ident()))
        closed.set()

    kind = environment(Echo, answer=answer, close=close)

    async def main() -> None:
        running = asyncio.create_task(loop_of(AnswersInTurn(result([STOP])), kind).run(init()))
        while not (kind.made and kind.made[0].actions):
            await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.wait([running])
        assert events == []

    asyncio.run(main())
    released.set()
    assert closed.wait(timeout=120)
    assert [name for name, _ in events] == ["step", "close"] and events[0][1] == events[1][1]


def test_a_cancelled_run_closes_its_environments_and_leaves_no_task() -> None:
    async def main() -> None:
        kind, group = environment(seconds=5.0), init(2)
        running = asyncio.create_task(loop_of(AnswersInTurn(result([STOP])), kind).run(group))
        await asyncio.sleep(7)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert [one.closed for one in kind.made] == [1, 1]
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert group.status is not Status.COMPLETED

    virtual(main())
