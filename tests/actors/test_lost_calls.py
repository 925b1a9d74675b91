"""A call to a worker or a rank that is lost, or its answer, is made again while its process lives. Without Ray."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnavailableError

from actors.remote import ASKED, REPEATS
from actors.rollout.member import PoolWorker
from actors.rollout.status import Held, WorkerStatus
from actors.rollout.weights import Says
from actors.training import once
from actors.training.answers import RankFacts
from actors.training.once import Once
from actors.training.ranks import Ranks
from raypost.config import Config
from raypost.errors import RankLostError, RanksLateError, WaitTimeoutError
from raypost.weights.manifest import Manifest
from raypost.weights.seats import Seats
from tests.actors.test_sleep import CONFIG, ScriptedEngine, Worker, published, request


class Line:
    """A worker behind a line that loses the calls, or the answers, of its plan; of each method the first first."""

    def __init__(self, **plan: str) -> None:
        self.plan = {method: list(fates) for method, fates in plan.items()}
        self.arrived = Counter[str]()
        self.pid = 7

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any) -> Any:
            fates = self.plan.get(method, [])
            fate = fates.pop(0) if fates else "."
            if fate == "h":
                await asyncio.Event().wait()
            if fate == "d":
                raise ActorDiedError
            if fate != "c":
                self.arrived[method] += 1
            if fate in "ca":
                raise ActorUnavailableError("lost", None)
            return self.pid if method == "ping" else args

        return SimpleNamespace(remote=call)


async def worker_on(line: Line) -> PoolWorker:
    worker = PoolWorker("rollout-0", cast(ActorHandle, line))
    await worker.answer(1.0)
    return worker


@pytest.mark.parametrize(("fates", "arrived"), [("c", 1), ("a", 2), ("cac", 2), ("c" * REPEATS, 1)])
async def test_what_was_lost_is_called_again_until_its_answer_comes(fates: str, arrived: int) -> None:
    line = Line(load=fates)
    assert await (await worker_on(line)).call("load", 5.0, "to load", 3) == (3,)
    assert line.arrived["load"] == arrived


@pytest.mark.parametrize("pings", ["." + "c" * ASKED, ".d"])
async def test_a_worker_that_does_not_say_that_it_is_well_is_given_up(pings: str) -> None:
    line = Line(load="c", ping=pings)
    with pytest.raises(ActorUnavailableError):
        await (await worker_on(line)).call("load", 5.0, "to load")
    assert line.arrived["load"] == 0


async def test_the_question_may_be_lost_too() -> None:
    line = Line(load="c", ping="." + "c" * (ASKED - 1))
    assert await (await worker_on(line)).call("load", 5.0, "to load") == ()


async def test_another_process_is_not_asked_for_what_the_dead_one_was() -> None:
    line = Line(load="a")
    worker = await worker_on(line)
    line.pid = 8
    with pytest.raises(ActorUnavailableError):
        await worker.call("load", 5.0, "to load")
    assert line.arrived["load"] == 1


async def test_a_process_that_restarts_is_waited_for_and_not_asked_for_in_growing_pauses() -> None:
    line = Line(ping="c" * (2 * ASKED))
    worker = PoolWorker("rollout-0", cast(ActorHandle, line))
    await worker.until_it_has_a_process(5.0)
    assert worker.pid == 7
    line.plan["ping"] = ["c"] * 100
    with pytest.raises(ActorUnavailableError):
        await worker.until_it_has_a_process(0.05)
    line.plan["ping"] = ["d"]
    with pytest.raises(ActorDiedError):
        await worker.until_it_has_a_process(5.0)


async def test_what_is_lost_every_time_ends() -> None:
    line = Line(load="c" * 100)
    with pytest.raises(ActorUnavailableError):
        await (await worker_on(line)).call("load", 5.0, "to load")
    assert len(line.plan["load"]) == 100 - 1 - REPEATS


async def test_the_deadline_is_that_of_all_tries_together() -> None:
    worker = await worker_on(Line(load="ch"))
    with pytest.raises(WaitTimeoutError, match="rollout-0 to load"):
        await worker.call("load", 0.2, "to load")


# ---------------------------------------------------------------- what a worker does with a call that comes twice


class CountingEngine(ScriptedEngine):
    """Counts what is brought to it."""

    def __init__(self) -> None:
        super().__init__()
        self.did = Counter[str]()

    async def load(self, manifest: Manifest) -> tuple[None, Says]:
        self.did["load"] += 1
        return await super().load(manifest)

    async def receive(self, manifest: Manifest, seats: Seats, name: str) -> None:
        self.did["receive"] += 1


class CountingWorker(Worker):
    """The real rollout worker with such an engine."""

    made = 0

    def _make_engine(self) -> Any:
        self.made += 1
        return CountingEngine()


@pytest.mark.parametrize("times", [1, 2])
async def test_each_call_of_a_sync_does_the_same_once_or_delivered_twice(times: int) -> None:
    worker = CountingWorker("rollout-0", "", CONFIG, 0)
    seats = Seats("127.0.0.2", 1, "gloo", 1.0, (("rollout-0", 1),))
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("start", ()),
        ("load_weights", (published(1)[0], *published(1)[1])),
        ("resume", (1,)),
        ("stage_weights", (published(2)[0], *published(2)[1])),
        ("swap", (published(2)[0], *published(2)[1])),
        ("receive_weights", (published(3)[0], seats)),
        ("pause", ("abort",)),
        ("load_weights", (published(3)[0], *published(3)[1])),
        ("canary", (np.arange(3),)),
        ("resume", (3,)),
        ("pause", ("keep",)),
        ("resume", (3,)),
        ("pause", ("abort",)),
        ("sleep", (True,)),
        ("resume", (3,)),
        ("status", ()),
    ]
    for method, args in calls:
        for _ in range(times):
            answer = await getattr(worker, method)(*args)
    held = Held(3, published(3)[0].digest, 0)
    assert replace(answer, room=None) == WorkerStatus(
        has_engine=True, is_whole=True, serving=True, mode=None, held=held, asleep=False
    )
    assert worker.made == 1 and worker.engine.did == {"load": 3, "receive": 1}
    assert (await worker.generate(request())).policy_versions.tolist() == [3]


# ---------------------------------------------------------------- ranks


class Rank(Once):
    """Counts what it runs, in order; its calls, or their answers, are lost as a plan says."""

    def __init__(self, rank: int, fates: str = "", facts: str = "") -> None:
        super().__init__()
        self.rank, self.ran, self.pid = rank, list[str](), 100 + rank
        self.fates = {"once": list(fates), "facts": list(facts)}
        self.hangs = False

    def __getattr__(self, method: str) -> Any:
        return lambda *args: self.run(method, *args)

    def run(self, method: str, *args: Any) -> Any:
        self.ran.append(f"{method}{args}")
        if method == "break_down":
            raise ValueError(f"rank {self.rank} broke down")
        return (None, f"column {self.rank}") if method == "compute" else (method, len(self.ran))

    async def delivered(self, method: str, *args: Any) -> Any:
        fates = self.fates[method]
        fate = fates.pop(0) if fates else "."
        if fate == "d":
            raise ActorDiedError
        await asyncio.sleep(0)
        if self.hangs and method == "once":
            await asyncio.Event().wait()
        answer: Any = RankFacts(self.pid, "node", True) if method == "facts" else None
        if fate != "c" and method == "once":
            answer = self.once(*args)
        if fate in "ca":
            raise ActorUnavailableError("lost", None)
        return answer


class Handle:
    """Stands for the handle of a rank."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.once, self.facts = self.method("once"), self.method("facts")

    def method(self, name: str, returns: int = 1) -> Any:
        def remote(*args: Any) -> Any:
            answer = asyncio.ensure_future(self.rank.delivered(name, *args))
            return answer if returns == 1 else [self.part(answer, number) for number in range(returns)]

        return SimpleNamespace(remote=remote, options=lambda num_returns: self.method(name, num_returns))

    def part(self, answer: asyncio.Future[Any], number: int) -> asyncio.Future[Any]:
        async def one() -> Any:
            return (await answer)[number]

        return asyncio.ensure_future(one())


