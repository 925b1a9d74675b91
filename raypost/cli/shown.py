"""What commands print: tables, what a configuration means, and prompts."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raypost.config import Config
from raypost.plan.cluster import ClusterResources


def shown_on() -> Console:
    """Return the terminal, or a wide one where the output goes elsewhere."""
    return Console() if sys.stdout.isatty() else Console(width=130)


def table(title: str, rows: Iterable[Sequence[object]], *columns: str) -> Table:
    """Return a table of these rows; without `columns` it has no heads."""
    made = Table(*columns, title=title, title_justify="left", show_header=bool(columns))
    for row in rows:
        made.add_row(*(escape(f"{cell:.4g}" if isinstance(cell, float) else str(cell)) for cell in row))
    return made


def print_plan(config: Config, cluster: ClusterResources | None, offline: bool = False) -> None:
    """Print what a configuration means. Raises ConfigError if it is refused."""
    # Imported here: it loads tokenizers and templates, which `status` and `--help` do without.
    from raypost.plan.plan import check

    found = check(config, cluster=cluster, offline=offline)
    out = shown_on()
    state = "continues the run that is there" if found.resumes else "new run"
    out.print(
        f"[bold]{config.name}[/bold]: {escape(str(found.run_dir))} ({state}), digest {found.run_digest}"
    )
    placed = map(dataclasses.astuple, found.placement)
    out.print(table("Placement", placed, "role", "actors", "count", "each reserves", "node"))
    if found.nodes:
        out.print(table("Nodes by type", found.nodes))
    bounds = [
        (one.task, one.strategy, f"staleness {one.threshold}", one.rule, one.oldest, one.beyond)
        for one in found.staleness
    ]
    columns = ("task", "strategy", "expired from", "which is", "oldest trained", "what is older")
    out.print(table("Staleness bound", bounds, *columns))
    out.print(table("Batch arithmetic", found.batch))
    out.print(table("Memory, estimated", found.memory))
    out.print(f"Transport of weights: {found.transport}", highlight=False)
    for warning in found.warnings:
        out.print(f"[yellow]warning:[/yellow] {escape(warning)}", highlight=False)


def print_prompts(config: Config, count: int) -> None:
    """Print so many prompts of each task as an engine is given them."""
    from raypost.plan.prompts import shown_prompts
    from raypost.report.prompt_terminal import prompt_text

    out = shown_on()
    for task in config.tasks:
        for shown in shown_prompts(task, config, count):
            tokens = "tokens unknown" if shown.num_tokens is None else f"{shown.num_tokens} tokens"
            out.rule(f"task {task.name}: {escape(shown.place)}, {tokens}", align="left")
            out.print(prompt_text(shown.text, shown.special_tokens), soft_wrap=True)
