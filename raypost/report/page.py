"""report.html: one self-contained page, the figures first, then the plots that explain them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources
from string import Template
from typing import Any

import yaml

from raypost.observe import metrics
from raypost.report.formatting import (
    GROUP_MEANINGS,
    bound,
    change,
    count,
    incidents,
    interval,
    length_bias,
    moment,
    number,
    percent,
    percentiles,
    score,
    seconds,
    size,
    steps_of,
    task_row,
)

_LEARNING = (
    metrics.HELD_OUT,
    "reward",
    metrics.LOSS,
    metrics.ENTROPY,
    metrics.GRAD_NORM,
    metrics.RESPONSE_TOKENS_MEAN,
)
_DATA = ("staleness", "mismatch")
_TASKS = ("tasks reward", "tasks length")


def render(report: Mapping[str, Any], config: Mapping[str, Any], svgs: Mapping[str, str]) -> str:
    """Return the page. `svgs` by name, as plots.draw gives them; sections without a plot are left out."""
    template = Template(resources.files("raypost.report").joinpath("page.html").read_text("utf-8"))
    return template.substitute(
        name=escape(report["name"]),
        status=escape(report["status"]),
        lead=_lead(report),
        notes=_notes(report),
        tiles="".join(_tile(*tile) for tile in _tiles(report)),
        learning=_figures(svgs, _LEARNING),
        tasks=_tasks(report["tasks"], svgs),
        timeline=_timeline(report, svgs),
        data=_figures(svgs, _DATA),
        groups=_groups(report["groups"]) + _lengths(report["length_bias"]),
        details=_details(report),
        evals=_evals(report["evals"]),
        versions=_table(report["versions"].items()),
        config=escape(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)),
    )


def _lead(report: Mapping[str, Any]) -> str:
    steps = f"{steps_of(report['steps'], report['num_steps'])} train steps in {seconds(report['wall_s'])}"
    return escape(
        f"{steps}. Model {report['model']}, seed {report['seed']}, started {moment(report['started'])}."
    )


def _notes(report: Mapping[str, Any]) -> str:
    notes = [f"<p class='note bad'><b>Failed.</b> {escape(report['error'])}</p>"] if report["error"] else []
    notes += [f"<p class='note'>{escape(problem)}</p>" for problem in report["problems"]]
    return "".join(notes)


def _tiles(report: Mapping[str, Any]) -> list[tuple[str, str, str, bool]]:
    """Return (label, figure, small print, whether it is bad) of each tile."""
    groups, limit, worst = report["groups"], report["staleness_bound"], report["staleness_max"]
    before, after = report["eval_before"], report["eval_after"]
    learnt = score(after) if before is None else f"{score(before)} → {score(after)}"
    gained = change(before, after)
    gained = f"{gained} on problems never trained on" if gained else "not measured twice"
    if report["eval_after_interval"] is not None:
        gained += f"; {percent(report['eval_confidence'])} interval {interval(report['eval_after_interval'])}"
    mean = f"mean {number(report['staleness_mean'], 2)}, {bound(limit)}"
    overlap = f"both worked for {seconds(report['overlap_s'])} of {seconds(report['window_s'])}"
    canary = report["canary_difference_max"]
    return [
        ("Held-out score", learnt, gained, False),
        ("Train steps", f"{report['steps']}", f"{seconds(report['step_s_median'])} each (median)", False),
        ("Groups trained", f"{groups['trained']:,}", f"of {groups['sampled']:,} sampled; {groups['lost']} lost",
         groups["lost"] != 0),
        ("Largest staleness", number(worst, 1) if worst is None else str(worst), mean,
         worst is not None and worst > limit),
        ("Trainer idle", percent(report["trainer_idle_fraction"]), overlap, False),
        ("Rollout idle", percent(report["rollout_idle_fraction"]),
         f"{number(report['tokens_per_s'])} tokens/s produced", False),
        ("Weight sync", seconds(report["sync_s_median"]), f"median of {report['num_syncs']}", False),
        ("Logprob mismatch", number(report["logprob_mismatch_max"], 2),
         "largest, same weights" + ("" if canary is None else f"; {number(canary, 2)} after a sync"), False),
    ]  # fmt: skip


def _tile(label: str, figure: str, small: str, bad: bool) -> str:
    return (
        f"<div class='tile{' bad' * bad}'><div class='label'>{escape(label)}</div>"
        f"<div class='figure'>{escape(figure)}</div><div class='small'>{escape(small)}</div></div>"
    )


def _figures(svgs: Mapping[str, str], names: tuple[str, ...]) -> str:
    return "".join(f"<figure class='plot'>{svgs[name]}</figure>" for name in names if name in svgs)


def _timeline(report: Mapping[str, Any], svgs: Mapping[str, str]) -> str:
    if "zoom" not in svgs:
        return "<p class='empty'>No train step was recorded, so there is no timeline.</p>"
    idle = (
        f"The trainer was idle for {percent(report['trainer_idle_fraction'])} and the rollout workers for "
        f"{percent(report['rollout_idle_fraction'])} of the {seconds(report['window_s'])} between the first rollout "
        "and the end of the last train step."
    )
    return (
        f"<p>{escape(idle)}</p><figure class='wide'>{svgs['shares']}</figure>"
        "<h3>A few seconds from the middle</h3><p class='hint'>A bar is a time in which that actor was busy. The "
        "dark row on top marks the moments in which training and rollout ran at once; shaded are pauses for a "
        "weight sync or an evaluation.</p>"
        f"<figure class='wide'>{svgs['zoom']}</figure>"
        f"<h3>The whole run</h3><figure class='wide'>{svgs['whole']}</figure>"
    )


def _groups(groups: Mapping[str, int]) -> str:
    rows = []
    for name, meaning in GROUP_MEANINGS.items():
        count = groups[name]
        width = 100 * count / groups["sampled"] if groups["sampled"] else 0
        bad = " class='bad'" if name == "lost" and count else ""
        rows.append(
            f"<tr{bad}><th>{name}</th><td class='n'>{count:,}</td>"
            f"<td class='bar'><i style='width:{max(0.0, width):.1f}%'></i></td><td>{meaning}</td></tr>"
        )
    return (
        f"<p>{groups['sampled']:,} groups were sampled from the dataset. Each is in exactly one of these "
        f"places.</p><table class='groups'>{''.join(rows)}</table>"
    )


def _lengths(bias: Mapping[str, Any] | None) -> str:
    if bias is None:
        return ""
    return (
        f"<p><b>Length bias.</b> {escape(length_bias(bias))}. Dropping what is old takes long answers more often "
        "than short ones, so this says how far what was trained is from what was generated.</p>"
    )


def _details(report: Mapping[str, Any]) -> str:
    expired_tokens = report["expired_tokens_mean"]
    rows = [
        (
            "Wall time",
            seconds(report["wall_s"])
            + (f" in {report['sessions']} sessions" if report["sessions"] > 1 else ""),
        ),
        (
            "Reward, first and last tenth of the steps",
            f"{score(report['reward_first'])} → {score(report['reward_last'])}",
        ),
        ("Tokens produced for training", count(report["tokens_produced"])),
        ("Tokens generated by the engines, evaluations included", count(report["tokens_generated"])),
        ("Response length, trained groups (mean)", number(report["trained_tokens_mean"])),
        (
            "Response length, expired groups (mean)",
            number(expired_tokens) + (" none expired" if expired_tokens is None else ""),
        ),
        ("Seconds that a group takes (p50, p90, p99)", percentiles(report["group_s"])),
        ("Pause before a sync (median)", seconds(report["pause_s_median"])),
        (
            "Weights sent to each worker, and spared since they did not change",
            f"{size(report.get('sync_bytes'))}, {size(report.get('sync_spared_bytes'))}",
        ),
        ("Peak memory of all processes on the node", size(report["peak_memory_bytes"])),
        ("Recipe digest", report["recipe_digest"]),
    ]
    if report["incidents"]:
        rows.append(("What happened, and did not end the run", incidents(report["incidents"])))
    if report["changed_settings"]:
        rows.append(("Continued with other settings", "; ".join(report["changed_settings"])))
    return _table(rows)


def _tasks(tasks: Mapping[str, Mapping[str, Any]], svgs: Mapping[str, str]) -> str:
    """Return the section of a run of several tasks; nothing for one, whose figures are the run's."""
    if len(tasks) < 2:
        return ""
    rows = [dict(task_row(name, task)) for name, task in tasks.items()]
    head = "".join(f"<th>{escape(title)}</th>" for title in list(rows[0])[1:])
    lines = []
    for row in rows:
        name, *cells = (escape(text) for text in row.values())
        lines.append(f"<tr><th>{name}</th>{''.join(f'<td class=n>{cell}</td>' for cell in cells)}</tr>")
    return (
        "<h2>Which task learns?</h2><p class='hint'>Rewards (before any filter) and lengths are means over the first "
        "and the last tenth of the steps.</p>"
        f"<section class='card'><table><tr><th></th>{head}</tr>{''.join(lines)}</table></section>"
        f"<section class='plots'>{_figures(svgs, _TASKS)}</section>"
    )


def _evals(evals: list[dict[str, Any]]) -> str:
    if not evals:
        return "<p class='empty'>Nothing was evaluated.</p>"
    names = {name for scores in evals for name in scores} - {"step"}
    names -= {bound for name in names for bound in metrics.bounds_of(name)}
    ordered = sorted(names, key=_eval_order)
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in ordered)
    rows = []
    for scores in evals:
        cells = "".join(
            f"<td class='n'>{number(scores.get(name))} {interval(metrics.bounds(scores, name))}</td>"
            for name in ordered
        )
        rows.append(f"<tr><th>after step {scores['step']}</th>{cells}</tr>")
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"


def _eval_order(name: str) -> tuple[int, int, str]:
    """Order by: the mean first, then pass rates by k, then the rest; each before its tasks."""
    statistic, _, _ = name.partition("/")
    kind, _, k = statistic.partition("@")
    return (("held_out", "pass").index(kind) if kind in ("held_out", "pass") else 2, int(k or 0), name)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    lines = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    return f"<table>{lines}</table>"
