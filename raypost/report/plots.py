"""The plots of a report, each as SVG for the page, and the two pictures a README shows, as PNG.

Owns colours and shapes; every number comes from a RunRecord or from the figures of report_json.py.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, MaxNLocator

from raypost.observe import metrics
from raypost.report.busy_time import training_windows
from raypost.report.colours import BLUE, GREEN, GREY, INK, LIGHT, ORANGE, PALE, RED, TASK_COLOURS
from raypost.report.record import RunRecord, Series
from raypost.report.report_json import reward_curve
from raypost.report.tasks import task_column
from raypost.report.timeline import draw_shares, draw_timeline, joined, note, whole_run, zoom

MAX_POINTS = 1500
"""A longer curve is averaged down to this many points."""

_STYLE = {
    "font.size": 10,
    "svg.fonttype": "none",
    "axes.edgecolor": LIGHT,
    "axes.labelcolor": GREY,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 9,
}

Plot = Callable[[Axes], None]
_DASHED = (0, (4, 3))


@dataclass(slots=True, frozen=True)
class Drawn:
    """`svgs` by name: the plots that had data, and `zoom`, `whole`, `shares` when there are spans."""

    svgs: dict[str, str]
    timeline_png: bytes
    curves_png: bytes


def draw(record: RunRecord, report: dict[str, Any]) -> Drawn:
    """Draw everything the record has data for."""
    with matplotlib.rc_context(_STYLE):
        plots = _plots(record, report)
        svgs = {name: _svg(_single(plot)) for name, plot in plots.items()}
        windows = training_windows(record.spans, record.sessions)
        near = zoom(windows, report["step_s_median"]) if len(windows) else whole_run(record)
        if len(windows):
            svgs["zoom"] = _svg(draw_timeline(record, near, bands=True))
            whole, restarts = joined(record)
            svgs["whole"] = _svg(draw_timeline(whole, whole_run(whole), restarts=restarts))
            svgs["shares"] = _svg(draw_shares(report["time_shares_s"]))
        timeline = draw_timeline(record, near, bands=True, title=True)
        return Drawn(svgs, _png(timeline), _png(_sheet(list(plots.values())[:6])))


def _plots(record: RunRecord, report: dict[str, Any]) -> dict[str, Plot]:
    """Return the plots by name, in the order of the page; those without data are left out."""
    mismatch = record.column(metrics.LOGPROB_MISMATCH_MAX)
    plots: dict[str, tuple[bool, Plot]] = {
        metrics.HELD_OUT: (bool(record.held_out()), partial(_held_out, record=record)),
        "reward": _curve(record, reward_curve(record), "Reward", BLUE),
        metrics.LOSS: _curve(record, record.column(metrics.LOSS), "Loss", ORANGE),
        "staleness": (bool(report["staleness_histogram"]), partial(_staleness, report=report)),
        "mismatch": (bool(np.isfinite(mismatch).any()), partial(_mismatch, record=record)),
    }
    for name, title, colour in (
        (metrics.ENTROPY, "Entropy, nats a token", GREEN),
        (metrics.GRAD_NORM, "Gradient norm", GREY),
        (metrics.RESPONSE_TOKENS_MEAN, "Response length, tokens", BLUE),
    ):
        plots[name] = _curve(record, record.column(name), title, colour)
    if len(report["tasks"]) > 1:
        plots |= {
            "tasks reward": _by_task(record, report, metrics.RAW_REWARD_MEAN, "Reward by task"),
            "tasks length": _by_task(
                record, report, metrics.RESPONSE_TOKENS_MEAN, "Response length by task, tokens"
            ),
        }
    return {name: plot for name, (has_data, plot) in plots.items() if has_data}


# ---------------------------------------------------------------- plots


def _held_out(ax: Axes, record: RunRecord) -> None:
    evals = record.held_out()
    steps = [one["step"] for one in evals]
    scores = np.asarray([one[metrics.HELD_OUT] for one in evals])
    unknown = (np.nan, np.nan)
    low, high = np.array([metrics.bounds(one, metrics.HELD_OUT) or unknown for one in evals]).T
    ax.fill_between(steps, low, high, color=GREEN, alpha=0.15, lw=0, zorder=2)
    ax.plot(steps, scores, color=GREEN, lw=2, marker="o", ms=5, mec="white", mew=1, clip_on=False, zorder=3)
    for n in sorted({0, len(steps) - 1}):
        # The first beside its point, clear of the axis' own numbers.
        offset, align = ((0, 8), "center") if n else ((10, -3), "left")
        note(ax, f"{scores[n]:.2f}", (steps[n], scores[n]), offset, ha=align, color=GREEN, weight="bold")
    _frame(ax, "Held-out score", steps[-1], scores)


def _curve(record: RunRecord, values: Series, title: str, colour: str) -> tuple[bool, Plot]:
    """Return whether the values have one that is finite, and their plot."""

    def plot(ax: Axes) -> None:
        steps, thin = _thin(record.steps, values)
        ax.plot(steps, thin, color=colour, lw=0.9, alpha=0.35)
        ax.plot(steps, _smooth(thin), color=colour, lw=2)
        _frame(ax, title, record.last_step, thin)

    return bool(np.isfinite(values).any()), plot


def _by_task(record: RunRecord, report: dict[str, Any], name: str, title: str) -> tuple[bool, Plot]:
    """Return whether a task has the metric, and the plot of all of them."""
    curves = {task: task_column(record, name, task, alone=False) for task in report["tasks"]}
    known = {task: values for task, values in curves.items() if np.isfinite(values).any()}

    def plot(ax: Axes) -> None:
        drawn = []
        for number, (task, values) in enumerate(known.items()):
            colour, dash = (
                TASK_COLOURS[number % len(TASK_COLOURS)],
                ("-", _DASHED)[number // len(TASK_COLOURS) % 2],
            )
            steps, thin = _thin(record.steps, values)
            ax.plot(steps, _smooth(thin), color=colour, ls=dash, lw=2, label=task)
            drawn.append(thin)
        _frame(ax, title, record.last_step, np.concatenate(drawn))
        ax.legend(loc="best", ncols=2, handlelength=1.2, borderaxespad=0.2)

    return bool(known), plot


def _staleness(ax: Axes, report: dict[str, Any]) -> None:
    counts = list(report["staleness_histogram"].values())
    limit = report["staleness_bound"]
    edge = max(len(counts) - 1, limit)
    shares = 100 * np.asarray(counts) / sum(counts)
    colours = [BLUE if s <= limit else RED for s in range(len(shares))]
    ax.bar(range(len(shares)), shares, width=0.62, color=colours, zorder=3)
    if edge < 12:
        for s in np.flatnonzero(shares):
            note(ax, f"{shares[s]:.3g} %", (s, shares[s]), (0, 3), ha="center", color=INK)
    ax.axvline(limit + 0.5, color=GREY, lw=1, ls=_DASHED)
    note(ax, "bound", (limit + 0.5, 0.97), (-4, 0), ("data", "axes fraction"), ha="right", va="top")
    ax.set_xlim(-0.6, edge + 0.7)
    ax.set_ylim(0, 118)
    ax.set_yticks([0, 50, 100])
    # With a single value, a locator of whole numbers falls back to fractions.
    ax.xaxis.set_major_locator(MaxNLocator(integer=True) if edge else FixedLocator([0]))
    ax.grid(axis="x", visible=False)
    ax.set_title("Staleness of trained groups")
    ax.set_xlabel("train steps behind the newest weights")
    ax.set_ylabel("% of groups")


def _mismatch(ax: Axes, record: RunRecord) -> None:
    for name, label, colour in (
        (metrics.LOGPROB_MISMATCH_MAX, "largest, same weights", RED),
        (metrics.LOGPROB_MISMATCH_MEAN, "mean, same weights", ORANGE),
    ):
        steps, values = _thin(record.steps, record.column(name), np.max)
        positive = np.where(values > 0, values, np.nan)
        if np.isfinite(positive).any():
            marker = "o" if len(steps) <= 200 else None
            ax.plot(steps, positive, color=colour, lw=1.4, marker=marker, ms=2, label=label)
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    # Room below for the legend, above for the line.
    ax.set_ylim(low / 12, max(high * 3, 3e-3))
    ax.axhline(1e-3, color=GREY, lw=1, ls=_DASHED)
    note(ax, "1e-3", (0.01, 1e-3), (0, 3), ("axes fraction", "data"))
    ax.set_title("Logprob mismatch, engine and trainer")
    ax.set_xlabel("train step")
    ax.set_xlim(0, record.last_step)
    ax.legend(loc="lower right", ncols=2, handlelength=1.2, borderaxespad=0.2)


def _frame(ax: Axes, title: str, last_step: int, values: Series) -> None:
    highest = values.max()
    if values.min() >= 0 and 0.05 < highest <= 1:
        ax.set_ylim(0, 1.0 if highest > 0.5 else highest * 1.25)
    else:
        ax.margins(y=0.12)
    ax.set_title(title)
    ax.set_xlabel("train step")
    ax.set_xlim(0, max(1, last_step))


def _smooth(values: Series) -> Series:
    """Average over a tenth of the curve around each point; the values are finite."""
    width = len(values) // 20
    kernel = np.ones(2 * width + 1)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones_like(values), kernel, "same")


def _thin(
    steps: list[int], values: Series, pick: Callable[[Series], np.floating[Any]] = np.mean
) -> tuple[Series, Series]:
    """Return the points that are finite, at most MAX_POINTS: one for each run of neighbours."""
    known = np.isfinite(values)
    x, y = np.asarray(steps, np.float64)[known], values[known]
    if len(x) <= MAX_POINTS:
        return x, y
    parts = np.array_split(np.arange(len(x)), MAX_POINTS)
    return np.array([x[p].mean() for p in parts]), np.array([pick(y[p]) for p in parts])


# ---------------------------------------------------------------- output


def _single(plot: Plot) -> Figure:
    figure = Figure(figsize=(4.9, 2.9), layout="constrained")
    plot(figure.subplots())
    return figure


def _sheet(plots: list[Plot]) -> Figure:
    rows = max(1, -(-len(plots) // 3))
    figure = Figure(figsize=(13.5, 3.5 * rows), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    for n, plot in enumerate(plots, start=1):
        plot(figure.add_subplot(rows, 3, n))
    return figure


def _svg(figure: Figure) -> str:
    """Return inline SVG that takes the page's font and scales with its column."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator")), transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'(<svg[^>]*?) (width="[^"]*") (height="[^"]*")', r"\1", text, count=1)
    return text.replace("'DejaVu Sans'", "system-ui, 'Helvetica Neue', Arial")


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, facecolor="white")
    return buffer.getvalue()
