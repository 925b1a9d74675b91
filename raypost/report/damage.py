"""Damage of a run folder, found before anything starts: one sentence for each file, with the place and the way on.

Owns what is looked at: that each name is a file or a folder as the run made it, that each line is as it was written,
and that the ledger reaches as far as the last checkpoint. Checkpoints verify themselves (raypost/checkpoint).
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

from raypost.checkpoint import CHECKPOINTS
from raypost.errors import LedgerError, RunFilesError
from raypost.files.jsonl import read_lines
from raypost.files.owner import OWNER
from raypost.ledger.closed import CLOSED_FILE, Closed, check_records
from raypost.ledger.journal import REMOVE_LEDGER, JournalReader
from raypost.ledger.ledger import LEDGER_FILE
from raypost.report import files

BUFFER = "buffer"
"""Folder of the buffer's journal. Of an earlier start, it is begun anew whatever it holds."""
STATE = "producer"
"""Name of production's state in a checkpoint."""
_LOST = "the report then lacks what it said"
_FILES = (
    *(
        files.CONFIG,
        files.METRICS,
        files.EVENTS,
        files.SPANS,
        LEDGER_FILE,
        CLOSED_FILE,
        OWNER,
        files.TRACKERS,
    ),
    *(files.REPORT_JSON, files.REPORT_HTML, files.TIMELINE_PNG, files.CURVES_PNG, f"{BUFFER}/lock"),
)
_FOLDERS = (BUFFER, CHECKPOINTS, files.SAMPLES, files.TENSORBOARD)


def damage(run_dir: Path) -> list[str]:
    """Return a sentence for each file of a run folder that a run could not go on with."""
    found = list(_of_wrong_kind(run_dir))
    if not found:
        for name in (files.METRICS, files.EVENTS, files.SPANS):
            found += filter(None, [_lines(run_dir / name, f"remove that line, or the file: {_LOST}")])
        found += _ledger(run_dir)
    return found


def _of_wrong_kind(run_dir: Path) -> Iterator[str]:
    for names, is_right, wanted in ((_FILES, stat.S_ISREG, "file"), (_FOLDERS, stat.S_ISDIR, "folder")):
        for path in (run_dir / name for name in names):
            try:
                mode = path.stat().st_mode
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                yield f"{path} cannot be looked at: {error.strerror}; mend the file system, or choose another name="
                continue
            if not is_right(mode):
                yield f"{path} is no {wanted}, though the run has one there: remove it"


def _lines(path: Path, fix: str) -> str | None:
    try:
        for _ in read_lines(path, fix):
            pass
    except RunFilesError as error:
        return str(error)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}; give this user the right to read and write it"
    return None


def _ledger(run_dir: Path) -> Iterator[str]:
    path = run_dir / LEDGER_FILE
    if (damaged := _lines(path, REMOVE_LEDGER)) is not None:
        yield damaged
        return
    if not path.exists():
        return
    try:
        reader = JournalReader(path)
    except (LedgerError, RunFilesError) as error:
        yield str(error)
        return
    step, saved = _saved_offset(run_dir)
    if reader.end < saved:
        yield (
            f"{path} ends at byte {reader.end} of its history, and the checkpoint of step {step} was saved at byte "
            f"{saved}: it was cut off, or is another run's; {REMOVE_LEDGER}"
        )
    if reader.snapshot is not None and (run_dir / CLOSED_FILE).exists():
        try:
            check_records(run_dir / CLOSED_FILE, Closed(*reader.snapshot["closed"]))
        except (OSError, ValueError) as error:
            yield (
                f"{error}: remove {CLOSED_FILE}, and the run goes on; what became of single groups that ended before "
                "is lost, their counts are not"
            )


def _saved_offset(run_dir: Path) -> tuple[int, int]:
    """Return step and offset of the ledger in the newest checkpoint; zeros where there is none to be read."""
    steps = [path for path in (run_dir / CHECKPOINTS).glob("step-*") if path.name[5:].isdecimal()]
    newest = max(steps, key=lambda path: int(path.name[5:]), default=None)
    try:
        if newest is None:
            return 0, 0
        return int(newest.name[5:]), int(
            json.loads((newest / f"{STATE}.json").read_text())["ledger"]["journal_bytes"]
        )
    except (OSError, ValueError, LookupError, TypeError):
        return 0, 0
