"""Loads: which worker of a pool a request goes to, by the room that each has.

Owns what one router knows of the workers' work: its own requests exactly, those of other routers as the engine's
answers report them. Pure: it is told what begins, what ends and what time it is. Owns no table and no call.

    room     what an engine says it holds at once: sequences, and tokens of keys and values
    work     what it has: requests, and the tokens that these may come to
    load     the fuller of the two with this request, by the worker's share of its siblings' speed

Invariants: no worker is picked while another one has a smaller load, but the home of a trajectory; a home is left when
it is fuller than AMPLE and has OVERLOAD times the load of the idlest; what is begun and ended cancels out.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from raypost.types import Work

OVERLOAD = 2.0
"""A worker with so many times the load of the idlest gives up a trajectory whose prefix it has,"""
AMPLE = 0.125
"""unless it is not even so full."""
MANY_HOMES = 10_000
REPORT_S = 5.0
"""What an engine said of others' requests counts for so long."""


class Room(NamedTuple):
    """What an engine holds at once."""

    slots: int
    """Sequences."""
    tokens: int
    """Keys and values of so many; 0: unknown."""


class Candidate(Protocol):
    """A worker that may be picked."""

    @property
    def worker(self) -> str:
        """Return its name."""
        ...

    @property
    def share(self) -> float:
        """Return its speed as a part of its siblings'."""
        ...

    @property
    def room(self) -> Room:
        """Return what it holds at once."""
        ...


C = TypeVar("C", bound=Candidate)
NOTHING = Work(0, 0)


class Loads:
    """The work of each worker, as one router knows it."""

    def __init__(self) -> None:
        """Know of none."""
        self._own: dict[str, Work] = {}
        self._others: dict[str, tuple[float, Work]] = {}
        """When a worker answered last, and what it had of others then."""
        self._homes: OrderedDict[str, str] = OrderedDict()
        """By trajectory the worker that has its prefix, the one used last at the end."""
        # Routers that begin at once do not all begin with the same worker.
        self._turn = random.randrange(1 << 16)

    def begin(self, worker: str, tokens: int) -> None:
        """Count a request that may come to so many tokens."""
        requests, before = self.own(worker)
        self._own[worker] = Work(requests + 1, before + tokens)

    def end(self, worker: str, tokens: int) -> None:
        """Count it out."""
        requests, before = self.own(worker)
        self._own[worker] = Work(requests - 1, before - tokens)

    def own(self, worker: str) -> Work:
        """Return what this router has there."""
        return self._own.get(worker, NOTHING)

    def heard(self, worker: str, left: Work | None, now_s: float) -> None:
        """Take note of what an engine still had when it gave an answer, which is counted out already."""
        if left is not None:
            own = self.own(worker)
            others = Work(max(0, left.requests - own.requests), max(0, left.tokens - own.tokens))
            self._others[worker] = now_s, others

    def load(self, one: Candidate, tokens: int, now_s: float) -> float:
        """Return how full a worker would be with one more request of so many tokens; above 1: it would queue."""
        at_s, others = self._others.get(one.worker, (0.0, NOTHING))
        if now_s - at_s > REPORT_S:
            others = NOTHING
        own, room = self.own(one.worker), one.room
        full = (own.requests + others.requests + 1) / room.slots
        if room.tokens:
            full = max(full, (own.tokens + others.tokens + tokens) / room.tokens)
        return full / one.share

    def pick(self, up: Sequence[C], trajectory: str, tokens: int, now_s: float) -> C:
        """Return the worker for a request that may come to `tokens`. `trajectory`: empty for one that has no home."""
        home = self._homes.get(trajectory)
        picked = next((one for one in up if one.worker == home), None) if home else None
        at_home = self.load(picked, tokens, now_s) if picked is not None else math.inf
        if picked is None or at_home > AMPLE:
            idlest, least = self._idlest(up, tokens, now_s)
            if picked is None or at_home > OVERLOAD * least:
                picked = idlest
        if trajectory:
            self._homes[trajectory] = picked.worker
            self._homes.move_to_end(trajectory)
            if len(self._homes) > MANY_HOMES:
                self._homes.popitem(last=False)
        return picked

    def _idlest(self, up: Sequence[C], tokens: int, now_s: float) -> tuple[C, float]:
        """Return the worker that would be the least full, and how full. Where several are, not always the first."""
        self._turn += 1
        found, least = up[0], math.inf
        for n in range(self._turn, self._turn + len(up)):
            one = up[n % len(up)]
            if (load := self.load(one, tokens, now_s)) < least:
                found, least = one, load
        return found, least
