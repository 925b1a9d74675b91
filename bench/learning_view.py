"""Tables and figures of the learning study, from the results of its runs.

Owns the statistics: means over seeds with 95 % intervals by Student's t, differences and ratios paired by seed.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from bench.learning_runs import CONFIGURATIONS
from raypost.report.colours import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, RED

Runs = dict[str, dict[int, dict[str, Any]]]
"""Results by configuration and seed."""

BASE = "trl"
T_95 = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t for a two-sided 95 % interval, by the number of values."""
SETTLED = 10
"""Steps after which every lag is what its configuration says."""
COLOURS = {
    "staleness-0": BLUE, "trl": INK, "staleness-2": GREEN, "staleness-2-uncorrected": ORANGE,
    "staleness-8": PURPLE, "staleness-8-uncorrected": RED, "cycle-8": GREY, "trl-staleness-2-uncorrected": "#b07a3a",
}  # fmt: skip


def draw(results: Path, figures: Path | None) -> None:
    """Print the tables, and write them and the figures beside the results, or the latter into `figures`."""
    runs = load(results)
    tables = "\n".join([*scores_table(runs), "", *drift_table(runs), "", *lag_table(runs)])
    (results / "tables.md").write_text(tables + "\n")
    print(tables)
    folder = figures or results
    folder.mkdir(parents=True, exist_ok=True)
    _save(learning_figure(runs), folder / "learning-curves.png")
    _save(drift_figure(runs), folder / "learning-drift.png")


def _save(figure: Figure, path: Path) -> None:
    """As PNG of few colours, which takes a third of the space."""
    whole = io.BytesIO()
    figure.savefig(whole, dpi=100)
    with Image.open(whole) as image:
        image.convert("P", palette=Image.Palette.ADAPTIVE, colors=96).save(path, optimize=True)


def load(results: Path) -> Runs:
    """Return what the runs left, in the order of CONFIGURATIONS."""
    runs: Runs = {name: {} for name in CONFIGURATIONS}
    for path in sorted(results.glob("*-[0-9].json")):
        result = json.loads(path.read_text())
        runs[result["configuration"]][result["seed"]] = result
    return {name: by_seed for name, by_seed in runs.items() if by_seed}


# ---------------------------------------------------------------- figures of a run


def final(run: dict[str, Any]) -> float:
    """Held-out score after the last step."""
    return float(run["points"][-1]["score"])


def area(run: dict[str, Any]) -> float:
    """Mean held-out score over the steps: the area under the curve, divided by its length."""
    steps, scores = zip(*((one["step"], one["score"]) for one in run["points"]), strict=True)
    return float(np.trapezoid(scores, steps) / (steps[-1] - steps[0]))


def settled(run: dict[str, Any], name: str) -> list[float]:
    """Return a metric's values after the first steps, where it exists."""
    return [row[name] for row in run["steps"] if row["step"] > SETTLED and name in row]


def with_interval(values: Sequence[float], digits: int = 3) -> str:
    """Mean and half of the 95 % interval; of two values the mean alone."""
    if len(values) < 3:
        return f"{np.mean(values):.{digits}f}"
    half = T_95[len(values)] * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.{digits}f} ± {half:.{digits}f}"


# ---------------------------------------------------------------- tables


def scores_table(runs: Runs) -> list[str]:
    """One row a configuration: scores, and how they compare with TRL's of the same seeds."""
    lines = [
        "| configuration | seeds | staleness of trained groups, mean (max) | held-out score after the last step | "
        "of each seed | mean over the steps | last score minus TRL's | in % of TRL's |",
        "|---" * 8 + "|",
    ]
    for name, by_seed in runs.items():
        cells = [CONFIGURATIONS[name].about, str(len(by_seed)), _staleness(name, by_seed.values())]
        scores = [final(one) for one in by_seed.values()]
        cells += [with_interval(scores), " ".join(f"{one:.2f}" for one in scores)]
        cells.append(with_interval([area(one) for one in by_seed.values()]))
        pairs = [(final(one), final(runs[BASE][seed])) for seed, one in by_seed.items() if seed in runs[BASE]]
        if name == BASE or not pairs:
            cells += ["", ""]
        else:
            cells.append(with_interval([ours - theirs for ours, theirs in pairs]))
            cells.append(with_interval([100 * ours / theirs for ours, theirs in pairs], 1))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _staleness(name: str, found: Iterable[dict[str, Any]]) -> str:
    counts = Counter(value for run in found for row in run["steps"] for value in row.get("staleness", ()))
    if not counts:
        return f"{CONFIGURATIONS[name].lag} (not recorded)" if CONFIGURATIONS[name].lag else "0"
    mean = sum(value * count for value, count in counts.items()) / counts.total()
    return f"{mean:.2f} ({max(counts)})"


DRIFT = {
    "rollout_kl_k3": "KL(rollout, trainer), nats a token",
    "effective_sample_size": "effective sample size",
    "rollout_ratio_max": "largest ratio",
    "importance_weight_mean": "importance weight, mean",
    "entropy": "entropy, nats",
    "grad_norm": "gradient norm",
}


