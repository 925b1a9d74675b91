"""Run a recipe on this machine: a private Ray head, the job on it, the job's log, and all of it gone again.

    raypost run --config FILE [--name NAME] [--resume] [--runs-dir DIR] [key=value ...]

What is submitted is what one would submit to any cluster (`ray job submit -- python -m jobs.train ...`, or
jobs.colocate), so nothing here knows about training. The job works in the current folder, where it imports and reads
what the configuration names. Owns the head it starts, and the job on it.

Ctrl-C, SIGTERM or the end of the terminal stops the job as `ray job stop` does: its driver saves and reports while its
log is still shown. A second one ends it at once. Exit code: the driver's; 130 or 143 after a stop; 2 when refused.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil

from jobs.arguments import TRIED, config_of, parser, python_path
from jobs.private_cluster import PrivateCluster
from jobs.stopping import outlive_terminal, stop_signals, stopped, unless
from raypost.config import Config
from raypost.errors import ConfigError, RaypostError, StoppedError, WaitTimeoutError
from raypost.plan.plan import ClusterResources, bundles, check
from raypost.report.files import CONFIG, REPORT_JSON

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

MACHINE_RESOURCES = ("CPU", "GPU")
EXIT_REFUSED = 2
STOP_WAIT_S = 90
"""Time a stopped driver has to save and to report before Ray kills it."""
STOP_MARGIN_S = 15
"""What Ray itself may take on top before it says that a stopped job has ended."""
LOST_HEAD_TRIES = 5
OBJECT_STORE_BYTES = 4 * 1024**3
"""Room for two versions of the weights of a model of 1 B parameters in bf16, taken only as it is used."""
ENTRYPOINT_LINE = re.compile(r"Running entrypoint for job ")
SETUP_LINE = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+\t[A-Z]+ \S+\.py:\d+ -- ")
"""What Ray writes into a driver's log: the first of the two when it starts it, but perhaps after its first lines."""


def main(argv: list[str] | None = None) -> int:
    """Validate, then run. Returns the exit code."""
    args = arguments(argv)
    try:
        config = configured(args)
        resources = local_resources(config)
        check(config, cluster=ClusterResources([resources]))
    except RaypostError as error:
        print(f"refused: {error}", file=sys.stderr, flush=True)
        return EXIT_REFUSED
    _say(f"run {config.name}, written to {config.run_dir}")
    module = f"{__package__}.{args.job or config.job}"
    driver = [sys.executable, "-m", module, "--config", str(args.config.resolve()), TRIED]
    named = ["--name", config.name, "--runs-dir", str(config.runs_dir)]

    def say_how_to_continue(code: int) -> None:
        if (config.run_dir / CONFIG).exists():
            _say_how_to_continue(config, args, finished=code == 0)

    return run_on_private_cluster(
        [*driver, *named, *args.overrides],
        working_dir=Path.cwd(),
        submission_id=config.name,
        resources=resources,
        logs_dir=config.run_dir,
        at_end=say_how_to_continue,
    )


