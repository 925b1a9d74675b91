"""Traps that no other test covers, and the proof that the tables of tests/README.md and docs/scenarios.md are true.

A trap is a mistake that asynchronous training systems make easily; tests/README.md has each with its number.
"""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from raypost.agent_loop.single_turn import SingleTurnAgentLoop
from raypost.errors import ProductionError
from raypost.types import GenerateRequest, GenerateResult, Group, Status
from raypost.types.packed import unpack_groups
from raypost.types.pause import PauseMode
from tests.named_tests import README, REFERENCE, names_of
from tests.unit.production import (
    HostDied,
    Pool,
    World,
    producing,
    progress_of,
    strategy,
    task_config,
    virtual,
)
from tests.unit.prompts import STOP
from tests.unit.scripted_generator import Scorer, decode, init, result

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = ROOT / "docs" / "scenarios.md"
NUMBERS = {str(number) for number in (*range(1, 76), *range(90, 115))} | {"19a", "19b", "58a", "58b", "58c"}


# ---------------------------------------------------------------- the table


def rows() -> list[tuple[str, str]]:
    """(number, last column) of every row of a trap."""
    found = re.finditer(r"^\| *(\d+[a-z]?) *\|.*\|(.+)\|$", README.read_text(), re.MULTILINE)
    return [(row[1], row[2].strip()) for row in found]


def test_every_trap_is_in_the_table_once_with_a_test_or_a_reason() -> None:
    numbers = [number for number, _ in rows()]
    assert len(numbers) == len(set(numbers))
    assert set(numbers) == NUMBERS
    for number, caught_by in rows():
        assert REFERENCE.search(caught_by) or caught_by.startswith("cannot occur: "), f"trap {number}"


def test_every_test_that_the_readme_names_exists() -> None:
    references = REFERENCE.findall(README.read_text())
    assert len(references) == README.read_text().count(".py::") > 100
    known = {file: names_of(file) for file in {file for file, _, _ in references}}
    missing = [f"{file}::{name}" for file, name, _ in references if name not in known[file]]
    assert missing == []


def test_every_acceptance_scenario_is_on_its_page_once_and_in_order() -> None:
    found = re.findall(r"^\| N(\d+) \| .+ \| .+ \|$", SCENARIOS.read_text(), re.MULTILINE)
    assert [int(number) for number in found] == list(range(1, 51))


# ---------------------------------------------------------------- the pause and its order


def test_the_gate_closes_before_engines_stop_and_opens_after_they_run() -> None:
    """Trap 16: a request that meets a stopped engine would come back as an abort nobody asked for."""

    async def main() -> None:
        world, seen = World(batch_size=1), []
        pending, pool = world.producer.pending, world.pool
        stop, go_on = pool.pause, pool.resume

        async def pause(mode: PauseMode = "abort") -> None:
            seen.append(("pause", pending.gate_open))
            await stop(mode)

        async def resume(version: int) -> None:
            await go_on(version)
            await asyncio.sleep(1)
            seen.append(("resume", pending.gate_open))

        pool.pause, pool.resume = pause, resume  # type: ignore[method-assign]
        async with producing(world):
            await asyncio.sleep(0.5)
            await world.producer.pause()
            await world.producer.resume(1)
        assert seen == [("resume", False), ("pause", False), ("resume", False)]

    virtual(main())


BLOCKING = ("ray.get", "ray.wait", "time.sleep")


