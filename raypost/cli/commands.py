"""The commands. Thin: they parse, call and print.

What is refused is one message on stderr and exit code 2, never a traceback. Nothing here needs Ray: `run` becomes the
job's launcher, and `submit` runs `ray job submit` as a process of its own.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raypost.cli.project import write_project
from raypost.cli.runtime import become
from raypost.cli.submission import Submission, dashboard_token
from raypost.config import Config, load_config
from raypost.errors import ConfigError, RaypostError
from raypost.plan.cluster import ClusterResources

CONFIG = "config.yaml"
"""What a command reads where no --config is given."""
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)

EXIT_REFUSED = 2

ConfigOption = Annotated[
    Path, typer.Option("--config", help="YAML file, such as jobs/recipes/quickstart.yaml")
]
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings of a command whose arguments are all those of a module of jobs/."""
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False)]
RunDir = Annotated[Path, typer.Argument(help="folder of a run, such as runs/quickstart")]


@app.callback()
def raypost() -> None:
    """Reinforcement learning of language models on Ray."""


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="NAME", help="folder to make; its name is the run's")],
) -> None:
    """Write a project that runs: a configuration, a reward function, data."""
    with _refusals():
        written = write_project(folder)
    print(f"wrote {', '.join(written)} into {folder}/\n\n  cd {folder}\n  raypost plan\n  raypost run")


@app.command(context_settings=PASSED_ON, add_help_option=False)
def run(context: typer.Context) -> None:
    """Train on this machine, on a Ray cluster started for it. `raypost run --help` lists its options."""
    with _refusals():
        become("run", context.args)


@app.command(context_settings=PASSED_ON, add_help_option=False)
def evaluate(context: typer.Context) -> None:
    """Score a model on held-out problems. `raypost evaluate --help` lists its options."""
    with _refusals():
        become("evaluate", context.args)


@app.command()
def plan(
    config: ConfigOption = Path(CONFIG),
    overrides: Overrides = None,
    cluster: Annotated[
        str,
        typer.Option(
            help="what to plan for: `local` (this machine), `none`, a cluster.yaml (its largest size), "
            "or the dashboard of a running cluster, http://host:8265"
        ),
    ] = "local",
    node: Annotated[
        list[str] | None,
        typer.Option(
            help="""one node of the cluster to plan for, such as '{"CPU": 8, "GPU": 4}'; repeatable"""
        ),
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="do not ask the services of judges")] = False,
    show_prompts: Annotated[
        int, typer.Option(min=0, help="print so many prompts of each task as an engine is given them")
    ] = 0,
) -> None:
    """Show what a configuration means: placement, staleness bound, batch arithmetic, prompts. Starts nothing."""
    with _refusals():
        resolved = load_config(config, overrides)
        _show_plan(resolved, _cluster_resources(cluster, node or []), offline)
        if show_prompts:
            _show_prompts(resolved, show_prompts)


@app.command()
def submit(
    address: Annotated[str, typer.Option(help="dashboard of the cluster, http://host:8265")],
    config: ConfigOption = Path(CONFIG),
    overrides: Overrides = None,
    submission_id: Annotated[
        str | None, typer.Option(help="name of the job; Ray makes one if absent")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="environment of the job; repeatable")
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="do not follow the job's log")] = False,
) -> None:
    """Submit the job of the configuration's placement to a cluster; this folder travels as its working directory."""
    with _refusals():
        submission = Submission.of(config, address, overrides or [], submission_id)
        # Elsewhere model, data and run folder are the cluster's, not this machine's.
        if submission.is_local:
            # It may have an autoscaler; the job checks again.
            _show_plan(submission.config, ClusterResources(submission.nodes, elastic=True))
        command = submission.command(env or [], no_wait)
    print("running: ray", shlex.join(command[3:]), flush=True)
    try:
        code = subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        print(
            f"no longer following; the job goes on until: ray job stop --address {address} ID",
            file=sys.stderr,
        )
        code = 130
    raise typer.Exit(code)


@app.command()
def status(run_dir: RunDir) -> None:
    """Show where a run stands: its last step, and its report once there is one."""
    with _refusals():
        from raypost.report.status import run_figures

        _require_run(run_dir)
        figures = run_figures(run_dir)
    _console().print(_table(str(run_dir), figures.items()))


@app.command()
def report(run_dir: RunDir) -> None:
    """Make report.json and report.html again from what the run wrote."""
    with _refusals():
        from raypost.report.writer import rebuild

        _require_run(run_dir)
        figures = rebuild(run_dir)
    print(f"{figures['status']}, {figures['steps']} steps: {run_dir / 'report.html'}")


