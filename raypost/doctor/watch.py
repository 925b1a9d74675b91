"""The run's own look at itself: it writes what `raypost doctor` would say when it stalls.

The driver's presence thread watches. Telemetry's does so when the driver's record grows old: a driver that is stopped
cannot. Owns when a stall has come (`Stalls`, pure); what it means is the diagnosis's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from raypost.doctor.diagnosis import DRIVER
from raypost.doctor.examine import examine, write_report
from raypost.doctor.presence import BEAT_S, PROCESSES, Presence
from raypost.errors import RunFilesError
from raypost.observe import waits

USUAL = 3.0
"""A wait that has taken long before is a stall after so many times that."""


DEPUTY = "telemetry"
"""The role that watches over the driver."""


def present(name: str, run_dir: Path, stall_s: float, but: Sequence[str] = ()) -> Presence:
    """Return the presence of the role `name` in this process, which watches if that is the role's duty; not started.

    `but`: see Stalls.
    """
    duties = {
        DRIVER: lambda: of_driver(run_dir, stall_s, but),
        DEPUTY: lambda: of_deputy(run_dir, stall_s),
    }
    at_beat = duties[name]() if name in duties else lambda: None
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        loop = None
    return Presence(name, run_dir, loop, at_beat, min(BEAT_S, stall_s / 4))


class Stalls:
    """Finds waits that last too long, each once."""

    def __init__(self, stall_s: float, but: Sequence[str] = ()) -> None:
        """`but`: waits that begin so are of something that goes on beside the run."""
        self._stall_s = stall_s
        self._but = tuple(but)
        self._usual: dict[str, float] = {}
        self._told: set[tuple[str, float]] = set()
        self._open: dict[tuple[str, float], float] = {}

    def new(self, open_now: Iterable[tuple[str, float, float | None]], now_s: float) -> list[str]:
        """Return what has been waited for too long since the last call. `open_now`: (what, since_s, limit_s)."""
        seen = {
            (what, since_s): now_s - since_s for what, since_s, limit_s in open_now if limit_s is not None
        }
        for key, age_s in self._open.items():
            if key not in seen:
                self._usual[key[0]] = max(age_s, self._usual.get(key[0], 0.0))
        self._open, self._told = seen, {key for key in self._told if key in seen}
        late = [
            key
            for key, age_s in seen.items()
            if age_s > max(self._stall_s, USUAL * self._usual.get(key[0], 0.0))
            and key not in self._told
            and not key[0].startswith(self._but or ("\0",))
        ]
        self._told.update(late)
        return [what for what, _ in late]


class Silence:
    """Finds processes that have stopped to write their records, each once until it writes again."""

    def __init__(self, stall_s: float) -> None:
        """`stall_s`: age of a record from which its process is silent."""
        self._stall_s = stall_s
        self._told: set[str] = set()
        self._seen: dict[str, tuple[int, float]] = {}
        """The last change of every record, and when it was seen."""

    def new(self, changed_ns: Mapping[str, int], now_s: float) -> list[str]:
        """Return whose record has not changed for too long since the last call; `now_s`: by a clock that nobody sets.

        Times of day are compared with nothing but themselves: the clock they are of may be set meanwhile.
        """
        unseen = (0, now_s)
        self._seen = {
            name: before if (before := self._seen.get(name, unseen))[0] == at else (at, now_s)
            for name, at in changed_ns.items()
        }
        silent = {name for name, (_, since_s) in self._seen.items() if now_s - since_s > self._stall_s}
        fresh, self._told = silent - self._told, silent
        return sorted(fresh)


def of_driver(run_dir: Path, stall_s: float, but: Sequence[str] = ()) -> Callable[[], None]:
    """Return what the driver's presence thread does after each record."""
    stalls, silence = Stalls(stall_s, but), Silence(stall_s)

    def look() -> None:
        waiting = [(one.what, one.since_s, one.limit_s) for one in waits.open_waits()]
        late = stalls.new(waiting, time.monotonic())
        silent = silence.new(_changes(run_dir), time.monotonic())
        if late or silent:
            tell(run_dir, f"stalled for {stall_s:g} s")

    return look


def of_deputy(run_dir: Path, stall_s: float) -> Callable[[], None]:
    """Return what telemetry's presence thread does after each record: it watches over the driver."""
    silence = Silence(stall_s)

    def look() -> None:
        driver = {name: at for name, at in _changes(run_dir).items() if name == DRIVER}
        if silence.new(driver, time.monotonic()):
            tell(run_dir, f"stalled for {stall_s:g} s")

    return look


def _changes(run_dir: Path) -> dict[str, int]:
    """Return when each record was written last."""
    found = {}
    for file in (run_dir / PROCESSES).glob("[!.]*.json"):
        try:
            found[file.stem] = file.stat().st_mtime_ns
        except FileNotFoundError:  # replaced just now
            continue
    return found


def tell(run_dir: Path, when: str, gave_up: str | None = None) -> None:
    """Write what the run waits for into its folder, and print a line. `gave_up`: what the driver just gave up."""
    try:
        found = examine(run_dir, gave_up=gave_up)
        file = write_report(run_dir, found)
    except (RunFilesError, OSError) as error:
        print(f"{when}: what is waited for cannot be said: {error}", flush=True)
        return
    print(f"{when}: {found.diagnosis.headline}; more in {file}", flush=True)