def gang(*ranks: Rank) -> Ranks:
    task = {"name": "t", "source": {"kind": "jsonl", "dataset": "none.jsonl"}, "judge": {"kind": "exact"}}
    train = {"step_timeout_s": 5, "num_steps": 1, "batch_size": 1}
    cfg = Config.model_validate({"model": {"name": "tiny"}, "tasks": [task], "train": train})
    return Ranks([cast(ActorHandle, Handle(rank)) for rank in ranks], cfg, "trainer")


@pytest.mark.parametrize("fates", ["c", "a", "ca", "aa", "cacacaca"])
@pytest.mark.parametrize("method", ["publish", "break_down"])
async def test_what_one_rank_lost_is_called_again_there_and_runs_once(fates: str, method: str) -> None:
    ranks = [Rank(0), Rank(1, fates)]
    called = gang(*ranks)
    if method == "break_down":
        with pytest.raises(ValueError, match="broke down"):
            await called.each(method, 3)
        # The other rank's failure came first: nobody waits for this one's any more.
        ranks[1].fates["once"].clear()
    else:
        assert await called.each(method, 3) == [(method, 1), (method, 1)]
        assert [rank.ran for rank in ranks] == [["publish(3,)"]] * 2
    await called.each("fit", 4)
    assert [rank.ran.count("fit(4,)") for rank in ranks] == [1, 1]


