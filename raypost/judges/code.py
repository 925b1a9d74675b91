"""CodeJudge: runs the program in a response against the prompt's tests, in the sandbox.

    stdio:   sandbox(program, case's input) -> output, compared here
    python:  sandbox(program) <--calls, values--> sandbox(tests) -> verdicts

Owns whose fault it is that there is no verdict. Whatever the program does is its fault, and a low score; tests that
fail before they ask the program for anything, and sandboxes that cannot be had, are a JudgeError.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from raypost.config import JudgeConfig
from raypost.data.prompt import Prompt
from raypost.errors import Boundary, JudgeError, SandboxError, blame
from raypost.judges import code_child
from raypost.judges.code_child import BrokenTestsError
from raypost.sandbox import MOST, Limits, Outcome, python, run, why_not
from raypost.types import RolloutState, Score

CLOCK = 3
"""How much longer than its CPU time a program may take by the clock, where the machine has a processor for it."""
TESTS_S = 10.0
"""What the tests of a program may take for themselves, by the clock, besides waiting for it."""
END_S = 2.0
"""How long a program may stay when its tests are done."""
TRIAL_PROGRAM = ""
"""Tests fail with it by its fault, unless they are broken."""
_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
_PLACES = re.compile(r"\{(code|question)\}")
_CHILD = Path(code_child.__file__).read_bytes()


def extract_code(response: str) -> str:
    """Return the last fenced block of a response, the whole response without one."""
    blocks = _FENCED.findall(response)
    return blocks[-1] if blocks else response


def read_tests(config: JudgeConfig, metadata: dict[str, Any]) -> str | list[tuple[str, str]]:
    """Return a prompt's tests: a text of Python, or cases of (input, output). Raises JudgeError."""
    if config.tests_field not in metadata:
        names = ", ".join(sorted(map(str, metadata)))
        raise JudgeError(
            f"the prompt has no {config.tests_field!r}, only {names}: tests_field names the tests' column"
        )
    found = metadata[config.tests_field]
    if isinstance(found, str) and (config.tests == "stdio" or found.lstrip().startswith(("[", '"'))):
        try:
            found = json.loads(found)
        except ValueError as error:
            if config.tests == "stdio":
                raise JudgeError(f"{config.tests_field} is no JSON: {error}: {found!r:.80}") from None
    return _python_tests(config, found, metadata) if config.tests == "python" else _cases(config, found)


def _python_tests(config: JudgeConfig, found: Any, metadata: dict[str, Any]) -> str:
    lines = [found] if isinstance(found, str) else found
    if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
        raise JudgeError(
            f"{config.tests_field} must be a text of Python or a list of them, got {found!r:.80}; for inputs and "
            "outputs set tests: stdio"
        )
    text = "\n".join(lines)
    try:
        code_child.counted(text, _entry_point(metadata))
    except BrokenTestsError as error:
        raise JudgeError(f"{config.tests_field}: {error}") from None
    return text


def _cases(config: JudgeConfig, found: Any) -> list[tuple[str, str]]:
    if isinstance(found, dict):
        given, wanted = (found.get(name, found.get(f"{name}s")) for name in ("input", "output"))
        if isinstance(given, list) and isinstance(wanted, list) and len(given) == len(wanted):
            found = [{"input": i, "output": o} for i, o in zip(given, wanted, strict=True)]
    cases = [(c.get("input"), c.get("output")) for c in found] if _are_dicts(found) else []
    if not cases or not all(isinstance(text, str) for case in cases for text in case):
        raise JudgeError(
            f'{config.tests_field} must be a list of {{"input": "...", "output": "..."}}, texts both, and not empty, '
            f"got {found!r:.80}"
        )
    return cases


def _are_dicts(found: Any) -> bool:
    return isinstance(found, list | tuple) and all(isinstance(one, dict) for one in found)


