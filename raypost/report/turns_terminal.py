"""How `raypost explain` shows the members of a group, turn by turn, from the samples that were kept of it.

Owns wording and layout; what is kept is samples.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raypost.report.formatting import number

MAX_CHARACTERS = 160
"""Of what was said, and of what was observed, in a turn."""


def turns_text(samples: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return every member with its reward, and its turns; of a session each trajectory, which are its branches."""
    parts: list[RenderableType] = []
    for member, of_member in groupby(samples, key=lambda one: one["sample"]):
        branches = list(of_member)
        parts.append(_head(member, branches))
        parts += [_turns(branch) for branch in branches if branch.get("turns")]
    return Group(*parts)


def _head(member: int, branches: Sequence[Mapping[str, Any]]) -> Text:
    last = branches[-1]
    text = Text.assemble((f"member {member}", "bold"), f": reward {number(last['reward'], 4)}")
    for name, value in last["reward_parts"].items():
        text.append(f", {name} {number(value, 4)}")
    facts = {
        "branches": len(branches) if len(branches) > 1 else None,
        "ended by": last.get("finish_reason"),
        "interrupted": last.get("aborts"),
        "began again": last.get("restarts"),
        "played again": last.get("retries"),
        "judged in": f"{last['judge_s']:.2f} s" if last.get("judge_s") else None,
    }
    text.append("".join(f"; {name} {value}" for name, value in facts.items() if value), "dim")
    return text


def _turns(branch: Mapping[str, Any]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for place, turn in enumerate(branch["turns"], 1):
        said = Text(_cut(turn["said"]))
        if not turn["trained"]:
            said.append("  (trained in a branch before)", "dim")
        if turn["reward"]:
            said.append(f"  reward {number(turn['reward'], 4)}", "bold")
        table.add_row(f"turn {place}", said)
        for call in turn["calls"]:
            table.add_row("", Text(f"{call['name'] or '?'}: {call['end']}, {call['seconds']:.3f} s", "cyan"))
        if turn.get("info"):
            table.add_row("", Text(turn["info"], "cyan"))
        if turn["observed"]:
            table.add_row("", Text(_cut(turn["observed"]), "dim"))
    return table


def _cut(text: str) -> str:
    shown = text.strip()
    return shown if len(shown) <= MAX_CHARACTERS else f"{shown[:MAX_CHARACTERS]}..."
