"""The single-turn loop: continuation, budget, judging, failures. Rows N22, N23, N25."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypost.agent_loop.single_turn import SingleTurnAgentLoop
from raypost.config import RolloutConfig, load_config
from raypost.data.sampler import Sampler
from raypost.errors import JudgeError, NoWorkersError, WaitTimeoutError
from raypost.types import EVALUATION_PRIORITY, GenerateRequest, GenerateResult, Group, Status
from raypost.types.pause import PauseDeadlines
from tests.unit.production import state, virtual
from tests.unit.prompts import STOP, Numbers, encode
from tests.unit.scripted_generator import (
    NOT_PARTIAL,
    TEN_SECONDS_OF_GRACE,
    Scorer,
    ScriptedGenerator,
    decode,
    init,
    of,
    result,
)


def run(engine: ScriptedGenerator, judge: Scorer, one: Group, **options: Any) -> Group:
    return virtual(SingleTurnAgentLoop(engine, judge, decode, **options).run(one))


def test_a_fresh_member_is_generated_and_judged() -> None:
    engine, judge = ScriptedGenerator(lambda _: result([9, STOP], "stop", 3)), Scorer()
    done = run(engine, judge, init(2))
    assert done.status is Status.COMPLETED and judge.calls == [[0, 1]]
    one = done.states[0]
    assert (one.reward, one.response_text, one.finish_reason, one.worker) == (1.0, "9 2", "stop", "w0")
    assert one.policy_versions.tolist() == [3, 3]
    assert len({request.request_id for request in engine.requests}) == 2
    assert len({request.group for request in engine.requests} - {None}) == 1, "answers may come together"


def test_a_continuation_sends_the_exact_ids_and_what_is_left_of_the_budget() -> None:
    """N22."""
    one = state([5] * 30, status=Status.ABORTED, max_tokens=100, prompt_ids=list(range(3, 13)))
    engine = ScriptedGenerator(lambda request: result([7] * request.sample_params.max_tokens, "length", 6))
    done = run(engine, Scorer(), of(one)).states[0]
    (request,) = engine.requests
    assert request.token_ids.tolist() == [*range(3, 13), *range(10, 40)]
    assert request.sample_params.max_tokens == 70
    assert done.sample_params.max_tokens == 100
    assert (done.num_tokens, done.status) == (100, Status.COMPLETED)
    assert done.policy_versions.tolist() == [5] * 30 + [6] * 70


@pytest.mark.parametrize(("min_tokens", "left"), [(50, 20), (30, 0), (100, 70), (0, 0)])
def test_a_continuation_asks_for_what_is_left_of_min_tokens(min_tokens: int, left: int) -> None:
    one = state([5] * 30, status=Status.ABORTED, max_tokens=100, min_tokens=min_tokens)
    engine = ScriptedGenerator(lambda request: result([7] * request.sample_params.max_tokens, "length", 6))
    done = run(engine, Scorer(), of(one)).states[0]
    assert [request.sample_params.min_tokens for request in engine.requests] == [left]
    assert done.sample_params.min_tokens == min_tokens


def test_without_partial_rollout_all_of_min_tokens_is_asked_for_again() -> None:
    one = state([5] * 3, status=Status.ABORTED, min_tokens=4)
    engine = ScriptedGenerator(lambda _: result([8, STOP], "stop"))
    run(engine, Scorer(), of(one), strategy=NOT_PARTIAL)
    assert engine.requests[0].sample_params.min_tokens == 4


LENGTHS = """
model: {name: tiny}
tasks:
  - {source: {kind: reasoning_gym, dataset: chain_sum}, max_tokens: 9, LENGTH}