def _entry_point(metadata: dict[str, Any]) -> str | None:
    name = metadata.get("entry_point")
    return name if isinstance(name, str) and name.isidentifier() else None


def same_output(written: str, wanted: str) -> bool:
    """Return whether two outputs are equal but for spaces at the ends of lines, and empty lines at the end."""
    return [x.rstrip() for x in written.rstrip().split("\n")] == [
        x.rstrip() for x in wanted.rstrip().split("\n")
    ]


class CodeJudge:
    """Scores responses by what their programs do. Equal programs of a group are run once."""

    def __init__(self, config: JudgeConfig) -> None:
        """`config`: a task's judge, or a part of it, of kind code."""
        self._config = config
        self.limits = limits_of(config)
        self._turns = asyncio.Semaphore(os.cpu_count() or 1)

    async def judge(self, states: list[RolloutState]) -> list[float]:
        """Return one Score for each state. Raises JudgeError naming the group."""
        who = f"task {states[0].task!r}, group {states[0].group_id}"
        try:
            tests = read_tests(self._config, states[0].metadata)
            programs = [self._program(state) for state in states]
            asked = dict.fromkeys(programs)
            runs = [self._score(program, tests, states[0].metadata) for program in asked]
            found = await asyncio.gather(*runs, return_exceptions=True)
        except JudgeError as error:
            raise JudgeError(f"{who}: {error}") from error
        for one in found:
            if isinstance(one, SandboxError):
                raise JudgeError(blame(Boundary.SANDBOX, f"{who}: {one}")) from one
            if isinstance(one, JudgeError):
                raise JudgeError(f"{who}: {one}") from one
            if isinstance(one, BaseException):
                raise one
        scores = dict(zip(asked, found, strict=True))
        return [scores[program] for program in programs]  # type: ignore[misc]

    def _program(self, state: RolloutState) -> str:
        question = str(state.metadata.get("question", ""))
        values = {"code": extract_code(state.response_text), "question": question}
        if not values["code"].strip():
            return ""
        return _PLACES.sub(lambda place: values[place[1]], self._config.program)

    async def _score(
        self, program: str, tests: str | list[tuple[str, str]], metadata: dict[str, Any]
    ) -> Score:
        if not program:
            return self._scored(0, 1, "no program")
        async with self._turns:
            if isinstance(tests, str):
                return await self.examine(program, tests, _entry_point(metadata))
            return await self._cases(program, tests)

    def _scored(self, passed: int, total: int, words: str) -> Score:
        share, solved = passed / total, float(passed == total)
        return Score(
            share if self._config.partial_credit else solved, {"passed": share, "solved": solved}, words
        )

    # ---------------------------------------------------------------- stdio

    async def _cases(self, program: str, cases: list[tuple[str, str]]) -> Score:
        """Run the program on each case; without partial credit, up to the first that fails."""
        passed, words = 0, ""
        for number, (given, wanted) in enumerate(cases, 1):
            outcome = await self._run(["solution.py"], {"solution.py": program}, stdin=given.encode())
            if outcome.ok and same_output(outcome.stdout.decode(errors="replace"), wanted):
                passed += 1
                continue
            words = words or f"case {number}: {_ending(outcome)}"
            if not self._config.partial_credit or outcome.timed_out:
                break
        return self._scored(passed, len(cases), words)

    # ---------------------------------------------------------------- tests in Python

    async def examine(self, program: str, tests: str, entry_point: str | None = None) -> Score:
        """Return the score of a program by tests in Python. Raises JudgeError, SandboxError."""
        ours, theirs = os.pipe(), os.pipe()
        child = {"main.py": _CHILD}
        submitted = self._run(
            ["main.py", "submission", str(ours[0]), str(theirs[1])],
            {**child, "solution.py": program},
            fds=[ours[0], theirs[1]],
        )
        examined = self._run(
            ["main.py", "tests", str(theirs[0]), str(ours[1]), *([entry_point] if entry_point else [])],
            {**child, "tests.py": tests},
            fds=[theirs[0], ours[1]],
            wall_s=MOST * self.limits.wall_s + TESTS_S,
        )
        submission, tester = asyncio.create_task(submitted), asyncio.create_task(examined)
        try:
            await asyncio.wait([submission, tester], return_when=asyncio.FIRST_COMPLETED)
            if not submission.done():  # its input ends with the tests, and so should it
                await asyncio.wait([submission], timeout=END_S)
            ended = submission.result() if submission.done() else None
            outcome = await tester
        finally:
            for task in (submission, tester):
                task.cancel()
            await asyncio.gather(submission, tester, return_exceptions=True)
        score = self._verdict(outcome)
        if score.words and ended is not None and not ended.ok:
            score.words += f" (the program {_ending(ended)})"
        return score

    def _verdict(self, outcome: Outcome) -> Score:
        passed, total, words, touched, ended = 0, 1, "", False, False
        # It may have been ended in the middle of a line.
        for line in outcome.stdout.split(b"\n")[:-1]:
            told = json.loads(line)
            if "broken" in told:
                raise JudgeError(f"{self._config.tests_field}: {told['broken']}")
            total = told.get("tests", total)
            touched, ended = touched or "touched" in told, ended or "end" in told
            passed += told.get("passed", False)
            words = words or told.get("words", "")
        if not ended and not touched:
            raise JudgeError(f"{self._config.tests_field}: the process of the tests {_ending(outcome)}")
        # What it had from the submission kept it from its end.
        return self._scored(passed, total, words or ("" if ended else f"the tests {_ending(outcome)}"))

    # ---------------------------------------------------------------- the sandbox

    async def _run(
        self,
        arguments: Sequence[str],
        files: dict[str, str | bytes],
        wall_s: float | None = None,
        **options: Any,
    ) -> Outcome:
        path, see = python()
        contents = {n: d if isinstance(d, bytes) else d.encode(errors="replace") for n, d in files.items()}
        limits = self.limits if wall_s is None else limits_of(self._config, wall_s)
        return await run(
            [path, "-I", "-S", *arguments],
            files=contents,
            limits=limits,
            see=see,
            unsafe=self._config.unsafe_no_sandbox,
            **options,
        )


