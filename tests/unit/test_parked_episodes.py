"""Episodes outlive a pause: they are parked in their worker, and no call runs twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from raypost.agent_loop.environment import EnvironmentAgentLoop, Observation, group_seed
from raypost.agent_loop.parking import PARKED, worker_of
from raypost.config import AgentLoopConfig
from raypost.types import GenerateRequest, GenerateResult, IntArray, Status
from raypost.types.turns import turns_of
from tests.unit.production import virtual
from tests.unit.prompts import STOP
from tests.unit.scripted_environments import AnswersInTurn, Echo, carried, environment, init, loop_of
from tests.unit.scripted_generator import NOT_PARTIAL, TEN_SECONDS_OF_GRACE, ScriptedGenerator, result

SLOW = AgentLoopConfig(step_timeout_s=1000, park_timeout_s=500)


def aborted_in_the_third_turn() -> AnswersInTurn:
    return AnswersInTurn(result([9, STOP]), result([8, STOP]), result([7], "abort"), result([6, STOP]))


def test_a_trajectory_goes_on_with_its_environment_and_nothing_is_asked_twice() -> None:
    async def main() -> None:
        kind, engine = environment(deterministic=False), aborted_in_the_third_turn()
        loop = loop_of(engine, kind, worker="w7")
        paused = carried(await loop.run(init()))
        assert (paused.status, loop.num_parked, worker_of(paused.states)) == (Status.ABORTED, 1, "w7")
        (one,) = (await loop.run(paused)).states
        assert (one.status, one.reward, one.num_restarts, loop.num_parked) == (Status.COMPLETED, 3.0, 0, 0)
        (made,) = kind.made
        assert made.actions == ["9 2", "8 2", "7 6 2"] and made.closed == 1
        assert engine.requests[-1].token_ids.tolist() == [5, 6, 9, STOP, 60, 1, 8, STOP, 60, 2, 7]
        assert PARKED not in one.metadata and len(turns_of(one)) == 3

    virtual(main())


def test_a_step_that_runs_when_a_pause_comes_is_not_cancelled_and_counts_afterwards() -> None:
    async def main() -> None:
        kind, engine = environment(turns=1, seconds=100.0), AnswersInTurn(result([9, 8], "stop"))
        loop = loop_of(engine, kind, options=SLOW, rollout=TEN_SECONDS_OF_GRACE)
        running = asyncio.create_task(loop.run(init()))
        await asyncio.sleep(150)
        await loop.interrupt()
        paused = await running
        assert asyncio.get_running_loop().time() == pytest.approx(160)
        assert (paused.status, paused.states[0].num_tokens, kind.made[0].closed) == (Status.ABORTED, 2, 0)
        await asyncio.sleep(100)
        assert kind.made[0].actions == ["9 8"]
        done = await loop.run(carried(paused))
        assert done.status is Status.COMPLETED and asyncio.get_running_loop().time() == pytest.approx(260)
        assert len(kind.made) == 1 and kind.made[0].actions == ["9 8"] and len(engine.requests) == 1

    virtual(main())


@pytest.mark.parametrize("deterministic", [True, False])
def test_an_episode_that_nobody_comes_for_is_closed_and_replayed_or_begun_again(deterministic: bool) -> None:
    async def main() -> None:
        kind, engine = environment(deterministic=deterministic), aborted_in_the_third_turn()
        loop = loop_of(engine, kind, options=SLOW)
        paused = carried(await loop.run(init()))
        await asyncio.sleep(600)
        assert loop.num_parked == 0 and kind.made[0].closed == 1
        (one,) = (await loop.run(paused)).states
        assert (one.status, one.num_restarts) == (Status.COMPLETED, 0 if deterministic else 1)
        assert kind.made[-1].actions == (["9 2", "8 2", "7 6 2"] if deterministic else ["6 2"] * 3)
        assert all(made.closed == 1 for made in kind.made)

    virtual(main())


def test_an_environment_that_answers_a_replay_differently_starts_again_and_never_fails() -> None:
    kind = environment(
        answer=lambda self, turn: Observation(text=str(60 + len(type(self).made)), done=turn > 2)
    )

    async def main() -> None:
        paused = await loop_of(AnswersInTurn(result([STOP]), result([], "abort")), kind).run(init())
        (one,) = (await loop_of(AnswersInTurn(result([STOP])), kind).run(carried(paused))).states
        assert (one.status, one.num_restarts) == (Status.COMPLETED, 1)
        assert one.response_ids.tolist() == [STOP, 63, STOP, 63, STOP]

    virtual(main())


def test_what_was_reset_meanwhile_begins_anew_and_its_episode_is_closed() -> None:
    async def main() -> None:
        kind = environment(deterministic=False)
        loop = loop_of(aborted_in_the_third_turn(), kind)
        paused = carried(await loop.run(init()))
        paused.states[0].reset()
        (one,) = (await loop.run(paused)).states
        assert (one.status, one.num_restarts) == (Status.COMPLETED, 0)
        assert len(kind.made) == 2 and [made.closed for made in kind.made] == [1, 1]

    virtual(main())


def test_without_partial_rollout_nothing_is_parked() -> None:
    async def main() -> None:
        kind = environment()
        loop = loop_of(aborted_in_the_third_turn(), kind, strategy=NOT_PARTIAL)
        paused = await loop.run(init())
        assert (paused.num_tokens, loop.num_parked, kind.made[0].closed) == (0, 0, 1)

    virtual(main())


def test_the_end_of_a_loop_closes_what_is_parked() -> None:
    async def main() -> None:
        kind = environment()
        loop = loop_of(aborted_in_the_third_turn(), kind)
        await loop.run(init())
        await loop.close()
        assert kind.made[0].closed == 1 and loop.num_parked == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual(main())


def test_a_session_that_takes_too_long_is_failed_and_says_for_what_it_waited() -> None:
    async def main() -> None:
        options = AgentLoopConfig(step_timeout_s=60, session_timeout_s=100)
        kind = environment(turns=9, seconds=30.0)
        (one,) = (await loop_of(AnswersInTurn(result([STOP])), kind, options=options).run(init())).states
        assert one.status is Status.FAILED and kind.made[0].closed == 1
        assert "session_timeout_s=100, waiting for the answer to turn 4" in str(one.error)

    virtual(main())


# ---------------------------------------------------------------- many pauses


class Cards(Echo):
    """A game whose course depends on a state that no replay brings back."""

    deterministic = False
    deck = random.Random(0)

    def reset(self, metadata: dict[str, Any]) -> Observation:
        self.played = 0
        return Observation(text=str(self.deck.randrange(10, 60)))

    def step(self, action: Any) -> Observation:
        self.played += 1
        self.actions.append(action)
        return Observation(text=str(self.deck.randrange(10, 60)), reward=1.0, done=self.played >= 5)


@pytest.mark.parametrize("probability", [0.05, 0.2, 0.6])
def test_games_under_many_pauses_all_complete_and_no_action_is_played_twice(probability: float) -> None:
    rng, count = random.Random(1), 0

    def answers(request: GenerateRequest) -> GenerateResult:
        nonlocal count
        count += 1
        if rng.random() < probability:
            return result([1000 + count][: rng.randrange(2)], "abort")
        return result([1000 + count, STOP])

    async def main() -> None:
        kind = environment(Cards)
        loop = loop_of(ScriptedGenerator(answers), kind)
        pauses = 0
        for _ in range(5):
            group = init(8, max_tokens=200)
            while (group := await loop.run(group)).status is Status.ABORTED:
                group, pauses = carried(group), pauses + 1
            for one in group.states:
                assert (one.status, one.reward, one.num_restarts) == (Status.COMPLETED, 5.0, 0)
        played = [action for made in kind.made for action in made.actions]
        assert len(played) == len(set(played)) == 5 * 8 * 5 and pauses > 2
        for _ in range(500):  # plain environments are closed in their own threads
            await asyncio.sleep(0.01 * any(made.closed == 0 for made in kind.made))
        assert loop.num_parked == 0 and all(made.closed == 1 for made in kind.made)

    asyncio.run(main())


# ---------------------------------------------------------------- seeds and messages


def test_siblings_are_reset_with_one_seed_and_other_groups_with_another() -> None:
    seeds = []

    class Seeded(Echo):
        made: list[Echo] = []
        turns = 1

        def reset(self, metadata: dict[str, Any], *, seed: int) -> Observation:  # type: ignore[override]
            seeds.append(seed)
            return Observation()

    group = init(2)
    asyncio.run(loop_of(AnswersInTurn(result([STOP])), Seeded, seed=3).run(group))
    assert seeds == [group_seed(3, group.states[0])] * 2
    group.states[0].group_id = 1
    assert group_seed(3, group.states[0]) != seeds[0] != group_seed(4, group.states[1])


class Words:
    """A renderer for messages of numbers."""

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = ()) -> IntArray:
        return np.asarray([int(message["content"]) for message in messages], np.int32)

    def parse(self, ids: IntArray, *, prompt_ids: IntArray, tools: Sequence[Any] = ()) -> Any:
        raise NotImplementedError

    def bridge(
        self, previous_ids: IntArray, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = ()
    ) -> IntArray | None:
        return None if messages[0]["content"] == "0" else np.asarray([50, *self.render(messages)], np.int32)


def chatting(first: str, **options: Any) -> tuple[EnvironmentAgentLoop, AnswersInTurn]:
    def answer(self: Any, turn: int) -> Observation:
        return Observation(messages=[{"role": "user", "content": first}], done=turn > 1)

    kind = environment(answer=answer)
    engine = AnswersInTurn(result([9, STOP]))
    return loop_of(engine, kind, renderer=Words(), **options), engine


def test_observations_may_be_messages_which_the_template_renders() -> None:
    (one,) = virtual(chatting("77")[0].run(init())).states
    assert one.response_ids.tolist() == [9, STOP, 50, 77, 9, STOP]
    assert one.response_mask.tolist() == [True, True, False, False, True, True]


def test_messages_that_cannot_follow_fail_with_a_hint() -> None:
    (one,) = virtual(chatting("0")[0].run(init())).states
    assert one.status is Status.FAILED and "needs a chat template" in str(one.error)


def test_messages_at_the_beginning_stand_in_the_prompt() -> None:
    class Greets(Echo):
        made: list[Echo] = []
        turns = 1

        def reset(self, metadata: dict[str, Any]) -> Observation:
            return Observation(messages=[{"role": "user", "content": "33"}])

    engine = AnswersInTurn(result([STOP]))
    loop = loop_of(
        engine, Greets, renderer=Words(), opening=lambda metadata, messages: np.asarray([5, 33], np.int32)
    )
    (one,) = asyncio.run(loop.run(init())).states
    assert engine.requests[0].token_ids.tolist() == [5, 33] == one.prompt_ids.tolist()
    assert one.response_ids.tolist() == [STOP]
    (one,) = asyncio.run(loop_of(engine, Greets).run(init())).states
    assert "no chat template" in str(one.error)


def test_episodes_of_groups_that_do_not_go_on_are_closed_at_once() -> None:
    async def main() -> None:
        kind, engine = environment(deterministic=False), aborted_in_the_third_turn()
        loop = loop_of(engine, kind, worker="w7", options=SLOW)
        paused = carried(await loop.run(init()))
        await loop.forget([("default", 8), ("other", 0)])
        assert loop.num_parked == 1 and kind.made[0].closed == 0
        await loop.forget([paused.key])
        await asyncio.sleep(1)
        assert loop.num_parked == 0 and kind.made[0].closed == 1
        (one,) = (await loop.run(paused)).states
        assert (one.status, one.num_restarts) == (Status.COMPLETED, 1), "it may come back all the same"

    virtual(main())