def blocking_calls(module: ast.Module) -> Iterator[str]:
    """Calls within coroutines that would stop every other coroutine of their event loop."""
    for function in ast.walk(module):
        if isinstance(function, ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in BLOCKING:
                    yield f"{function.name}: {ast.unparse(node)}"


def test_no_coroutine_blocks_its_event_loop() -> None:
    """Trap 22."""
    planted = "async def f():\n    return [ray.get(x) for x in y]"
    assert list(blocking_calls(ast.parse(planted))) == ["f: ray.get(x)"]
    files = [file for folder in ("raypost", "actors", "jobs") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 50
    texts = {str(file): file.read_text() for file in files}
    found = {
        file: list(blocking_calls(ast.parse(text)))
        for file, text in texts.items()
        if any(call in text for call in BLOCKING)
    }
    assert {file: calls for file, calls in found.items() if calls} == {}


# ---------------------------------------------------------------- who hears of a failure


@pytest.mark.parametrize("end", [ZeroDivisionError("bug"), None], ids=["error", "silent"])
def test_a_driver_that_waits_for_a_batch_hears_of_productions_end_at_once(end: Exception | None) -> None:
    """Trap 24: also of one without an error, which is never right."""
    from jobs.stopping import production_ended, unless

    async def produce() -> None:
        await asyncio.sleep(1)
        if end is not None:
            raise end

    async def main() -> None:
        producing = asyncio.create_task(produce())
        with pytest.raises(
            type(end) if end else ProductionError, match="bug" if end else "ended without an error"
        ):
            await unless(asyncio.sleep(1000), production_ended(producing))
        assert asyncio.get_running_loop().time() == pytest.approx(1)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual(main())


def test_no_sibling_generates_on_after_its_group_was_given_up() -> None:
    """Trap 75: the first error of a group is raised when its last member has ended."""

    class Engine:
        running = 0

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            self.running += 1
            try:
                await asyncio.sleep(0 if self.running == 1 else 5)
                if self.running == 2:
                    raise ConnectionError("host died")
                return result([STOP], "stop")
            finally:
                self.running -= 1

    async def main() -> None:
        engine = Engine()
        with pytest.raises(ConnectionError):
            await SingleTurnAgentLoop(engine, Scorer(), decode).run(init(2))
        assert engine.running == 0 and asyncio.all_tasks() == {asyncio.current_task()}

    virtual(main())


# ---------------------------------------------------------------- tokens and counters


class DiesOnce(Pool):
    """The second start of a group dies after a token."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    async def run(self, group: Group) -> Group:
        self.lengths.append(group.num_tokens)
        if len(self.lengths) != 2:
            return await super().run(group)
        running = asyncio.create_task(super().run(group))
        await asyncio.sleep(1.5)
        running.cancel()
        await asyncio.wait([running])
        assert group.num_tokens == 2 * 3
        raise HostDied


def test_a_host_that_dies_costs_no_token_of_an_earlier_segment() -> None:
    """Trap 45: what a retry forgets is its own attempt, not what came before."""

    async def main() -> None:
        pool = DiesOnce()
        pool.seconds = lambda one: 4
        world = World(task_config(max_staleness=9, max_pending=1), batch_size=1, pool=pool)
        async with producing(world):
            await asyncio.sleep(2.5)
            await world.producer.pause()
            await world.producer.resume(1)
            _, packed = await world.take(1)
            (one,) = unpack_groups(packed)
            assert {tuple(member.policy_versions.tolist()) for member in one.states} == {(0, 0, 1, 1)}
            assert pool.started[:3] == [0, 0, 0] and pool.lengths[:3] == [0, 4, 4]

    virtual(main())


def test_capacity_does_not_grow_because_a_batch_was_smaller_than_allotted() -> None:
    """Trap 42: what was given up counts as delivered."""
    one, progress = strategy(max_staleness=2), progress_of(4)
    progress.ensure_target_upto("default", 4)
    progress.consume(1, {"default": 1})
    assert progress.consumed == {"default": 1}
    got = one.plan(
        target=progress.target["default"],
        available=progress.available("default", 0),
        pending=0,
        task_batch_size=4,
        tail_batch=False,
    )
    assert got.num_groups == 3 * 4


def test_groups_made_far_ahead_are_as_old_as_the_step_that_takes_them_next() -> None:
    """Trap 31: aged at the step that production works for, those that come last would be dropped."""

    async def main() -> None:
        world = World(task_config(max_staleness=2, over_sample_threshold=1.0), batch_size=2)
        world.pool.seconds = lambda one: 1 if one.group_id < 6 else 50
        async with producing(world):
            await asyncio.sleep(10)
            progress = world.producer.progress
            assert (progress.producer_future_step["default"], progress.next_consumer_step) == (4, 1)
            await asyncio.sleep(100)
            assert (await world.buffer.counts()).groups["default"] == {Status.COMPLETED: 8}
            counts = await world.producer.counts()
            assert (counts.sampled, counts.expired) == (8, 0)

    virtual(main())
