"""Replay: a ledger from its journal, so that what the lines say obeys the rules under which they were written.

Owns what each line does to a ledger. Whoever only counts makes one for itself (summary.py); a producer whose process
died goes on with the one that `continued` gives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from raypost.errors import LedgerError
from raypost.files.disk import Fsync
from raypost.ledger.closed import Closed
from raypost.ledger.events import DROPPED, PHASES, LedgerEvent
from raypost.ledger.journal import JournalReader
from raypost.ledger.ledger import Ledger
from raypost.types import GroupKey, Status

Fields = dict[str, Any]

MAX_PROBLEMS = 10


class Replay:
    """Replays a journal, line by line, through a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        """`ledger`: what the lines before came to."""
        self.ledger = ledger
        self._problems: list[str] = []
        self._num_problems = 0

    def play(self, fields: Fields) -> None:
        """Apply one line; a move that the ledger refuses is a problem of the journal, and changes nothing."""
        event = fields["event"]
        self.ledger.replayed_s = float(fields["time"])
        try:
            if event in _MOVES:
                facts = {name: value for name, value in fields.items() if name not in _SAID}
                _MOVES[event](self.ledger, (fields["task"], fields["group"]), facts)
            elif event == LedgerEvent.RESTORED:
                self._restored(fields)
            elif event == LedgerEvent.ALLOTTED:
                self.ledger.allot(fields["step"], lambda: fields["shares"])
            else:
                self._noted(LedgerEvent(event), fields)
        except (LedgerError, KeyError, TypeError, ValueError) as error:
            self._problem(f"{event}: {error}" if isinstance(error, LedgerError) else f"{event}: {error!r}")

    def _noted(self, event: LedgerEvent, fields: Fields) -> None:
        self.ledger.events[event] += 1
        if event in PHASES:
            self.ledger.last_note = (event, {name: fields[name] for name in fields if name not in _SAID})
        self.ledger.attempt = fields.get("attempt", self.ledger.attempt)
        if event is LedgerEvent.SAVED:
            self.ledger.snapshot()  # it numbered names then, and wrote records: both go on from there

    @property
    def problems(self) -> list[str]:
        """The first of them, and how many there were more."""
        more = self._num_problems - len(self._problems)
        return [*self._problems, *([f"and {more} more"] if more else [])]

    def _problem(self, text: str) -> None:
        self._num_problems += 1
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(text)

    def _restored(self, fields: Fields) -> None:
        """Leases that were open when the checkpoint was saved are back in the buffer."""
        self.ledger.reopen_leases()
        self._noted(LedgerEvent.RESTORED, fields)
        played, saved = self.ledger.believed().sampled, fields["sampled"]
        if played != saved:
            self._problem(
                f"restored: the checkpoint had {saved} groups, the journal before it {played}: "
                "it is not the journal of that checkpoint"
            )


def _stored(ledger: Ledger, key: GroupKey, facts: Fields) -> None:
    ledger.stored(key, Status(facts.pop("status")), **facts)


def _leased(ledger: Ledger, key: GroupKey, facts: Fields) -> None:
    ledger.leased([key], facts["step"], [facts["staleness"]])


def _dropped(reason: Status, ledger: Ledger, key: GroupKey, facts: Fields) -> None:
    ledger.dropped(key, reason, **facts)


def _trained(ledger: Ledger, key: GroupKey, facts: Fields) -> None:
    # Ends all of the step at once: its other lines change nothing, and may not be written yet.
    ledger.trained(facts["step"])


_MOVES: dict[str, Callable[[Ledger, GroupKey, Fields], None]] = {
    LedgerEvent.SAMPLED: lambda ledger, key, _: ledger.sampled(key),
    LedgerEvent.CONTINUED: lambda ledger, key, _: ledger.continued(key),
    LedgerEvent.STORED: _stored,
    LedgerEvent.LEASED: _leased,
    LedgerEvent.TRAINED: _trained,
    **{end: partial(_dropped, Status(end.value)) for end in DROPPED},
}
"""What a line about a group does to a ledger."""
_SAID = ("time", "event", "task", "group")


def ledger_before(reader: JournalReader, ledger: Ledger | None = None) -> Ledger:
    """Return the ledger with which the lines of a journal begin: that of its snapshot, or an empty one.

    `ledger`: the one that becomes so, which has not begun; else a new one.
    """
    ledger = Ledger(begin=False) if ledger is None else ledger
    closed = Closed()
    if reader.snapshot is not None and not reader.is_snapshot_void:
        ledger.load_snapshot(reader.snapshot)
        ledger.attempt = reader.snapshot.get("attempt", "")
        closed = Closed(*reader.snapshot["closed"])
    ledger.continue_closed(closed)
    return ledger


def continued(
    journal: Path,
    attempt: str,
    clock: Callable[[], float] = time.time,
    *,
    patience_s: float = 0.0,
    fsync: Fsync = "off",
) -> Ledger:
    """Return the ledger of a process that died, as its journal has it; it goes on writing there.

    Where the journal has no line of this attempt, the process died before it did anything, and the ledger begins.
    Raises LedgerError if the journal contradicts itself.
    """
    if not journal.exists():
        return Ledger(journal, clock, attempt=attempt, patience_s=patience_s, fsync=fsync)
    reader = JournalReader(journal)
    replay = Replay(
        ledger_before(reader, Ledger(journal, clock, begin=False, patience_s=patience_s, fsync=fsync))
    )
    for fields, _ in reader.lines():
        replay.play(fields)
    if replay.ledger.attempt != attempt:
        return Ledger(journal, clock, attempt=attempt, patience_s=patience_s, fsync=fsync)
    problems = [*replay.problems, *([f"{reader.num_damaged} damaged lines"] if reader.num_damaged else [])]
    if problems:
        raise LedgerError(
            f"production cannot go on where it was, {journal} contradicts itself: {'; '.join(problems)}; continue "
            "the run from its last checkpoint"
        )
    replay.ledger.replayed_s = None
    return replay.ledger
