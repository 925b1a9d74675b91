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
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.markup import escape

from raypost.cli.project import write_project
from raypost.cli.runtime import become
from raypost.cli.shown import print_plan, print_prompts, shown_on, table
from raypost.cli.submission import Submission, dashboard_token
from raypost.config import load_config
from raypost.errors import ConfigError, RaypostError
from raypost.plan.cluster import ClusterResources
from raypost.plan.node_types import types_of_file

CONFIG = "config.yaml"
"""What a command reads where no --config is given."""
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
EXIT_REFUSED = 2
ConfigOption = Annotated[
    Path, typer.Option("--config", help="YAML file, such as jobs/recipes/quickstart.yaml")
]
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


def _passed_on(module: str, text: str) -> None:
    """Make a command whose arguments are all those of a module of jobs/."""
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(module, help=text, context_settings=settings, add_help_option=False)
    def command(context: typer.Context) -> None:
        with _refusals():
            become(module, context.args)


_passed_on(
    "run", "Train on this machine, on a Ray cluster started for it. `raypost run --help` lists its options."
)
_passed_on("evaluate", "Score a model on held-out problems. `raypost evaluate --help` lists its options.")
_passed_on(
    "chaos", "Kill roles of a run that goes on, and audit it. `raypost chaos --help` lists its options."
)


@app.command()
def plan(
    config: ConfigOption = Path(CONFIG),
    overrides: Overrides = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            help="what to plan for: `local` (this machine, the default), `none`, a cluster.yaml or KubeRay manifest "
            "(its largest size), or the dashboard of a running cluster, http://host:8265; given beside that, a file "
            "says which nodes its autoscaler may add"
        ),
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(help="""a node to plan for, such as '{"CPU": 8, "GPU": 4}'; repeatable"""),
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="do not ask the services of judges")] = False,
    show_prompts: Annotated[
        int, typer.Option(min=0, help="print so many prompts of each task as an engine is given them")
    ] = 0,
    like: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="forecast seconds a step from the rates of this run that ended"),
    ] = None,
) -> None:
    """Show what a configuration means: placement, staleness, memory, batch arithmetic, prompts. Starts nothing."""
    with _refusals():
        resolved = load_config(config, overrides)
        print_plan(
            resolved, _cluster_resources(cluster or ["local"], node or [], resolved.autoscaling), offline
        )
        if like is not None:
            from raypost.plan.pace import pace_lines, rates_of

            title = f"Pace, forecast as if engines and ranks were those of {like}"
            shown_on().print(table(title, pace_lines(resolved, rates_of(like))))
        if show_prompts:
            print_prompts(resolved, show_prompts)


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
            print_plan(submission.config, dataclasses.replace(submission.cluster, elastic=True))
        command = submission.command(env or [], no_wait)
    print("running: ray", shlex.join(command[3:]), flush=True)
    try:
        code = subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        print(f"the job goes on until: ray job stop --address {address} ID", file=sys.stderr)
        code = 130
    raise typer.Exit(code)


@app.command()
def status(run_dir: RunDir) -> None:
    """Show where a run stands: its last step, and its report once there is one."""
    with _refusals():
        from raypost.report.status import run_figures

        _require_run(run_dir)
        figures = run_figures(run_dir)
    shown_on().print(table(str(run_dir), figures.items()))


@app.command()
def scale(
    run_dir: RunDir,
    workers: Annotated[str, typer.Option(help="how many rollout workers, or `auto`: the run chooses")],
    pool: Annotated[str, typer.Option(help="name of one of rollout.pools; `rollout` itself if absent")] = "",
) -> None:
    """Give a run that goes on another number of rollout workers; production does not stop for it."""
    with _refusals():
        from raypost.report.pool import ask_for_size

        _require_run(run_dir)
        ask_for_size(run_dir, workers, pool)
    where = f" in pool {pool}" if pool else ""
    print(f"asked for {workers} rollout workers{where}: `raypost status {run_dir}` shows when they are there")


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
    console = shown_on()
    for sample in shown:
        console.print(sample_panel(sample))
    console.print(samples_text(kept.step, kept.steps, len(shown), len(kept.samples)), highlight=False)


