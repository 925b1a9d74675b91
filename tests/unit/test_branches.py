"""Sessions of several trajectories: each sampled token is trained once, and a session is one member everywhere."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypost.agent_loop.session import Session
from raypost.buffer.expiry import Expiry
from raypost.config import AdvantageConfig, KlConfig, StrategyConfig
from raypost.errors import JudgeError, ProductionError
from raypost.ledger.ledger import group_facts
from raypost.production.pending import PendingGroup
from raypost.production.strategy import build_strategy
from raypost.production.verdict import check_members, decide
from raypost.trainer.algorithm.losses import sequence_scales
from raypost.trainer.algorithm.token_advantages import token_advantages
from raypost.trainer.batch.train_batch import plan_batch
from raypost.trainer.rank import batch_metrics
from raypost.types import SESSION, GenerateRequest, GenerateResult, Group, RolloutState, Status, TaskLimits
from raypost.types.packed import pack_groups
from tests.unit.chat_templates import bpe
from tests.unit.scripted_environments import AnswersInTurn, carried
from tests.unit.scripted_generator import Scorer
from tests.unit.test_session_loop import client_of, init, loop_of
from tests.unit.test_tool_loop import call, said


class Counts(AnswersInTurn):
    """Counts the tokens that it gives."""

    sampled = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        given = await super().generate(request)
        self.sampled += len(given.response_ids)
        return given


def wanders(seed: int) -> Any:
    """An agent that goes on, rewrites what was said, asks twice at once, and begins anew, at random."""

    async def agent(session: Session) -> float:
        rng = random.Random(f"{seed} {session.api_key}")
        known = [session.messages]
        for _ in range(rng.randint(1, 6)):
            messages = [*rng.choice(known)]
            if len(messages) > 1 and rng.random() < 0.4:
                messages[0] = {"role": "user", "content": f"again {rng.random()}"}
            replies = await asyncio.gather(
                *(session.complete(messages) for _ in range(rng.choice([1, 1, 2])))
            )
            more = {"role": "user", "content": f"and {rng.random()}?"}
            known += [[*messages, reply["choices"][0]["message"], more] for reply in replies]
        return rng.random()

    return agent


def played(agent: Any, count: int, engine: Any = None, judge: Any = None, **options: Any) -> Group:
    async def main() -> Group:
        answers = said("7", "It is eight.", "No", "four five")
        loop = loop_of(engine or AnswersInTurn(*answers), agent, judge, **options)
        group: Group = carried(await loop.run(init(count, max_tokens=2000)))
        await loop.close()
        return group

    return asyncio.run(main())


def strategy(**options: Any) -> Any:
    return build_strategy(StrategyConfig(**options), 1)


def decided(group: Group, started: Group, **options: Any) -> Any:
    entry = PendingGroup(group.key, started.states, None, 0.0, 9, False)  # type: ignore[arg-type]
    check_members(group.key, entry.last_known, group)
    return decide(entry, group, strategy(**options))


@given(st.integers(0, 2**32), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_each_sampled_token_is_trained_once_and_a_session_is_one_member(seed: int, count: int) -> None:
    engine = Counts(*said("7", "It is eight.", "No", "four five"))
    group = played(wanders(seed), count, engine)
    assert sum(int(state.response_mask.sum()) for state in group.states) == engine.sampled
    assert len(group.members) == count and {state.status for state in group.states} == {Status.COMPLETED}
    received = decided(group, init(count))
    assert received.verdict is Status.COMPLETED and received.completed == count
    facts, packed = group_facts(group), pack_groups([group])
    assert len(facts["tokens"]) == len(facts["rewards"]) == packed.num_members == count
    assert sum(facts["tokens"]) == sum(state.num_tokens for state in group.states)

    config = AdvantageConfig(kind="dr_grpo")
    batch = plan_batch(packed, config, 1)
    if count == 1:
        assert not batch.samples, (
            "one member has nothing to be compared with, however many trajectories it is"
        )
        return
    figures = batch_metrics(batch)
    rewards = np.asarray([member[-1].reward for member in group.members], np.float64)
    assert figures["num_samples"] == count and figures["reward_mean"] == pytest.approx(rewards.mean())
    column = token_advantages(batch, config, KlConfig()).advantages
    of_members = dict(zip(range(count), rewards - rewards.mean(), strict=True))
    weights: dict[int, float] = defaultdict(float)
    members = [sample.member for sample in batch.samples]
    scales = sequence_scales("sequence", [one.num_trained for one in batch.samples], None, members)
    for sample, scale in zip(batch.samples, scales, strict=True):
        index = sample.state.sample_index
        assert column[sample.places] == pytest.approx(of_members[index], abs=1e-6)
        weights[index] += float(scale) * sample.num_trained
    assert all(weight == pytest.approx(1 / count) for weight in weights.values())


def test_a_constant_scale_counts_sessions_and_a_token_scale_counts_tokens() -> None:
    assert sequence_scales("constant", [1, 1, 5], 10, ["a", "a", "b"]).tolist() == [0.05] * 3
    assert sequence_scales("token", [1, 1, 2], None, ["a", "a", "b"]).tolist() == [0.25] * 3
    assert sequence_scales("sequence", [1, 1, 2], None, ["a", "a", "b"]).tolist() == [0.25, 0.25, 0.25]


# ---------------------------------------------------------------- what becomes of such a member


class Fails(Scorer):
    """A judge that is gone."""

    async def judge(self, states: list[RolloutState]) -> list[float]:
        assert [state.sample_index for state in states] == list(range(len(states))), (
            "a session is judged once"
        )
        raise JudgeError("gone")


async def rewrites(session: Session) -> None:
    first = await session.complete()
    said = {**first["choices"][0]["message"], "content": "I never said so"}
    await session.complete([*session.messages, said, {"role": "user", "content": "Sure?"}])


def test_a_session_whose_judge_failed_keeps_its_trajectories_and_is_judged_again() -> None:
    group = played(rewrites, 2, judge=Fails())
    assert [state.sample_index for state in group.states] == [0, 0, 1, 1]
    received = decided(group, init(2), max_retries=1)
    assert received.retried == received.failures.total() == 2 and received.verdict is Status.ABORTED

    async def again() -> Group:
        engine = AnswersInTurn(None)
        loop = loop_of(engine, rewrites)
        found: Group = await loop.run(carried(received.group))
        assert not engine.requests, "nothing is generated again"
        await loop.close()
        return found

    judged = asyncio.run(again())
    assert [(one.sample_index, one.status, one.reward) for one in judged.states] == [
        (index, Status.COMPLETED, 1.0) for index in (0, 0, 1, 1)
    ]
    assert len({one.metadata[SESSION] for one in judged.states}) == 2


def test_a_session_that_the_world_failed_begins_anew_as_one_trajectory() -> None:
    group = played(rewrites, 2)
    for state in group.members[0]:
        state.status, state.error = Status.FAILED, "environment: it burnt down"
    received = decided(group, init(2), max_retries=1)
    assert [(one.sample_index, one.status, one.num_tokens > 0) for one in received.group.states] == [
        (0, Status.ABORTED, False), (1, Status.COMPLETED, True), (1, Status.COMPLETED, True),
    ]  # fmt: skip
    assert received.failures.total() == received.retried == 1
    lost = decided(group, init(2), max_retries=0, on_failed_member="drop_member")
    assert lost.dropped == 2 - len(lost.group.members) or lost.verdict is Status.FAILED


def test_a_session_expires_whole() -> None:
    group = played(rewrites, 2)
    for state in (group.states[0], *group.states[2:]):
        state.policy_versions[:] = np.where(state.response_mask, 5, -1)
    expiry = Expiry({"default": TaskLimits(2)})
    packed = expiry.reset(pack_groups([group]), 6)
    assert packed.num_members == 2 and packed.group_sizes.tolist() == [3]
    assert packed.sample_indices.tolist() == [0, 1, 1]


def test_trajectories_that_are_no_session_fail_their_member() -> None:
    group = played(rewrites, 2)
    group.states[1].metadata = {}
    group.states[2].reward = 0.5
    check_members(group.key, init(2).states, group)
    assert [(one.sample_index, one.status) for one in group.states] == [
        (0, Status.FAILED),
        (1, Status.FAILED),
    ]
    assert "do not name one session_id" in str(group.states[0].error)
    assert "differ in status or reward" in str(group.states[1].error)
    states = played(rewrites, 2).states
    apart = Group(task="default", group_id=0, states=[states[0], states[2], states[1], states[3]])
    with pytest.raises(ProductionError, match="must return the same members"):
        check_members(apart.key, init(2).states, apart)


# ---------------------------------------------------------------- smolagents


def test_smolagents_which_rewrites_its_history_every_turn_is_one_member_of_a_trajectory_a_turn() -> None:
    import smolagents  # type: ignore[import-untyped]

    @smolagents.tool  # type: ignore[untyped-decorator]
    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    def agent(session: Session) -> float:
        model = smolagents.OpenAIModel("policy", api_base=session.base_url, api_key=session.api_key)
        solver = smolagents.ToolCallingAgent([add], model, verbosity_level=0, max_steps=4)
        return float(str(solver.run("What is 3 plus 4?")) == "7")

    answers = said(call(a=3, b=4), call(a=7, b=0), call("final_answer", answer="7"))
    engine = AnswersInTurn(*answers)
    group = played(agent, 1, engine, max_prompt_tokens=5000)
    assert [(one.status, one.reward, one.sample_index) for one in group.states] == [
        (Status.COMPLETED, 1.0, 0)
    ] * 3, group.states[0].error
    assert len({one.metadata[SESSION] for one in group.states}) == 1 and len(group.members) == 1
    for state, request, answer in zip(group.states, engine.requests, answers, strict=True):
        assert state.prompt_ids.tolist() == request.token_ids.tolist(), "what the engine was sent"
        assert state.response_ids.tolist() == answer.response_ids.tolist() and state.response_mask.all()
    assert "Calling tools:" in bpe().decode(group.states[1].prompt_ids)
    assert decided(group, init(1)).verdict is Status.COMPLETED


def test_the_same_request_twice_at_once_is_two_branches_and_both_end_with_the_session() -> None:
    async def twice(session: Session) -> None:
        async with client_of(session) as client:
            asked: Any = session.messages
            ask = partial(client.chat.completions.create, model="policy", messages=asked)
            await asyncio.gather(ask(), ask())

    engine = AnswersInTurn(*said("7", "8"))
    group = played(twice, 1, engine)
    assert sorted(bpe().decode(one.response_ids) for one in group.states) == ["7", "8"]
    assert len(engine.requests) == 2 and len(group.members) == 1

    async def hangs() -> None:
        loop = loop_of(AnswersInTurn(None), twice, session_timeout_s=0.3, step_timeout_s=0.1)
        (one,) = (await loop.run(init())).states
        assert one.status is Status.FAILED and "session_timeout_s" in str(one.error)
        await loop.close()
        open_ = [task.get_name() for task in asyncio.all_tasks()]
        assert "a session's request" not in open_

    asyncio.run(hangs())
