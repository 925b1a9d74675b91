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
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from actors.remote import raised
from jobs.arguments import config_of, parser, python_path
from jobs.nodes import live_cluster
from jobs.stopping import outlive_terminal, stop_signals
from jobs.wiring import checkpoints_of
from raypost.checkpoint import verify_files
from raypost.config import Config
from raypost.doctor.diagnosis import DRIVER
from raypost.doctor.presence import Presence, forget_all
from raypost.doctor.watch import present
from raypost.errors import ClusterError, ConfigError, RaypostError, StoppedError
from raypost.files.owner import TRACEBACK, owning
from raypost.plan import plan
from raypost.plan.cluster import occupied

Job = Callable[[Config, asyncio.Event], Coroutine[Any, Any, None]]

EXIT_REFUSED = 2
ROOM_S = 1.0
"""How often it is looked whether others have given back what the run needs."""
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
            found = checkpoints_of(config).latest(fallback=config.checkpoint.fallback)
            if found is None and config.checkpoint.start_from is not None:
                verify_files(config.checkpoint.start_from)
            plan.check(config, cluster=connect(config), tried=True)
            wait_for_room(config, lambda: live_cluster(config.autoscaling))
            owned.enter_context(owning(config.run_dir))
            forget_all(config.run_dir)
            beside = ["evaluator."] if config.eval.pool is not None else []
            presence = present(DRIVER, config.run_dir.resolve(), config.stall_s, beside)
            owned.enter_context(presence)
        except REFUSALS as error:
            return refused(error)
        stop = asyncio.Event()
        stopping = "the run pauses, saves and writes its report"
        return run(_seen(job(config, stop), presence), stop, stopping, config.run_dir / TRACEBACK)


async def _seen(work: Coroutine[Any, Any, None], presence: Presence) -> None:
    """Do `work`, while the driver's presence sees whether its event loop turns."""
    presence.attach(asyncio.get_running_loop())
    await work


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
    nodes = [node for node in ray.nodes() if node["Alive"] and node.get("MetricsExportPort")]
    served = [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics" for node in nodes]
    if served:
        more = f" and {len(served) - 1} more nodes" if len(served) > 1 else ""
        print(f"metrics for Prometheus at {served[0]}{more}", flush=True)
    return live_cluster(config.autoscaling)


def wait_for_room(
    config: Config,
    look: Callable[[], plan.ClusterResources],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait until others hold nothing that the run needs: what was asked for before it starts holds in it.

    Says what it waits for. Raises ClusterError after `rollout.start_timeout_s`. A cluster that grows is not waited for:
    only what is asked for lets it grow.
    """
    begin, limit_s, told = clock(), config.rollout.start_timeout_s, ""
    while not (cluster := look()).elastic and (lacking := occupied(config, cluster)):
        if clock() - begin >= limit_s:
            raise ClusterError(
                "\n  ".join([f"waited rollout.start_timeout_s {limit_s:g} s for resources", *lacking])
            )
        if told != (told := "; ".join(lacking)):
            print(f"waiting for at most {limit_s - (clock() - begin):.0f} s: {told}", flush=True)
        sleep(ROOM_S)


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
    except (RaypostError, RayError, OSError) as error:
        cause = raised(error)
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text("".join(traceback.format_exception(error)))
            print(f"traceback: {kept}", file=sys.stderr)
        except OSError as full:
            print(f"no traceback is kept: {full}", file=sys.stderr)
        print(f"failed: {type(cause).__name__}: {cause}", file=sys.stderr, flush=True)
        return 1
    return 0