train: {num_steps: 1, batch_size: 8}
"""


@pytest.mark.parametrize(
    ("length", "asked"),
    [("min_tokens: 5", (9, 5, (STOP,))), ("ignore_eos: true", (9, 0, ())), ("top_k: 0", (9, 0, (STOP,)))],
)
def test_what_a_file_says_of_lengths_is_what_the_engine_is_asked(
    tmp_path: Path, length: str, asked: tuple[int, int, tuple[int, ...]]
) -> None:
    (tmp_path / "run.yaml").write_text(LENGTHS.replace("LENGTH", length))
    (task,) = load_config(tmp_path / "run.yaml").tasks
    engine = ScriptedGenerator(lambda _: result([9] * 9, "length"))
    run(engine, Scorer(), Sampler(task, Numbers(3), encode, (STOP,), 0).sample())
    params = engine.requests[0].sample_params
    assert (params.max_tokens, params.min_tokens, params.stop_token_ids) == asked


def test_requests_have_the_priority_of_their_trajectory() -> None:
    group = init(2)
    group.states[1].priority = EVALUATION_PRIORITY
    engine = ScriptedGenerator(lambda _: result([STOP], "stop"))
    run(engine, Scorer(), group)
    assert [request.priority for request in engine.requests] == [0, EVALUATION_PRIORITY]


def test_two_interruptions_keep_tokens_versions_and_alignment() -> None:
    """N23."""
    answers = iter([result([9] * 3, "abort", 5), result([9] * 2, "Abort", 7), result([9] * 4, "stop", 8)])
    engine, judge, one = ScriptedGenerator(lambda _: next(answers)), Scorer(), init()
    for aborts in (1, 2):
        one = run(engine, judge, one)
        assert (one.status, one.states[0].num_aborts) == (Status.ABORTED, aborts)
        assert judge.calls == []
    done = run(engine, judge, one).states[0]
    assert done.policy_versions.tolist() == [5, 5, 5, 7, 7, 8, 8, 8, 8]
    done.check_aligned()
    assert done.status is Status.COMPLETED


@pytest.mark.parametrize(
    ("ids", "max_tokens"),
    [([9, STOP], 16), ([9] * 4, 4)],
    ids=["ends in a stop token", "budget used up"],
)
def test_an_abort_after_the_last_token_is_complete_without_another_request(
    ids: list[int], max_tokens: int
) -> None:
    engine = ScriptedGenerator(lambda _: result(ids, "abort"))
    assert run(engine, Scorer(), init(max_tokens=max_tokens)).status is Status.COMPLETED
    one = state([0] * len(ids), status=Status.ABORTED, max_tokens=max_tokens)
    one.response_ids = np.asarray(ids, np.int32)
    assert run(engine, Scorer(), of(one)).status is Status.COMPLETED
    assert len(engine.requests) == 1


@pytest.mark.parametrize("reason", ["STOP", "Length", "tool_calls"])
def test_finish_reasons_are_read_whatever_their_case(reason: str) -> None:
    assert run(ScriptedGenerator(lambda _: result([9], reason)), Scorer(), init()).status is Status.COMPLETED


def test_a_stop_token_at_the_end_of_the_prompt_does_not_finish_it() -> None:
    one = state([], status=Status.INIT, prompt_ids=[5, STOP])
    engine = ScriptedGenerator(lambda _: result([9, STOP], "stop"))
    assert run(engine, Scorer(), of(one)).states[0].num_tokens == 2


def test_without_partial_rollout_an_interrupted_member_starts_again() -> None:
    answers = iter([result([9] * 3, "abort"), result([8, STOP], "stop")])
    engine = ScriptedGenerator(lambda _: next(answers))
    once = run(engine, Scorer(), init(), strategy=NOT_PARTIAL)
    assert (once.status, once.num_tokens, once.states[0].num_aborts) == (Status.ABORTED, 0, 1)
    done = run(engine, Scorer(), once, strategy=NOT_PARTIAL).states[0]
    assert done.response_ids.tolist() == [8, STOP]
    assert engine.requests[1].token_ids.tolist() == [5, 6]


def test_without_partial_rollout_a_kept_prefix_is_dropped_first() -> None:
    engine = ScriptedGenerator(lambda _: result([8, STOP], "stop"))
    done = run(
        engine,
        Scorer(),
        of(state([1, 1], status=Status.ABORTED)),
        strategy=NOT_PARTIAL,
    )
    assert done.states[0].response_ids.tolist() == [8, STOP]
    assert engine.requests[0].sample_params.max_tokens == 16


def test_completed_members_are_neither_generated_nor_judged_again() -> None:
    """N25: also while their sibling is interrupted."""
    engine, judge = ScriptedGenerator(lambda _: result([9], "abort")), Scorer(rewards=[0.0])
    kept = state([1, 1], sample_index=0, reward=0.25)
    group = of(kept, state([1], sample_index=1, status=Status.ABORTED))
    assert run(engine, judge, group).status is Status.ABORTED
    assert (kept.status, kept.reward, judge.calls, len(engine.requests)) == (Status.COMPLETED, 0.25, [], 1)
    engine.script = lambda _: result([STOP], "stop")
    run(engine, judge, group)
    assert (kept.reward, judge.calls) == (0.25, [[1]])


def test_members_are_judged_together_when_the_last_of_them_is_done() -> None:
    """So that a judge may compare them, whatever pause comes between."""
    answers = iter([result([STOP], "stop"), result([9], "abort"), result([STOP], "stop")])
    engine, judge, group = ScriptedGenerator(lambda _: next(answers)), Scorer(), init(2)
    first, second = run(engine, judge, group).states
    assert (first.status, second.status, judge.calls) == (Status.ABORTED, Status.ABORTED, [])
    assert (first.num_aborts, second.num_aborts) == (0, 1)
    assert run(engine, judge, group).status is Status.COMPLETED
    assert (judge.calls, len(engine.requests), first.num_tokens) == ([[0, 1]], 3, 1)


def test_expired_members_start_again() -> None:
    engine = ScriptedGenerator(lambda _: result([STOP], "stop", 4))
    done = run(engine, Scorer(), of(state([1, 1], status=Status.EXPIRED)))
    assert done.states[0].policy_versions.tolist() == [4]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (result([], "error"), "finish reason 'error'"),
        (result([9], "martian"), "martian"),
        (result([9], ""), "finish reason ''"),
        (GenerateResult.nothing("error", "w", "engine said no"), "engine said no"),
        (result([9, 9], "stop", logprobs=3), "logprobs 3"),
        (result([9] * 17, "length"), "17 tokens came, 16 were left"),
        (WaitTimeoutError("too slow"), "too slow"),
        (None, "took longer than 600 s"),
    ],
)
def test_a_failure_is_failed_with_its_reason_and_siblings_go_on(answer: Any, error: str) -> None:
    first = []

    def script(request: GenerateRequest) -> Any:
        first.append(request.request_id)
        return answer if len(first) == 1 else result([STOP], "stop")

    done = run(ScriptedGenerator(script), Scorer(), init(2))
    failed, fine = done.states
    assert (failed.status, failed.reward) == (Status.FAILED, None) and error in str(failed.error)
    assert (fine.status, fine.reward) == (Status.COMPLETED, 1.0)
    assert done.status is Status.FAILED


@pytest.mark.parametrize(
    "rewards",
    [JudgeError("no verdict"), WaitTimeoutError("no verdict in time"), [1.0], [float("nan"), float("nan")]],
    ids=["raises", "hangs", "short", "nan"],
)
def test_a_judges_failure_is_never_a_reward(rewards: Any) -> None:
    done = run(ScriptedGenerator(lambda _: result([STOP], "stop")), Scorer(rewards=rewards), init(2))
    assert {(one.status, one.reward) for one in done.states} == {(Status.FAILED, None)}
    assert all(one.error for one in done.states)


@pytest.mark.parametrize("error", [NoWorkersError("all gone"), ConnectionError("host died")])
def test_what_is_no_members_fault_is_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        run(ScriptedGenerator(lambda _: error), Scorer(), init(2))
    with pytest.raises(type(error)):
        run(ScriptedGenerator(lambda _: result([STOP], "stop")), Scorer(rewards=error), init(2))


def test_interrupted_judging_keeps_the_tokens_and_is_done_later() -> None:
    async def main() -> None:
        engine, judge = ScriptedGenerator(lambda _: result([9, 8], "stop", 1)), Scorer(seconds=1000)
        loop = SingleTurnAgentLoop(engine, judge, decode, rollout=TEN_SECONDS_OF_GRACE)
        running = asyncio.create_task(loop.run(init(2)))
        await asyncio.sleep(1)
        await loop.interrupt()
        one = await running
        assert asyncio.get_running_loop().time() == pytest.approx(11)
        assert [(m.status, m.num_tokens, m.reward) for m in one.states] == [(Status.ABORTED, 2, None)] * 2
        judge.seconds = 0
        done = await loop.run(one)
        assert (done.status, len(engine.requests), len(judge.calls)) == (Status.COMPLETED, 2, 2)

    virtual(main())


def test_judging_that_began_between_two_interrupts_ends_within_its_grace_after_the_second() -> None:
    async def main() -> None:
        deadlines = PauseDeadlines(120.0)
        judge = Scorer(seconds=1000)
        asked = asyncio.Event()

        class Late(ScriptedGenerator):
            async def generate(self, request: GenerateRequest) -> GenerateResult:
                await asked.wait()
                return result([9, STOP], "stop")

        loop = SingleTurnAgentLoop(
            Late(lambda _: None), judge, decode, rollout=RolloutConfig(pause_timeout_s=120)
        )
        running = asyncio.create_task(loop.run(init()))
        await loop.interrupt()
        await asyncio.sleep(1)
        asked.set()
        await asyncio.sleep(deadlines.resend_s - 1)
        assert judge.calls and not running.done()
        await loop.interrupt()
        one = await running
        now = asyncio.get_running_loop().time()
        assert now == pytest.approx(deadlines.resend_s + deadlines.judge_grace_s)
        assert (one.status, one.states[0].num_tokens) == (Status.ABORTED, 2)

    virtual(main())


def test_judging_that_ends_within_the_grace_period_counts() -> None:
    async def main() -> None:
        loop = SingleTurnAgentLoop(
            ScriptedGenerator(lambda _: result([STOP], "stop")),
            Scorer(seconds=5),
            decode,
            rollout=TEN_SECONDS_OF_GRACE,
        )
        running = asyncio.create_task(loop.run(init()))
        await asyncio.sleep(1)
        await loop.interrupt()
        assert (await running).status is Status.COMPLETED

    virtual(main())


@pytest.mark.parametrize(
    ("retries", "tokens", "stops", "seconds"),
    [
        (0, 0, False, 0),
        (1, 0, False, 0.5),
        (2, 0, False, 1),
        (3, 2, True, 2),
        (99, 0, False, 8),
        (1, 2, False, 0),
    ],
)
def test_what_failed_is_played_again_after_a_wait_that_doubles_up_to_a_bound(
    retries: int, tokens: int, stops: bool, seconds: float
) -> None:
    async def main() -> None:
        again = state([0] * tokens, status=Status.ABORTED, max_tokens=16)
        again.num_retries, again.finish_reason = retries, "stop" if stops else "abort"
        engine = ScriptedGenerator(lambda _: result([STOP], "stop"))
        done = await SingleTurnAgentLoop(engine, Scorer(), decode).run(of(again))
        assert done.status is Status.COMPLETED
        assert asyncio.get_running_loop().time() == pytest.approx(seconds)

    virtual(main())


def test_a_pause_ends_the_wait_and_the_judge_is_asked_again_after_it() -> None:
    async def main() -> None:
        again = state([1, 1], status=Status.ABORTED, max_tokens=16)
        again.num_retries, again.finish_reason = 9, "stop"
        engine, judge = ScriptedGenerator(lambda _: result([STOP], "stop")), Scorer()
        no_grace = RolloutConfig(pause_timeout_s=24)
        loop = SingleTurnAgentLoop(engine, judge, decode, rollout=no_grace, strategy=NOT_PARTIAL)
        running = asyncio.create_task(loop.run(of(again)))
        await asyncio.sleep(1)
        await loop.interrupt()
        one = await running
        assert asyncio.get_running_loop().time() == pytest.approx(2)
        assert (one.status, one.num_tokens, judge.calls) == (Status.ABORTED, 2, [])
        assert (await loop.run(one)).status is Status.COMPLETED
        assert (engine.requests, len(judge.calls)) == ([], 1)

    virtual(main())


def test_a_cancelled_run_leaves_no_member_that_looks_finished_and_no_judge_running() -> None:
    async def main() -> None:
        one = init()
        loop = SingleTurnAgentLoop(
            ScriptedGenerator(lambda _: result([STOP], "stop")), Scorer(seconds=99), decode
        )
        running = asyncio.create_task(loop.run(one))
        await asyncio.sleep(1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.sleep(1)
        assert one.status is not Status.COMPLETED
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual(main())
