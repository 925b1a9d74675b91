"""The terminal during a run: phases, a line a step, and the figures at its end.

Owns layout and wording. With a terminal a panel is redrawn in place; without one (`ray job submit`, a file)
every step is one aligned line. It is told what to show and measures only the time between steps.

Invariant: its memory does not grow with the number of steps.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raypost.config import Config, EvalConfig
from raypost.observe import metrics
from raypost.report.eval_statistics import CONFIDENCE
from raypost.report.formatting import (
    MISSING,
    bound,
    change,
    clock,
    group_sum,
    incidents,
    length_bias,
    number,
    percent,
    score,
    seconds,
    size,
    steps_of,
    task_row,
    with_interval,
)

PACE_STEPS = 10
"""Steps over which tokens/s and the time left are averaged."""
REFRESH_PER_S = 4
SHOWN_S = 0.001
"""Shortest part of a weight sync that is shown, seconds."""
COLUMNS = {"reward": 4, "held-out": 4, "buffer": 2, "staleness": 5, "tokens/s": 5, "sync": 6, "left": 5}
"""What a line shows beside the step, and how wide."""
STATE_STYLES = {"up": "green", "starting": "yellow", "catching up": "yellow", "down": "red"}


class RunDisplay:
    """Live progress of one run. Use from one thread."""

    def __init__(self, config: Config, tty: bool | None = None, out: TextIO | None = None) -> None:
        """Show nothing yet. `tty` None: whether `out` (standard output by default) is a terminal."""
        self._config = config
        self._out = out or sys.stdout
        self._tty = self._out.isatty() if tty is None else tty
        self._num_steps = config.train.num_steps
        self._bound = str(config.staleness_bound)
        self._started_s = time.monotonic()
        self._ends: deque[tuple[float, float]] = deque(maxlen=PACE_STEPS + 1)
        self._first_score: float | None = None
        self._states: dict[str, str] = {}
        self._step = 0
        self._record = dict[str, Any]()
        self._live: Live | None = None
        self._greeted = False

    def phase(self, text: str) -> None:
        """Say what has just happened, or begins, outside the steps."""
        self._greet()
        self._line(f"  {text}")

    def step(self, step: int, record: Mapping[str, Any]) -> None:
        """Show one train step."""
        self._greet()
        self._ends.append((time.monotonic(), float(record.get(metrics.PRODUCED_TOKENS) or 0)))
        self._step = step
        self._record = dict(record)
        if self._tty:
            self._redraw()
        else:
            self._line("\n".join([self._step_line(), *self._task_lines()]))

    def evaluated(self, step: int, scores: Mapping[str, Any]) -> None:
        """Show an evaluation."""
        value = scores.get(metrics.HELD_OUT)
        self._record[metrics.HELD_OUT] = value
        when = "before training" if step == 0 else f"after step {step}"
        gained = change(self._first_score, value)
        if self._first_score is None:
            self._first_score = value
        failed = int(scores.get(metrics.EVAL_FAILED) or 0)
        rates = map(metrics.pass_at, self._config.eval.pass_k[1:])
        self.phase(
            f"held-out {with_interval(value, metrics.bounds(scores, metrics.HELD_OUT))} {when}"
            + (f" ({gained} since the first)" if gained else "")
            + "".join(
                f", {name} {with_interval(scores[name], metrics.bounds(scores, name))}"
                for name in rates
                if name in scores
            )
            + (f", {failed} responses failed" if failed else "")
        )
        # A step is not slower because an evaluation followed it.
        if self._ends:
            away_s = time.monotonic() - self._ends[-1][0]
            self._ends = deque(((end + away_s, tokens) for end, tokens in self._ends), self._ends.maxlen)

    def workers(self, states: Mapping[str, str]) -> None:
        """Show the rollout workers' states; without a terminal only a change is worth a line."""
        changed = [
            f"{name} is {state}"
            for name, state in states.items()
            if self._states.get(name) not in (None, state)
        ]
        self._states = dict(states)
        if changed:
            self.phase(", ".join(changed))
        elif self._tty and self._live is not None:
            self._redraw()

    def finish(self, report: Mapping[str, Any], run_dir: Path) -> None:
        """Show the figures that matter and where the report is."""
        self.close()
        self._line("\n" + report_text(report, run_dir))

    def close(self) -> None:
        """Leave the terminal as it was found. Idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _greet(self) -> None:
        if self._greeted:
            return
        self._greeted = True
        config, (task, *more) = self._config, self._config.tasks
        others = f" and {len(more)} more tasks" if more else ""
        workers, ranks = config.rollout.num_engines, config.train.num_workers
        self._line(
            f"raypost {config.name}: {config.model.name} on {task.source.dataset}{others}, {self._num_steps} steps of "
            f"{config.train.batch_size} groups x {task.group_size}\n  {workers} rollout worker{_s(workers)}, "
            f"{ranks} trainer rank{_s(ranks)}, {config.device}, "
            f"staleness at most {self._bound}"
        )

    def _line(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, file=self._out, flush=True)

    def _pace(self) -> tuple[float | None, float | None]:
        """(seconds a step, produced tokens a second) over the last steps; None until there are two."""
        if len(self._ends) < 2:
            return None, None
        elapsed = max(1e-9, self._ends[-1][0] - self._ends[0][0])
        return elapsed / (len(self._ends) - 1), sum(tokens for _, tokens in list(self._ends)[1:]) / elapsed

    def _figures(self) -> dict[str, str]:
        """Name -> text of what a step shows, in order."""
        record, (step_s, tokens_per_s) = self._record, self._pace()
        reward = record.get(metrics.RAW_REWARD_MEAN, record.get(metrics.REWARD_MEAN))
        mean, buffered = record.get(metrics.STALENESS_MEAN), record.get(metrics.BUFFER_GROUPS)
        left_s = None if step_s is None else step_s * (self._num_steps - self._step)
        loss = record.get(metrics.LOSS)
        return {
            "reward": score(reward),
            "held-out": score(record.get(metrics.HELD_OUT)),
            "buffer": MISSING if buffered is None else str(buffered),
            "staleness": (MISSING if mean is None else f"{mean:.1f}") + f"/{self._bound}",
            "tokens/s": MISSING if tokens_per_s is None else f"{tokens_per_s:.0f}",
            "sync": seconds(record.get(metrics.SYNC_S)),
            "left": clock(left_s),
            "loss": MISSING if loss is None else f"{loss:+.3f}",
        }

    def _step_line(self) -> str:
        figures, digits = self._figures(), len(str(self._num_steps))
        parts = [f"step {self._step:>{digits}}/{self._num_steps}"]
        parts += [f"{name} {figures[name]:>{width}}" for name, width in COLUMNS.items()]
        return "  ".join(parts)

    def _task_lines(self) -> list[str]:
        """Return a line for each task, if there are several."""
        tasks = [task.name for task in self._config.tasks]
        if len(tasks) == 1:
            return []
        width = max(map(len, tasks))
        return [f"  {task:<{width}}  {task_text(self._record, task)}" for task in tasks]

    # ---------------------------------------------------------------- with a terminal

    def _redraw(self) -> None:
        if self._live is None:
            console = Console(file=self._out, force_terminal=True)
            self._live = Live(console=console, refresh_per_second=REFRESH_PER_S, transient=False)
            self._live.start()
        self._live.update(self._panel())

    def _panel(self) -> Panel:
        grid = Table.grid(padding=(0, 2), expand=True)
        figures = list(self._figures().items())
        for _ in range(4):
            grid.add_column()
        for row in range(0, len(figures), 4):
            cells = [
                Text.assemble((f"{name} ", "dim"), (text, "bold")) for name, text in figures[row : row + 4]
            ]
            grid.add_row(*cells)
        # A bar alone ends no line.
        bar = Table.grid(expand=True)
        bar.add_row(ProgressBar(total=self._num_steps, completed=self._step))
        parts: list[Any] = [bar, grid, *map(Text, self._task_lines())]
        if self._states:
            states = Text("workers ", style="dim")
            for name, state in self._states.items():
                states.append(f"{name} {state}  ", style=STATE_STYLES.get(state, ""))
            parts.append(states)
        elapsed = seconds(time.monotonic() - self._started_s)
        title = f"{self._config.name}  step {self._step}/{self._num_steps}  {elapsed}"
        return Panel(Group(*parts), title=title, title_align="left", border_style="blue")


def task_text(record: Mapping[str, Any], task: str) -> str:
    """Return a line about one task of several, from a step's record."""

    def value(name: str) -> Any:
        return metrics.value_of(record, name, task, alone=False)

    failed = sum(metrics.failures_of(record, task).values())
    figures = {
        "reward": f"{score(value(metrics.RAW_REWARD_MEAN)):>4}",
        "tokens": f"{number(value(metrics.RESPONSE_TOKENS_MEAN)):>5}",
        "staleness": f"{number(value(metrics.STALENESS_MEAN), 2):>4}",
        "filtered": str(value(metrics.FILTERED_SAMPLES) or 0),
        "failures": f"{failed:g}",
        "group p50": f"{seconds(value(metrics.GROUP_S_P50)):>6}",
        "p99": seconds(value(metrics.GROUP_S_P99)),
    }
    return "  ".join(f"{name} {text}" for name, text in figures.items())


