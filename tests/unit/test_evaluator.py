"""The evaluator on a scripted pool: what it opens and closes, what it refuses to score, and its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.evaluator import Evaluator
from raypost.config import Config
from raypost.errors import RaypostError, StaleWeightsError, WaitTimeoutError
from raypost.types import EVALUATION_PRIORITY, Group, GroupKey, RolloutState, Status
from tests.factories import make_config
from tests.unit.production import virtual
from tests.unit.tokenizers import write_tokenizer

TASKS = [
    {"name": name, "source": {"kind": "reasoning_gym", "dataset": dataset}, "max_tokens": 8}
    for name, dataset in (("sums", "chain_sum"), ("products", "products"))
]


def eval_config(**options: object) -> Config:
    drawn = {"num_prompts": 6, "samples": 2, "temperature": 1.0}
    return make_config(tasks=TASKS, eval=drawn | options)


class Pool:
    """A pool's control, and an agent loop on it whose members are right where `is_right` says so."""

    def __init__(self, is_right: Callable[[RolloutState], bool] = lambda state: True) -> None:
        self.is_right = is_right
        self.serving: int | None = None
        self.calls: list[str] = []
        self.seen: list[RolloutState] = []
        self.done: set[tuple[str, int]] = set()
        self.wait = asyncio.Event()
        self.wait.set()
        self.broken: Exception | None = None

    async def resume(self, version: int) -> None:
        self.calls.append(f"resume {version}")
        self.serving = version

    async def pause(self, mode: str = "abort") -> None:
        self.calls.append("pause")
        self.serving = None

    async def forget(self, keys: Sequence[GroupKey]) -> None: ...

    async def run(self, group: Group) -> Group:
        if self.broken is not None:
            raise self.broken
        if group.group_id == -6:
            await self.wait.wait()
        for state in group.states:
            assert self.serving is not None and state.status is Status.INIT, "nothing is left of a run before"
            self.seen.append(state)
            self.finish(state, self.serving)
        self.done.add(group.key)
        return group

    def finish(self, state: RolloutState, version: int) -> None:
        state.append_segment(
            np.arange(3, dtype=np.int32), np.zeros(3, np.float32), np.full(3, version, np.int32)
        )
        state.status = Status.COMPLETED
        state.reward = float(self.is_right(state))
        state.worker = "rollout-0"

    async def interrupt(self) -> None:
        """Nothing is judged here."""


def evaluator(folder: Path, pool: Pool, **options: object) -> Evaluator:
    return Evaluator(eval_config(**options), str(write_tokenizer(folder)), pool, pool)


async def test_every_held_out_problem_is_scored_with_priority_and_the_pool_is_closed_again(
    tmp_path: Path,
) -> None:
    pool = Pool(lambda state: state.task == "sums" or state.sample_index == 0)
    own = evaluator(tmp_path, pool)
    for version in (0, 3):
        scores = await own.evaluate(version)
        assert (
            scores["held_out/sums"] == 1 and scores["held_out/products"] == 0.5 == scores["pass@1/products"]
        )
        assert scores["held_out"] == 0.75 and scores["pass@2"] == 1.0
        assert scores["held_out_low"] < 0.75 < scores["held_out_high"]
        assert (scores["eval_failed"], scores["eval_tokens_mean"]) == (0, 3)
    assert pool.calls == ["resume 0", "pause", "resume 3", "pause"]
    assert len(pool.seen) == 2 * 2 * 6 * 2
    assert {state.priority for state in pool.seen} == {EVALUATION_PRIORITY}
    # One span, or two, if the machine took its time between them.
    assert {span.kind for span in await own.drain_spans()} == {"evaluate"}


@pytest.mark.parametrize(("failures", "failed"), [(2, 0), (3, 2 * 2 * 6)])
async def test_a_response_that_failed_is_played_again_as_often_as_in_production(
    tmp_path: Path, failures: int, failed: int
) -> None:
    class Flaky(Pool):
        async def run(self, group: Group) -> Group:
            for state in group.states:
                assert state.status is not Status.COMPLETED or state.sample_index == 0, (
                    "siblings keep their scores"
                )
                if state.status is Status.COMPLETED:
                    continue
                assert (state.num_tokens, state.error) == (0, None)
                if state.sample_index == 1 and state.num_retries < failures:
                    state.status, state.error = Status.FAILED, "engine: lost"
                else:
                    self.finish(state, self.serving or 0)
            return group

    scores = await evaluator(tmp_path, Flaky()).evaluate(1)
    assert scores["eval_failed"] == failed // 2 and scores["held_out"] == 1.0


async def test_a_token_of_another_version_is_an_error_and_no_score(tmp_path: Path) -> None:
    class Mixed(Pool):
        def finish(self, state: RolloutState, version: int) -> None:
            super().finish(state, version - (state.task == "products"))

    pool = Mixed()
    with pytest.raises(
        StaleWeightsError, match=r"version 4 got tokens of version 3 from rollout-0 .*'products'"
    ):
        await evaluator(tmp_path, pool).evaluate(4)
    assert pool.calls[-1] == "pause"


async def test_tokens_that_no_policy_made_are_no_other_version(tmp_path: Path) -> None:
    class Observing(Pool):
        def finish(self, state: RolloutState, version: int) -> None:
            versions, mask = np.asarray([version, -1], np.int32), np.asarray([True, False])
            state.append_segment(np.arange(2, dtype=np.int32), np.zeros(2, np.float32), versions, mask)
            state.status, state.reward = Status.COMPLETED, 1.0

    pool = Observing()
    assert (await evaluator(tmp_path, pool).evaluate(2))["held_out"] == 1.0


