"""From what each process of a run waits for to what all of them wait for in the end. Pure: no file and no clock.

    driver --producer.take_batch--> producer --agent-loop-0.run--> agent-loop-0 --judge-0.judge--> judge-0 --> service

An edge is an open wait whose text names another role. `diagnose` follows the driver's longest wait, and of what it
reaches it blames what is sickest: a process that is stopped or gone, then one whose event loop is blocked, then a wait
for something outside of the run, then who is busy although nobody else is waited for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, NamedTuple

from raypost.doctor.presence import BLOCKED_S
from raypost.doctor.stacks import Frame, collective_of, doing, in_object_store, working

DRIVER = "driver"
RANKS = ("trainer-", "critic-")
LONG_S = 2.0
"""A shorter wait is no sign of anything."""
SILENT_BEATS = 4
"""A process that did not write its record for so many beats does not work."""

State = Literal["runs", "stopped", "disk", "gone", "absent", "far"]
"""stopped: by a signal or a debugger. disk: in an uninterruptible call of the system. gone: no such process any more.
absent: it has not begun yet. far: on another machine."""


class SeenWait(NamedTuple):
    """An open wait, as its process recorded it."""

    what: str
    age_s: float
    limit_s: float | None = None
    outside: str | None = None
    group: str | None = None


class Child(NamedTuple):
    """A process that a role has started, such as its engine's."""

    pid: int
    name: str
    state: State


@dataclass(frozen=True, slots=True)
class Seen:
    """One process of the run."""

    name: str
    pid: int = 0
    host: str = ""
    state: State = "runs"
    silent_s: float = 0.0
    """Since its last record."""
    beat_s: float = 2.0
    blocked_s: float = 0.0
    blocked_in: tuple[Frame, ...] = ()
    waits: tuple[SeenWait, ...] = ()
    """The oldest first."""
    children: tuple[Child, ...] = ()
    resources: Mapping[str, float] = field(default_factory=dict)
    """What one that is absent needs."""
    stack: str = ""

    @property
    def where(self) -> str:
        """Its process and machine."""
        return f"process {self.pid} on {self.host}" if self.pid else "no process yet"


class Step(NamedTuple):
    """Somebody, and the wait that leads to the next; the last one waits for nobody of the run."""

    name: str
    wait: SeenWait | None


class Severity(IntEnum):
    """How sure one can be that something is the cause, the surest first."""

    RAY = 0
    DEAD = 1
    ENGINE = 2
    BLOCKED = 3
    OUTSIDE = 4
    RANK = 5
    BUSY = 6
    IDLE = 7


class Cause(NamedTuple):
    """What may be at the root."""

    severity: Severity
    text: str
    chain: tuple[Step, ...] = ()
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a run waits for."""

    cause: Cause
    also: tuple[Cause, ...]
    """What else is sick."""
    waited_s: float
    """How long the driver has waited."""

    @property
    def concerned(self) -> list[str]:
        """Names of the processes of the chain, the root first, and of what else is sick."""
        chains = [self.cause.chain, *(one.chain[-1:] for one in self.also)]
        return list(dict.fromkeys(step.name for chain in chains for step in reversed(chain)))

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        return self.cause.text


def diagnose(seen: Sequence[Seen], ray: Sequence[str] = ()) -> Diagnosis:
    """Return the root of what the driver waits for. `ray`: what is wrong with Ray's own processes, in words."""
    world = {one.name: one for one in seen}
    pattern = _names(world)
    sick = [cause for one in seen for cause in _sick(one, (Step(one.name, None),))]
    of_ray = [Cause(Severity.RAY, text, fix="kill -CONT lets a stopped process go on") for text in ray]
    driver = world.get(DRIVER)
    if all(one.state in ("gone", "absent") for one in seen):
        ended = f"the run has ended: none of its {len(seen)} processes is there"
        return Diagnosis(Cause(Severity.IDLE, ended), (), 0.0)
    if driver is None or driver.state not in ("runs", "far"):
        gone = sick or [Cause(Severity.IDLE, "no driver of the run is there: it has ended")]
        gone.sort(key=lambda cause: cause.chain[-1].name != DRIVER if cause.chain else False)
        return Diagnosis(gone[0], tuple(gone[1:]), 0.0)
    starts = sorted(driver.waits, key=lambda wait: (wait.limit_s is None, -wait.age_s))
    found: list[Cause] = list(_sick(driver, (Step(DRIVER, None),)))
    for start in starts:
        reached = _reached(driver, start, world, pattern)
        found += _causes(reached, world)
        if found and min(found).severity <= Severity.RANK:
            break
    waited_s = max((wait.age_s for wait in driver.waits if wait.limit_s is not None), default=0.0)
    known = {cause.chain[-1].name for cause in found if cause.chain and cause.severity <= Severity.BLOCKED}
    elsewhere = [cause for cause in sick if cause.chain[-1].name not in known]
    best = min(found, key=_rank, default=None)
    if best is None or best.severity >= Severity.BUSY:
        # Not everything that is needed is waited for by name: a batch comes from whoever stored it.
        best = min([*elsewhere, *([best] if best else [])], key=_rank, default=None)
    if of_ray:
        best = Cause(of_ray[0].severity, of_ray[0].text, best.chain if best else (), of_ray[0].fix)
    if best is None:
        best = Cause(Severity.IDLE, "nothing hangs: the driver waits for nobody")
    serious = [*of_ray, *(one for one in found if one.severity <= Severity.BLOCKED), *elsewhere]
    also = {one.text: one for one in serious if one.text != best.text}
    return Diagnosis(best, tuple(also.values()), waited_s)


