"""Environments in processes of their own: they disturb nobody, and nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from raypost.agent_loop.environment import EnvironmentAgentLoop
from raypost.agent_loop.fork_server import EnvironmentSpec
from raypost.agent_loop.isolated import EnvironmentProcesses
from raypost.config import AgentLoopConfig
from raypost.types import GenerateRequest, GenerateResult, RolloutState, Status
from tests.unit.prompts import STOP
from tests.unit.scripted_environments import AnswersInTurn, encode, init
from tests.unit.scripted_generator import ScriptedGenerator, decode, result

SOURCE = """
import os, random, subprocess, sys, time
from pathlib import Path
from raypost import Observation

class Game:
    deterministic = True

    def __init__(self, folder):
        self.folder = Path(folder)
        (self.folder / f"pid-{os.getpid()}").touch()

    def reset(self, metadata):
        print("a game writes where it likes")
        return Observation(text=str(random.randrange(1000)))

    def step(self, action):
        what = action.split()[0]
        if what == "11":
            (self.folder / f"hangs-{os.getpid()}").touch()
            time.sleep(1e9)
        if what == "12":
            os.kill(os.getpid(), 9)
        if what == "13":
            raise ValueError("no such move")
        if what == "14":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e9)"])
            (self.folder / f"pid-{child.pid}").touch()
            return Observation(done=True, reward=1.0)
        if what == "15":
            return None
        if what == "16":
            sys.exit(3)
        if what == "17":
            if os.fork() == 0:
                return Observation(done=True, reward=99.0)
            return Observation(done=True, reward=1.0)
        if what == "18":
            return Observation(info={"bad": Game})
        return Observation(text=f"{random.randrange(1000)} {os.getpid()}", done=what == "10", reward=1.0)

    def close(self):
        (self.folder / f"closed-{os.getpid()}").touch()
