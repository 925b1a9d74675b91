"""How `raypost explain` shows the life of a group, and the summary of a run, on a terminal.

Owns wording and layout; every fact comes from ledger/life.py and ledger/summary.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raypost.ledger.events import ENDS, LedgerEvent
from raypost.ledger.ledger import REGENERATED
from raypost.ledger.life import GroupLife
from raypost.ledger.summary import LedgerSummary
from raypost.report.formatting import (
    GROUP_MEANINGS,
    MISSING,
    group_sum,
    length_bias,
    number,
    percent,
    seconds,
)
from raypost.types import Status

Fields = dict[str, Any]

MAX_REWARDS = 16
"""More rewards than these are shown by their mean alone."""
MAX_NOTES = 6
"""More lines than these about production as a whole, in a row, are shown as one."""

_STYLES = {
    LedgerEvent.TRAINED: "green",
    LedgerEvent.FILTERED: "yellow",
    LedgerEvent.FAILED: "red",
    LedgerEvent.EXPIRED: "yellow",
    LedgerEvent.RESTORED: "magenta",
}
_KINDS = GROUP_MEANINGS | {
    REGENERATED: "grew too old, stayed to be generated again; ends, or waits, in another row",
}
_SAID = ("time", "event", "task", "group")


# ---------------------------------------------------------------- one group


def life_text(life: GroupLife) -> RenderableType:
    """Return the life of one group, a line an event."""
    task, group_id = life.key
    parts: list[RenderableType] = [
        Text(f"group {task}/{group_id} of {life.run_dir}: {_verdict(life)}", "bold")
    ]
    if life.lines:
        parts.append(_events(life, life.lines))
    if life.void:
        parts += [Text("undone by a restore, which went back to an earlier checkpoint:", "magenta")]
        parts.append(_events(life, life.void, style="dim"))
    return Group(*parts)


def _verdict(life: GroupLife) -> str:
    own = [line for line in life.lines if "group" in line or line["event"] == LedgerEvent.RESTORED]
    if not own:
        return "not sampled again since a restore undid what was done with it"
    last, until = own[-1], f"{seconds(life.last_s - life.started_s)} after the start, where the journal ends"
    if last["event"] == LedgerEvent.TRAINED:
        ages = [line["staleness"] for line in own if line["event"] == LedgerEvent.LEASED]
        return f"trained in step {last['step']}" + (f", staleness {ages[-1]}" if ages else "")
    if last["event"] in ENDS:
        why = f": {last['why']}" if last.get("why") else ""
        return f"dropped as {last['event']}{why}"
    if last["event"] in (LedgerEvent.SAMPLED, LedgerEvent.CONTINUED):
        return f"in flight, {until}"
    stored = [line["status"] for line in own if line["event"] == LedgerEvent.STORED]
    status = f" as {stored[-1]}" if stored else ""
    if last["event"] == LedgerEvent.LEASED:
        return f"leased for step {last['step']}, which is not trained yet, {until}"
    return f"in the buffer{status}, {until}"


def _events(life: GroupLife, lines: list[Fields], style: str = "") -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), style=style)
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for event, time_s, text, tone in _rows(lines):
        table.add_row(f"+{time_s - life.started_s:.2f} s", Text(event, tone), Text(text, tone and "dim"))
    return table


def _rows(lines: list[Fields]) -> Iterator[tuple[str, float, str, str]]:
    """(event, time, text, style) of each line; many notes in a row are one."""
    again = False
    for about_group, run in groupby(
        lines, key=lambda line: "group" in line or line["event"] == LedgerEvent.RESTORED
    ):
        batch = list(run)
        if not about_group and len(batch) > MAX_NOTES:
            yield "...", batch[0]["time"], _many(batch), "cyan"
            continue
        for line in batch:
            event, style = line["event"], _STYLES.get(line["event"], "" if about_group else "cyan")
            if event == LedgerEvent.CONTINUED:
                text = "from the buffer, " + ("to be generated again" if again else "to be continued")
            else:
                text = _text(line)
            again = line["status"] == Status.EXPIRED if event == LedgerEvent.STORED else again
            yield event, line["time"], text, style


def _many(notes: list[Fields]) -> str:
    pauses = sum(note["event"] == LedgerEvent.PAUSING for note in notes)
    versions = [note["version"] for note in notes if isinstance(note.get("version"), int)]
    between = f", versions {min(versions)} to {max(versions)}" if versions else ""
    last_s = notes[-1]["time"] - notes[0]["time"]
    return f"{pauses} pauses in {seconds(last_s)}{between}"


def _text(line: Fields) -> str:
    """Say in words what one line of the journal records."""
    rest = {name: value for name, value in line.items() if name not in _SAID}
    event = line["event"]
    parts: list[str] = []
    if event == LedgerEvent.SAMPLED:
        parts.append("left the dataset")
    elif event == LedgerEvent.STORED:
        parts.append(f"into the buffer as {rest.pop('status', '?')}")
        if rest.pop("put_back", False):
            parts.append("put back as it was when it started")
        if rest.pop("too_old", True) is False:
            parts.append("interrupted too often")
    elif event == LedgerEvent.LEASED:
        parts.append(f"in the batch of step {rest.pop('step', '?')}")
    elif event == LedgerEvent.TRAINED:
        parts.append(f"step {rest.pop('step', '?')} is trained")
    elif event == LedgerEvent.RESTORED:
        parts.append("production went back to a checkpoint; open leases are in the buffer again")
        rest = {}
    elif event in ENDS:
        parts.append(str(rest.pop("why", "dropped")))
    return "; ".join(parts + _facts(rest))


def _facts(rest: Fields) -> list[str]:
    """Say the facts of `ledger.group_facts` in words, then those of any other name."""
    parts = [say(rest[name]) for name, say in _FACTS.items() if name in rest]
    return [*parts, *(f"{name} {value}" for name, value in rest.items() if name not in _FACTS)]


def _tokens(tokens: list[int]) -> str:
    low, high = min(tokens), max(tokens)
    if low == high:
        return f"{len(tokens)} responses of {low} tokens"
    return f"{len(tokens)} responses of {low} to {high} tokens, mean {number(sum(tokens) / len(tokens))}"


def _versions(counts: dict[str, int]) -> str:
    named = {version: "no policy" if version == "-1" else f"version {version}" for version in counts}
    return "tokens " + ", ".join(f"{count} by {named[version]}" for version, count in counts.items())


def _rewards(rewards: list[float | None]) -> str:
    known = [reward for reward in rewards if reward is not None]
    mean = number(sum(known) / len(known)) if known else MISSING
    if len(rewards) > MAX_REWARDS:
        return f"rewards of mean {mean}"
    each = " ".join(MISSING if reward is None else f"{reward:g}" for reward in rewards)
    return f"rewards {each}, mean {mean}"


def _compact(figures: Fields) -> str:
    """Say the figures that a record has of a group (`ledger.facts`)."""
    parts = [f"on {figures['engine']}"] if "engine" in figures else []
    if "tokens" in figures:
        low, mean, high = figures["tokens"]
        between = f"{low} to {high} tokens, mean {number(mean)}"
        parts = [
            f"{figures['responses']} responses of {between}",
            "versions {} to {}".format(*figures["versions"]),
            *parts,
        ]
    if "rewards" in figures:
        low, mean, high = figures["rewards"]
        parts.append(f"rewards {low:g} to {high:g}, mean {number(mean)}")
    counts = {
        "aborts": "interrupted",
        "continued": "continued",
        "regenerated": "too old, and generated again",
    }
    return "; ".join(parts + [f"{said} {figures[name]}x" for name, said in counts.items() if name in figures])


_FACTS: dict[str, Callable[[Any], str]] = {
    "tokens": _tokens,
    "versions": _versions,
    "engines": lambda names: "on " + ", ".join(names),
    "rewards": _rewards,
    "finish": lambda counts: "ended by " + ", ".join(f"{reason} {n}x" for reason, n in counts.items()),
    "aborts": lambda count: f"{count} interruptions so far",
    "compact": _compact,
}
"""How each fact of `ledger.group_facts` reads, and what a record has instead of them."""


# ---------------------------------------------------------------- all groups


def ledger_text(summary: LedgerSummary) -> RenderableType:
    """Return where all groups of a run are, by task."""
    parts: list[RenderableType] = [_stats_table(summary), Text(group_sum(summary.counts.as_dict()))]
    if summary.problems:
        parts += [Text(f"problem: {problem}", "red") for problem in summary.problems]
    else:
        parts.append(
            Text(
                "every move in the journal is a legal one: no group is counted twice, none is missing",
                "green",
            )
        )
    if summary.events:
        named = [f"{event} {count}x" for event, count in summary.events.items()]
        parts.append(Text("production: " + ", ".join(named)))
    parts.append(Text("length bias: " + length_bias(summary.length_bias.as_dict())))
    return Group(*parts)


def _stats_table(summary: LedgerSummary) -> Table:
    table = Table(title=f"groups of {summary.run_dir}", title_justify="left")
    table.add_column("task")
    table.add_column("where")
    for name in ("groups", "share", "mean tokens", "mean staleness"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("meaning", style="dim")
    for task, kinds in summary.tasks.items():
        sampled = sum(stats.groups for kind, stats in kinds.items() if kind != REGENERATED)
        for kind, meaning in _KINDS.items():
            if kind in kinds:
                stats = kinds[kind]
                share = MISSING if kind == REGENERATED or not sampled else percent(stats.groups / sampled)
                means = (number(stats.tokens_mean), number(stats.staleness_mean, 2))
                table.add_row(task, kind.replace("_", " "), f"{stats.groups:,}", share, *means, meaning)
        table.add_section()
    return table
