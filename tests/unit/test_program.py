"""A program that plays sessions ends with the process that runs it, however that ends."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

CODE = """
import asyncio
from raypost.agent_loop.program import play_program
from raypost.agent_loop.session import Session

session = Session.__new__(Session)
session.__dict__.update(messages=[], metadata={}, base_url="http://127.0.0.1:9", api_key="k")
asyncio.run(play_program([PROGRAM, "300"], session))
"""


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="the system has no setpriv")
def test_a_program_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    # A program of its own name is easily found, and no other test's.
    program = tmp_path / "sleeps"
    shutil.copy(shutil.which("sleep") or "", program)
    code = CODE.replace("PROGRAM", repr(str(program)))
    with subprocess.Popen([sys.executable, "-c", code]) as host:
        try:
            running = found(host.pid, str(program))
        finally:
            host.kill()
    gone, alive = psutil.wait_procs([running], timeout=30)
    assert gone and not alive


def found(parent: int, program: str) -> psutil.Process:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process(parent).children():
            if child.cmdline()[:1] == [program]:
                return child
        time.sleep(0.05)
    raise AssertionError("the program did not start")
