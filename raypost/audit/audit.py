"""`raypost audit`: recounts a run from its files, and compares what each of them says of the same thing.

    ledger.jsonl + ledger.closed  ->  Account  <->  checkpoints, the buffer's journal, metrics.jsonl, report.json

Owns what is compared. How often a group was sampled, where it is, and what was trained at which step is counted by
account.py, which knows nothing of the ledger's own counting; formats are decoded by those who own them.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from raypost.audit.account import LEASED, STORED, Account
from raypost.audit.batches import check_batches, read_batches
from raypost.audit.buffer_log import HeldGroups, held_groups
from raypost.audit.checkpoints import check_moments, named, read_checkpoints
from raypost.audit.findings import Check, Findings
from raypost.checkpoint import CHECKPOINTS
from raypost.errors import ConfigError, LedgerError
from raypost.files.jsonl import parsed, whole_lines
from raypost.files.owner import owner
from raypost.ledger.closed import CLOSED_FILE, Closed, read_records
from raypost.ledger.events import ENDS, LedgerEvent
from raypost.ledger.facts import RECORD_TYPE
from raypost.ledger.journal import JournalReader
from raypost.ledger.ledger import LEDGER_FILE

CONFIG, METRICS, EVENTS, REPORT = "config.yaml", "metrics.jsonl", "events.jsonl", "report.json"
BUFFER, BATCHES = "buffer", "batches"
ENDED_WELL = ("finished", "stopped")


@dataclass(slots=True)
class Audit:
    """The outcome."""

    run_dir: Path
    findings: Findings = field(default_factory=Findings)
    figures: dict[str, Any] = field(default_factory=dict)
    """Recounted: groups by where they are, steps, checkpoints."""

    @property
    def num_contradictions(self) -> int:
        """0 is what a run should have."""
        return self.findings.contradictions.total()

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"run": str(self.run_dir), "figures": self.figures, **self.findings.as_dict()}


def audit(run_dir: Path) -> Audit:
    """Recount the run in a folder, also of one that goes on or was killed. Raises ConfigError if it holds none."""
    if not (run_dir / LEDGER_FILE).is_file():
        raise ConfigError(f"{run_dir} holds no {LEDGER_FILE}: no run sampled a group there")
    found = Audit(run_dir)
    findings, is_going_on = found.findings, owner(run_dir) is not None
    config = _config(run_dir, findings)
    # The ledger last: of a run that goes on, it is then ahead of all others.
    report = _read_report(run_dir, findings)
    starts = [line["time_s"] for line in _lines(run_dir / EVENTS, findings) if line.get("event") == "start"]
    records = _surviving_records(run_dir, findings)
    saved = read_checkpoints(run_dir / CHECKPOINTS, findings)
    held = _read_buffer(run_dir / BUFFER, findings)
    batches = read_batches(run_dir / BATCHES, findings)
    account = Account(_thresholds(config), findings)
    if read_ledger(run_dir, account, findings):
        check_moments(saved, account.moments, findings)
    _check_account(account, findings)
    _check_metrics(records, starts, account, config, findings)
    if held is not None:
        _check_buffer(held, account, is_going_on, findings)
    check_batches(batches, account, findings)
    if is_going_on:
        findings.notes.append("the run goes on: what it did meanwhile is not compared")
    elif report is not None:
        _check_report(report, account, records, findings)
    found.figures = {
        "sampled": account.sampled,
        **{end.value: account.totals[end] for end in ENDS},
        **{place.replace(" ", "_"): count for place, count in sorted(account.places().items())},
        "twice": account.twice,
        "lost": found.findings.contradictions[Check.LOST],
        "last_step": max(account.steps, default=0),
        "staleness_max": account.staleness_max,
        "checkpoints": [one.step for one in saved],
    }
    return found


# ---------------------------------------------------------------- configuration


def _config(run_dir: Path, findings: Findings) -> dict[str, Any]:
    try:
        return dict(yaml.safe_load((run_dir / CONFIG).read_text()))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        findings.add(Check.FILES, f"{run_dir / CONFIG} cannot be read: {error}")
        return {}


def _thresholds(config: dict[str, Any]) -> dict[str, int]:
    """Return the staleness from which a group of each task is expired."""
    interval = config.get("sync_weights_interval", 1)
    found = {}
    for task in config.get("tasks", ()):
        strategy = task["strategy"]
        periods = 1 if strategy["kind"] == "sync" else strategy["max_staleness"] + 1
        found[task["name"]] = periods * interval
    return found


# ---------------------------------------------------------------- ledger


def read_ledger(run_dir: Path, account: Account, findings: Findings) -> bool:
    """Count all groups; returns whether the journal has every line since the run began."""
    path = run_dir / LEDGER_FILE
    try:
        reader = JournalReader(path)
    except LedgerError as error:
        findings.add(Check.FILES, str(error))
        return False
    snapshot = None if reader.is_snapshot_void else reader.snapshot
    if snapshot is not None:
        _begin(run_dir, snapshot, account, findings)
    account.moments.add(account.moment)
    for line, _ in reader.lines():
        try:
            account.play(line)
        except (LookupError, TypeError, ValueError) as error:
            findings.add(Check.FILES, f"a line of {path} cannot be understood ({error!r}): {line}")
    findings.unless(
        not reader.num_damaged,
        Check.FILES,
        f"{reader.num_damaged} lines of {path} are damaged, and were skipped",
    )
    return snapshot is None


def _begin(run_dir: Path, snapshot: dict[str, Any], account: Account, findings: Findings) -> None:
    names, closed = list(snapshot["names"]), Closed(*snapshot["closed"])
    path = run_dir / CLOSED_FILE
    live = np.frombuffer(base64.b64decode(snapshot["live"]), RECORD_TYPE)
    try:
        ended = np.concatenate([np.empty(0, RECORD_TYPE), *read_records(path, closed)])
    except (OSError, ValueError) as error:
        findings.add(
            Check.FILES, f"the groups that ended before the journal's first line cannot be read: {error}"
        )
        ended = np.empty(0, RECORD_TYPE)
    account.begin(live, ended, names)
    told = (snapshot["sampled"], *(snapshot["totals"].get(end, 0) for end in ENDS))
    findings.unless(
        told == account.moment,
        Check.MOVES,
        f"the snapshot counts (sampled, {', '.join(ENDS)}) {told}, and its records come to {account.moment}",
    )


def _check_account(account: Account, findings: Findings) -> None:
    missing = list(account.missing())
    findings.unless(
        not missing,
        Check.LOST,
        f"groups that the dataset gave out and the ledger does not know: {named(missing)}",
    )
    steps = sorted(account.steps)
    holes = sorted({*range(1, max(steps, default=0) + 1)} - {*steps})
    findings.unless(not holes, Check.STEPS, f"no group was trained at steps {holes[:8]}, and some later")


# ---------------------------------------------------------------- metrics


def _lines(path: Path, findings: Findings) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    damaged = 0
    with path.open("rb") as file:
        for raw in whole_lines(file):
            try:
                yield parsed(raw)
            except ValueError:
                damaged += 1
    findings.unless(not damaged, Check.FILES, f"{damaged} lines of {path} are damaged, and were skipped")


def _surviving_records(run_dir: Path, findings: Findings) -> dict[int, dict[str, Any]]:
    """Return the line of each step in metrics.jsonl, but for those that were abandoned when a run went back."""
    records: dict[int, dict[str, Any]] = {}
    for line in _lines(run_dir / METRICS, findings):
        if line.get("abandoned"):
            continue
        step = line["step"]
        findings.unless(
            step not in records,
            Check.METRICS,
            f"step {step} is in {METRICS} twice, and the first line is not marked as abandoned",
        )
        records[step] = line
    return records


def _missing(
    records: dict[int, dict[str, Any]], trained: set[int], starts: list[float], findings: Findings
) -> list[int]:
    """Return the trained steps that have no line, but for those that a driver which died had not recorded yet."""
    missing = []
    for step in sorted(trained - {*records} - {max(trained, default=0)}):
        before = max((one["time_s"] for at, one in records.items() if at < step), default=0.0)
        after = min((one["time_s"] for at, one in records.items() if at > step), default=math.inf)
        if any(before <= start <= after for start in starts):
            findings.notes.append(
                f"step {step} was trained and saved, and its driver died before {METRICS} had it"
            )
        else:
            missing.append(step)
    return missing


def _check_metrics(
    records: dict[int, dict[str, Any]],
    starts: list[float],
    account: Account,
    config: dict[str, Any],
    findings: Findings,
) -> None:
    tasks = config.get("tasks", ())
    whole_tokens = all(
        task["agent_loop"]["kind"] == "single_turn" and task["strategy"]["max_token_staleness"] is None
        for task in tasks
    )
    missing = _missing(records, {*account.steps}, starts, findings)
    findings.unless(
        not missing, Check.METRICS, f"{METRICS} has no line for steps {missing[:8]}, which were trained"
    )
    beyond = sorted({*records} - {*account.steps} - {max(account.steps, default=0) + 1})
    findings.unless(
        not beyond, Check.STEPS, f"{METRICS} has steps {beyond[:8]}, and the ledger trained nothing there"
    )
    for step in sorted({*records} & {*account.steps}):
        record, counted = records[step], account.steps[step]
        told = Counter(record.get("staleness") or ())
        findings.unless(
            told == counted.staleness,
            Check.METRICS,
            f"step {step}: {METRICS} has {told.total()} groups of staleness {dict(told)}, the ledger "
            f"{counted.groups} of {dict(counted.staleness)}",
        )
        if record.get("left_out") or not counted.members or "response_tokens" not in record:
            continue
        findings.unless(
            record.get("num_samples") == counted.members,
            Check.METRICS,
            f"step {step}: {record.get('num_samples'):.0f} samples were trained, and the ledger has {counted.members}",
        )
        trained = round(record["response_tokens"])
        agrees = trained == counted.tokens if whole_tokens else trained <= counted.tokens
        findings.unless(
            agrees,
            Check.TOKENS,
            f"step {step}: {trained} tokens were trained, and {counted.tokens} generated",
        )


# ---------------------------------------------------------------- buffer


def _read_buffer(folder: Path, findings: Findings) -> HeldGroups | None:
    try:
        held = held_groups(folder)
    except (OSError, ValueError, LookupError, TypeError) as error:
        findings.add(Check.FILES, str(error))
        return None
    if held is None:
        findings.notes.append(f"{folder} has no journal: what the buffer held is not compared")
    return held


def _check_buffer(held: HeldGroups, account: Account, is_going_on: bool, findings: Findings) -> None:
    findings.unless(not held.twice, Check.TWICE, f"the buffer saw groups trained twice: {named(held.twice)}")
    if is_going_on:
        return
    trained = {key for key, step in account.ended.items() if step > 0}
    again = held.groups & trained
    findings.unless(not again, Check.TWICE, f"the buffer holds groups that were trained: {named(again)}")
    if account.last != LedgerEvent.PAUSED:
        findings.notes.append(
            "the run did not end in a pause: the last moves of the ledger's journal and of the buffer's may differ"
        )
        return
    stored = {key for key, life in account.live.items() if life.place in (STORED, LEASED)}
    lost = stored - held.groups
    findings.unless(
        not lost, Check.LOST, f"the ledger has groups in the buffer that its journal lacks: {named(lost)}"
    )
    foreign = held.groups - {*account.live}
    findings.unless(
        not foreign,
        Check.BUFFER,
        f"the buffer holds groups that the ledger does not have there: {named(foreign)}",
    )


# ---------------------------------------------------------------- report


def _read_report(run_dir: Path, findings: Findings) -> dict[str, Any] | None:
    path = run_dir / REPORT
    try:
        report = json.loads(path.read_text())
        return {**report, "groups": dict(report["groups"]), "status": str(report["status"])}
    except FileNotFoundError:
        findings.notes.append(f"there is no {REPORT}: the run did not end, or was killed")
    except (OSError, ValueError, LookupError, TypeError) as error:
        findings.add(Check.FILES, f"{path} cannot be read: {error!r}")
    return None


def _check_report(
    report: dict[str, Any], account: Account, records: dict[int, dict[str, Any]], findings: Findings
) -> None:
    groups, status, steps = report["groups"], report["status"], report["steps"]
    findings.unless(
        steps == max(records, default=0),
        Check.REPORT,
        f"it has {steps} steps, {METRICS} {max(records, default=0)}",
    )
    if status not in ENDED_WELL:
        findings.notes.append(f"the run {status}: its last counts may be older than the ledger's journal")
        return
    findings.unless(
        not groups["lost"], Check.LOST, f"the report itself counts {groups['lost']} groups as lost"
    )
    rest = sum(count for name, count in groups.items() if name != "sampled")
    findings.unless(
        groups["sampled"] == rest, Check.REPORT, f"{groups['sampled']} groups sampled, {rest} by place"
    )
    told = (groups["sampled"], *(groups[end] for end in ENDS))
    findings.unless(
        told in account.moments,
        Check.REPORT,
        f"(sampled, {', '.join(ENDS)}) is {told}, which the journal never came to; at its end it is {account.moment}",
    )
    if report.get("staleness_max") is not None:
        findings.unless(
            report["staleness_max"] == account.staleness_max,
            Check.REPORT,
            f"its staleness_max is {report['staleness_max']}, the ledger's {account.staleness_max}",
        )