def limits_of(config: JudgeConfig, wall_s: float | None = None) -> Limits:
    """Return what a program of this judge may take."""
    return Limits(cpu_s=config.cpu_s, wall_s=wall_s or CLOCK * config.cpu_s, memory_mb=config.memory_mb)


def _ending(outcome: Outcome) -> str:
    if outcome.timed_out:
        return "took too long"
    if outcome.truncated:
        return "wrote too much"
    if outcome.out_of_memory:
        return "had no memory left"
    if outcome.signal is not None:
        return f"ended with signal {outcome.signal}"
    if outcome.exit_code:
        last = outcome.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return f"ended with exit code {outcome.exit_code}: {last:.200}"
    return f"wrote {outcome.stdout.decode(errors='replace')!r:.100}"


def try_code(config: JudgeConfig, prompts: Sequence[Prompt], num_run: int) -> str | None:
    """Read the tests of the prompts, and run those of the first with an empty program; return what is wrong."""
    if not config.unsafe_no_sandbox and (problem := why_not(limits_of(config))) is not None:
        return problem
    judge = CodeJudge(config)

    async def trial() -> str | None:
        for number, prompt in enumerate(prompts, 1):
            try:
                tests = read_tests(config, prompt.metadata)
                if number <= num_run and isinstance(tests, str):
                    await judge.examine(TRIAL_PROGRAM, tests, _entry_point(prompt.metadata))
            except (JudgeError, SandboxError) as error:
                return f"{error} (prompt {number})"
        return None

    # A thread, because the caller may have a running event loop of its own.
    with ThreadPoolExecutor(1, "trial") as thread:
        return thread.submit(asyncio.run, trial()).result()
