"""What every job's driver does around its loop: arguments, validation, Ray, signals, the exit code.

Nothing starts before the configuration is valid on this very cluster. SIGTERM (`ray job stop`) and SIGINT
set the stop event; the loop then pauses, saves and leaves. A second signal cancels at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from actors.placement import cluster_nodes
from raypost.config import Config, load_config
from raypost.errors import ConfigError, ProductionError, RaypostError, StoppedError
from raypost.plan import plan

T = TypeVar("T")
Job = Callable[[Config, asyncio.Event], Awaitable[None]]

ROOT = Path(__file__).resolve().parent.parent
EXIT_REFUSED = 2


def main(job: Job, argv: list[str] | None = None, *, placement: str = "separate") -> int:
    """Run `job` with the configuration of the command line. Exit code: 0 done or stopped, 1 failed, 2 refused.

    `placement` is the one that the job composes; a configuration with another is refused.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s", force=True
    )
    args = _arguments(argv)
    try:
        config = load_config(Path(args.config), overrides_of(args))
        config = config.model_copy(update={"runs_dir": config.runs_dir.expanduser().resolve()})
        _check_placement(config, placement)
        plan.check(config)
        connect()
        plan.check(config, cluster=plan.ClusterResources(cluster_nodes(), elastic=config.autoscaling))
    except (RaypostError, ConnectionError) as error:
        print(f"refused: {error}", file=sys.stderr, flush=True)
        return EXIT_REFUSED
    try:
        return asyncio.run(run_job(job, config))
    finally:
        ray.shutdown()


def _check_placement(config: Config, placement: str) -> None:
    if config.placement != placement:
        raise ConfigError(
            f"placement is {config.placement!r}, and this job composes {placement!r}: set placement={placement}, or "
            f"run jobs.{'colocate' if config.placement == 'colocate' else 'train'}"
        )


def connect() -> None:
    """Join the cluster of RAY_ADDRESS, which `ray job submit` sets; without it start one for this process."""
    options: dict[str, Any] = {"address": os.environ.get("RAY_ADDRESS") or "local"}
    if options["address"] == "local":
        options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:  # started by hand: no working directory travels
        options["runtime_env"] = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    ray.init(log_to_driver=False, logging_level=logging.WARNING, **options)


async def first_of(wanted: Awaitable[T], producing: asyncio.Task[None]) -> T:
    """The result of `wanted`, unless production ends first: then what ended it is raised here, at once."""
    task = asyncio.ensure_future(wanted)
    try:
        await asyncio.wait({task, producing}, return_when=asyncio.FIRST_COMPLETED)
        if producing.done():
            producing.result()
            raise ProductionError("production ended without an error although the run goes on")
        return task.result()
    finally:
        task.cancel()


async def run_job(
    job: Job, config: Config, stopping: str = "the run pauses, saves and writes its report"
) -> int:
    """Run a job until it ends or a signal stops it. Exit code as of `main`. `stopping` is said at a signal."""
    stop = asyncio.Event()
    work = asyncio.ensure_future(job(config, stop))

    def on_signal() -> None:
        if stop.is_set():
            work.cancel()
            return
        print(f"stopping: {stopping}", flush=True)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    try:
        await work
    except asyncio.CancelledError:
        print("stopped before the run could be saved", file=sys.stderr, flush=True)
        return 1
    except StoppedError as error:
        print(error, flush=True)
    except (RaypostError, RayError) as error:
        traceback.print_exc()
        cause = getattr(error, "cause", None) or error  # what an actor raised, without its remote traceback
        print(f"failed: {type(cause).__name__}: {cause}", file=sys.stderr, flush=True)
        return 1
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", required=True, help="YAML file, for instance jobs/recipes/quickstart.yaml"
    )
    parser.add_argument("--name", help="name of the run folder")
    parser.add_argument("--runs-dir", help="folder of all runs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for instance train.num_steps=10")
    return parser.parse_args(argv)


def overrides_of(args: argparse.Namespace) -> list[str]:
    """The overrides of a command line, `--name` and `--runs-dir` among them."""
    named = [("name", args.name), ("runs_dir", args.runs_dir)]
    return [*args.overrides, *(f"{key}={value}" for key, value in named if value)]
