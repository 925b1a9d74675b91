"""Colours of the report: text and lines, series, and the kinds of spans."""

from __future__ import annotations

from raypost.observe.spans import SpanKind

INK, GREY, LIGHT, PALE = "#1f2933", "#5f6c7b", "#cbd2d9", "#edf0f3"
BLUE, ORANGE, GREEN, RED, PURPLE = "#2f6fde", "#e8871e", "#15936b", "#cf3f3f", "#8057c9"

TASK_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)

KIND_COLOURS: dict[SpanKind, str] = {
    "rollout": BLUE,
    "train": ORANGE,
    "sync": PURPLE,
    "evaluate": GREEN,
    "pause": "#b8a9d9",
    "checkpoint": "#7a5c44",
    "wait": LIGHT,
    "judge": "#5fae8f",
    "tool": "#c77d98",
    "environment": "#c9a13b",
    "sandbox": "#4f9aa8",
}
