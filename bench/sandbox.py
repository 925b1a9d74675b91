"""Small Python programs a second in the sandbox, against the same programs as bare processes, in the same run.

    python -m bench.sandbox --programs 100 --rounds 5

Subjects take turns in every round, each with as many programs at once as there are cores, and twice that. Of each the
median is printed with the lowest and the highest, and as ratio the median of the rounds' own ratios to bare processes.
The last line is one JSON object, with the cores that other processes of the machine took meanwhile.

    bare       subprocess: python -I -S, nothing limited
    limits     the same by raypost.sandbox without a sandbox (unsafe)
    empty      /usr/bin/true in the sandbox: what the sandbox itself costs
    sandbox    the program in the sandbox
    judge      judge.kind code: the program in one sandbox, its tests in another
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable

from bench.figures import Foreign, spread
from raypost.config import JudgeConfig
from raypost.judges.code import CodeJudge
from raypost.sandbox import Limits, python, run, why_not

SOURCE = b"print(sum(map(int, input().split())))"
PROGRAM = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(1, 2) == 3\nassert add(2, 2) == 4\n"
DEADLINE_S = 300.0

Subject = Callable[[], Awaitable[None]]


def subjects() -> dict[str, Subject]:
    """Return what runs one program, by name."""
    path, see = python()
    limits, judge = Limits(cpu_s=5, wall_s=60), CodeJudge(JudgeConfig(kind="code", cpu_s=5))

    async def bare() -> None:
        pipe, argv = asyncio.subprocess.PIPE, ["-I", "-S", "-c", SOURCE.decode()]
        process = await asyncio.create_subprocess_exec(path, *argv, stdin=pipe, stdout=pipe, env={})
        out, _ = await process.communicate(b"1 2\n")
        assert out == b"3\n", out

    async def program(unsafe: bool) -> None:
        argv = [path, "-I", "-S", "-c", SOURCE.decode()]
        outcome = await run(argv, stdin=b"1 2\n", limits=limits, see=see, unsafe=unsafe)
        assert outcome.stdout == b"3\n", outcome

    async def empty() -> None:
        assert (await run(["/usr/bin/true"], limits=limits)).ok

    async def judged() -> None:
        assert await judge.examine(PROGRAM, TESTS) == 1.0

    return {
        "bare": bare,
        "limits": lambda: program(unsafe=True),
        "empty": empty,
        "sandbox": lambda: program(unsafe=False),
        "judge": judged,
    }


async def rate(subject: Subject, programs: int, at_once: int) -> float:
    """Return how many a second are run, so many at once."""
    turns = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with turns:
            await subject()

    start = time.perf_counter()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(one() for _ in range(programs)))
    return programs / (time.perf_counter() - start)


async def measure(programs: int, rounds: int, at_once: int) -> dict[str, list[float]]:
    """Return the rates of every subject in every round."""
    found: dict[str, list[float]] = {}
    for name, subject in subjects().items():
        await rate(subject, at_once, at_once)  # what is loaded once
        found[name] = []
    for number in range(rounds):
        order = list(subjects().items())
        for name, subject in order[number % len(order) :] + order[: number % len(order)]:
            found[name].append(await rate(subject, programs, at_once))
    return found


def main() -> None:
    """Measure, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description="Programs a second in the sandbox.")
    parser.add_argument("--programs", type=int, default=100, help="in each turn of a subject")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if (problem := why_not(Limits(cpu_s=5, wall_s=60))) is not None:
        raise SystemExit(problem)
    cores, foreign, result = os.cpu_count() or 1, Foreign(), {}
    for at_once in (cores, 2 * cores):
        rates = asyncio.run(measure(args.programs, args.rounds, at_once))
        for name, values in rates.items():
            ratios = [value / bare for value, bare in zip(values, rates["bare"], strict=True)]
            result[f"{name}/{at_once}"] = {"per_s": spread(values), "ratio": spread(ratios)}
            a_second, ratio = spread(values), spread(ratios)
            print(
                f"{name:8} {at_once:2} at once: {a_second['median']:7.1f}/s ({a_second['low']:.1f} to "
                f"{a_second['high']:.1f}), of bare {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
            )
    print(json.dumps({"cores": cores, "foreign_cores": round(foreign.cores(), 2), **result}))


if __name__ == "__main__":
    main()
