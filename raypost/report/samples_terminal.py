"""Samples as a reader sees them: prompt, response with the policy's versions marked, reward and what it is made of."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from raypost.report.formatting import number

VERSION_STYLES = ("", "cyan", "green", "magenta", "yellow")
"""Of the versions of a response, in turn."""


def sample_panel(sample: Mapping[str, Any]) -> Panel:
    """Return one sample in a frame."""
    title = f"step {sample['step']}  {sample['task']}/{sample['group']}, sample {sample['sample']}"
    reward = Text.assemble(("reward ", "dim"), (number(sample["reward"], 4), "bold"))
    for name, value in sample["reward_parts"].items():
        reward.append(f"   {name} {number(value, 4)}")
    if sample.get("answer") is not None:
        reward.append(f"   answer {sample['answer']}", "dim")
    parts = [
        Text("prompt", style="dim"),
        Text(sample["prompt"]),
        Text("response", style="dim"),
        _response(sample),
        reward,
        Text(_facts(sample), style="dim"),
    ]
    if sample["judge_words"]:
        parts.append(Text.assemble(("judge: ", "dim"), sample["judge_words"]))
    if sample.get("error"):
        parts.append(Text(f"error: {sample['error']}", style="red"))
    return Panel(Group(*parts), title=Text(title), title_align="left")


def _response(sample: Mapping[str, Any]) -> Text:
    """Return the response; where it has several versions or observations, each stretch begins with a mark."""
    segments = sample["segments"]
    if len(segments) < 2:
        return Text(sample["response"])
    text, versions = Text(), dict[int, str]()
    for segment in segments:
        version, trained = segment["version"], segment["trained"]
        style = versions.setdefault(version, VERSION_STYLES[len(versions) % len(VERSION_STYLES)])
        mark = f"[v{version}]" if version >= 0 else "[observed]"
        text.append(mark if trained or version < 0 else f"{mark[:-1]}, not trained]", "bold reverse")
        text.append(segment["text"], style if trained else "dim")
    return text


def _facts(sample: Mapping[str, Any]) -> str:
    versions = sorted({one["version"] for one in sample["segments"] if one["version"] >= 0})
    shown = (
        f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else f"{versions[0]}" if versions else "none"
    )
    logprobs = [one for one in sample["logprobs"] if one is not None]
    facts = {
        "tokens": len(sample["logprobs"]),
        "version": shown,
        "staleness": sample["staleness"],
        "mean logprob": number(statistics.fmean(logprobs)) if logprobs else None,
        "ended by": sample.get("finish_reason"),
        "judged in": f"{sample['judge_s']:.2f} s" if sample.get("judge_s") else None,
        "judge retries": sample.get("judge_retries"),
        "played again": sample.get("retries"),
        "engine": sample.get("worker"),
    }
    known = {name: value for name, value in facts.items() if value or name in ("tokens", "staleness")}
    return "   ".join(f"{name} {value}" for name, value in known.items())


def samples_text(step: int, steps: Iterable[int], shown: int, there: int) -> str:
    """Return a line about what is shown."""
    first, *_, last = [*steps, *steps] or [0, 0]
    return f"step {step}: {shown} of {there} samples; kept of steps {first} to {last}"