def drift_table(runs: Runs) -> list[str]:
    """One row a configuration: the medians of its diagnostics over steps, then the mean over seeds."""
    lines = [f"| configuration | {' | '.join(DRIFT.values())} |", "|---" * (len(DRIFT) + 1) + "|"]
    for name, by_seed in runs.items():
        cells = [CONFIGURATIONS[name].about]
        for metric in DRIFT:
            values = [np.median(found) for one in by_seed.values() if (found := settled(one, metric))]
            cells.append(f"{np.mean(values):.3g}" if values else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


LAGGED = {
    "rollout_kl_k3": "KL(rollout, trainer), nats a token",
    "effective_sample_size": "effective sample size",
    "ratio_mean": "ratio of the loss, mean",
    "ratio_min": "smallest",
    "ratio_max": "largest",
    "clip_fraction": "clipped tokens",
}


def lag_table(runs: Runs, name: str = "cycle-8") -> list[str]:
    """One row a lag: means of the diagnostics by lag over all steps and seeds."""
    lines = [f"| lag | {' | '.join(LAGGED.values())} |", "|---" * (len(LAGGED) + 1) + "|"]
    for lag, row in by_lag(runs, name).items():
        lines.append(f"| {lag} | {' | '.join(f'{row[metric]:.3g}' for metric in LAGGED)} |")
    return lines


def by_lag(runs: Runs, name: str) -> dict[int, dict[str, float]]:
    """Means of the diagnostics of one configuration by version lag."""
    rows = [row for run in runs.get(name, {}).values() for row in run["steps"]]
    found: dict[int, dict[str, float]] = {}
    for lag in range(9):
        here = [row for row in rows if f"effective_sample_size_lag{lag}" in row]
        if here:
            found[lag] = {m: float(np.mean([row[f"{m}_lag{lag}"] for row in here])) for m in LAGGED}
    return found


# ---------------------------------------------------------------- figures


def learning_figure(runs: Runs) -> Figure:
    """Held-out score and training reward by step: means over seeds, and each seed."""
    figure = Figure(figsize=(10, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name, by_seed in runs.items():
        if name == "cycle-8":
            continue
        steps = [one["step"] for one in next(iter(by_seed.values()))["points"]]
        scores = [[point["score"] for point in one["points"]] for one in by_seed.values()]
        _lines(left, steps, scores, name)
        rewards = [_smooth([row["reward_mean"] for row in one["steps"]]) for one in by_seed.values()]
        _lines(right, range(1, len(rewards[0]) + 1), rewards, name)
    _dress(left, "held-out score, greedy")
    _dress(right, "training reward, mean of 5 steps")
    left.set_ylim(0, 1)
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    return figure


def drift_figure(runs: Runs) -> Figure:
    """KL and effective sample size by step; both, and the clip fraction, by lag."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    kl, size, lags = figure.subplots(1, 3)
    for name, by_seed in runs.items():
        if CONFIGURATIONS[name].trl or name == "cycle-8":
            continue
        for axes, metric in ((kl, "rollout_kl_k3"), (size, "effective_sample_size")):
            values = [_smooth([row[metric] for row in one["steps"]]) for one in by_seed.values()]
            _lines(axes, range(1, len(values[0]) + 1), values, name)
    kl.set_yscale("log")
    kl.set_ylim(bottom=1e-4)
    _dress(kl, "KL(rollout, trainer), nats a token")
    _dress(size, "effective sample size")
    figure.legend(
        *size.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    found = by_lag(runs, "cycle-8")
    for shares, label, colour in (
        ([1 - row["effective_sample_size"] for row in found.values()], "1 - effective sample size", BLUE),
        ([row["rollout_kl_k3"] for row in found.values()], "KL, nats a token", RED),
        ([row["clip_fraction"] for row in found.values()], "clipped tokens", ORANGE),
    ):
        lags.plot(list(found), shares, "o-", color=colour, label=label, ms=4)
    _dress(lags, "by version lag, staleness 0 to 8 in turn")
    lags.set_xlabel("lag, steps", color=GREY)
    lags.legend(frameon=False, fontsize=8)
    return figure


def _lines(axes: Axes, steps: Sequence[int], values_SN: Sequence[Sequence[float]], name: str) -> None:
    """Draw the mean, and each seed in pale."""
    values, colour = np.asarray(values_SN), COLOURS[name]
    dashed = "--" if CONFIGURATIONS[name].trl else "-"
    for one in values:
        axes.plot(steps, one, dashed, color=colour, alpha=0.4, lw=0.8)
    axes.plot(steps, values.mean(0), dashed, color=colour, label=CONFIGURATIONS[name].about, lw=1.8)


def _smooth(values: Sequence[float], width: int = 5) -> list[float]:
    return [float(np.mean(values[max(0, n - width + 1) : n + 1])) for n in range(len(values))]


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    axes.set_xlabel("train step", color=GREY)
    axes.grid(color=PALE)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
