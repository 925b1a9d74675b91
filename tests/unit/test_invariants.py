"""What must always be true, where no other test shows it as a whole: aligned trajectories (5), failures that are
no rewards and rewards that are no failures (7), waits that end and say for what (8), reproducible batches (10).
"""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypost.agent_loop.single_turn import SingleTurnAgentLoop
from raypost.errors import JudgeError
from raypost.judges.rules import RuleJudge
from raypost.types import GenerateRequest, GenerateResult, Group, RolloutState, Status
from raypost.types.packed import pack_groups, unpack_groups
from tests.thorough import examples
from tests.unit.production import Pool, World, fate, producing, take_after_sync, task_config, virtual
from tests.unit.prompts import STOP
from tests.unit.scripted_generator import Scorer, decode, init, result

# ---------------------------------------------------------------- 5: one length, and never another token

segments = st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["w0", "w1", "w2"])), max_size=8)


@settings(deadline=None, max_examples=examples(100))
@given(segments, st.integers(1, 20), st.booleans())
def test_a_trajectory_is_aligned_and_continued_token_by_token_however_often_it_moves(
    parts: list[tuple[int, str]], max_tokens: int, travels: bool
) -> None:
    """Each continuation may run on another worker under a newer version, and cross process borders in between."""

    class Engine:
        def __init__(self) -> None:
            self.script = iter([*parts, (max_tokens, "last")])
            self.asked: list[list[int]] = []

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            length, worker = next(self.script)
            self.asked.append(request.token_ids.tolist())
            start, count = len(request.token_ids), min(length, request.sample_params.max_tokens)
            return GenerateResult(
                response_ids=np.arange(100 + start, 100 + start + count, dtype=np.int32),
                logprobs=-np.arange(start, start + count, dtype=np.float32),
                policy_versions=np.full(count, len(self.asked), np.int32),
                finish_reason="length" if count == request.sample_params.max_tokens else "abort",
                worker=worker,
            )

    async def main() -> None:
        engine = Engine()
        loop, one = SingleTurnAgentLoop(engine, Scorer(), decode), init(max_tokens=max_tokens)
        while one.status is not Status.COMPLETED:
            before = one.states[0]
            expected = [*before.prompt_ids.tolist(), *before.response_ids.tolist()]
            if travels:
                (one,) = unpack_groups(pack_groups([one]))
            one = await loop.run(one)
            assert engine.asked[-1] == expected
            one.states[0].check_aligned()
        (done,) = one.states
        assert done.response_ids.tolist() == list(range(102, 102 + max_tokens))
        assert done.logprobs.tolist() == [-float(place) for place in range(2, 2 + max_tokens)]
        assert done.policy_versions.tolist() == sorted(done.policy_versions.tolist())
        assert done.response_mask.all()

    virtual(main())


# ---------------------------------------------------------------- 7: a failure is no reward, zero is no failure


def scored(answer: str) -> float:
    if answer == "9":
        raise ZeroDivisionError("the scorer's own")
    return float(answer == "7")


@pytest.mark.parametrize(
    ("ids", "status", "reward"), [([7], "completed", 1.0), ([8], "completed", 0.0), ([9], "failed", None)]
)
def test_right_wrong_and_unknown_are_told_apart_from_engine_to_record(
    ids: list[int], status: str, reward: float | None
) -> None:
    class Engine:
        async def generate(self, request: GenerateRequest) -> GenerateResult:
            return result(ids, "stop")

    judge = RuleJudge(lambda answer, metadata: scored(answer))
    (done,) = virtual(SingleTurnAgentLoop(Engine(), judge, decode).run(init())).states
    assert (str(done.status), done.reward, done.error is None) == (status, reward, status == "completed")


