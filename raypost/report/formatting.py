"""How numbers, times and sizes are written for people, in the report and on the terminal alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

MISSING = "–"
GROUP_MEANINGS = {
    "trained": "contributed to a train step",
    "filtered": "of no use for training, for instance because all its rewards are equal",
    "failed": "generation or judging failed",
    "expired": "grew too old and was dropped",
    "buffered": "in the replay buffer, leased groups included",
    "in_flight": "being generated or judged",
    "lost": "missing from every other place; must be 0",
}
"""What it means for a group to be counted there, by the names of `GroupCounts.as_dict`."""


def number(value: float | None, digits: int = 3) -> str:
    """Write a number with `digits` significant digits, without an exponent where it can be helped; a dash for None."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        return f"{value:,.{decimals}f}"
    mantissa, exponent = f"{value:.{max(0, digits - 1)}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def count(value: int | None) -> str:
    """Write a number with commas between thousands."""
    return MISSING if value is None else f"{value:,}"


def incidents(counts: Mapping[str, int]) -> str:
    """Write what happened to a run and did not end it: 2 role died, 2 role restarted."""
    return ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in counts.items())


def seconds(value: float | None) -> str:
    """Write a duration: 45 ms, 0.71 s, 12.3 s, 3 min 12 s, 2 h 05 min."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    if value < 9.95:
        return f"{value:.2f} s"
    if value < 99.5:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def clock(value: float | None) -> str:
    """Write a time that is left: 00:05, 03:12, 2:05:00."""
    return MISSING if value is None else str(timedelta(seconds=max(0, round(value)))).removeprefix("0:")


def percent(fraction: float | None) -> str:
    """Write a fraction: 34 %, or 0.4 % below one."""
    if fraction is None or not math.isfinite(fraction):
        return MISSING
    value = 100 * fraction
    return f"{value:.0f} %" if value >= 1 or value <= 0 else f"{value:.1f} %"


def size(nbytes: float | None) -> str:
    """Write bytes as MB or GB, powers of ten."""
    if nbytes is None:
        return MISSING
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


def bound(value: int) -> str:
    """Return `bound 4`."""
    return f"bound {value}"


def change(before: float | None, after: float | None) -> str:
    """Write a difference: +0.56, or nothing unless both are known."""
    return "" if before is None or after is None else f"{after - before:+.2f}"


def moment(iso: str) -> str:
    """Return an ISO time in UTC, to the minute."""
    return iso[:16].replace("T", " ") + " UTC"


def score(value: float | None) -> str:
    """Write a score with two decimals."""
    return MISSING if value is None else f"{value:.2f}"


def interval(bounds: Sequence[float] | None) -> str:
    """Write an interval, such as [0.55, 0.69]; nothing for None."""
    return "" if bounds is None else f"[{score(bounds[0])}, {score(bounds[1])}]"


def with_interval(value: float | None, bounds: Sequence[float] | None) -> str:
    """Write a score and its interval, such as 0.62 [0.55, 0.69], or the score alone."""
    return f"{score(value)} {interval(bounds)}".rstrip()


def length_bias(bias: Mapping[str, Any]) -> str:
    """Describe length bias in a sentence, from `LengthBias.as_dict()`."""
    kinds = (("dropped", "dropped"), ("regenerated", "generated again"), ("trained", "trained"))
    parts = [
        f"{count(bias[kind]['groups'])} {name} ({number(bias[kind]['tokens_mean'])} tokens)"
        for kind, name in kinds
        if bias[kind]["groups"] or kind == "trained"
    ]
    if len(parts) == 1:
        return "no group grew too old"
    ratio = bias["ratio"]
    lengths = "of unknown length" if ratio is None else f"{number(ratio)} times as long as trained ones"
    return f"{percent(bias['share'])} of the groups grew too old, {lengths}: {', '.join(parts)}"


def steps_of(steps: int, num_steps: int) -> str:
    """Write how many steps of those asked for: `4 of 8`, or `8 (4 are asked for)` where a run was longer before."""
    return f"{steps} of {num_steps}" if steps <= num_steps else f"{steps} ({num_steps} are asked for)"


def percentiles(values: Mapping[str, float]) -> str:
    """Write seconds at several percentiles, such as 1.20 s, 2.50 s, 9.10 s; a dash without any."""
    return ", ".join(seconds(value) for value in values.values()) or MISSING


def first_to_last(figures: Mapping[str, Any], name: str, write: Callable[[float | None], str]) -> str:
    """Write how a figure went, such as 0.22 → 0.81."""
    return f"{write(figures[f'{name}_first'])} → {write(figures[f'{name}_last'])}"


def task_row(name: str, task: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (title, text) of the figures of one task of a report."""
    produced, failures = task["samples_produced"], task["failures"]
    lost = [f"{count(number)} {boundary}" for boundary, number in failures.items()]
    held_out = f"{score(task['eval_before'])} → {score(task['eval_after'])}"
    worst = MISSING if task["staleness_max"] is None else f"{task['staleness_max']}"
    return [
        ("task", name),
        ("held-out", held_out),
        ("reward", first_to_last(task, "raw_reward", score)),
        ("trained", count(task["samples_trained"])),
        ("tokens", first_to_last(task, "response_tokens", number)),
        ("staleness", f"{number(task['staleness_mean'], 2)}, at most {worst}"),
        ("filtered", percent(task["samples_filtered"] / produced if produced else None)),
        ("failures", ", ".join(lost) or "0"),
        ("retries", count(task["retries"])),
        ("p50, p90, p99 of a group", percentiles(task["group_s"])),
    ]


def group_sum(counts: Mapping[str, int]) -> str:
    """Write where the groups are, such as `6 sampled = 4 trained + 2 in flight`; `lost` is left out."""
    places = [f"{counts[n]} {n.replace('_', ' ')}" for n in GROUP_MEANINGS if n != "lost" and counts[n]]
    return f"{counts['sampled']} sampled = {' + '.join(places) or 0}"
