"""docs/metrics.md names what there is, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from actors.telemetry import gauges
from raypost.config.trackers import MODULES
from raypost.observe import metrics

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def rows_of(text: str) -> list[list[str]]:
    """The cells of the tables' rows, heads and rules left out."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if re.match(r"\| `", line)]
    return [[cell.strip() for cell in row] for row in rows]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def named(*sections: str) -> set[str]:
    return {name for section in sections for row in rows_of(SECTIONS[section]) for name in names_in(row[0])}


def test_every_metric_has_a_row_and_every_row_a_metric() -> None:
    known = {value for name, value in vars(metrics).items() if name.isupper() and isinstance(value, str)}
    on_page = {
        re.sub(r"(/[A-Z]+)+$|_lagK$", "", name) for name in named("Of a train step", "Of an evaluation")
    }
    assert on_page - {"pass@K"} == known
    assert metrics.pass_at(3) == "pass@3"


def test_every_row_says_what_its_metric_is() -> None:
    for row in rows_of(SECTIONS["Of a train step"] + SECTIONS["Of an evaluation"]):
        assert len(row) == 3 and row[2], row


def test_metrics_of_tasks_are_those_that_a_step_has_by_task() -> None:
    assert set(names_in(SECTIONS["Of each task"].partition(".")[0])) - {"NAME/TASK"} == {
        name for name in metrics.BY_TASK if name not in metrics.GROUP_S_PERCENTILES
    }


def test_every_gauge_and_counter_has_a_row_with_its_labels() -> None:
    labels = {name: list[str]() for name in gauges.GAUGES} | {name: ["task"] for name in gauges.OF_TASKS}
    labels |= {name: list(tags) for name, (_, tags) in (gauges.OTHER_GAUGES | gauges.COUNTERS).items()}
    on_page = {name: names_in(row[1]) for row in rows_of(SECTIONS["Prometheus"]) for name in names_in(row[0])}
    assert on_page == labels


def test_every_tracker_has_a_row() -> None:
    assert named("Trackers") == set(MODULES)
