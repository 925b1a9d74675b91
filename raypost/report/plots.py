"""The plots of a report, each as SVG for the page, and the two pictures a README shows, as PNG.

Owns colours and shapes; every number comes from a RunRecord or from the figures of report_json.py.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, MaxNLocator
from numpy.typing import NDArray

from raypost import metrics
from raypost.report.busy_time import training_windows
from raypost.report.colours import BLUE, GREEN, GREY, INK, LIGHT, ORANGE, PALE, RED
from raypost.report.record import Column, RunRecord, held_out_intervals, held_out_scores
from raypost.report.report_json import reward_curve
from raypost.report.timeline import draw_shares, draw_timeline, whole_run, zoom

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

Panel = Callable[[Axes], None]


@dataclass(slots=True, frozen=True)
class Drawn:
    """`svgs` by name: the keys of PANELS that had data, and `zoom`, `whole`, `shares` when there are spans."""

    svgs: dict[str, str]
    timeline_png: bytes
    curves_png: bytes


def draw(record: RunRecord, report: dict[str, Any]) -> Drawn:
    """Draw everything the record has data for."""
    with matplotlib.rc_context(_STYLE):
        panels = _panels(record, report)
        svgs = {name: _svg(_single(panel)) for name, panel in panels.items()}
        windows = training_windows(record.spans, record.sessions)
        step_s = report["step_s_median"]
        near, all_of_it = zoom(windows, step_s), whole_run(record)
        if len(windows):
            svgs["zoom"] = _svg(draw_timeline(record, near, bands=True))
            svgs["whole"] = _svg(draw_timeline(record, all_of_it))
            svgs["shares"] = _svg(draw_shares(report["time_shares_s"]))
        timeline = draw_timeline(record, near if len(windows) else all_of_it, bands=True, title=True)
        return Drawn(svgs, _png(timeline), _png(_sheet(list(panels.values())[:6])))


def _panels(record: RunRecord, report: dict[str, Any]) -> dict[str, Panel]:
    """Panels by name, in the order of the page; those without data are left out."""
    panels: dict[str, Panel] = {}
    if held_out_scores(record):
        panels[metrics.HELD_OUT] = lambda ax: _held_out(ax, record)
    if np.isfinite(reward_curve(record)).any():
        panels["reward"] = lambda ax: _curve(ax, record, reward_curve(record), "Reward", BLUE)
    for name, title, colour in (
        (metrics.LOSS, "Loss", ORANGE),
        (metrics.ENTROPY, "Entropy, nats a token", GREEN),
        (metrics.GRAD_NORM, "Gradient norm", GREY),
        (metrics.RESPONSE_TOKENS_MEAN, "Response length, tokens", BLUE),
    ):
        if np.isfinite(record.column(name)).any():
            panels[name] = lambda ax, n=name, t=title, c=colour: _curve(ax, record, record.column(n), t, c)  # type: ignore[misc]
    if report["staleness_histogram"]:
        panels["staleness"] = lambda ax: _staleness(ax, report)
    if np.isfinite(record.column(metrics.LOGPROB_MISMATCH_MAX)).any():
        panels["mismatch"] = lambda ax: _mismatch(ax, record)
    first = [
        name for name in (metrics.HELD_OUT, "reward", metrics.LOSS, "staleness", "mismatch") if name in panels
    ]
    return {name: panels[name] for name in [*first, *(n for n in panels if n not in first)]}


# ---------------------------------------------------------------- panels


def _held_out(ax: Axes, record: RunRecord) -> None:
    steps, scores = zip(*held_out_scores(record), strict=True)
    intervals = held_out_intervals(record)
    if np.isfinite(intervals).any():
        ax.fill_between(steps, intervals[:, 0], intervals[:, 1], color=GREEN, alpha=0.15, lw=0, zorder=2)
    ax.plot(steps, scores, color=GREEN, lw=2, marker="o", ms=5, mec="white", mew=1, clip_on=False, zorder=3)
    for n in sorted({0, len(steps) - 1}):
        # The first beside its point, clear of the axis' own numbers.
        offset, align = ((0, 8), "center") if n else ((10, -3), "left")
        ax.annotate(
            f"{scores[n]:.2f}", (steps[n], scores[n]), offset, textcoords="offset points", ha=align,
            color=GREEN, weight="bold",
        )  # fmt: skip
    _frame(ax, "Held-out score", steps[-1], np.asarray(scores))


def _curve(ax: Axes, record: RunRecord, values: Column, title: str, colour: str) -> None:
    steps, values = _thin(record.steps, values)
    smooth = _smooth(values)
    ax.plot(steps, values, color=colour, lw=0.9, alpha=0.35, label="each step")
    ax.plot(steps, smooth, color=colour, lw=2, label="moving mean")
    _frame(ax, title, int(record.steps[-1]), values)


def _staleness(ax: Axes, report: dict[str, Any]) -> None:
    histogram = {int(s): n for s, n in report["staleness_histogram"].items()}
    bound, total = report["staleness_bound"], sum(histogram.values())
    edge = max(histogram) if bound is None else max(max(histogram), bound)
    values = list(range(edge + 1))
    shares = [100 * histogram.get(s, 0) / total for s in values]
    ax.bar(
        values,
        shares,
        width=0.62,
        color=[BLUE if bound is None or s <= bound else RED for s in values],
        zorder=3,
    )
    if len(values) <= 12:
        for s, share in zip(values, shares, strict=True):
            if share:
                ax.annotate(
                    f"{share:.3g} %", (s, share), (0, 3), textcoords="offset points", ha="center", color=INK
                )
    if bound is not None:
        ax.axvline(bound + 0.5, color=GREY, lw=1, ls=(0, (4, 3)))
        ax.annotate(
            "bound", (bound + 0.5, 0.97), (-4, 0), xycoords=("data", "axes fraction"), textcoords="offset points",
            ha="right", va="top", color=GREY, fontsize=9,
        )  # fmt: skip
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
    shown = [(metrics.LOGPROB_MISMATCH_MAX, "largest, same weights", RED)]
    shown += [(metrics.LOGPROB_MISMATCH_MEAN, "mean, same weights", ORANGE)]
    for name, label, colour in shown:
        steps, values = _thin(record.steps, record.column(name), np.nanmax)
        positive = np.where(values > 0, values, np.nan)
        if np.isfinite(positive).any():
            marker = "o" if len(steps) <= 200 else None
            ax.plot(steps, positive, color=colour, lw=1.4, marker=marker, ms=2, label=label)
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    # Room below for the legend, above for the line.
    ax.set_ylim(low / 12, max(high * 3, 3e-3))
    ax.axhline(1e-3, color=GREY, lw=1, ls=(0, (4, 3)))
    ax.annotate(
        "1e-3", (0.01, 1e-3), (0, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
        color=GREY, fontsize=9,
    )  # fmt: skip
    ax.set_title("Logprob mismatch, engine and trainer")
    ax.set_xlabel("train step")
    ax.set_xlim(0, int(record.steps[-1]))
    ax.legend(loc="lower right", ncols=2, handlelength=1.2, borderaxespad=0.2)


def _frame(ax: Axes, title: str, last_step: int, values: Column) -> None:
    finite = values[np.isfinite(values)]
    if len(finite) and finite.min() >= 0 and 0.05 < finite.max() <= 1:
        ax.set_ylim(0, 1.0 if finite.max() > 0.5 else finite.max() * 1.25)
    else:
        ax.margins(y=0.12)
    ax.set_title(title)
    ax.set_xlabel("train step")
    ax.set_xlim(0, max(1, last_step))


def _smooth(values: Column) -> Column:
    """Centred moving mean over a tenth of the curve, NaN left out."""
    width = max(1, len(values) // 20)
    known = np.isfinite(values)
    kernel = np.ones(2 * width + 1)
    total = np.convolve(np.where(known, values, 0.0), kernel, "same")[: len(values)]
    number = np.convolve(known.astype(float), kernel, "same")[: len(values)]
    return np.where(number > 0, total / np.maximum(number, 1), np.nan) if len(values) > 2 * width else values


def _thin(
    steps: NDArray[Any], values: Column, pick: Callable[..., Any] = np.nanmean
) -> tuple[Column, Column]:
    """At most MAX_POINTS points: one for each run of neighbours."""
    known = np.isfinite(values)
    steps, values = np.asarray(steps, float)[known], values[known]
    if len(steps) <= MAX_POINTS:
        return steps, values
    parts = np.array_split(np.arange(len(steps)), MAX_POINTS)
    return np.array([steps[p].mean() for p in parts]), np.array([pick(values[p]) for p in parts])


# ---------------------------------------------------------------- output


def _single(panel: Panel) -> Figure:
    figure = Figure(figsize=(4.9, 2.9), layout="constrained")
    panel(figure.subplots())
    return figure


def _sheet(panels: list[Panel]) -> Figure:
    rows = max(1, -(-len(panels) // 3))
    figure = Figure(figsize=(13.5, 3.5 * rows), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    axes = figure.subplots(rows, 3, squeeze=False).ravel()
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    for ax, panel in zip(axes, panels, strict=False):
        panel(ax)
    return figure


def _svg(figure: Figure) -> str:
    """Inline SVG that takes the page's font and scales with its column."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, count=1, flags=re.S)
    return text.replace("'DejaVu Sans'", "system-ui, 'Helvetica Neue', Arial")


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, facecolor="white")
    return buffer.getvalue()