def test_a_late_evaluation_names_the_groups_it_waits_for_and_closes_the_pool(tmp_path: Path) -> None:
    async def main() -> None:
        pool = Pool()
        pool.wait.clear()
        own = evaluator(tmp_path, pool, timeout_s=600)
        with pytest.raises(
            WaitTimeoutError, match=r"eval\.timeout_s\) for 2 of 12 groups: products/-6, sums/-6; raise it"
        ):
            await own.evaluate(1)
        assert pool.calls == ["resume 1", "pause"] and len(pool.done) == 10
        pool.wait.set()
        assert (await own.evaluate(2))["held_out"] == 1.0, "what was late is forgotten"

    virtual(main())


def test_no_group_of_an_evaluation_has_the_key_of_a_group_that_is_trained(tmp_path: Path) -> None:
    pool = Pool()
    asyncio.run(evaluator(tmp_path, pool).evaluate(1))
    assert {state.group_id for state in pool.seen} == {-1, -2, -3, -4, -5, -6}


def few(most: int, **options: object) -> Config:
    loop = {"kind": "environment", "environment": "m:f", "max_concurrent": most}
    chosen = {"num_prompts": 6, "samples": 2, "temperature": 1.0, "timeout_s": 100} | options
    return make_config(tasks=[TASKS[0] | {"agent_loop": loop}, TASKS[1]], eval=chosen)


def test_trajectories_of_which_few_play_at_once_begin_in_rounds_and_each_has_its_time(tmp_path: Path) -> None:
    playing, most = dict[str, int](), dict[str, int]()

    class Slow(Pool):
        async def run(self, group: Group) -> Group:
            playing[group.task] = playing.get(group.task, 0) + 1
            most[group.task] = max(most.get(group.task, 0), playing[group.task])
            await asyncio.sleep(90)
            playing[group.task] -= 1
            return await super().run(group)

    async def main() -> None:
        config, pool = few(4), Slow()
        own = Evaluator(config, str(write_tokenizer(tmp_path)), pool, pool)
        assert (await own.evaluate(1))["held_out"] == 1.0
        assert most == {"sums": 2, "products": 6}
        # Three rounds, one after the other: longer than one may take.
        assert asyncio.get_running_loop().time() == pytest.approx(270)

    virtual(main())


@pytest.mark.parametrize(
    ("most", "options", "timeout_s"),
    [
        (4, {}, 300),
        (1, {}, 600),
        (12, {}, 100),
        (5, {"num_prompts": 0}, 100),
        (4, {"pool": {"name": "e", "num_workers": 1}}, 600),
        (8, {"pool": {"name": "e", "num_workers": 1}}, 300),
    ],
)
def test_an_evaluation_has_the_time_of_its_rounds(
    most: int, options: dict[str, Any], timeout_s: float
) -> None:
    assert few(most, **options).eval_timeout_s == timeout_s


async def test_one_evaluation_at_a_time(tmp_path: Path) -> None:
    pool = Pool()
    pool.wait.clear()
    own = evaluator(tmp_path, pool)
    first = asyncio.create_task(own.evaluate(1))
    await asyncio.sleep(0)
    with pytest.raises(RaypostError, match="version 2 was asked for while that of version 1 goes on"):
        await own.evaluate(2)
    pool.wait.set()
    assert (await first)["held_out"] == 1.0
    assert pool.calls == ["resume 1", "pause"], "the refused one touched nothing"


async def test_interrupted_groups_run_again_and_what_never_ends_is_counted_as_failed(tmp_path: Path) -> None:
    tries: dict[tuple[str, int], int] = {}

    class Interrupted(Pool):
        async def run(self, group: Group) -> Group:
            tries[group.key] = tries.get(group.key, 0) + 1
            if group.group_id == -1 or (group.group_id == -2 and tries[group.key] < 3):
                group.states[0].status = Status.ABORTED
                return group
            for state in group.states:
                state.status = Status.INIT
            return await super().run(group)

    pool = Interrupted()
    scores = await evaluator(tmp_path, pool).evaluate(1)
    assert tries["sums", -1] == 5 and tries["sums", -2] == 3 and tries["sums", -3] == 1
    assert scores["eval_failed"] == 4 and scores["held_out"] == 1.0


async def test_what_breaks_under_it_is_raised_at_once_and_the_pool_is_closed(tmp_path: Path) -> None:
    pool = Pool()
    pool.broken = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        await evaluator(tmp_path, pool).evaluate(1)
    assert pool.calls == ["resume 1", "pause"]


async def test_lengths_are_the_tasks_own(tmp_path: Path) -> None:
    folder, pool = str(write_tokenizer(tmp_path)), Pool()
    tasks = [TASKS[0] | {"min_tokens": 3}, TASKS[1] | {"ignore_eos": True}]
    config = make_config(tasks=tasks, eval={"num_prompts": 1})
    await Evaluator(config, folder, pool, pool).evaluate(1)
    asked = {
        one.task: (one.sample_params.min_tokens, len(one.sample_params.stop_token_ids)) for one in pool.seen
    }
    assert asked == {"sums": (3, 1), "products": (0, 0)}


async def test_switched_off_it_has_no_problems(tmp_path: Path) -> None:
    assert await evaluator(tmp_path, Pool(), num_prompts=0).evaluate(1) == {"eval_failed": 0.0}
