"""The multi-turn loop: turns, masks, budget, and continuation by replay. Traps 50 to 53."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raypost.agent_loop.environment import Observation
from raypost.config import AgentLoopConfig
from raypost.types import NO_VERSION, Status
from raypost.types.staleness import oldest_version
from raypost.types.turns import TURNS, turns_of
from tests.unit.production import virtual
from tests.unit.prompts import STOP
from tests.unit.scripted_environments import (
    AnswersInTurn,
    AsyncEcho,
    Echo,
    carried,
    environment,
    init,
    loop_of,
    really,
    run,
)
from tests.unit.scripted_generator import NOT_PARTIAL, TEN_SECONDS_OF_GRACE, result

TWO_TURNS = AgentLoopConfig(max_turns=2)
FOUR_TOKENS = AgentLoopConfig(max_turn_tokens=4)
"""Of one action."""

# ---------------------------------------------------------------- turns


@pytest.mark.parametrize("base", [Echo, AsyncEcho])
def test_policy_and_environment_take_turns_until_the_environment_ends_it(base: type[Echo]) -> None:
    kind, engine = environment(base), AnswersInTurn(result([9, STOP], version=3))
    done = really(engine, kind, init())
    (one,), (made,) = done.states, kind.made
    assert (one.status, one.reward, one.finish_reason, one.error) == (Status.COMPLETED, 3.0, "stop", None)
    assert made.actions == ["9 2"] * 3 and made.metadata == {"answer": "4"}
    assert one.response_ids.tolist() == [9, STOP, 60, 1, 9, STOP, 60, 2, 9, STOP]
    assert one.response_mask.tolist() == [True, True, False, False] * 2 + [True, True]
    assert one.policy_versions.tolist() == [3, 3, NO_VERSION, NO_VERSION] * 2 + [3, 3]
    assert one.logprobs.tolist() == [-0.5, -0.5, 0.0, 0.0] * 2 + [-0.5, -0.5]
    assert [(turn.start, turn.end, turn.next, turn.reward, turn.done) for turn in turns_of(one)] == [
        (0, 2, 4, 1.0, False),
        (4, 6, 8, 1.0, False),
        (8, 10, 10, 1.0, True),
    ]
    one.check_aligned()
    assert oldest_version(one) == 3


def test_every_request_is_the_prompt_and_the_exact_tokens_so_far_with_what_is_left_of_the_budget() -> None:
    engine = AnswersInTurn(result([9, STOP]), result([8, 7, STOP]), result([STOP]))
    run(engine, environment(), init(max_tokens=20))
    assert [request.token_ids.tolist() for request in engine.requests] == [
        [5, 6],
        [5, 6, 9, STOP, 60, 1],
        [5, 6, 9, STOP, 60, 1, 8, 7, STOP, 60, 2],
    ]
    assert [request.sample_params.max_tokens for request in engine.requests] == [20, 16, 11]
    assert {request.group for request in engine.requests} == {None}, "every answer is wanted at once"


def test_what_reset_observes_stands_behind_the_prompt_and_is_not_trained() -> None:
    engine = AnswersInTurn(result([STOP]))
    (one,) = run(engine, environment(reset_text="70 71", turns=1), init()).states
    assert engine.requests[0].token_ids.tolist() == [5, 6, 70, 71]
    assert one.response_mask.tolist() == [False, False, True]
    assert turns_of(one)[0].start == 2


def test_actions_and_observations_may_be_ids() -> None:
    def answer(self: Any, turn: int) -> Observation:
        return Observation(ids=np.asarray([77], np.int32), done=turn > 1)

    kind = environment(answer=answer)
    (one,) = run(AnswersInTurn(result([9, STOP])), kind, init(), action="ids").states
    assert one.response_ids.tolist() == [9, STOP, 77, 9, STOP]
    assert [action.tolist() for action in kind.made[0].actions] == [[9, STOP]] * 2


def test_what_an_environment_says_besides_is_kept_with_the_turn_and_cut() -> None:
    def answer(self: Any, turn: int) -> Observation:
        info = {"board": "x" * 1000, "legal": [1, 2]} if turn == 1 else {}
        return Observation(ids=np.asarray([77], np.int32), done=turn > 1, info=info)

    kind = environment(answer=answer)
    (one,) = run(AnswersInTurn(result([9, STOP])), kind, init(), action="ids").states
    assert [turn.info for turn in turns_of(one)] == [f"board {'x' * 100}, legal [1, 2]", ""]


def test_the_last_of_max_turns_ends_it_without_an_observation() -> None:
    (one,) = run(AnswersInTurn(result([STOP])), environment(turns=9), init(), options=TWO_TURNS).states
    assert (one.status, one.finish_reason, one.reward) == (Status.COMPLETED, "length", 2.0)
    assert one.response_ids.tolist() == [STOP, 60, 1, STOP]
    assert [turn.done for turn in turns_of(one)] == [False, False]


@pytest.mark.parametrize(("max_tokens", "num_tokens"), [(3, 1), (4, 4), (7, 7), (1, 1)])
def test_an_observation_is_appended_only_if_an_action_can_follow(max_tokens: int, num_tokens: int) -> None:
    (one,) = run(AnswersInTurn(result([STOP])), environment(turns=9), init(max_tokens=max_tokens)).states
    assert (one.num_tokens, one.status, one.finish_reason) == (num_tokens, Status.COMPLETED, "length")
    assert one.response_mask[-1]


def test_an_action_that_the_budget_cuts_is_still_answered() -> None:
    engine, kind = AnswersInTurn(result([9, 9, 9], "length")), environment()
    (one,) = run(engine, kind, init(max_tokens=3)).states
    assert (one.status, one.reward, kind.made[0].actions) == (Status.COMPLETED, 1.0, ["9 9 9"])


def test_max_turn_tokens_bounds_one_action_not_the_trajectory() -> None:
    engine = AnswersInTurn(result([9, 9], "length"))
    (one,) = run(engine, environment(turns=2), init(), options=AgentLoopConfig(max_turn_tokens=2)).states
    assert [request.sample_params.max_tokens for request in engine.requests] == [2, 2]
    assert (one.num_tokens, one.status) == (6, Status.COMPLETED)


def test_what_is_left_of_max_turn_tokens_counts_what_came_before_a_pause() -> None:
    kind = environment(turns=2)
    paused = run(
        AnswersInTurn(result([9, STOP]), result([8, 8, 8], "abort")),
        kind,
        init(),
        options=FOUR_TOKENS,
    )
    engine = AnswersInTurn(result([7], "length"))
    (one,) = run(engine, kind, carried(paused), options=FOUR_TOKENS).states
    assert [request.sample_params.max_tokens for request in engine.requests] == [1]
    assert kind.made[1].actions == ["9 2", "8 8 8 7"] and one.status is Status.COMPLETED


def test_every_request_asks_for_what_is_left_of_min_tokens_but_for_no_more_than_its_turn_may_have() -> None:
    kind, options = environment(turns=3), AgentLoopConfig(max_turn_tokens=6)
    engine = AnswersInTurn(result([9, 9, STOP]), result([8, 8], "abort"))
    paused = run(engine, kind, init(min_tokens=10), options=options)
    rest = AnswersInTurn(result([7, 7], "stop"))
    run(rest, kind, carried(paused), options=options)
    asked = [request.sample_params for request in (*engine.requests, *rest.requests)]
    # 3 tokens of the first action, 2 observed, 2 before the pause, 2 after it, 2 observed.
    assert [(one.max_tokens, one.min_tokens) for one in asked] == [(6, 6), (6, 5), (4, 3), (6, 0)]


def test_each_member_has_its_own_environment_and_metadata_is_not_shared() -> None:
    kind, group = environment(turns=1), init(3)
    shared = group.states[0].metadata
    run(AnswersInTurn(result([STOP])), kind, group)
    assert len(kind.made) == 3 and shared == {"answer": "4"}
    assert len({id(one.metadata) for one in group.states}) == 3


# ---------------------------------------------------------------- pauses


def test_a_pause_in_the_middle_of_a_turn_goes_on_in_that_turn() -> None:
    """Two actions before, one token into the third."""
    kind = environment()
    engine = AnswersInTurn(
        result([9, STOP], version=1), result([8, STOP], version=1), result([7], "abort", 1)
    )
    paused = run(engine, kind, init())
    assert (paused.status, paused.states[0].num_aborts, paused.states[0].reward) == (Status.ABORTED, 1, None)
    assert kind.made[0].actions == ["9 2", "8 2"]
    engine = AnswersInTurn(result([6, STOP], version=4))
    (one,) = run(engine, kind, carried(paused)).states
    assert engine.requests[0].token_ids.tolist() == [5, 6, 9, STOP, 60, 1, 8, STOP, 60, 2, 7]
    assert kind.made[1].actions == ["9 2", "8 2", "7 6 2"]
    assert (one.status, one.reward) == (Status.COMPLETED, 3.0)
    assert one.policy_versions.tolist() == [1, 1, -1, -1, 1, 1, -1, -1, 1, 4, 4]


def test_a_pause_between_turns_calls_no_environment_until_it_goes_on() -> None:
    kind = environment()
    paused = run(AnswersInTurn(result([9, STOP]), result([], "abort")), kind, init())
    assert paused.status is Status.ABORTED and kind.made[0].actions == ["9 2"]
    (one,) = run(AnswersInTurn(result([STOP])), kind, carried(paused)).states
    assert kind.made[1].actions == ["9 2", "2", "2"] and one.reward == 3.0


def test_a_pause_before_the_first_token_observes_the_reset_once() -> None:
    kind = environment(reset_text="70", turns=1)
    paused = run(AnswersInTurn(result([], "abort")), kind, init())
    assert paused.states[0].response_ids.tolist() == [70]
    (one,) = run(AnswersInTurn(result([STOP])), kind, carried(paused)).states
    assert one.response_ids.tolist() == [70, STOP]


def test_turns_without_observations_keep_their_boundaries_over_a_pause() -> None:
    kind = environment(answer=lambda self, turn: Observation(reward=1.0, done=turn >= 3))
    paused = run(AnswersInTurn(result([9]), result([8]), result([7], "abort")), kind, init())
    (one,) = run(AnswersInTurn(result([6])), kind, carried(paused)).states
    assert kind.made[1].actions == ["9", "8", "7 6"]
    assert [(turn.start, turn.end) for turn in turns_of(one)] == [(0, 1), (1, 2), (2, 4)]


def test_an_abort_that_comes_after_the_last_token_of_an_action_is_no_interruption() -> None:
    kind = environment(turns=1)
    assert run(AnswersInTurn(result([9, STOP], "abort")), kind, init()).status is Status.COMPLETED


def test_a_step_that_ends_within_the_grace_period_counts() -> None:
    async def main() -> None:
        loop = loop_of(
            AnswersInTurn(result([STOP])), environment(turns=1, seconds=5.0), rollout=TEN_SECONDS_OF_GRACE
        )
        running = asyncio.create_task(loop.run(init()))
        await asyncio.sleep(6)
        await loop.interrupt()
        assert (await running).status is Status.COMPLETED

    virtual(main())


def test_without_partial_rollout_an_interrupted_trajectory_starts_again() -> None:
    kind = environment(
        answer=lambda self, turn: Observation(text=str(60 + len(type(self).made)), done=turn > 1)
    )
    paused = run(
        AnswersInTurn(result([9, STOP]), result([8], "abort")),
        kind,
        init(),
        strategy=NOT_PARTIAL,
    )
    assert (paused.status, paused.num_tokens, paused.states[0].num_aborts) == (Status.ABORTED, 0, 1)
    (one,) = run(
        AnswersInTurn(result([STOP])),
        kind,
        carried(paused),
        strategy=NOT_PARTIAL,
    ).states
    assert one.status is Status.COMPLETED and one.response_ids.tolist() == [STOP, 62, STOP]


def test_a_trajectory_that_was_reset_meanwhile_has_no_turns_left() -> None:
    kind = environment()
    paused = run(AnswersInTurn(result([9, STOP]), result([8], "abort")), kind, init())
    paused.states[0].reset()
    assert TURNS in paused.states[0].metadata
    (one,) = run(AnswersInTurn(result([STOP])), kind, paused).states
    assert kind.made[1].actions == ["2", "2", "2"] and len(turns_of(one)) == 3


def test_expired_members_start_again() -> None:
    kind = environment()
    paused = run(AnswersInTurn(result([9, STOP]), result([8], "abort")), kind, init())
    paused.states[0].status = Status.EXPIRED
    (one,) = run(AnswersInTurn(result([STOP], version=4)), kind, paused).states
    assert set(one.policy_versions.tolist()) == {4, NO_VERSION}


def test_completed_members_are_not_played_again() -> None:
    kind = environment(turns=1)
    group = run(AnswersInTurn(result([STOP])), kind, init(2))
    group.states[1].reset()
    kept = replace(group.states[0])
    run(AnswersInTurn(result([9, STOP])), kind, group)
    assert len(kind.made) == 3 and group.states[0] is not kept
    assert (group.states[0].num_tokens, group.states[1].num_tokens) == (1, 2)