@app.command()
def checkpoints(run_dir: RunDir) -> None:
    """List the checkpoints of a run and what each holds, verified byte by byte; exit code 1 if one is damaged."""
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
                one.holds,
                one.damage or "whole",
            )
            for one in found
        ]
    shown_on().print(
        table(
            str(run_dir / CHECKPOINTS),
            rows,
            *["checkpoint", "saved", "size", "held-out", "is", "holds", "state"],
        )
    )
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
    from raypost.report.samples import samples_of_group
    from raypost.report.turns_terminal import turns_text

    with _refusals():
        folder = find_run(run)
        if group is not None:
            life = group_life(folder, group)
            members = samples_of_group(folder, life.key, life.step) if life.step is not None else []
            found = life.as_dict() | {"members": members}
            text: RenderableType = Group(life_text(life), turns_text(members))
        else:
            summary = ledger_summary(folder)
            found, text = summary.as_dict(), ledger_text(summary)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        shown_on().print(text, highlight=False)


@app.command()
def audit(
    run: Annotated[str, typer.Argument(help="folder of a run, or its name below runs/")],
    as_json: Annotated[bool, typer.Option("--json", help="print plain data instead of text")] = False,
) -> None:
    """Recount a run from its files and say what contradicts what; exit code 1 if anything does."""
    from raypost.audit.audit import audit as audited
    from raypost.audit.findings import Check
    from raypost.ledger.life import find_run

    with _refusals():
        found = audited(find_run(run))
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        console, findings = shown_on(), found.findings
        console.print(table(str(found.run_dir), found.figures.items()))
        rows = [
            (check, findings.compared[check], findings.contradictions[check] or "none") for check in Check
        ]
        console.print(table("", rows, "check", "compared", "contradictions"))
        for check, texts in findings.texts.items():
            for text in texts:
                console.print(f"[red]{check}[/red]: {escape(text)}", highlight=False)
        for note in findings.notes:
            console.print(f"note: {escape(note)}", highlight=False)
    if found.num_contradictions:
        raise typer.Exit(1)


@app.command()
def doctor(
    run: Annotated[str, typer.Argument(help="folder of a run, or its name below runs/")],
    keep: Annotated[bool, typer.Option("--keep", help="write it into the run folder too")] = False,
) -> None:
    """Say what a run waits for, down to the root: whose process, which group, judge, node or environment."""
    from raypost.doctor.examine import examine, present_run, write_report

    with _refusals():
        folder = present_run(run)
        found = examine(folder)
    first, rest = found.report.split("\n", 1)
    console = shown_on()
    console.print(f"[bold]{escape(first)}[/bold]", highlight=False, soft_wrap=True)
    console.print(rest, markup=False, highlight=False, soft_wrap=True)
    if keep:
        console.print(f"written to {write_report(folder, found)}", highlight=False, soft_wrap=True)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn errors that are raised on purpose into one message and exit code 2."""
    try:
        yield
    except RaypostError as error:
        print(f"refused: {error}", file=sys.stderr, flush=True)
        raise typer.Exit(EXIT_REFUSED) from None


def _cluster_resources(named: list[str], nodes: list[str], autoscaling: bool) -> ClusterResources | None:
    if nodes:
        return ClusterResources([_node(text) for text in nodes])
    live = [one for one in named if one.startswith(("http://", "https://"))]
    files = [one for one in named if one not in ("none", "local", *live)]
    if len(named) > 1 and (len(named), len(live), len(files)) != (2, 1, 1):
        raise ConfigError(
            f"--cluster is {', '.join(named)}: give one, or the dashboard of a running cluster and the file of its "
            "node types"
        )
    if live:
        found = ClusterResources.of_dashboard(live[0], dashboard_token())
        addable = types_of_file(Path(files[0])) if files else None
        return dataclasses.replace(found, elastic=autoscaling, addable=addable)
    if files:
        return ClusterResources.of_cluster_file(Path(files[0]))
    return ClusterResources.of_this_machine() if named == ["local"] else None


def _node(text: str) -> dict[str, float]:
    try:
        return {str(name): float(amount) for name, amount in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"""--node {text!r} must be JSON such as '{{"CPU": 8, "GPU": 4}}': {error}"""
        ) from None


def _require_run(run_dir: Path) -> None:
    if not (run_dir / CONFIG).is_file():
        raise ConfigError(f"{run_dir} holds no run (no config.yaml): give the folder that a run wrote")