def run_on_private_cluster(
    entrypoint: list[str],
    *,
    working_dir: Path,
    submission_id: str,
    resources: Mapping[str, float],
    logs_dir: Path | None = None,
    stop_wait_s: int = STOP_WAIT_S,
    at_end: Callable[[int], None] = lambda code: None,
) -> int:
    """Run `entrypoint` as a job of a Ray head made for it, with its log on stdout. Returns the exit code.

    `resources` are what the head offers, CPU and GPU among them. Where the job fails, Ray's logs are copied into
    `logs_dir`, if the job made that folder. `at_end` is given the exit code; after what it says comes the cause of a
    failure alone, the last line. Call it from the main thread: it takes over Ctrl-C and SIGTERM.
    """
    custom = {name: amount for name, amount in resources.items() if name not in MACHINE_RESOURCES}
    with Interrupts() as interrupts:
        try:
            with PrivateCluster(
                num_cpus=int(resources.get("CPU", 1)),
                num_gpus=int(resources.get("GPU", 0)),
                resources=custom,
                dashboard=True,
                object_store_memory=min(OBJECT_STORE_BYTES, psutil.virtual_memory().total // 4),
            ) as cluster:
                _say(f"Ray dashboard at {cluster.dashboard_url}, token {cluster.token}")
                job = _Job(cluster, entrypoint, working_dir, submission_id, stop_wait_s)
                code = asyncio.run(job.run(interrupts))
                if code not in (0, EXIT_REFUSED) and interrupts.number is None:
                    _keep_logs(cluster, logs_dir)
            at_end(code)
            if job.failure is not None:
                print(job.failure, file=sys.stderr, flush=True)
            return code
        except RaypostError as error:
            print(f"failed: {error}", file=sys.stderr, flush=True)
            return 1
        except KeyboardInterrupt:
            return 128 + (interrupts.number or signal.SIGINT)


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
class _Job:
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
        _say(f"stopping: the job has {self.stop_wait_s} s to save and report; Ctrl-C again ends it at once")
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
            _say("stopped")
            return 128 + (interrupts.number or signal.SIGTERM)
        code = details.driver_exit_code or 1
        cause = self._log.tail[-1] if self._log.tail else (details.message or "no message").strip()
        self.failure = f"failed (exit code {code}): {cause.removeprefix('failed: ')}"
        return code


def local_resources(config: Config) -> dict[str, float]:
    """Return what a head on this machine offers: what it has, and of each custom resource what is asked for."""
    offered = dict(ClusterResources.of_this_machine().nodes[0])
    for bundle in bundles(config):
        for name, amount in bundle.resources.items():
            if name not in MACHINE_RESOURCES:
                offered[name] = offered.get(name, 0) + amount
    return offered


def configured(args: argparse.Namespace) -> Config:
    """Return the configuration of the run that is named or resumed, or of a new one with a name of its own."""
    config = config_of(args)
    if args.name:
        return config
    base = config.name if "name" in config.model_fields_set else args.config.stem
    if args.resume:
        args.name = unfinished_run(config.runs_dir, base)
    else:
        args.name = f"{base}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    return config_of(args)


def unfinished_run(runs_dir: Path, base: str) -> str:
    """Return the name of the last run of a recipe that has not finished. Raises ConfigError if there is none."""
    ours = re.compile(re.escape(base) + r"(-\d{8}-\d{6}-[0-9a-f]{4})?")
    runs = [file for file in runs_dir.glob(f"*/{CONFIG}") if ours.fullmatch(file.parent.name)]
    for file in sorted(runs, key=lambda file: file.stat().st_mtime, reverse=True):
        report = file.with_name(REPORT_JSON)
        if not report.exists() or json.loads(report.read_text()).get("status") != "finished":
            return file.parent.name
    raise ConfigError(
        f"--resume: {runs_dir} has no unfinished run of {base!r} ({len(runs)} finished): leave --resume out to begin "
        "one, or name one with --name and raise train.num_steps to train it on"
    )


def _say_how_to_continue(config: Config, args: argparse.Namespace, *, finished: bool) -> None:
    beside = Path(sys.executable).with_name("raypost")
    shell = (
        [os.path.relpath(beside)] if beside.exists() else [os.path.relpath(sys.executable), "-m", "raypost"]
    )
    command = ["raypost"] if shutil.which("raypost") else shell
    command += ["run", "--config", str(args.config), "--name", config.name]
    command += ["--runs-dir", str(args.runs_dir)] if args.runs_dir else []
    command += ["--job", args.job] if args.job else []
    command += args.overrides
    if finished:
        command.append(f"train.num_steps={2 * config.train.num_steps}")
    _say(f"{'to train on' if finished else 'to continue'}: {shlex.join(command)}")


def _keep_logs(cluster: PrivateCluster, folder: Path | None) -> None:
    if folder is None or not folder.is_dir():
        return
    cluster.save_logs(folder / "ray_logs")
    print(f"logs of every actor: {folder / 'ray_logs'}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _without_environ(*names: str) -> Iterator[None]:
    """Hide variables that Ray obeys before any argument."""
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


def _say(text: str) -> None:
    print(f"raypost: {text}", flush=True)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    made = parser(__doc__, "raypost run")
    made.add_argument("--resume", action="store_true", help="continue this recipe's last unfinished run")
    made.add_argument(
        "--job",
        choices=("train", "colocate", "colocate_lowlevel"),
        help="a module of jobs/; the one of the recipe's placement otherwise",
    )
    return made.parse_intermixed_args(argv)


if __name__ == "__main__":
    sys.exit(main())
