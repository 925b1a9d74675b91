"""No wait and no figure depends on a clock that can be set: what is measured or due is told by the monotonic one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from raypost.ledger.journal import JournalReader
from raypost.ledger.ledger import LEDGER_FILE, Ledger
from raypost.ledger.life import group_life
from raypost.ledger.replay import continued
from raypost.ledger.summary import ledger_summary
from raypost.types import Status

ROOT = Path(__file__).resolve().parents[2]
OF_DAY = {
    "raypost/data/row_index.py": "compares with the times of files",
    "raypost/doctor/examine.py": "compares with what another process wrote",
    "raypost/report/status.py": "compares with what another process wrote",
    "raypost/observe/spans.py": "the time of day of an end is that of its beginning and a duration",
}
"""Modules that may subtract or compare times of day, and why."""
CLOCKS = ("time.time", "datetime.now")


def wall_clock_arithmetic(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that add, subtract or compare what `time.time()` returned."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        named: set[str] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and any(map(is_wall_clock, ast.walk(node.value))):
                names = (one for target in node.targets for one in ast.walk(target))
                named |= {
                    one.id for one in names if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
                }
        for node in ast.walk(function):
            if isinstance(node, ast.Compare) or (
                isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)
            ):
                others = node.comparators if isinstance(node, ast.Compare) else [node.right]
                parts = [node.left, *others]
                if any(
                    is_wall_clock(one) or (isinstance(one, ast.Name) and one.id in named) for one in parts
                ):
                    yield node.lineno


def is_wall_clock(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in CLOCKS


def test_no_wait_or_figure_depends_on_a_clock_that_can_be_set() -> None:
    found = {}
    for folder in ("raypost", "actors", "jobs"):
        for file in (ROOT / folder).rglob("*.py"):
            name, text = str(file.relative_to(ROOT)), file.read_text()
            if not any(clock in text for clock in CLOCKS):
                continue
            if lines := sorted({*wall_clock_arithmetic(ast.parse(text))}):
                found[name] = lines
    assert {name: lines for name, lines in found.items() if name not in OF_DAY} == {}
    assert set(OF_DAY) == set(found), "a module that no longer needs it must leave the list"


@pytest.mark.parametrize(
    "text",
    [
        "end = time.time() + 5\n    while time.monotonic() < end: pass",
        "start = time.time()\n    work()\n    return time.time() - start",
        "return time.time() > deadline",
    ],
)
def test_the_scan_notices_a_deadline_or_a_duration_by_the_time_of_day(text: str) -> None:
    assert list(wall_clock_arithmetic(ast.parse(f"def wait(deadline):\n    {text}")))


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_clock_that_is_set_during_a_run_loses_no_line_and_changes_no_count(
    tmp_path: Path, step_s: float
) -> None:
    now = [1_000_000.0]
    ledger = Ledger(tmp_path / LEDGER_FILE, lambda: now[0], attempt="a")
    for n in range(12):
        now[0] += 0.01 + (step_s if n in (4, 8) else 0.0)
        if n == 8:
            ledger.flush()
            ledger = continued(tmp_path / LEDGER_FILE, "a", lambda: now[0])
        ledger.sampled(("t", n))
        ledger.stored(("t", n), Status.COMPLETED, staleness=0, tokens=[3], versions={"0": 3})
        ledger.leased([("t", n)], n + 1, [0])
        ledger.trained(n + 1)
        if n == 4:
            told = [line.fields.get("group") for line in JournalReader(tmp_path / LEDGER_FILE).lines()]
            assert told.count(3) == 4, "what was written before the clock was set does not wait for its time"
    ledger.flush()
    again = continued(tmp_path / LEDGER_FILE, "a")
    assert again.believed().trained == 12 and again.snapshot()["ended"] == {"t": [[0, 12]]}
    summary = ledger_summary(tmp_path)
    assert summary.problems == [] and summary.counts.trained == 12
    assert len(group_life(tmp_path, "5").lines) == 4
