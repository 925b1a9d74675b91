"""abort, keep and wait on a real engine, with real weight loads in the middle of long generations."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
import torch

from raypost.agent_loop.single_turn import SingleTurnAgentLoop
from raypost.errors import WeightError
from raypost.types import (
    EVALUATION_PRIORITY,
    FloatArray,
    GenerateResult,
    Group,
    RolloutState,
    SampleParams,
    Status,
)
from raypost.types.pause import PauseDeadlines, PauseMode
from tests.actors.tiny_engine import (
    CONFIG,
    PROMPT,
    TOLERANCE,
    Bench,
    difference,
    expected_logprobs,
    request,
    started,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 200
SLOTS = CONFIG.rollout.max_num_seqs
MORE_THAN_SLOTS = SLOTS + 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    async with started(tmp_path_factory.mktemp("model"), tied=True) as bench:
        yield bench


@pytest_asyncio.fixture(loop_scope="module")
async def bench(one_bench: Bench) -> Bench:
    """Serving a version of its own."""
    await one_bench.sync()
    return one_bench


def start(bench: Bench, count: int, max_tokens: int = TOKENS) -> list[asyncio.Task[GenerateResult]]:
    asked = (request(f"r{n}", max_tokens) for n in range(count))
    return [asyncio.create_task(bench.worker.generate(one)) for one in asked]


async def results_of(calls: list[asyncio.Task[GenerateResult]]) -> list[GenerateResult]:
    return await asyncio.wait_for(asyncio.gather(*calls), 60)


async def is_stopped(bench: Bench) -> bool:
    """Whether nothing is generated, and a request that comes is refused without tokens."""
    late = await bench.worker.generate(request("late"))
    running = (await bench.worker.stats()).running
    return (running, late.finish_reason, len(late.response_ids)) == (0, "abort", 0)


def boundary(result: GenerateResult) -> int:
    """The first token of the second version. There are two, in order."""
    changes = np.flatnonzero(np.diff(result.policy_versions))
    assert len(changes) == 1
    return int(changes[0]) + 1


async def test_keep_splits_versions_at_the_token_and_continues_from_a_prefix_under_the_new_weights(
    bench: Bench,
) -> None:
    old = bench.version
    calls = start(bench, MORE_THAN_SLOTS)
    await bench.progress(SLOTS)
    await bench.worker.pause("keep")
    assert await is_stopped(bench)
    await bench.load()
    await asyncio.sleep(0.1)
    assert not any(call.done() for call in calls)
    await bench.worker.resume(bench.version)
    results = await results_of(calls)

    assert {(one.finish_reason, len(one.response_ids)) for one in results} == {("length", TOKENS)}
    spanning = [one for one in results if old in one.policy_versions]
    assert len(spanning) == SLOTS, "the others were queued, and have the new version only"
    assert max(bench.gaps(one).max() for one in results) < TOLERANCE
    for one in spanning:
        at = boundary(one)
        assert one.policy_versions[0] == old and one.policy_versions[-1] == bench.version
        for wrong in (at - 1, at + 1):
            versions = np.where(np.arange(TOKENS) < wrong, old, bench.version)
            shifted = bench.gaps(replace(one, policy_versions=versions))
            assert shifted[min(wrong, at)] > TOLERANCE, "a version off by one token would show"


async def test_swap_splits_versions_at_the_token_in_one_call(bench: Bench) -> None:
    old = bench.version
    calls = start(bench, SLOTS)
    await bench.progress(SLOTS)
    report = await bench.swap()
    assert (report.version, report.digest) == (bench.version, (await bench.worker.held()).digest)
    assert report.load_s > 0
    results = await results_of(calls)
    assert {(one.finish_reason, len(one.response_ids)) for one in results} == {("length", TOKENS)}
    assert {tuple(sorted(set(one.policy_versions))) for one in results} == {(old, bench.version)}
    assert max(bench.gaps(one).max() for one in results) < TOLERANCE


@contextlib.contextmanager
def without_recomputing(bench: Bench) -> Iterator[None]:
    """As with `sync.recompute_kv_cache: false`."""
    engine = bench.worker._life.engine
    assert engine is not None and CONFIG.recompute_kv_cache == engine.recompute_kv_cache, (
        "the configuration's"
    )
    engine.recompute_kv_cache = not CONFIG.recompute_kv_cache
    yield
    engine.recompute_kv_cache = CONFIG.recompute_kv_cache


def continued_logprobs(bench: Bench, result: GenerateResult) -> FloatArray:
    """Logprobs of a result of two versions, the second of which goes on from keys and values of the first."""
    at, (old, new) = boundary(result), sorted(set(result.policy_versions))
    ids = torch.from_numpy(np.concatenate([PROMPT, result.response_ids]).astype(np.int64))[None]
    # The last token of the first version has not been through the model yet when the second one comes.
    computed = len(PROMPT) + at - 1
    with torch.no_grad():
        first = bench.history[old](ids[:, :computed], use_cache=True)
        second = bench.history[new](ids[:, computed:], past_key_values=first.past_key_values)
    logprobs = torch.log_softmax(torch.cat([first.logits, second.logits], 1)[0, :-1], -1)
    expected: FloatArray = logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy()
    return expected[len(PROMPT) - 1 :]


async def test_without_recomputing_requests_go_on_from_their_keys_and_values(bench: Bench) -> None:
    with without_recomputing(bench):
        calls = start(bench, MORE_THAN_SLOTS)
        await bench.progress(SLOTS)
        old = bench.version
        await bench.swap()
        results = await results_of(calls)
    assert {(one.finish_reason, len(one.response_ids)) for one in results} == {("length", TOKENS)}
    spanning = [one for one in results if old in one.policy_versions]
    assert len(spanning) == SLOTS
    for one in spanning:
        assert np.max(np.abs(continued_logprobs(bench, one) - one.logprobs)) < TOLERANCE
    assert max(bench.gaps(one).max() for one in spanning) > TOLERANCE, "the two ways differ"
    queued = [one for one in results if old not in one.policy_versions]
    assert max(difference(bench.model, one) for one in queued) < TOLERANCE


async def test_without_recomputing_later_requests_use_nothing_that_older_weights_made(bench: Bench) -> None:
    prompt = np.arange(200, dtype=np.int32) % 50
    with without_recomputing(bench):
        frozen = start(bench, 2)
        await bench.progress(2)
        for _ in range(2):
            result = await bench.worker.generate(request("same prompt", 4, prompt))
            ids = np.concatenate([prompt, result.response_ids])
            expected = expected_logprobs(bench.model, ids)[len(prompt) - 1 :]
            assert np.max(np.abs(expected - result.logprobs)) < TOLERANCE
            await bench.swap()
        await results_of(frozen)


async def test_keep_may_be_repeated_and_span_several_loads(bench: Bench) -> None:
    first = bench.version
    calls = start(bench, 8, 240)
    for _ in range(3):
        await bench.progress(8)
        await bench.worker.pause("keep")
        await bench.worker.pause("keep")
        await bench.load()
        await bench.worker.resume(bench.version)
    await bench.worker.pause("keep")
    await bench.worker.resume(bench.version)
    results = await results_of(calls)
    assert all(
        sorted(set(one.policy_versions)) == [first, first + 1, first + 2, first + 3] for one in results
    )
    assert all((np.diff(one.policy_versions) >= 0).all() for one in results)
    assert max(bench.gaps(one).max() for one in results) < TOLERANCE


async def test_canary_of_a_keeping_worker_is_that_of_its_weights_and_leaves_requests_in_place(
    bench: Bench,
) -> None:
    calls = start(bench, MORE_THAN_SLOTS, 240)
    await bench.progress(SLOTS)
    await bench.worker.pause("keep")
    for _ in range(2):
        await bench.load()
        ids = np.arange(40, dtype=np.int32)
        got = await asyncio.wait_for(bench.worker.canary(ids), 60)
        assert np.max(np.abs(got - expected_logprobs(bench.model, ids))) < TOLERANCE
        assert await is_stopped(bench)
        assert not any(call.done() for call in calls)
    await bench.worker.resume(bench.version)
    results = await results_of(calls)
    assert {(one.finish_reason, len(one.response_ids)) for one in results} == {("length", 240)}
    assert max(bench.gaps(one).max() for one in results) < TOLERANCE


async def test_abort_overrules_keep_and_what_was_frozen_comes_back_with_its_tokens(bench: Bench) -> None:
    calls = start(bench, MORE_THAN_SLOTS)
    await bench.progress(SLOTS)
    await bench.worker.pause("keep")
    old = bench.version
    await bench.load()
    await bench.worker.pause("abort")
    results = await results_of(calls)
    assert {one.finish_reason for one in results} == {"abort"}
    assert sum(len(one.response_ids) > 0 for one in results) == SLOTS
    assert all(set(one.policy_versions) <= {old} for one in results)
    assert max(bench.gaps(one).max(initial=0.0) for one in results) < TOLERANCE
    await bench.worker.pause("keep")
    assert await is_stopped(bench)
    await bench.worker.resume(bench.version)
    await bench.assert_serves(bench.version)


async def test_cancelled_call_leaves_nothing_frozen_in_the_engine(bench: Bench) -> None:
    calls = start(bench, 4)
    await bench.progress(4)
    await bench.worker.pause("keep")
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert bench.llm.get_num_unfinished_requests() == 0
    await bench.load()
    await bench.worker.resume(bench.version)
    await bench.assert_serves(bench.version)


async def test_wait_runs_everything_to_its_end_under_one_version(bench: Bench) -> None:
    calls = start(bench, MORE_THAN_SLOTS, 100)
    await bench.progress(SLOTS)
    pause = asyncio.create_task(bench.worker.pause("wait"))
    await asyncio.sleep(0)
    late = await bench.worker.generate(request("late"))
    assert (late.finish_reason, len(late.response_ids), pause.done()) == ("abort", 0, False)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(bench.worker.held()), 0.01)
    await asyncio.wait_for(pause, 60)
    assert await is_stopped(bench)
    results = await results_of(calls)
    assert {(one.finish_reason, len(one.response_ids)) for one in results} == {("length", 100)}
    assert {version for one in results for version in one.policy_versions} == {bench.version}
    assert max(difference(bench.model, one) for one in results) < TOLERANCE
    await bench.load()
    await bench.worker.resume(bench.version)
    await bench.assert_serves(bench.version)


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_stricter_pause_overrules_one_that_waits(bench: Bench, mode: PauseMode) -> None:
    calls = start(bench, 8 * SLOTS)
    await bench.progress(SLOTS)
    waiting = asyncio.create_task(bench.worker.pause("wait"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await asyncio.wait_for(bench.worker.pause(mode), 60)
    await asyncio.wait_for(waiting, 60)
    assert await is_stopped(bench)
    assert sum(call.done() for call in calls) == (0 if mode == "keep" else len(calls))
    await bench.worker.pause("wait")
    assert await is_stopped(bench), "a gentler pause changes nothing"
    await bench.worker.pause("abort")
    results = await results_of(calls)
    assert len(results) == 8 * SLOTS and "abort" in {one.finish_reason for one in results}, (
        "not run to their end"
    )


async def test_wait_says_what_still_runs_when_time_is_up_and_aborts_it(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.worker._gate, "deadlines", PauseDeadlines(3.0))
    calls = start(bench, 32 * SLOTS)
    await bench.progress(SLOTS)
    with caplog.at_level(logging.WARNING):
        await asyncio.wait_for(bench.worker.pause("wait"), 60)
    assert await is_stopped(bench)
    assert "aborts what still runs" in caplog.text and "requests: r" in caplog.text
    results = await results_of(calls)
    assert {one.finish_reason for one in results} >= {"abort"}


async def test_weights_are_not_loaded_while_a_pause_is_not_confirmed(bench: Bench) -> None:
    calls = start(bench, 2 * SLOTS)
    waiting = asyncio.create_task(bench.worker.pause("wait"))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    with pytest.raises(WeightError, match="pause it before loading"):
        await bench.load()
    await bench.worker.pause("abort")
    await results_of(calls)


async def test_interrupted_group_continues_under_newer_weights_and_loses_no_token(bench: Bench) -> None:
    class Everybody:
        async def judge(self, states: list[RolloutState]) -> list[float]:
            return [1.0] * len(states)

    loop = SingleTurnAgentLoop(bench.worker, Everybody(), lambda ids: str(len(ids)))
    params = SampleParams(max_tokens=240)
    states = [
        RolloutState(task="t", group_id=0, sample_index=n, prompt_ids=PROMPT, sample_params=params)
        for n in range(8)
    ]
    group, first = Group(task="t", group_id=0, states=states), bench.version
    for _ in range(3):
        running = asyncio.create_task(loop.run(group))
        await bench.progress(8)
        await bench.worker.pause("abort")
        group = await asyncio.wait_for(running, 60)
        assert group.status is Status.ABORTED
        await bench.load()
        await bench.worker.resume(bench.version)
    group = await asyncio.wait_for(loop.run(group), 60)
    assert group.status is Status.COMPLETED
    for state in group.states:
        assert (state.num_tokens, state.num_aborts, state.finish_reason) == (240, 3, "length")
        assert sorted(set(state.policy_versions)) == [first, first + 1, first + 2, first + 3]
        whole = GenerateResult(
            response_ids=state.response_ids,
            logprobs=state.logprobs,
            policy_versions=state.policy_versions,
            finish_reason="length",
            worker="",
        )
        assert bench.gaps(whole).max() < TOLERANCE


async def test_evaluation_goes_before_training_requests_that_queue(bench: Bench) -> None:
    order: list[str] = []

    async def run(name: str, max_tokens: int, priority: int) -> None:
        await bench.worker.generate(request(name, max_tokens, priority=priority))
        order.append(name)

    names = [f"train-{n}" for n in range(4 * SLOTS)]
    calls = [asyncio.create_task(run(name, 60, 0)) for name in names]
    await bench.progress(SLOTS)
    calls.append(asyncio.create_task(run("evaluation", 50, EVALUATION_PRIORITY)))
    await asyncio.wait_for(asyncio.gather(*calls), 60)
    before = order[: order.index("evaluation")]
    assert set(before) <= set(names[:SLOTS]), "only what was decoded already ends before it"