@app.command()
def samples(
    run: Annotated[str, typer.Argument(help="folder of a run, or its name below runs/")],
    step: Annotated[int | None, typer.Option(help="train step; the last that was kept if absent")] = None,
    best: Annotated[int, typer.Option(min=0, help="show so many responses with the highest rewards")] = 0,
    worst: Annotated[int, typer.Option(min=0, help="show so many responses with the lowest rewards")] = 0,
    task: Annotated[str | None, typer.Option(help="of this task alone")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print a line of JSON for each instead")] = False,
) -> None:
    """Show what the policy answered, and its rewards, of the groups that were kept of a step."""
    from raypost.ledger.life import find_run
    from raypost.report.samples import kept_samples, ranked
    from raypost.report.samples_terminal import sample_panel, samples_text

    with _refusals():
        kept = kept_samples(find_run(run), step, task)
    shown = ranked(kept.samples, best, worst) if best or worst else kept.samples
    if as_json:
        for sample in shown:
            print(json.dumps(sample))
        return
    console = _console()
    for sample in shown:
        console.print(sample_panel(sample))
    console.print(samples_text(kept.step, kept.steps, len(shown), len(kept.samples)), highlight=False)


@app.command()
def checkpoints(run_dir: RunDir) -> None:
    """List the checkpoints of a run, each verified byte by byte; exit code 1 if one is damaged."""
    with _refusals():
        from raypost.checkpoint import CHECKPOINTS, CheckpointDir
        from raypost.report.formatting import score, size

        _require_run(run_dir)
        found = list(CheckpointDir(run_dir / CHECKPOINTS, 1, {}).listed())
        rows = [
            (
                one.path.name,
                f"{datetime.fromtimestamp(one.path.stat().st_mtime):%Y-%m-%d %H:%M:%S}",
                size(one.num_bytes),
                "" if one.score is None else score(one.score),
                ", ".join(one.links),
                one.damage or "whole",
            )
            for one in found
        ]
    columns = ("checkpoint", "saved", "size", "held-out", "is", "state")
    _console().print(_table(str(run_dir / CHECKPOINTS), rows, *columns))
    if any(one.damage for one in found):
        raise typer.Exit(1)


@app.command()
def explain(
    run: Annotated[str, typer.Argument(help="folder of a run, or its name below runs/")],
    group: Annotated[
        str | None, typer.Argument(help="group, such as sums/7, or 7 where there is one task; all if absent")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print plain data instead of text")] = False,
) -> None:
    """Tell what became of a group, or where all groups of a run are; also while the run goes on."""
    from raypost.ledger.life import find_run, group_life
    from raypost.ledger.summary import ledger_summary
    from raypost.report.explain_terminal import ledger_text, life_text

    with _refusals():
        folder = find_run(run)
        if group is not None:
            life = group_life(folder, group)
            found, text = life.as_dict(), life_text(life)
        else:
            summary = ledger_summary(folder)
            found, text = summary.as_dict(), ledger_text(summary)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _console().print(text, highlight=False)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn errors that are raised on purpose into one message and exit code 2."""
    try:
        yield
    except RaypostError as error:
        print(f"refused: {error}", file=sys.stderr, flush=True)
        raise typer.Exit(EXIT_REFUSED) from None


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=130)


def _table(title: str, rows: Iterable[Sequence[object]], *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left", show_header=bool(columns))
    for row in rows:
        table.add_row(*(escape(f"{cell:.4g}" if isinstance(cell, float) else str(cell)) for cell in row))
    return table


def _cluster_resources(cluster: str, nodes: list[str]) -> ClusterResources | None:
    if nodes:
        return ClusterResources([_node(text) for text in nodes])
    if cluster == "none":
        return None
    if cluster == "local":
        return ClusterResources.of_this_machine()
    if cluster.startswith(("http://", "https://")):
        return ClusterResources.of_dashboard(cluster, dashboard_token())
    return ClusterResources.of_cluster_file(Path(cluster))


def _node(text: str) -> dict[str, float]:
    try:
        return {str(name): float(amount) for name, amount in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"""--node {text!r} must be JSON such as '{{"CPU": 8, "GPU": 4}}': {error}"""
        ) from None


def _show_plan(config: Config, cluster: ClusterResources | None, offline: bool = False) -> None:
    # Imported here: it loads tokenizers and templates, which `status` and `--help` do without.
    from raypost.plan.plan import check

    found = check(config, cluster=cluster, offline=offline)
    console = _console()
    state = "continues the run that is there" if found.resumes else "new run"
    console.print(
        f"[bold]{config.name}[/bold]: {escape(str(found.run_dir))} ({state}), digest {found.run_digest}"
    )
    placed = map(dataclasses.astuple, found.placement)
    console.print(_table("Placement", placed, "role", "actors", "count", "each reserves", "node"))
    bounds = [
        (one.task, one.strategy, f"staleness {one.threshold}", one.rule, one.oldest, one.beyond)
        for one in found.staleness
    ]
    columns = ("task", "strategy", "expired from", "which is", "oldest trained", "what is older")
    console.print(_table("Staleness bound", bounds, *columns))
    console.print(_table("Batch arithmetic", found.batch))
    console.print(f"Transport of weights: {found.transport}", highlight=False)
    for warning in found.warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}", highlight=False)


def _show_prompts(config: Config, count: int) -> None:
    from raypost.plan.prompts import shown_prompts
    from raypost.report.prompt_terminal import prompt_text

    console = _console()
    for task in config.tasks:
        for shown in shown_prompts(task, config, count):
            tokens = "tokens unknown" if shown.num_tokens is None else f"{shown.num_tokens} tokens"
            console.rule(f"task {task.name}: {escape(shown.place)}, {tokens}", align="left")
            console.print(prompt_text(shown.text, shown.special_tokens), soft_wrap=True)


def _require_run(run_dir: Path) -> None:
    from raypost.report import files

    if not (run_dir / files.CONFIG).is_file():
        raise ConfigError(f"{run_dir} holds no run (no config.yaml): give the folder that a run wrote")