def _rank(cause: Cause) -> tuple[int, float]:
    """Order the surest first, then what the longest wait leads to."""
    ages = [step.wait.age_s for step in cause.chain if step.wait is not None]
    return cause.severity, -min(ages, default=0.0)


def _names(world: Mapping[str, Seen]) -> re.Pattern[str]:
    longest_first = sorted(map(re.escape, world), key=len, reverse=True)
    return re.compile(rf"(?<![\w-])(?:{'|'.join(longest_first)})(?![\w-])")


def _reached(
    driver: Seen, start: SeenWait, world: Mapping[str, Seen], pattern: re.Pattern[str]
) -> dict[str, tuple[Step, ...]]:
    """Return whom the driver's wait leads to, with the shortest chain to each, along the oldest waits."""
    found: dict[str, tuple[Step, ...]] = {}
    front = [(tuple[Step, ...](), driver, start)]
    while front:
        following = []
        for before, who, wait in front:
            chain = (*before, Step(who.name, wait))
            for name in dict.fromkeys(pattern.findall(wait.what)):
                if name in found or name == DRIVER:
                    continue
                found[name] = chain
                following += [(chain, world[name], one) for one in world[name].waits]
        front = following
    return found if found else {DRIVER: ()}


def _causes(reached: Mapping[str, tuple[Step, ...]], world: Mapping[str, Seen]) -> Iterator[Cause]:
    for name, before in reached.items():
        one, chain = world[name], (*before, Step(name, None))
        yield from _sick(one, chain)
        for wait in one.waits:
            if wait.outside is not None and wait.age_s >= LONG_S:
                yield _outside(one, (*before, Step(name, wait)), wait)
    ranks = [world[name] for name in reached if name.startswith(RANKS)]
    if ranks:
        yield from _ranks(ranks, reached)
    leads = {step.name for chain in reached.values() for step in chain}
    for name, before in reached.items():
        if name not in leads and not name.startswith(RANKS):
            yield _busy(world[name], (*before, Step(name, None)))


# ---------------------------------------------------------------- what may be wrong


def _sick(one: Seen, chain: tuple[Step, ...]) -> Iterator[Cause]:
    """Yield what is wrong with a process whatever it waits for."""
    if one.state == "absent":
        needs = ", ".join(f"{amount:g} {name}" for name, amount in one.resources.items()) or "no resources"
        text = f"{one.name} has no process after {one.silent_s:.0f} s: no node has given it {needs}"
        yield Cause(Severity.DEAD, text, chain, "add a node that has them, or ask for less (raypost plan)")
    elif one.state == "stopped":
        text = f"{one.name} is stopped by a signal ({one.where})"
        yield Cause(
            Severity.DEAD, text, chain, f"kill -CONT {one.pid} lets it go on; kill -9 {one.pid} ends it"
        )
    elif one.state == "gone":
        text = f"{one.name} is gone ({one.where}), and no new process has come for {one.silent_s:.0f} s"
        yield Cause(Severity.DEAD, text, chain, "its log says why it ended")
    elif one.silent_s > SILENT_BEATS * one.beat_s:
        hangs = (
            "in an uninterruptible call of the system" if one.state == "disk" else "its threads do not run"
        )
        node = ", or its node" if one.state == "far" else ""
        what = f"{one.name}{node} gave no sign of life for {one.silent_s:.0f} s ({one.where})"
        yield Cause(Severity.DEAD, what if one.state == "far" else f"{what}: {hangs}", chain)
    elif one.blocked_s > BLOCKED_S:
        yield _blocked(one, chain)
    for child in one.children:
        if child.state == "stopped":
            text = f"the engine of {one.name} is stopped by a signal (process {child.pid}, {child.name})"
            yield Cause(Severity.ENGINE, text, chain, f"kill -CONT {child.pid} lets it go on")