def scores_table(scores: Mapping[str, Any], tasks: Sequence[str], options: EvalConfig) -> Table:
    """Return the scores of an evaluation, a line a task, with intervals."""
    statistics = {metrics.HELD_OUT: f"mean@{options.samples}"}
    statistics |= {metrics.pass_at(k): metrics.pass_at(k) for k in options.pass_k}
    failed = int(scores.get(metrics.EVAL_FAILED) or 0)
    table = Table(
        caption=f"up to {options.num_prompts} prompts a task at temperature {options.temperature:g}; in brackets: "
        f"{percent(CONFIDENCE)} intervals over prompts"
        + (f"; {failed} responses failed and have no score" if failed else "")
    )
    table.add_column("task")
    for title in statistics.values():
        table.add_column(title, justify="right", no_wrap=True)
    rows = {task: f"/{task}" for task in tasks} | ({"all": ""} if len(tasks) > 1 else {})
    for title, suffix in rows.items():
        names = [f"{statistic}{suffix}" for statistic in statistics]
        table.add_row(title, *(with_interval(scores.get(n), metrics.bounds(scores, n)) for n in names))
    return table


def report_text(report: Mapping[str, Any], run_dir: Path) -> str:
    """Return the figures that matter, a line each, and the path of the report."""
    before, after = report["eval_before"], report["eval_after"]
    gained = change(before, after)
    worst = report["staleness_max"]
    rows = [
        ("held-out score", f"{with_interval(before, report['eval_before_interval'])} -> "
                           f"{with_interval(after, report['eval_after_interval'])}"
                           + (f"  ({gained})" if gained else "")),
        ("steps", f"{steps_of(report['steps'], report['num_steps'])} in {seconds(report['wall_s'])}, "
                  f"{seconds(report['step_s_median'])} each"),
        ("groups", f"{group_sum(report['groups'])}; {report['groups']['lost']} lost"),
        ("staleness", f"at most {MISSING if worst is None else worst} ({bound(report['staleness_bound'])}), "
                      f"mean {number(report['staleness_mean'], 2)}"),
        ("idle", f"trainer {percent(report['trainer_idle_fraction'])}, rollout "
                 f"{percent(report['rollout_idle_fraction'])}; both busy {seconds(report['overlap_s'])} of "
                 f"{seconds(report['window_s'])}"),
        ("weight sync", f"{seconds(report['sync_s_median'])} (median of {report['num_syncs']}){_sync_parts(report)}"
                        f"{_spared(report)}"),
        ("logprob mismatch", f"at most {number(report['logprob_mismatch_max'], 2)}"),
        ("peak memory", size(report["peak_memory_bytes"])),
    ]  # fmt: skip
    lines = [f"{report['status']}: {report['name']}"]
    if report["error"]:
        lines.append(f"  {report['error']}")
    lines += [f"  {name:<18}{text}" for name, text in rows]
    if len(report["tasks"]) > 1:
        for task, figures in report["tasks"].items():
            row = task_row(task, figures)[1:]
            lines.append(f"  {f'task {task}':<18}{'; '.join(f'{title} {text}' for title, text in row)}")
    if report["length_bias"] and report["length_bias"]["share"]:
        lines.append(f"  {'length bias':<18}{length_bias(report['length_bias'])}")
    if report["incidents"]:
        lines.append(f"  {'incidents':<18}{incidents(report['incidents'])}")
    lines += [f"  {'problem':<18}{text}" for text in report["problems"]]
    return "\n".join([*lines, f"  {'report':<18}{run_dir / 'report.html'}"])


def _sync_parts(report: Mapping[str, Any]) -> str:
    """Return where the time of a sync goes; what is so short that it rounds to nothing is left out."""
    parts = report.get("sync_parts_s") or {}
    shown = [f"{part} {seconds(s)}" for part, s in parts.items() if s is not None and s >= SHOWN_S]
    return f": {', '.join(shown)}" if shown else ""


def _spared(report: Mapping[str, Any]) -> str:
    """Return how much of the weights did not travel, if any of them."""
    spared = report.get("sync_spared_bytes")
    return f"; {size(report['sync_bytes'])} sent to each worker, {size(spared)} spared" if spared else ""


def _s(count: int) -> str:
    return "s" if count != 1 else ""