async def test_a_rank_meets_calls_in_their_order_though_one_of_them_was_lost() -> None:
    ranks = [Rank(0), Rank(1, "c.c")]
    called = gang(*ranks)
    taking = called.submitted("snapshot", "folder")
    await called.each("fit", 1)
    await called.first("left_out")
    assert (await taking)[1] == ("snapshot", 1)
    assert ranks[1].ran == ["snapshot('folder',)", "fit(1,)"]
    assert ranks[0].ran == [*ranks[1].ran, "left_out()"]


async def test_of_two_returns_the_second_is_that_of_the_call_that_was_answered() -> None:
    ranks = [Rank(0, "a"), Rank(1)]
    assert await (await gang(*ranks).result_of("compute")) == "column 0"
    assert [rank.ran for rank in ranks] == [["compute()"]] * 2


async def test_a_rank_in_another_process_is_lost_and_not_called_again() -> None:
    ranks = [Rank(0), Rank(1)]
    called = gang(*ranks)
    await called.each("fit", 1)
    ranks[1].fates["once"], ranks[1].pid = ["c"], 7
    with pytest.raises(RankLostError, match="trainer-1 died during fit"):
        await called.each("fit", 2)
    assert ranks[1].ran == ["fit(1,)"]
    assert (await called.each("fit", 3))[1] == ("fit", 2)


async def test_a_rank_whose_answers_are_lost_several_times_is_not_taken_for_dead() -> None:
    assert await gang(Rank(0, facts="a" * (ASKED - 1))).lost_ranks() == {}
    assert await gang(Rank(0, facts="a" * ASKED), Rank(1, facts="d")).lost_ranks() == {
        "trainer-0": "it died (ActorUnavailableError)",
        "trainer-1": "it died (ActorDiedError)",
    }


async def test_a_call_behind_one_that_hangs_ends_at_its_own_deadline_and_names_the_ranks() -> None:
    ranks = [Rank(0), Rank(1)]
    called = gang(*ranks)
    ranks[1].hangs = True
    hanging = called.submitted("fit", 1)
    with pytest.raises(RanksLateError, match=r"close of trainer-0, trainer-1.*the call before"):
        await called.each("close", timeout_s=0.05)
    hanging.cancel()


def test_an_error_is_an_outcome_too() -> None:
    rank = Rank(0)
    for _ in range(2):
        with pytest.raises(ValueError, match="broke down"):
            rank.once("a", 1, "break_down")
    assert rank.ran == ["break_down()"]


def test_a_call_that_comes_late_or_whose_outcome_is_gone_runs_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(0)
    rank.once("a", 1, "publish", 1)
    rank.once("a", 2, "fit", 1)
    with pytest.raises(RankLostError, match="too late"):
        rank.once("a", 1, "publish", 1)
    monkeypatch.setattr(once, "KEPT_S", -1.0)
    rank.once("b", 1, "canary")
    with pytest.raises(RankLostError, match="too late"):
        rank.once("a", 2, "fit", 1)
    assert rank.ran == ["publish(1,)", "fit(1,)", "canary()"]