def _blocked(one: Seen, chain: tuple[Step, ...]) -> Cause:
    """Say what keeps an event loop from turning."""
    where = f"{one.name} is blocked for {one.blocked_s:.0f} s ({one.where})"
    for wait in reversed(one.waits):
        if wait.outside == "file system":
            text = f"the file system does not answer {one.name}: {wait.what}, for {wait.age_s:.0f} s"
            return Cause(Severity.BLOCKED, text, (*chain[:-1], Step(one.name, wait)), "look at the mount")
    frames = working(one.stack) or one.blocked_in
    if in_object_store(frames) == "put":
        return Cause(Severity.BLOCKED, f"the object store has no room: {where}, {doing(frames)}", chain)
    return Cause(Severity.BLOCKED, f"{where}, {doing(frames) or 'nowhere in Python'}", chain)


def _outside(one: Seen, chain: tuple[Step, ...], wait: SeenWait) -> Cause:
    group = next((step.wait.group for step in reversed(chain) if step.wait and step.wait.group), None)
    of_group = f", group {group}" if group else ""
    limit = f" of at most {wait.limit_s:.0f}" if wait.limit_s else ""
    kind = (
        f"the {wait.outside} does not answer" if wait.outside != "node" else "no node has what is asked for"
    )
    text = f"{kind}: {one.name}{of_group} has waited {wait.age_s:.0f}{limit} s for {wait.what}"
    return Cause(Severity.OUTSIDE, text, chain)


def _ranks(ranks: Sequence[Seen], reached: Mapping[str, tuple[Step, ...]]) -> Iterator[Cause]:
    """Yield which rank keeps the others: the one that is not where they are."""
    calls = {one.name: working(one.stack) for one in ranks if one.stack}
    inside = {name: found for name, frames in calls.items() if (found := collective_of(frames)) is not None}
    outside = {name: frames for name, frames in calls.items() if name not in inside}
    for name, frames in outside.items():
        chain, now = (*reached[name], Step(name, None)), _now(frames)
        if inside:
            others = ", ".join(f"{one} ({what})" for one, what in inside.items())
            verb = "wait" if len(inside) > 1 else "waits"
            text = f"{name} does not come to the collective that {others} {verb} in: it {now}"
            yield Cause(Severity.RANK, text, chain)
        elif store := in_object_store(frames):
            what = "has no room" if store == "put" else "does not give what is asked for"
            yield Cause(Severity.RANK, f"the object store {what}: {name} {now}", chain)
        else:
            yield Cause(Severity.BUSY, f"{name} {now}", chain)
    if inside and not outside:
        root, said = _apart(inside)
        where = "; ".join(
            f"{one} is {doing(calls[one])}" for one in sorted(inside, key=lambda one: one != root)
        )
        yield Cause(Severity.RANK, f"{said}: {where}", (*reached[root], Step(root, None)))
    for one in ranks:
        if not one.stack:
            text = f"{one.name} works, or waits for another rank; it gave no stack ({one.where})"
            yield Cause(Severity.BUSY, text, (*reached[one.name], Step(one.name, None)))


def _apart(inside: Mapping[str, str]) -> tuple[str, str]:
    """Return the rank to begin with, and how it stands to the others; `inside`: the collective of each."""
    usual, count = Counter(inside.values()).most_common(1)[0]
    odd = [name for name, what in inside.items() if what != usual]
    if odd and len(odd) < count:
        verb = "are" if len(odd) > 1 else "is"
        return odd[0], f"{', '.join(odd)} {verb} in another collective than the other ranks ({usual})"
    kinds = "different collectives" if odd else "a collective"
    return next(iter(inside)), f"all ranks wait in {kinds} for each other"


def _now(frames: Sequence[Frame]) -> str:
    place = doing(frames)
    return f"is {place}" if place else "waits for its next call"


def _busy(one: Seen, chain: tuple[Step, ...]) -> Cause:
    now = doing(working(one.stack))
    own = max((wait for wait in one.waits if wait.limit_s), key=lambda wait: wait.age_s, default=None)
    if now:
        return Cause(Severity.BUSY, f"{one.name} works: it is {now}", chain)
    if own is not None and own.age_s >= LONG_S:
        return Cause(Severity.BUSY, f"{one.name} waits {own.age_s:.0f} s for {own.what}", chain)
    return Cause(Severity.IDLE, f"{one.name} has nothing to do ({one.where})", chain)