"""

Check = Callable[[EnvironmentAgentLoop, Path], Awaitable[None]]


def played(folder: Path, check: Check, *answers: Any, **options: Any) -> None:
    """Run `check` with a loop over such games; afterwards none of their processes is left."""

    async def main() -> None:
        spec = EnvironmentSpec(path="game.py:Game", what="it", source=SOURCE, params={"folder": str(folder)})
        settings = AgentLoopConfig(step_timeout_s=options.pop("step_timeout_s", 20))
        processes = EnvironmentProcesses(spec, settings.step_timeout_s)
        engine = ScriptedGenerator(answers[0]) if callable(answers[0]) else AnswersInTurn(*answers)
        loop = EnvironmentAgentLoop(engine, processes, encode, decode, settings, **options)
        try:
            await check(loop, folder)
        finally:
            await loop.close()

    asyncio.run(main())
    assert not [pid for pid in pids(folder) if is_alive(pid)]


def pids(folder: Path, kind: str = "pid") -> list[int]:
    return [int(one.name.partition("-")[2]) for one in folder.glob(f"{kind}-*")]


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_siblings_begin_alike_in_processes_of_their_own_and_random_numbers_are_not_shared(
    tmp_path: Path,
) -> None:
    async def check(loop: EnvironmentAgentLoop, folder: Path) -> None:
        one, other = init(3, max_tokens=90), init(1, max_tokens=90)
        other.group_id = other.states[0].group_id = 1
        for group in await asyncio.gather(loop.run(one), loop.run(other)):
            assert group.status is Status.COMPLETED
        drawn = [[int(i) for i in state.response_ids if i not in (9, 10, STOP)] for state in one.states]
        # What they drew: alike. The number behind it is their process.
        assert {tuple(ids[:2]) for ids in drawn} == {tuple(drawn[0][:2])}
        assert len({ids[2] for ids in drawn}) == 3
        assert set(pids(folder)) == set(pids(folder, "closed"))
        assert other.states[0].response_ids[0] != one.states[0].response_ids[0]
        assert os.getpid() not in pids(folder) and len(pids(folder)) == 4

    played(tmp_path, check, lambda asked: result([10 if 9 in asked.token_ids else 9, STOP]))


FAILURES = {
    12: "its process ended with signal 9 in step",
    13: "ValueError: no such move",
    15: "step must return an Observation, got NoneType",
    16: "SystemExit: 3",
    18: "raypost_file_",
}
"""Moves, and what they become."""


def test_what_goes_wrong_in_a_process_is_its_own_failure_by_name_and_what_it_started_ends_with_it(
    tmp_path: Path,
) -> None:
    moves = [*FAILURES, 14, 17]

    async def check(loop: EnvironmentAgentLoop, folder: Path) -> None:
        states = (await loop.run(init(len(moves)))).states
        for move, one in zip(moves, states, strict=True):
            if move in FAILURES:
                assert one.status is Status.FAILED and FAILURES[move] in str(one.error), one.error
                assert str(one.error).startswith("environment: ")
            else:  # neither a child of theirs nor a copy changes what they say
                assert (one.status, one.reward) == (Status.COMPLETED, 1.0), one.error
        assert not [pid for pid in pids(folder) if is_alive(pid)]

    def move(asked: GenerateRequest) -> GenerateResult:
        return result([moves[int(asked.request_id.split("/")[2])], STOP])

    played(tmp_path, check, move)


def test_one_that_hangs_is_ended_after_its_time(tmp_path: Path) -> None:
    async def check(loop: EnvironmentAgentLoop, folder: Path) -> None:
        (one,) = (await loop.run(init())).states
        assert one.status is Status.FAILED and "longer than step_timeout_s" in str(one.error), one.error
        assert not [pid for pid in pids(folder) if is_alive(pid)]

    played(tmp_path, check, result([11, STOP]), step_timeout_s=1)


def test_one_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    async def check(loop: EnvironmentAgentLoop, folder: Path) -> None:
        hanging = asyncio.create_task(loop.run(init()))
        async with asyncio.timeout(100):
            while not pids(folder, "hangs"):
                await asyncio.sleep(0.01)
        other = init()
        other.group_id = other.states[0].group_id = 1
        assert (await loop.run(other)).status is Status.COMPLETED and not hanging.done()
        (pid,) = pids(folder, "hangs")
        os.kill(pid, signal.SIGKILL)
        (one,) = (await hanging).states
        assert one.status is Status.FAILED and "ended with signal 9" in str(one.error), one.error

    played(tmp_path, check, result([11, STOP]), result([10, STOP]), step_timeout_s=100)


def test_a_parked_one_keeps_its_process(tmp_path: Path) -> None:
    async def check(loop: EnvironmentAgentLoop, folder: Path) -> None:
        paused = await loop.run(init(max_tokens=90))
        assert (paused.status, loop.num_parked) == (Status.ABORTED, 1)
        (pid,) = pids(folder)
        assert is_alive(pid) and not pids(folder, "closed")
        done: RolloutState = (await loop.run(paused)).states[0]
        assert (done.status, done.reward, done.num_restarts) == (Status.COMPLETED, 2.0, 0)
        assert pids(folder) == [pid]

    played(tmp_path, check, result([9, STOP]), result([], "abort"), result([10, STOP]))


def test_a_server_that_was_killed_is_started_again_and_took_its_environments_along(tmp_path: Path) -> None:
    async def check(loop: EnvironmentAgentLoop, folder: Path) -> None:
        paused = await loop.run(init(max_tokens=90))
        processes = loop._environment
        assert isinstance(processes, EnvironmentProcesses) and processes._server is not None
        processes._server.process.kill()
        (one,) = (await loop.run(paused)).states
        assert one.status is Status.FAILED and "process" in str(one.error)
        again = await loop.run(init(max_tokens=90))
        assert again.status is Status.COMPLETED
        assert len(pids(folder)) == 2

    played(tmp_path, check, result([9, STOP]), result([], "abort"), result([12, STOP]), result([10, STOP]))


def test_code_that_cannot_be_imported_is_said(tmp_path: Path) -> None:
    async def main() -> None:
        spec = EnvironmentSpec(path="game.py:Game", what="agent_loop.environment", source="import no_such")
        processes = EnvironmentProcesses(spec, 5)
        loop = EnvironmentAgentLoop(AnswersInTurn(result([STOP])), processes, encode, decode)
        (one,) = (await loop.run(init())).states
        assert one.status is Status.FAILED and "No module named 'no_such'" in str(one.error)
        await loop.close()

    asyncio.run(main())
