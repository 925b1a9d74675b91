"""What every bench says of its rounds: medians with their range, and how much of the machine others took meanwhile."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable

import psutil

Spread = dict[str, float]


def spread(values: Iterable[float]) -> Spread:
    """Return `median`, `low` and `high`; nothing of no values."""
    known = list(values)
    if not known:
        return {}
    found = {"median": statistics.median(known), "low": min(known), "high": max(known)}
    return {name: round(value, 4) for name, value in found.items()}


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and all that it started and that still run."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:2])
    return total


class Foreign:
    """The cores that others take from its making on; processes of this run that end meanwhile count as theirs."""

    def __init__(self) -> None:
        """Begin to count."""
        self._begin, self._busy, self._own = time.perf_counter(), machine_seconds(), cpu_seconds()

    def cores(self) -> float:
        """Return how many cores others took in the mean until now."""
        busy, own = machine_seconds() - self._busy, cpu_seconds() - self._own
        return max(0.0, busy - own) / (time.perf_counter() - self._begin)


def machine_seconds() -> float:
    """Return the CPU seconds of the whole machine."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)
