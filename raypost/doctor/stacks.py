"""What a process is doing, by its stacks as faulthandler or py-spy print them. Pure text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_THREAD = re.compile(r"^(Current thread|Thread|Process) ", re.MULTILINE)
_FAULTHANDLER = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$')
_PY_SPY = re.compile(r"^    (?P<function>.+) \((?P<file>[^()]+):(?P<line>\d+)\)$")
_FOREIGN = (
    "/lib/python3",
    "site-packages/",
    "<frozen",
    "<string>",
    "python/ray/",
    "ray/_private/",
    "_raylet",
)
_COLLECTIVE = ("torch/distributed/", "deepspeed/comm/", "ray/util/collective/")
_PRESENCE = "doctor/presence.py"
_IDLE = {"main_loop", "run_forever"}


class Frame(NamedTuple):
    """One call of a stack."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        """Return it in one line, with the last two parts of the file's name."""
        return f"{self.function} ({'/'.join(self.file.split('/')[-2:])}:{self.line})"

    @property
    def name(self) -> str:
        """The function's own name: py-spy puts that of its class before it."""
        return self.function.rpartition(".")[2]

    @property
    def is_ours(self) -> bool:
        """Whether it is neither Python's nor a library's."""
        return not any(part in self.file for part in (*_FOREIGN, *_COLLECTIVE))


def threads(text: str) -> list[list[Frame]]:
    """Return the calls of each thread, the innermost first. What is no stack is ignored."""
    found: list[list[Frame]] = [[]]
    for line in text.splitlines():
        if _THREAD.match(line):
            found.append([])
        elif match := _FAULTHANDLER.match(line) or _PY_SPY.match(line):
            found[-1].append(Frame(match["function"], match["file"], int(match["line"])))
    return [one for one in found if one]


def working(text: str) -> list[Frame]:
    """Return the calls of the thread that works: the one with the most calls of ours that is not waiting for work."""
    busy = [
        one
        for one in threads(text)
        if not any(_PRESENCE in frame.file for frame in one) and any(frame.is_ours for frame in one)
    ]
    return max(busy, key=lambda one: sum(frame.is_ours for frame in one), default=[])


def collective_of(frames: Sequence[Frame]) -> str | None:
    """Return the name of the collective that these calls are in, such as all_reduce."""
    inside = [one for one in frames if any(part in one.file for part in _COLLECTIVE)]
    named = [one.name for one in inside if one.name not in ("wrapper", "log_wrapper", "wait")]
    return next(iter(named or [one.name for one in inside]), None)


def in_object_store(frames: Sequence[Frame]) -> str | None:
    """Return "put" or "get" if these calls move something into or out of Ray's object store."""
    for one in frames:
        if one.name in ("put_object", "put_serialized_object_and_increment_local_ref"):
            return "put"
        if one.name in ("get_objects", "deserialize_objects") and "ray/" in one.file:
            return "get"
    return None


def doing(frames: Sequence[Frame]) -> str:
    """Say in a few words what a thread with these calls does; empty: it waits for work."""
    if not frames or frames[0].name in _IDLE:
        return ""
    place = next((one for one in frames if one.is_ours), frames[0])
    collective, store = collective_of(frames), in_object_store(frames)
    if collective is not None:
        return f"in the collective {collective}, called by {place}"
    if store is not None:
        return f"in a {store} of the object store, called by {place}"
    inner = "" if place == frames[0] else f", in {frames[0]}"
    return f"at {place}{inner}"
