"""`raypost.collect`: what it yields, its limits, its sinks, and plain iteration."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raypost
from raypost.agent_loop.single_turn import SingleTurnAgentLoop
from raypost.collector import DialogTurn
from raypost.errors import ConfigError, ProductionError
from raypost.types import GenerateRequest, GenerateResult, IntArray, RolloutState
from raypost.types.turns import turns_of
from tests.unit.collecting import (
    Engine,
    Numbers,
    PlainSteps,
    Steps,
    alone,
    collect,
    environment,
    flat,
    listed,
    quick,
    really,
    sizes,
)
from tests.unit.production import virtual
from tests.unit.prompts import STOP

# ---------------------------------------------------------------- what is yielded


@pytest.mark.parametrize("group_size", [1, 3])
def test_batches_of_turns_are_exact_and_the_last_is_cut_to_the_total(group_size: int) -> None:
    collector = collect(dialog_turns_per_batch=4, total_dialog_turns=18, task={"group_size": group_size})
    batches = virtual(listed(collector))
    assert sizes(batches) == [4, 4, 4, 4, 2]
    assert collector.num_turns == 18
    assert all(isinstance(turn, DialogTurn) for batch in batches for turn in batch)


def test_turns_of_a_trajectory_come_in_order_each_once() -> None:
    turns = flat(virtual(listed(collect(dialog_turns_per_batch=5, total_dialog_turns=60))))
    assert len({(turn.trajectory.group_id, turn.index) for turn in turns}) == 60
    each = [list(one) for _, one in itertools.groupby(turns, key=lambda turn: turn.trajectory.group_id)]
    assert {len(one) for one in each[:-1]} == {1, 2, 3}
    for one in each[:-1]:
        assert [turn.index for turn in one] == list(range(one[0].trajectory.metadata["turns"]))
        assert [turn.is_last for turn in one] == [False] * (len(one) - 1) + [True]
        assert not any(turn.truncated for turn in one)


def test_a_turn_shows_what_came_before_it_and_what_followed() -> None:
    turns = flat(virtual(listed(collect(dialog_turns_per_batch=1, total_dialog_turns=24))))
    second = next(turn for turn in turns if turn.index == 1 and not turn.is_last)
    assert second.prompt_ids.tolist() == [5, 6, 9, STOP, 60]
    assert second.response_ids.tolist() == [9, STOP]
    assert second.logprobs.tolist() == [-0.5, -0.5]
    assert second.observation_ids.tolist() == [60]
    assert (second.reward, second.policy_version) == (1.0, 0)


def test_whole_trajectories_come_until_a_batch_has_its_turns() -> None:
    collector = collect(yield_completed_trajectories=True, dialog_turns_per_batch=4, total_dialog_turns=20)
    batches = virtual(listed(collector))
    assert all(isinstance(one, RolloutState) for batch in batches for one in batch)
    turns = [[len(turns_of(one)) for one in batch] for batch in batches]
    assert all(sum(batch) >= 4 > sum(batch[:-1]) for batch in turns[:-1])
    each = flat(turns)
    assert sum(each) == collector.num_turns >= 20 > sum(each[:-1])
    assert all(one.reward == len(turns_of(one)) for batch in batches for one in batch)


def test_last_steps_are_as_many_as_asked_for_and_the_total_counts_the_turns_kept_back() -> None:
    collector = collect(yield_only_last_steps=True, dialog_turns_per_batch=3, total_dialog_turns=20)
    batches = virtual(listed(collector))
    assert sizes(batches)[:-1] == [3] * (len(batches) - 1) and 1 <= len(batches[-1]) <= 3
    turns = flat(batches)
    assert all(turn.is_last for turn in turns)
    counted = [turn.index + 1 for turn in turns]
    assert sum(counted) == collector.num_turns >= 20 > sum(counted[:-1])


def test_without_a_batch_size_each_group_is_a_batch() -> None:
    collector = collect(yield_completed_trajectories=True, total_dialog_turns=12, task={"group_size": 2})
    batches = virtual(listed(collector))
    assert set(sizes(batches)[:-1]) == {2}
    assert all(len({one.group_id for one in batch}) == 1 for batch in batches)


def test_a_single_turn_agent_loop_yields_one_turn_a_trajectory() -> None:
    class Right:
        async def judge(self, states: list[RolloutState]) -> list[float]:
            return [0.5] * len(states)

    tokenizer: Any = Numbers()
    collector = raypost.collect(
        Engine(),
        tokenizer,
        ["5 6", "7"],
        agent_loop=lambda generator: SingleTurnAgentLoop(generator, Right(), tokenizer.decode),
        dialog_turns_per_batch=2,
        total_dialog_turns=4,
    )
    batches = virtual(listed(collector))
    assert sizes(batches) == [2, 2]
    assert {(turn.reward, turn.is_last, turn.turn.done) for turn in flat(batches)} == {(0.5, True, True)}


def test_max_turns_truncates() -> None:
    collector = collect(
        yield_only_last_steps=True, max_turns=1, dialog_turns_per_batch=12, total_dialog_turns=12
    )
    (batch,) = virtual(listed(collector))
    assert sum(turn.truncated for turn in batch) == 8


def test_no_more_than_num_groups_are_at_work_or_wait_for_the_caller() -> None:
    async def main() -> None:
        engine = Engine()
        async with collect(engine, num_groups=3, dialog_turns_per_batch=1) as collector:
            async for _ in collector:
                await asyncio.sleep(50)
                counts = await collector.counts()
                assert counts.in_flight + counts.buffered <= 3 + 1 and counts.lost == 0
                if collector.num_turns > 6:
                    break
        assert engine.most == 3

    virtual(main())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"replay_buffer": [], "queue": asyncio.Queue()}, "not to both"),
        ({"yield_only_last_steps": True, "yield_completed_trajectories": False}, "needs completed"),
        ({"dialog_turns_per_batch": 0}, "dialog_turns_per_batch must be >= 1"),
        ({"total_dialog_turns": 0}, "total_dialog_turns must be >= 1"),
        ({"total_dialog_turns": -2}, "total_dialog_turns must be >= 1"),
        ({"version_type": "date"}, "'int' or 'uuid'"),
        ({"environment": None}, "either an environment or an agent_loop"),
        ({"agent_loop": lambda generator: None}, "either an environment or an agent_loop"),
        ({"task": {"groupsize": 2}}, "groupsize"),
        ({"num_groups": 0}, "num_groups must be >= 1"),
        ({"task": {"strategy": {"max_staleness": 1}}}, r"max_staleness.*give batch_size"),
        ({"batch_size": 0}, "batch_size must be >= 1"),
        ({"pause_mode": "keep"}, "Engine has no pause"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        collect(**options)


# ---------------------------------------------------------------- without an event loop


@pytest.mark.parametrize("environment", [Steps, PlainSteps])
def test_a_plain_for_works_and_ends_its_threads(environment: Any) -> None:
    before = set(threading.enumerate())
    batches = list(collect(quick(), environment, dialog_turns_per_batch=4, total_dialog_turns=10))
    assert sizes(batches) == [4, 4, 2]
    assert ended(before)


def test_leaving_a_plain_for_closes_the_collector() -> None:
    before = set(threading.enumerate())
    for batch in collect(quick(), dialog_turns_per_batch=2):
        assert len(batch) == 2
        break
    assert ended(before)


def test_inside_a_with_a_loop_may_be_left_and_entered_again() -> None:
    with collect(quick(), dialog_turns_per_batch=2) as collector:
        seen = [next(iter(collector)) for _ in range(3)]
        assert collector.update_policy_and_wait() == 1
        seen.append(next(iter(collector)))
    keys = [(turn.trajectory.group_id, turn.index) for batch in seen for turn in batch]
    assert len(set(keys)) == 8
    with pytest.raises(ProductionError, match="closed"):
        next(iter(collector))
    collector.close()


def test_a_collector_of_an_event_loop_refuses_plain_iteration() -> None:
    async def main() -> None:
        async with collect(dialog_turns_per_batch=1) as collector:
            await anext(aiter(collector))
            with pytest.raises(ProductionError, match="async for"):
                next(iter(collector))

    virtual(main())


def ended(before: set[threading.Thread]) -> bool:
    """Whether all threads but those of before end at once; other tests may have left some of theirs."""
    new = set(threading.enumerate()) - before
    for thread in new:
        if thread.name.startswith(("collector", "environment", "sink")):
            thread.join(timeout=120)
    return not any(thread.is_alive() for thread in new)


# ---------------------------------------------------------------- sinks


class AsyncBuffer(list[Any]):
    async def extend(self, items: Any) -> int:  # type: ignore[override]
        await asyncio.sleep(0.001)
        super().extend(items)
        return len(items)


@pytest.mark.parametrize("sink", [list, AsyncBuffer])
def test_a_buffer_is_filled_and_the_iterator_yields_nothing(sink: Callable[[], Any]) -> None:
    buffer = sink()
    batches = really(
        listed(collect(quick(), replay_buffer=buffer, dialog_turns_per_batch=4, total_dialog_turns=10))
    )
    assert batches == [None] * 3 and len(buffer) == 10


def test_a_full_queue_holds_production_until_somebody_takes_from_it() -> None:
    async def main() -> None:
        full: asyncio.Queue[DialogTurn] = asyncio.Queue(maxsize=3)
        collector = collect(queue=full, num_groups=2, dialog_turns_per_batch=1, total_dialog_turns=10)
        filling = asyncio.create_task(collector.fill())
        await asyncio.sleep(1000)
        assert full.qsize() == 3 and not filling.done()
        assert (await collector.counts()).sampled <= 6
        got = [await full.get() for _ in range(10)]
        assert await filling == 10 and full.empty()
        assert len({(turn.trajectory.group_id, turn.index) for turn in got}) == 10

    virtual(main())


def test_start_fills_a_plain_queue_in_the_background() -> None:
    before = set(threading.enumerate())
    full: queue.Queue[DialogTurn] = queue.Queue(maxsize=2)
    collector = collect(quick(), queue=full, total_dialog_turns=6)
    done = collector.start()
    assert all(isinstance(full.get(timeout=120), DialogTurn) for _ in range(6))
    assert done.result(timeout=120) == 6
    collector.close()
    assert ended(before)


def test_closing_ends_a_background_that_waits_for_a_full_queue(caplog: pytest.LogCaptureFixture) -> None:
    full: queue.Queue[DialogTurn] = queue.Queue(maxsize=2)
    collector = collect(quick(), queue=full)
    done = collector.start()
    full.get(timeout=120)
    collector.close()
    assert done.done() and not caplog.records


def test_start_reports_what_ended_production() -> None:
    collector = collect(Engine(0.0), environment("always"), replay_buffer=[])
    with pytest.raises(ProductionError, match="no world"):
        collector.start().result(timeout=120)
    collector.close()


def test_filling_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="replay_buffer or a queue"):
        virtual(collect().fill())


async def rewards(batch: list[DialogTurn]) -> list[float]:
    await asyncio.sleep(0.001)
    return [turn.reward for turn in batch]


@pytest.mark.parametrize("postproc", [rewards, lambda batch: [turn.reward for turn in batch]])
def test_postproc_makes_what_is_delivered(postproc: Any) -> None:
    options = {"dialog_turns_per_batch": 4, "total_dialog_turns": 6, "postproc": postproc}
    assert really(listed(collect(quick(), **options))) == [[1.0] * 4, [1.0] * 2]
    buffer: list[float] = []
    really(collect(quick(), **options, replay_buffer=buffer).fill())
    assert buffer == [1.0] * 6


def test_an_error_of_postproc_is_raised_and_closes() -> None:
    def broken(batch: Any) -> Any:
        raise KeyError("no such field")

    async def main() -> None:
        with pytest.raises(KeyError, match="no such field"):
            await listed(collect(quick(), postproc=broken, dialog_turns_per_batch=1))
        await alone()

    really(main())


# ---------------------------------------------------------------- the page about it


class Bytes(Numbers):
    """A tokenizer whose ids are bytes."""

    eos_ids = (0,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> IntArray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: IntArray) -> str:
        return bytes(int(one) for one in ids).decode()


class Guesser(Engine):
    """Says a digit, another one each time it is asked."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        ids = np.asarray([ord("1") + len(request.token_ids) // 12 % 9], np.int32)
        return replace(
            result, response_ids=ids, logprobs=result.logprobs[:1], policy_versions=result.policy_versions[:1]
        )


def test_the_example_of_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "collect.md").read_text()
    example = (
        page.split("```python")[1].split("```")[0].replace("        ...\n", "        seen.append(turn)\n")
    )
    seen: list[DialogTurn] = []
    exec(example, {"generator": Guesser(0.0), "tokenizer": Bytes(), "seen": seen})
    assert len(seen) == 1000 and {turn.reward for turn in seen} == {0.0, 1.0}
