"""A diagnosis as text: the answer first, then the chain, then stacks and logs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from raypost.doctor.diagnosis import Diagnosis, Seen, SeenWait


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was found of one process."""

    where: str
    stack: str
    log: tuple[str, ...]


def answer(found: Diagnosis) -> str:
    """Return the root in one line."""
    waited = f"the driver has waited {found.waited_s:.0f} s; " if found.waited_s else ""
    return f"{waited}{found.headline}"


def chain_lines(found: Diagnosis, seen: Sequence[Seen]) -> Iterator[str]:
    """Yield the chain from the driver to the root, a line for each who waits."""
    world = {one.name: one for one in seen}
    for depth, step in enumerate(found.cause.chain):
        who = world.get(step.name)
        where = f" ({who.where})" if who else ""
        yield f"{'   ' * depth}{'└─ ' if depth else ''}{step.name}{where}{_of_wait(step.wait)}"


def _of_wait(wait: SeenWait | None) -> str:
    if wait is None:
        return ""
    limit = "without a deadline" if wait.limit_s is None else f"of at most {wait.limit_s:.0f} s"
    group = f", group {wait.group}" if wait.group else ""
    return f" waits {wait.age_s:.0f} s ({limit}) for {wait.what}{group}"


def report(found: Diagnosis, seen: Sequence[Seen], evidence: Mapping[str, Evidence]) -> str:
    """Return all that was found."""
    lines = [answer(found)]
    if found.cause.fix:
        lines.append(f"what helps: {found.cause.fix}")
    lines += ["", *chain_lines(found, seen)]
    lines += [f"also: {one.text}" for one in found.also]
    for name, one in evidence.items():
        lines += ["", f"==== {name} ({one.where})"]
        lines += one.stack.strip().splitlines() or ["no stack could be had"]
        if one.log:
            lines += ["---- its log ends with", *one.log]
    return "\n".join(lines) + "\n"
