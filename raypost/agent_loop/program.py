"""A program of the user's that plays one session: what it is given, its reward, and its end.

Owns its processes, its environment and its files. Invariants: it sees nothing of this process's environment but
PATH; nothing that it started runs on when it has ended; all of it ends with this process, however that ends; no key is
in a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Sequence
from typing import IO

from raypost.agent_loop.session import Session
from raypost.chat.openai import MODEL
from raypost.sandbox.reaper import REAP_S, reaped

MAX_OUTPUT = 4096
"""Characters that are kept of what a program wrote last."""
MAX_REWARD = 100
"""Bytes of a reward that are read."""


async def play_program(command: Sequence[str], session: Session) -> float | None:
    """Run a program to its end; return the reward that it wrote, if any. Raises RuntimeError and ValueError."""
    # Files of memory: nothing is left of them, however this process ends.
    given, reward = (os.memfd_create(name) for name in ("session", "reward"))
    try:
        with open(given, "w", closefd=False) as file:
            json.dump({"messages": session.messages, "metadata": session.metadata}, file, default=str)
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "OPENAI_MODEL": MODEL,
            "RAYPOST_QUESTION": str(session.metadata.get("question", "")),
            "RAYPOST_SESSION": f"/dev/fd/{given}",
            "RAYPOST_REWARD": f"/dev/fd/{reward}",
        }
        code, words = await _run(command, environment, (given, reward))
        if code:
            said = words.decode(errors="replace").replace(session.api_key, "***")
            raise RuntimeError(f"the program ended with exit code {code}: {said[-400:]}")
        return _read_reward(os.pread(reward, MAX_REWARD, 0).decode(errors="replace"))
    finally:
        os.close(given)
        os.close(reward)


async def _run(
    command: Sequence[str], environment: dict[str, str], files: Sequence[int]
) -> tuple[int, bytes]:
    """Return a program's exit code, and the last of what it wrote; all that it started ends with it."""
    read, write = os.pipe()
    # A pipe of our own: asyncio takes a program for running while somebody holds one that it made.
    with open(write, "wb") as output, open(read, "rb", buffering=0) as pipe:
        program = await asyncio.create_subprocess_exec(
            *reaped(command),
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            pass_fds=files,
        )
        output.close()
        words = asyncio.create_task(_last_words(pipe))
        ended = asyncio.create_task(program.wait())
        try:
            code = await asyncio.shield(ended)
        finally:
            if not ended.done():
                _signal_group(program.pid, signal.SIGTERM)
            await asyncio.wait([words, ended], timeout=2 * REAP_S)
            if not ended.done():
                _signal_group(program.pid, signal.SIGKILL)
            words.cancel()
    return code, words.result() if words.done() and not words.cancelled() else b""


def _read_reward(text: str) -> float | None:
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"the program wrote {text!r} as its reward: it must be a number") from None


async def _last_words(pipe: IO[bytes]) -> bytes:
    """Return the last of what a program wrote, once nobody writes any more."""
    reader, words = asyncio.StreamReader(), b""
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        while piece := await reader.read(1 << 16):
            words = (words + piece)[-MAX_OUTPUT:]
    finally:
        transport.close()
    return words


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
