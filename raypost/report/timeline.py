"""The timeline: who was busy when, a row for each actor, so that the overlap can be seen."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from raypost.report.busy_time import Intervals_N2, any_busy, intersect, length_s, union
from raypost.report.colours import GREY, INK, KIND_COLOURS, LIGHT, PALE
from raypost.report.formatting import percent
from raypost.report.record import RunRecord
from raypost.spans import CHECKPOINT, EVALUATE, PAUSE, ROLLOUT, SYNC, TRAIN, WAIT

STEPS_IN_ZOOM = 24
MAX_ROWS = 20
MAX_BARS = 400
"""A row with more intervals is drawn as its busy share in each of BINS slices of time."""
BINS = 500
BOTH = "#1f2933"

_ORDER = (ROLLOUT, TRAIN, SYNC, EVALUATE, PAUSE, CHECKPOINT, WAIT)
_SHARES = {
    "both": ("training and rollout at once", BOTH),
    "train": ("training alone", KIND_COLOURS[TRAIN]),
    "rollout": ("rollout alone", KIND_COLOURS[ROLLOUT]),
    "sync": ("weight sync", KIND_COLOURS[SYNC]),
    "evaluate": ("evaluation", KIND_COLOURS[EVALUATE]),
    "neither": ("neither (pause, hand-over, checkpoint)", LIGHT),
}

Window = tuple[float, float]


def zoom(windows: Intervals_N2, step_s: float | None) -> Window:
    """The middle of the longest training window, about STEPS_IN_ZOOM steps wide."""
    if not len(windows):
        return (0.0, 1.0)
    start, end = windows[np.argmax(windows[:, 1] - windows[:, 0])]
    width = min(end - start, max(1.0, STEPS_IN_ZOOM * (step_s or 0.75)))
    middle = (start + end) / 2
    return (middle - width / 2, middle + width / 2)


def whole_run(record: RunRecord) -> Window:
    """The last session, from its start to its end."""
    start, end = record.sessions[-1]
    return (start, max(end, start + 1.0))


def draw_timeline(record: RunRecord, window: Window, bands: bool = False, title: bool = False) -> Figure:
    """One row an actor over `window`; `bands` shades the syncs and evaluations across all rows."""
    rows, hidden = _rows(record, window)
    figure = Figure(figsize=(12.4, 1.35 + 0.4 * (len(rows) + 1)), layout="constrained")
    ax = figure.subplots()
    origin = record.sessions[-1][0] if window[0] >= record.sessions[-1][0] else record.started_s
    frame = np.array([window])
    if bands:
        for start, end in intersect(union(_both(record, SYNC, EVALUATE, PAUSE)), frame) - origin:
            ax.axvspan(start, end, color=PALE, lw=0, zorder=0)
    both = intersect(any_busy(record.spans, TRAIN), any_busy(record.spans, ROLLOUT))
    _draw_row(ax, 0, intersect(both, frame), BOTH, window, origin)
    kinds, dense = set(), False
    for y, actor in enumerate(rows, start=1):
        for kind in reversed(_ORDER):
            spans = intersect(record.spans.get((actor, kind), np.empty((0, 2))), frame)
            if len(spans):
                kinds.add(kind)
                dense = dense or len(spans) > MAX_BARS
                _draw_row(ax, y, spans, KIND_COLOURS[kind], window, origin)
    _dress(ax, ["both at once", *rows], window, origin)
    first = min((spans[0, 0] for spans in record.spans.values() if len(spans)), default=window[0])
    if first - window[0] > 0.08 * (window[1] - window[0]):
        # Nothing is wrong with an empty stretch before the engines are up.
        ax.text((window[0] + first) / 2 - origin, (len(rows) + 1) / 2, "starting up", color=GREY, ha="center")
    handles = [Patch(color=KIND_COLOURS[kind], label=kind) for kind in _ORDER if kind in kinds]
    legend = ax.legend(
        handles=handles, ncols=8, loc="lower right", bbox_to_anchor=(1.0, 1.0), handlelength=1.0,
        handleheight=0.9, columnspacing=1.4, labelcolor=INK, borderaxespad=0.3,
    )  # fmt: skip
    legend.set_in_layout(True)
    if title:
        ax.set_title("Who was busy when")
    notes = [f"{hidden} more actors not shown"] if hidden else []
    if dense:
        notes.append("height: share of the time an actor was busy")
    if notes:
        ax.annotate(
            "; ".join(notes), (1, 0), (0, -24), xycoords="axes fraction",
            textcoords="offset points", ha="right", va="top", color=GREY, fontsize=9,
        )  # fmt: skip
    return figure


def draw_shares(shares_s: dict[str, float]) -> Figure:
    """The training window as one bar, split by who was busy."""
    total = sum(shares_s.values())
    figure = Figure(figsize=(12.4, 1.05), layout="constrained")
    ax = figure.subplots()
    left, handles = 0.0, []
    for name, (label, colour) in _SHARES.items():
        share = shares_s[name] / total
        if share <= 0:
            continue
        ax.barh(0, share, left=left, color=colour, height=0.9, edgecolor="white", lw=1)
        if share > 0.04:
            shade = INK if name == "neither" else "white"
            ax.text(left + share / 2, 0, percent(share), ha="center", va="center", color=shade, weight="bold")
        handles.append(Patch(color=colour, label=f"{label} {percent(share)}"))
        left += share
    ax.set_xlim(0, 1)
    ax.set_axis_off()
    ax.legend(
        handles=handles, ncols=6, loc="upper left", bbox_to_anchor=(0, 0), handlelength=1.0, handleheight=0.9,
        columnspacing=1.4, labelcolor=INK, borderaxespad=0.2,
    )  # fmt: skip
    return figure


def _rows(record: RunRecord, window: Window) -> tuple[list[str], int]:
    """Actors that did something within the window, by what they mainly do, then by name; and how many of
    them did not fit."""
    totals: dict[str, dict[str, float]] = {}
    for (actor, kind), spans in record.spans.items():
        if len(within := intersect(spans, np.array([window]))):
            totals.setdefault(actor, {})[kind] = length_s(within)
    main = {actor: min(kinds, key=lambda k: (-kinds[k], _ORDER.index(k))) for actor, kinds in totals.items()}
    for actor, kinds in totals.items():
        main[actor] = next((k for k in (ROLLOUT, TRAIN) if k in kinds), main[actor])
    actors = sorted(totals, key=lambda actor: (_ORDER.index(main[actor]), len(actor), actor))
    if len(actors) <= MAX_ROWS:
        return actors, 0
    # Some of each kind rather than all of the first.
    per_kind = [[actor for actor in actors if main[actor] == kind] for kind in _ORDER]
    in_turn = [of_kind[n] for n in range(len(actors)) for of_kind in per_kind if n < len(of_kind)]
    shown = set(in_turn[:MAX_ROWS])
    return [actor for actor in actors if actor in shown], len(actors) - MAX_ROWS


def _both(record: RunRecord, *kinds: str) -> Intervals_N2:
    return np.concatenate([any_busy(record.spans, kind) for kind in kinds])


def _draw_row(ax: Axes, y: int, spans: Intervals_N2, colour: str, window: Window, origin: float) -> None:
    if len(spans) <= MAX_BARS:
        bars = [(start - origin, end - start) for start, end in spans]
        ax.broken_barh(bars, (y - 0.36, 0.72), facecolor=colour, lw=0, zorder=2)
        return
    edges = np.linspace(*window, BINS + 1)
    busy_until = np.concatenate([[0.0], np.cumsum(spans[:, 1] - spans[:, 0])])
    corners = np.concatenate([[[window[0], 0.0]], np.stack([spans[:, 0], busy_until[:-1]], 1),
                              np.stack([spans[:, 1], busy_until[1:]], 1)])  # fmt: skip
    corners = corners[np.lexsort((corners[:, 1], corners[:, 0]))]
    share = np.diff(np.interp(edges, corners[:, 0], corners[:, 1])) / np.diff(edges)
    tops = y + 0.36 - 0.72 * np.clip(share, 0, 1)
    ax.fill_between(edges[:-1] - origin, y + 0.36, tops, step="post", color=colour, lw=0, zorder=2)


def _dress(ax: Axes, labels: list[str], window: Window, origin: float) -> None:
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.axhline(0.5, color=LIGHT, lw=1)
    ax.set_xlim(window[0] - origin, window[1] - origin)
    ax.grid(axis="y", visible=False)
    ax.spines["left"].set_visible(False)
    for tick in ax.get_yticklabels():
        tick.set_color(INK)
    ax.set_xlabel("seconds since the start of the run")
