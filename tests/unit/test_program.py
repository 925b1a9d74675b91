"""Nothing of a program that plays sessions, or serves tools, or of an environment, outlives what it was started for."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from raypost.agent_loop.fork_server import EnvironmentSpec
from raypost.agent_loop.isolated import EnvironmentProcesses
from raypost.sandbox.reaper import NOT_STARTED, reaped

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux gives orphans to whom one chooses"
)

CODE = """
import asyncio
from pathlib import Path
from raypost.agent_loop.program import play_program
from raypost.agent_loop.session import Session

session = Session.__new__(Session)
session.__dict__.update(messages=[], metadata={}, base_url="http://127.0.0.1:9", api_key="k")

async def main():
    playing = asyncio.create_task(play_program(COMMAND, session))
    while CANCELS and not Path(READY).exists():
        await asyncio.sleep(0.02)
    if CANCELS:
        playing.cancel()
    await asyncio.wait([playing])
    print("ended", flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""
PROGRAM = """
import subprocess, sys, time
from pathlib import Path

sleeps, ready, stays = sys.argv[1:]
subprocess.Popen([sleeps, "300"])
subprocess.Popen([sleeps, "300"], start_new_session=True)
subprocess.run(["sh", "-c", f"{sleeps} 300 & {sleeps} 300 &"], start_new_session=True, check=True)
Path(ready).touch()
time.sleep(300 * float(stays))
"""
STARTED = 4
WAIT_S = 120.0
"""Far more than any of it takes."""


def sleeping(sleeps: Path) -> list[psutil.Process]:
    """Return the processes of a program of its own name, which is no other test's."""
    return [
        one for one in psutil.process_iter(["cmdline"]) if (one.info["cmdline"] or [""])[0] == str(sleeps)
    ]


def started(sleeps: Path, ready: Path) -> list[psutil.Process]:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if ready.exists() and len(found := sleeping(sleeps)) == STARTED:
            return found
        time.sleep(0.02)
    raise AssertionError("the program did not start all of its processes")


@pytest.fixture
def sleeps(tmp_path: Path) -> Iterator[Path]:
    """Yield a program that sleeps."""
    program = tmp_path / "sleeps"
    shutil.copy(shutil.which("sleep") or "", program)
    yield program
    for left in sleeping(program):
        left.kill()


@pytest.mark.parametrize("end", ["killed", "cancelled", "ended"])
def test_what_a_program_started_in_whatever_session_ends_with_it(
    end: str, tmp_path: Path, sleeps: Path
) -> None:
    ready, stays = tmp_path / "ready", "0" if end == "ended" else "1"
    command = [sys.executable, "-c", PROGRAM, str(sleeps), str(ready), stays]
    code = CODE.replace("COMMAND", repr(command)).replace("READY", repr(str(ready)))
    code = code.replace("CANCELS", str(end == "cancelled"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as host:
        try:
            if end == "killed":
                running = started(sleeps, ready)
            else:
                assert host.stdout is not None and host.stdout.readline() == b"ended\n"
                assert ready.exists() and not sleeping(sleeps)
        finally:
            host.kill()
    if end == "killed":
        assert not psutil.wait_procs(running, timeout=WAIT_S)[1]


GAME = """
import subprocess
from pathlib import Path

class Game:
    def __init__(self, program, arguments):
        self.command = [program, *arguments]

    def reset(self, metadata):
        self.program = subprocess.Popen(self.command, start_new_session=True)

    def step(self, action):
        return None
"""


def test_what_an_environment_started_in_a_session_of_its_own_ends_with_the_loop(
    tmp_path: Path, sleeps: Path
) -> None:
    ready = tmp_path / "ready"
    params = {"program": sys.executable, "arguments": ["-c", PROGRAM, str(sleeps), str(ready), "1"]}

    async def main() -> None:
        spec = EnvironmentSpec(path="game.py:Game", what="it", source=GAME, params=params)
        processes = EnvironmentProcesses(spec, WAIT_S)
        one = processes()
        await one.start()
        await one.reset({})
        await asyncio.to_thread(started, sleeps, ready)
        await one.close()
        await processes.close()

    asyncio.run(main())
    assert not sleeping(sleeps)


def test_a_reaper_ends_as_its_program_does(tmp_path: Path) -> None:
    shell = ["sh", "-c"]
    for command, code in (
        ([*shell, "exit 3"], 3),
        ([*shell, "kill -9 $$"], -9),
        ([*shell, "kill -15 $$"], -15),
        ([str(tmp_path / "none")], NOT_STARTED),
    ):
        done = subprocess.run(reaped(command), capture_output=True, timeout=WAIT_S)
        assert done.returncode == code, done.stderr
    assert b"none: No such file" in done.stderr
