"""What every job's driver does around its loop: arguments, validation, Ray, signals, the exit code.

Nothing starts before the configuration is valid on this very cluster. SIGTERM (`ray job stop`) and SIGINT
set the stop event; the loop then pauses, saves and leaves. A second signal cancels at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from actors.placement import cluster_nodes
from jobs.arguments import config_of, parser, python_path
from jobs.stopping import outlive_terminal, stop_signals
from jobs.wiring import checkpoints_of
from raypost.config import Config
from raypost.errors import ConfigError, RaypostError, StoppedError
from raypost.owner import TRACEBACK, owning
from raypost.plan import plan

Job = Callable[[Config, asyncio.Event], Coroutine[Any, Any, None]]

EXIT_REFUSED = 2
REFUSALS = (RaypostError, ConnectionError)
"""What is raised before anything was started."""


def main(job: Job, argv: list[str] | None = None, *, placement: str = "separate") -> int:
    """Run `job` with the configuration of the command line. Exit code: 0 done or stopped, 1 failed, 2 refused.

    `placement` is the one that the job composes; a configuration with another is refused.
    """
    args = parser(__doc__).parse_intermixed_args(argv)
    with contextlib.ExitStack() as owned:
        try:
            config = config_of(args)
            _check_placement(config, placement)
            plan.check(config, tried=args.tried)
            # Before engines start, which takes a minute.
            checkpoints_of(config).latest(fallback=config.checkpoint.fallback)
            plan.check(config, cluster=connect(config), tried=True)
            owned.enter_context(owning(config.run_dir))
        except REFUSALS as error:
            return refused(error)
        stop = asyncio.Event()
        stopping = "the run pauses, saves and writes its report"
        return run(job(config, stop), stop, stopping, config.run_dir / TRACEBACK)


def _check_placement(config: Config, placement: str) -> None:
    if config.placement != placement:
        raise ConfigError(
            f"placement is {config.placement!r}, and this job composes {placement!r}: set placement={placement}, or "
            f"run jobs.{config.job}"
        )


def refused(error: Exception) -> int:
    """Say why nothing was started; returns the exit code."""
    print(f"refused: {error}", file=sys.stderr, flush=True)
    return EXIT_REFUSED


def connect(config: Config) -> plan.ClusterResources:
    """Join the cluster of RAY_ADDRESS, or start one for this process; returns what the cluster has.

    `ray job submit` sets RAY_ADDRESS.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s", force=True
    )
    options: dict[str, Any] = {"address": os.environ.get("RAY_ADDRESS") or "local"}
    if options["address"] == "local":
        options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:  # started by hand: no working directory travels
        options["runtime_env"] = {"env_vars": {"PYTHONPATH": python_path(Path.cwd())}}
    ray.init(log_to_driver=False, logging_level=logging.WARNING, **options)
    return plan.ClusterResources(cluster_nodes(), elastic=config.autoscaling)


def run(work: Coroutine[Any, Any, None], stop: asyncio.Event, stopping: str, kept: Path) -> int:
    """Run a job to its end, leave the cluster, and return the exit code as `main` does.

    The first signal sets `stop` and says `stopping`; the second cancels `work`. Of a failure that has a name a line
    is shown, and its traceback goes into the file `kept`.
    """
    try:
        return asyncio.run(_until_it_ends(work, stop, stopping, kept))
    finally:
        ray.shutdown()


async def _until_it_ends(work: Awaitable[None], stop: asyncio.Event, stopping: str, kept: Path) -> int:
    task = asyncio.ensure_future(work)

    def on_signal(number: int) -> None:
        outlive_terminal(number)
        if stop.is_set():
            task.cancel()
            return
        print(f"stopping: {stopping}", flush=True)
        stop.set()

    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    try:
        await task
    except asyncio.CancelledError:
        print("stopped before the run could be saved", file=sys.stderr, flush=True)
        return 1
    except StoppedError as error:
        print(error, flush=True)
    except (RaypostError, RayError) as error:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text("".join(traceback.format_exception(error)))
        cause = getattr(error, "cause", None) or error  # what an actor raised, without its remote traceback
        print(f"traceback: {kept}\nfailed: {type(cause).__name__}: {cause}", file=sys.stderr, flush=True)
        return 1
    return 0
