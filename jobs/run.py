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
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from jobs.arguments import TRIED, config_of, parser, settings_of
from jobs.private_cluster import PrivateCluster
from jobs.submitted_job import Interrupts, SubmittedJob, say
from raypost.config import Config
from raypost.errors import ConfigError, RaypostError
from raypost.plan.plan import ClusterResources, bundles, check
from raypost.report.files import CONFIG, REPORT_JSON

MACHINE_RESOURCES = ("CPU", "GPU")
EXIT_REFUSED = 2
STOP_WAIT_S = 90
"""Time a stopped driver has to save and to report before Ray kills it."""
OBJECT_STORE_BYTES = 4 * 1024**3
"""Room for two versions of the weights of a model of 1 B parameters in bf16, taken only as it is used."""


def main(argv: list[str] | None = None) -> int:
    """Validate, then run. Returns the exit code."""
    args = arguments(argv)
    args.overrides += [f"{key}={value}" for key, value in settings_of(args).items() if value]
    try:
        config = configured(args)
        resources = local_resources(config)
        check(config, cluster=ClusterResources([resources]))
    except RaypostError as error:
        print(f"refused: {error}", file=sys.stderr, flush=True)
        return EXIT_REFUSED
    say(f"run {config.name}, written to {config.run_dir}")
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
                say(f"Ray dashboard at {cluster.dashboard_url}, token {cluster.token}")
                job = SubmittedJob(cluster, entrypoint, working_dir, submission_id, stop_wait_s)
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
        if _status_in(report) != "finished":
            return file.parent.name
    raise ConfigError(
        f"--resume: {runs_dir} has no unfinished run of {base!r} ({len(runs)} finished): leave --resume out to begin "
        "one, or name one with --name and raise train.num_steps to train it on"
    )


def _status_in(report: Path) -> str | None:
    """Return the status that a report has; None where there is none that can be read."""
    try:
        return str(json.loads(report.read_text())["status"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


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
    say(f"{'to train on' if finished else 'to continue'}: {shlex.join(command)}")


def _keep_logs(cluster: PrivateCluster, folder: Path | None) -> None:
    if folder is None or not folder.is_dir():
        return
    try:
        cluster.save_logs(folder / "ray_logs")
        said = f"logs of every actor: {folder / 'ray_logs'}"
    except OSError as error:
        # Such as a full disk, which may be why the job failed: that cause is what has to be said.
        said = f"not all logs of the actors could be kept in {folder / 'ray_logs'}: {error!s:.300}"
    print(said, file=sys.stderr, flush=True)


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