class Stops:
    """An engine that needs a second for a whole response."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        await asyncio.sleep(1)
        return result([9, STOP], "stop")


@pytest.mark.parametrize(("error", "failed"), [(None, 0), (JudgeError("no verdict"), 1)])
def test_what_was_wrong_is_trained_with_zero_and_what_failed_is_not_trained(
    error: BaseException | None, failed: int
) -> None:
    async def main() -> None:
        world = World(task_config(max_staleness=0), batch_size=2)
        wrong = Scorer(rewards=error or [0.0, 0.0])
        first, others = (SingleTurnAgentLoop(Stops(), judge, decode) for judge in (wrong, Scorer()))
        world.pool.run = lambda one: (others if one.group_id else first).run(one)  # type: ignore[method-assign, assignment]
        async with producing(world):
            status, packed = await world.take(1)
            rewards = {one.group_id: {m.reward for m in one.states} for one in unpack_groups(packed)}
            assert rewards == ({1: {1.0}, 2: {1.0}} if failed else {0: {0.0}, 1: {1.0}})
            assert (await world.producer.counts()).failed == failed
            metrics = status.metrics
            assert (metrics.raw_rewards_count, metrics.failed_samples) == (4, 2 * failed)
            assert metrics.raw_rewards_sum == (4.0 if failed else 2.0)

    virtual(main())


# ---------------------------------------------------------------- 8: every wait ends and says for what


@pytest.mark.parametrize("how", ["hang", "stubborn"])
def test_a_pause_past_its_deadline_names_the_group_it_gave_up(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        world = World(batch_size=2, pause_timeout_s=20)
        world.pool.fate = fate(**{how: {1}})
        async with producing(world):
            await asyncio.sleep(0.5)
            assert 20 <= await world.producer.pause() <= 25

    with caplog.at_level(logging.ERROR):
        virtual(main())
    assert "group ('default', 1) did not end within the pause" in caplog.text
    assert "('default', 0)" not in caplog.text


def test_a_consumer_that_waits_long_says_so_before_it_gives_up(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        world = World(take_timeout_s=150.0)
        with pytest.raises(TimeoutError, match=r"batch of step 1: .*pending 0.*take_timeout_s=150"):
            await world.producer.take_batch(1)
        assert asyncio.get_running_loop().time() == pytest.approx(150)

    with caplog.at_level(logging.WARNING):
        virtual(main())
    assert caplog.text.count("the consumer waits for the batch of step 1") == 2


# ---------------------------------------------------------------- 10: the same seed gives the same batches


def contents(packed: Any) -> Any:
    """All that training sees of a batch, in its order."""
    return [
        (
            one.key,
            [(m.sample_index, m.reward, m.metadata, m.prompt_ids.tolist()) for m in one.states],
            tokens(one),
        )
        for one in unpack_groups(packed)
    ]


def tokens(one: Group) -> list[Any]:
    def columns(m: RolloutState) -> list[list[Any]]:
        return [array.tolist() for array in (m.response_ids, m.logprobs, m.policy_versions, m.response_mask)]

    return [columns(member) for member in one.states]


class Scripted(Pool):
    """Tokens depend on the prompt, the sample and the version; how long they take, on `haste` as well."""

    def __init__(self, seed: int, haste: int) -> None:
        super().__init__()
        self.seconds = lambda one: 1 + (one.group_id * 7 + seed) % 5
        self.fate = lambda one: ("ok", "ok", "uniform", "failed")[(one.group_id * 5 + seed) % 4]
        self.haste = haste

    async def _run(self, group: Group) -> Group:
        await asyncio.sleep((group.group_id * self.haste) % 7)
        return await super()._run(group)


class Driver:
    """The main loop of a synchronous run, which is interrupted now and then."""

    def __init__(self, seed: int, haste: int, interval: int, num_tasks: int) -> None:
        self.seed, self.haste, self.interval = seed, haste, interval
        self.tasks = [
            task_config(f"task{n}", kind="sync", weight=1 + n, drop_uniform_rewards=True)
            for n in range(num_tasks)
        ]
        self.step = self.version = 0
        self.batches: dict[int, Any] = {}
        self.saved: tuple[dict[str, Any], int, int] | None = None
        self.world = self.make()

    def make(self) -> World:
        world = World(
            *self.tasks, batch_size=3, interval=self.interval, size=11, pool=Scripted(self.seed, self.haste)
        )
        self.running = world.start()
        return world

    async def begin(self) -> None:
        await self.world.producer.resume(self.version)
        await self.save()

    async def train(self) -> None:
        """One step, and the sync that is due after it."""
        status, packed = await take_after_sync(self.world, self.step + 1)
        assert packed is not None and status.num_groups == 3
        self.step += 1
        seen = contents(packed)
        assert self.batches.setdefault(self.step, seen) == seen, "a step that is trained again differs"
        await self.world.producer.acknowledge(self.step)
        if self.step % self.interval == 0:
            await self.world.producer.pause()
            self.version = self.step
            await self.world.producer.resume(self.version)

    async def save(self) -> None:
        await self.world.producer.pause()
        state = await self.world.producer.state_dict(model_step=self.step)
        self.saved = copy.deepcopy((state, self.step, self.version))
        await self.world.producer.resume(self.version)

    async def crash(self) -> None:
        """Continue from the last checkpoint in a new world."""
        assert self.saved is not None
        await self.end()
        self.haste += 3
        self.world = self.make()
        state, self.step, self.version = copy.deepcopy(self.saved)
        await self.world.producer.load_state_dict(state)
        await self.world.producer.resume(self.version)

    async def end(self) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])
        await self.world.producer.close()


ACTIONS = ("save", "crash", "save and crash", "take and save", "pause")


async def drive(driver: Driver, actions: list[tuple[str, float]], num_steps: int = 6) -> Any:
    await driver.begin()
    for action, seconds in actions:
        await asyncio.sleep(seconds)
        if action == "pause":
            await driver.world.producer.pause()
            await driver.world.producer.resume(driver.version)
        if action == "take and save":
            # The batch is not in the model that is saved with it: it is taken again.
            await driver.world.producer.take_batch(driver.step + 1)
        if "save" in action:
            await driver.save()
        if "crash" in action or action == "take and save":
            await driver.crash()
        if driver.step < num_steps:
            await driver.train()
    while driver.step < num_steps:
        await driver.train()
    assert (await driver.world.producer.counts()).lost == 0
    await driver.end()
    return [driver.batches[step] for step in range(1, num_steps + 1)]


@pytest.mark.no_cover  # other tests reach the same lines in a tenth of the time
@settings(deadline=None, max_examples=examples(20))
@given(
    seed=st.integers(0, 50),
    haste=st.integers(1, 9),
    interval=st.sampled_from([1, 2]),
    num_tasks=st.integers(1, 2),
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from([0.0, 0.5, 2.5, 9.0])), max_size=8),
)
def test_the_same_seed_and_versions_give_the_same_batches_whatever_interrupts_a_synchronous_run(
    seed: int, haste: int, interval: int, num_tasks: int, actions: list[tuple[str, float]]
) -> None:
    async def main(haste: int, actions: list[tuple[str, float]]) -> Any:
        return await drive(Driver(seed, haste, interval, num_tasks), actions)

    assert virtual(main(haste, actions)) == virtual(main(0, []))
