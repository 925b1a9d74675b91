"""The timeline: who was busy when, a row for each actor, so that the overlap can be seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from raypost.observe.spans import (
    CHECKPOINT,
    ENVIRONMENT,
    EVALUATE,
    JUDGE,
    PAUSE,
    ROLLOUT,
    SANDBOX,
    SYNC,
    TOOL,
    TRAIN,
    WAIT,
    SpanKind,
)  # fmt: skip
from raypost.report.busy_time import Intervals_N2, any_busy, intersect, length_s, union
from raypost.report.colours import GREY, INK, KIND_COLOURS, LIGHT, PALE
from raypost.report.formatting import percent
from raypost.report.record import RunRecord

STEPS_IN_ZOOM = 24
MAX_ROWS = 20
MAX_BARS = 400
"""A row with more intervals is drawn as its busy share in each of BINS slices of time."""
BINS = 500

_ORDER: tuple[SpanKind, ...] = (
    ROLLOUT, TRAIN, SANDBOX, JUDGE, TOOL, ENVIRONMENT, SYNC, EVALUATE, PAUSE, CHECKPOINT, WAIT,
)  # fmt: skip
_SHARES = {
    "both": ("training and rollout at once", INK),
    "train": ("training alone", KIND_COLOURS[TRAIN]),
    "rollout": ("rollout alone", KIND_COLOURS[ROLLOUT]),
    "sync": ("weight sync", KIND_COLOURS[SYNC]),
    "evaluate": ("evaluation", KIND_COLOURS[EVALUATE]),
    "neither": ("neither (pause, hand-over, checkpoint)", LIGHT),
}

Window = tuple[float, float]


def zoom(windows: Intervals_N2, step_s: float | None) -> Window:
    """Return the middle of the longest training window, about STEPS_IN_ZOOM steps wide."""
    start, end = windows[np.argmax(windows[:, 1] - windows[:, 0])]
    half = min(end - start, max(1.0, STEPS_IN_ZOOM * (step_s or 0.75))) / 2
    middle = (start + end) / 2
    return (middle - half, middle + half)


def whole_run(record: RunRecord) -> Window:
    """Return the time from the start of the first session to the end of the last."""
    start, end = record.sessions[0][0], record.sessions[-1][1]
    return (start, max(end, start + 1.0))


def joined(record: RunRecord) -> tuple[RunRecord, list[float]]:
    """Return the record with the time between sessions cut out, and when each session but the first then starts."""
    starts, ends = np.array(record.sessions).T
    cut_s = np.concatenate([[0.0], np.cumsum(starts[1:] - ends[:-1])])

    def cut(times: NDArray[np.float64]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = cut_s[np.maximum(0, np.searchsorted(starts, times, side="right") - 1)]
        return found

    spans = {key: union(one - cut(one[:, 0])[:, None]) for key, one in record.spans.items()}
    moves = [(at - float(cut(np.array([at]))[0]), actor, came) for at, actor, came in record.moves]
    targets = [(at - float(cut(np.array([at]))[0]), text) for at, text in record.targets]
    whole = replace(
        record, spans=spans, moves=moves, targets=targets, sessions=[(starts[0], ends[-1] - cut_s[-1])]
    )
    return whole, [float(start) for start in starts[1:] - cut_s[1:]]


def draw_timeline(
    record: RunRecord,
    window: Window,
    bands: bool = False,
    title: bool = False,
    restarts: Sequence[float] = (),
) -> Figure:
    """Draw one row an actor over `window`; `bands` shades the syncs and evaluations across all rows.

    `restarts`: when sessions start that are no first ones.
    """
    rows, hidden = _rows(record, window)
    figure = Figure(figsize=(12.4, 1.35 + 0.4 * (len(rows) + 1)), layout="constrained")
    ax = figure.subplots()
    first, last = record.sessions[0][0], record.sessions[-1][0]
    origin = last if window[0] >= last else first
    frame = np.array([window])
    busy = {kind: intersect(any_busy(record.spans, kind), frame) for kind in _ORDER}
    if bands:
        for start, end in union(np.concatenate([busy[SYNC], busy[EVALUATE], busy[PAUSE]])) - origin:
            ax.axvspan(start, end, color=PALE, lw=0, zorder=0)
    _draw_row(ax, 0, intersect(busy[TRAIN], busy[ROLLOUT]), INK, window, origin)
    for start in restarts:
        ax.axvline(start - origin, color=GREY, lw=1, ls=(0, (4, 3)))
    dense = False
    for y, actor in enumerate(rows, start=1):
        for kind in reversed(_ORDER):
            spans = intersect(record.spans.get((actor, kind), np.empty((0, 2))), frame)
            dense |= _draw_row(ax, y, spans, KIND_COLOURS[kind], window, origin)
    moves = [one for one in record.moves if window[0] <= one[0] <= window[1] and one[1] in rows]
    for at, actor, came in moves:
        y, mark = rows.index(actor) + 1, ">" if came else "<"
        ax.plot(at - origin, y, mark, ms=8, color="white", mec=INK, mew=1.4, clip_on=False, zorder=4)
    targets = [one for one in record.targets if window[0] <= one[0] <= window[1]]
    for at, text in targets:
        ax.axvline(at - origin, color=GREY, lw=0.8, ls=":")
        note(ax, text, (at - origin, -0.6), (3, 3))
    _dress(ax, ["both at once", *rows], window, origin)
    begins = min((spans[0, 0] for spans in record.spans.values() if len(spans)), default=window[0])
    if begins - window[0] > 0.08 * (window[1] - window[0]):
        # Nothing is wrong with an empty stretch before the engines are up.
        ax.text(
            (window[0] + begins) / 2 - origin, (len(rows) + 1) / 2, "starting up", color=GREY, ha="center"
        )
    _legend(ax, {kind: KIND_COLOURS[kind] for kind in _ORDER if len(busy[kind])}, "lower right", (1, 1))
    if title:
        ax.set_title("Who was busy when")
    notes = [f"{hidden} more actors not shown"] * (hidden > 0)
    notes += ["a dashed line: the run was started again; the time until then is left out"] * bool(restarts)
    notes += ["> a worker joined the pool, < it had left it"] * bool(moves)
    notes += ["dotted: how many it is to have"] * bool(targets)
    notes += ["height: share of the time an actor was busy"] * dense
    # Beside the axis' name, or below it.
    below = -24 if len(notes) < 2 else -38
    note(ax, "; ".join(notes), (1, 0), (0, below), "axes fraction", ha="right", va="top")
    return figure


def draw_shares(shares_s: dict[str, float]) -> Figure:
    """Draw the training window as one bar, split by who was busy."""
    total = sum(shares_s.values())
    figure = Figure(figsize=(12.4, 1.05), layout="constrained")
    ax = figure.subplots()
    left, labels = 0.0, {}
    for name, (label, colour) in _SHARES.items():
        share = shares_s[name] / total
        if share <= 0:
            continue
        ax.barh(0, share, left=left, color=colour, height=0.9, edgecolor="white", lw=1)
        if share > 0.04:
            shade = INK if name == "neither" else "white"
            ax.text(left + share / 2, 0, percent(share), ha="center", va="center", color=shade, weight="bold")
        labels[f"{label} {percent(share)}"] = colour
        left += share
    ax.set_xlim(0, 1)
    ax.set_axis_off()
    _legend(ax, labels, "upper left", (0, 0))
    return figure


def note(
    ax: Axes,
    text: str,
    xy: tuple[float, float],
    offset: tuple[float, float],
    xycoords: str | tuple[str, str] = "data",
    **options: str,
) -> None:
    """Write small text beside a point, `offset` points away from it."""
    style: dict[str, Any] = {"color": GREY, "fontsize": 9, **options}
    ax.annotate(text, xy, offset, xycoords=xycoords, textcoords="offset points", **style)


def _legend(ax: Axes, colours: dict[str, str], loc: str, anchor: tuple[float, float]) -> None:
    handles = [Patch(color=colour, label=label) for label, colour in colours.items()]
    ax.legend(
        handles=handles, ncols=8, loc=loc, bbox_to_anchor=anchor, handlelength=1.0, handleheight=0.9,
        columnspacing=1.4, labelcolor=INK, borderaxespad=0.3,
    )  # fmt: skip


def _rows(record: RunRecord, window: Window) -> tuple[list[str], int]:
    """Return the actors that did something within the window, and how many did not fit.

    They stand by what they mainly do, then by name.
    """
    totals: dict[str, dict[SpanKind, float]] = {}
    for (actor, kind), spans in record.spans.items():
        if len(within := intersect(spans, np.array([window]))):
            totals.setdefault(actor, {})[kind] = length_s(within)
    main = {
        actor: next((kind for kind in (ROLLOUT, TRAIN) if kind in kinds), max(kinds, key=kinds.__getitem__))
        for actor, kinds in totals.items()
    }
    actors = sorted(totals, key=lambda actor: (_ORDER.index(main[actor]), len(actor), actor))
    # Where not all fit, some of each kind rather than all of the first.
    rank = {actor: sum(main[other] == main[actor] for other in actors[:n]) for n, actor in enumerate(actors)}
    shown = sorted(actors, key=lambda actor: rank[actor])[:MAX_ROWS]
    return [actor for actor in actors if actor in shown], len(actors) - len(shown)


def _draw_row(ax: Axes, y: int, spans: Intervals_N2, colour: str, window: Window, origin: float) -> bool:
    """Draw the bars of a row; returns whether they are too many and their density is drawn instead."""
    if len(spans) <= MAX_BARS:
        bars = [(start - origin, end - start) for start, end in spans]
        ax.broken_barh(bars, (y - 0.36, 0.72), facecolor=colour, lw=0, zorder=2)
        return False
    edges = np.linspace(*window, BINS + 1)
    # Busy seconds until each edge of a span, between which they grow with time or stay.
    corners = np.concatenate([[window[0]], spans.ravel(), [window[1]]])
    busy_s = np.cumsum(np.diff(corners, prepend=window[0]) * (np.arange(len(corners)) % 2 == 0))
    share = np.diff(np.interp(edges, corners, busy_s)) / np.diff(edges)
    tops = y + 0.36 - 0.72 * np.clip(share, 0, 1)
    ax.fill_between(edges[:-1] - origin, y + 0.36, tops, step="post", color=colour, lw=0, zorder=2)
    return True


def _dress(ax: Axes, labels: list[str], window: Window, origin: float) -> None:
    ax.set_yticks(range(len(labels)), labels, color=INK)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.axhline(0.5, color=LIGHT, lw=1)
    ax.set_xlim(window[0] - origin, window[1] - origin)
    ax.grid(axis="y", visible=False)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("seconds since the start of the run")
