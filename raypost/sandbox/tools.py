"""Python and a shell as tools of a policy, in the sandbox: `tools: ["raypost.sandbox.tools:python"]`.

What a program does, its failure included, is what the policy reads; a sandbox that cannot be had is raised.
"""

from __future__ import annotations

import asyncio
import os

from raypost.sandbox.command import python as interpreter
from raypost.sandbox.limits import Limits, Outcome
from raypost.sandbox.run import run

LIMITS = Limits(cpu_s=10, wall_s=30)
"""Of each call."""
_turns = asyncio.Semaphore(os.cpu_count() or 1)


async def python(code: str) -> str:
    """Run a Python program, without a network, and return what it prints.

    Args:
        code: the program; nothing of an earlier one is left
    """
    path, see = interpreter()
    async with _turns:
        outcome = await run(
            [path, "-I", "-S", "program.py"],
            files={"program.py": code.encode(errors="replace")},
            limits=LIMITS,
            see=see,
        )
    return told(outcome)


async def shell(command: str) -> str:
    """Run a command of the shell, without a network, and return what it prints.

    Args:
        command: the command; no file of an earlier one is left
    """
    async with _turns:
        outcome = await run(["/bin/sh", "-c", command.replace("\0", "")], limits=LIMITS)
    return told(outcome)


def told(outcome: Outcome) -> str:
    """Return what the policy reads of a program."""
    words = [part.decode(errors="replace").strip() for part in (outcome.stdout, outcome.stderr)]
    if outcome.timed_out:
        words.append("error: it took too long")
    elif outcome.truncated:
        words.append("error: it wrote too much")
    elif outcome.signal is not None:
        words.append(f"error: it ended with signal {outcome.signal}")
    elif outcome.exit_code:
        words.append(f"error: it ended with exit code {outcome.exit_code}")
    return "\n".join(word for word in words if word)
