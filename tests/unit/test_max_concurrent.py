"""`max_concurrent`: trajectories wait for their turn, without a clock that runs, and give it back at a pause."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from raypost.config import AgentLoopConfig, parse_config
from raypost.errors import ConfigError
from raypost.plan.loops import loop_problems
from raypost.production.build import strategy_of
from raypost.types import Status
from tests.factories import make_config, plain_config, refusal_of
from tests.unit.production import virtual
from tests.unit.prompts import STOP
from tests.unit.scripted_environments import AnswersInTurn, environment, init, loop_of
from tests.unit.scripted_generator import TEN_SECONDS_OF_GRACE, result

TWO = AgentLoopConfig(
    kind="environment", environment="m:f", max_concurrent=2, step_timeout_s=60, session_timeout_s=110
)
"""Of episodes that take 100 s each: if its clock ran while it waits, one that waited would not end in time."""


def test_others_wait_for_their_turn_over_all_groups_and_their_clocks_do_not_run() -> None:
    async def main() -> None:
        kind = environment(turns=1, seconds=50.0)
        loop = loop_of(AnswersInTurn(result([STOP])), kind, options=TWO)
        done = asyncio.gather(loop.run(init(3)), loop.run(init(3)))
        await asyncio.sleep(75)
        assert len(kind.made) == 2
        for group in await done:
            assert [state.status for state in group.states] == [Status.COMPLETED] * 3
        # Three rounds of two, of a reset and a step each.
        assert asyncio.get_running_loop().time() == pytest.approx(300) and len(kind.made) == 6

    virtual(main())


def test_a_pause_sends_those_that_wait_back_at_once_and_nothing_begins_afterwards() -> None:
    async def main() -> None:
        kind = environment(turns=1, seconds=50.0)
        loop = loop_of(AnswersInTurn(result([STOP])), kind, options=TWO, rollout=TEN_SECONDS_OF_GRACE)
        running = asyncio.create_task(loop.run(init(4)))
        await asyncio.sleep(60)
        await loop.interrupt()
        paused = await running
        assert asyncio.get_running_loop().time() == pytest.approx(70)
        assert (paused.status, loop.num_parked, len(kind.made)) == (Status.ABORTED, 2, 2)
        # Those that wait were not interrupted in anything.
        assert sorted(state.num_aborts for state in paused.states) == [0, 0, 1, 1]
        assert (await loop.run(paused)).status is Status.COMPLETED and len(kind.made) == 4
        for _ in range(2):  # all turns were given back
            assert (await loop.run(init(4))).status is Status.COMPLETED

    virtual(main())


def test_a_cancelled_group_gives_its_turns_back() -> None:
    async def main() -> None:
        kind = environment(turns=1, seconds=50.0)
        loop = loop_of(AnswersInTurn(result([STOP])), kind, options=TWO)
        for wait_s in (0, 10, 75):
            running = asyncio.create_task(loop.run(init(5)))
            await asyncio.sleep(wait_s)
            running.cancel()
            await asyncio.wait([running])
        assert (await loop.run(init(2))).status is Status.COMPLETED

    virtual(main())


def of(most: int, **changes: Any) -> Any:
    loop = {
        "kind": "environment",
        "environment": "m:f",
        "max_concurrent": most,
        "session_timeout_s": 300,
    }
    return make_config(
        tasks__0__agent_loop=loop, **{"tasks__0__group_size": 8, "train__batch_size": 64, **changes}
    )


def test_no_more_groups_are_started_than_can_play() -> None:
    counts = {"target": 64, "available": 0, "pending": 0, "task_batch_size": 64, "tail_batch": False}
    for most, strategy, started in [(20, {}, 3), (8, {}, 1), (3, {}, 1), (80, {"max_pending": 4}, 4)]:
        config = of(most, tasks__0__strategy=strategy)
        plan = strategy_of(config.tasks[0], config).plan(**counts)  # type: ignore[arg-type]
        assert plan.num_groups == started


@pytest.mark.parametrize(
    ("most", "changes", "why"),
    [
        (1, {"rollout__agent_workers": 2}, "max_concurrent is 1, less than the 2 agent-loop actors"),
        (
            2,
            {},
            "a group of 8 plays in 4 rounds, each for at most session_timeout_s 300 s, but is given up after",
        ),
        (4, {"rollout__agent_workers": 2}, "plays in 4 rounds"),
        (4, {"eval__pool": {"name": "e", "num_workers": 1}}, "plays in 4 rounds"),
        (4, {"eval__samples": 16, "eval__temperature": 1.0}, "a group of 16 plays in 4 rounds"),
        (4, {}, None),
    ],
)
def test_turns_that_do_not_fit_are_refused_by_the_plan(
    most: int, changes: dict[str, Any], why: str | None
) -> None:
    config = of(most, rollout__request_timeout_s=600, **changes)
    found = list(loop_problems(config.tasks[0], config, None))
    assert (not found) if why is None else any(why in problem for problem in found), found


def two(**other: Any) -> Any:
    """Two tasks of eight; one has four turns together with the `other`."""
    raw = plain_config(train__batch_size=64, rollout__request_timeout_s=600)
    loop = {"kind": "environment", "environment": "m:f", "session_timeout_s": 300}
    shop = {"max_concurrent": 4, "max_concurrent_of": "shop"}
    (task,) = raw["tasks"]
    task |= {"group_size": 8, "agent_loop": {**loop, **shop}}
    raw["tasks"] = [task, {**task, "name": "other", "agent_loop": {**loop, **shop, **other}}]
    return raw


def test_tasks_that_share_turns_say_the_same_and_groups_wait_for_each_other() -> None:
    for other, problem in (({}, True), ({"max_concurrent_of": "inn"}, False)):
        config = parse_config(two(**other))
        found = list(loop_problems(config.tasks[0], config, None))
        assert any("plays in 4 rounds" in one for one in found) is problem, found
    said = refusal_of(two(max_concurrent=8))
    assert "have [4, 8]: give all the same" in said
    assert "max_concurrent_of 'shop' needs max_concurrent" in refusal_of(two(max_concurrent=None))


def test_a_kind_without_turns_has_no_bound() -> None:
    with pytest.raises(ConfigError, match="max_concurrent 2 is not used by kind 'single_turn'"):
        make_config(tasks__0__agent_loop={"max_concurrent": 2})
