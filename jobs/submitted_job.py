"""SubmittedJob: a job on a private head, from its submission to its exit code, through the signals of a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shlex
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from jobs.arguments import python_path
from jobs.private_cluster import PrivateCluster
from jobs.stopping import outlive_terminal, stop_signals, stopped, unless
from raypost.errors import RaypostError, StoppedError, WaitTimeoutError

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

STOP_MARGIN_S = 15
"""What Ray itself may take on top before it says that a stopped job has ended."""
LOST_HEAD_TRIES = 5
ENTRYPOINT_LINE = re.compile(r"Running entrypoint for job ")
SETUP_LINE = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+\t[A-Z]+ \S+\.py:\d+ -- ")
"""What Ray writes into a driver's log: the first of the two when it starts it, but perhaps after its first lines."""


class Interrupts:
    """Catches the signals that stop a run. Each raises KeyboardInterrupt; inside `counted` it sets an event."""

    def __init__(self) -> None:
        """Catch nothing yet."""
        self.number: int | None = None
        """The last signal caught."""
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        """Take the signals over."""
        for number in stop_signals():
            self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Set `first` at the first signal and `second` at the next, instead of raising."""
        self._loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            self._loop = None

    def _caught(self, number: int, _: FrameType | None) -> None:
        self.number = number
        outlive_terminal(number)
        if self._loop is None:
            raise KeyboardInterrupt
        self._loop.call_soon_threadsafe(self._count)

    def _count(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


@dataclass
class DriverLog:
    """Shows a driver's log, without what Ray writes there when it starts the driver."""

    seen: int = 0
    """Characters received."""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    _started: bool = False

    def feed(self, text: str) -> None:
        """Show what was added to the log."""
        self.seen += len(text)
        for line in text.splitlines(keepends=True):
            if not self._started and ENTRYPOINT_LINE.match(line):
                self._started = True
                own = [one for one in self.tail if not SETUP_LINE.match(one)]
                self.tail.clear()
                self.tail.extend(own)
                continue
            if self._started or not SETUP_LINE.match(line):
                sys.stdout.write(line)
            if line.strip():
                self.tail.append(line.rstrip())
        sys.stdout.flush()


@dataclass
class SubmittedJob:
    """One job, submitted to a private head and followed to its end, or to the end of a stop."""

    cluster: PrivateCluster
    entrypoint: list[str]
    working_dir: Path
    id: str
    stop_wait_s: int
    failure: str | None = None
    """What to say of it, once it has failed."""
    _log: DriverLog = field(default_factory=DriverLog)

    async def run(self, interrupts: Interrupts) -> int:
        """Submit, follow, and stop at a signal. Returns the exit code; a second signal is a KeyboardInterrupt."""
        with interrupts.counted():
            client = self._client()
            await asyncio.to_thread(self._submit, client)
            try:
                details = await unless(self._follow(client), stopped(interrupts.first, "a signal came"))
            except StoppedError:
                details = await self._stop(client, interrupts.second)
            return self._exit_code(details, interrupts)

    async def _stop(self, client: JobSubmissionClient, again: asyncio.Event) -> JobDetails:
        """Stop the job and follow it to its end."""
        say(f"stopping: the job has {self.stop_wait_s} s to save and report; Ctrl-C again ends it at once")
        await asyncio.to_thread(client.stop_job, self.id)
        limit_s = self.stop_wait_s + STOP_MARGIN_S
        try:
            async with asyncio.timeout(limit_s):
                return await unless(self._follow(client), stopped(again, "a second signal came"))
        except StoppedError:
            raise KeyboardInterrupt from None
        except TimeoutError:
            raise WaitTimeoutError(
                f"job {self.id} did not stop within {limit_s} s; its cluster is ended"
            ) from None

    def _client(self) -> JobSubmissionClient:
        from ray.job_submission import JobSubmissionClient

        # What the client has to say about its own work is for its authors.
        for handler in logging.getLogger("ray").handlers:
            handler.setLevel(logging.ERROR)
        headers = {"Authorization": f"Bearer {self.cluster.token}"}
        # A proxy cannot reach loopback.
        for name in ("NO_PROXY", "no_proxy"):
            os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
        with _without_environ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
            return JobSubmissionClient(self.cluster.dashboard_url, headers=headers)

    def _submit(self, client: JobSubmissionClient) -> None:
        client.submit_job(
            # exec: the signal of a stop then reaches the driver alone, not a shell around it.
            entrypoint=f"cd {shlex.quote(str(self.working_dir))} && exec {shlex.join(self.entrypoint)}",
            submission_id=self.id,
            runtime_env={
                "env_vars": {
                    # On this machine nothing need travel: a folder may be large, and git may ignore what a run reads.
                    "PYTHONPATH": python_path(self.working_dir),
                    "RAY_JOB_STOP_WAIT_TIME_S": str(self.stop_wait_s),
                },
            },
        )

    async def _follow(self, client: JobSubmissionClient) -> JobDetails:
        """Show the log until the job has ended, across lost connections."""
        import aiohttp

        failures = 0
        while True:
            try:
                skip = self._log.seen
                async for text in client.tail_job_logs(self.id):
                    self._log.feed(text[skip:])
                    skip = max(0, skip - len(text))
                details = await asyncio.to_thread(client.get_job_info, self.id)
                if details.status.is_terminal():
                    return details
            except (RuntimeError, OSError, aiohttp.ClientError) as error:
                failures += 1
                if failures >= LOST_HEAD_TRIES or not self.cluster.alive():
                    tail = self.cluster.log_tail()
                    raise RaypostError(f"lost the Ray head: {error}; its log ends with:\n{tail}") from error
            await asyncio.sleep(0.5)

    def _exit_code(self, details: JobDetails, interrupts: Interrupts) -> int:
        from ray.job_submission import JobStatus

        if details.status == JobStatus.SUCCEEDED:
            return 0
        if details.status == JobStatus.STOPPED:
            say("stopped")
            return 128 + (interrupts.number or signal.SIGTERM)
        code, cause = end_of_driver(details.driver_exit_code, list(self._log.tail), details.message or "")
        self.failure = f"failed (exit code {code}): {cause}"
        return code


def end_of_driver(status: int | None, tail: Sequence[str], message: str) -> tuple[int, str]:
    """Return (exit code, cause) of a driver that ended with `status` (negative: a signal), the last lines of its log.

    The cause is what the driver said of it, or the signal that ended it before it could say anything.
    """
    said = [at for at, line in enumerate(tail) if line.startswith(("failed: ", "refused: "))]
    code = status or 1
    number = -code if code < 0 else code - 128
    last = tail[-1] if tail else message.strip() or "it said nothing"
    if said:
        cause = "\n".join(tail[said[-1] :]).removeprefix("failed: ")
    elif number > 0 and number in set(signal.Signals):
        name = signal.Signals(number).name
        why = (
            " (by hand, or by the system because memory ran out: `dmesg` tells)" if name == "SIGKILL" else ""
        )
        cause = f"the driver was ended by {name}{why} and could say nothing; its last line was: {last}"
    else:
        cause = last
    return (128 + number if code < 0 else code), cause


@contextlib.contextmanager
def _without_environ(*names: str) -> Iterator[None]:
    """Hide variables that Ray obeys before any argument."""
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


def say(text: str) -> None:
    """Print a line of the launcher's own."""
    print(f"raypost: {text}", flush=True)
