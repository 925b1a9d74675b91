"""Small programs for the tiny model: what is asked for, a hasty answer, a careful one, and tests.

    Write f(n, k): start with n, add k, multiply by 3.    def f(n, k):           def f(n, k):
                                                              return n + k * 3       r = n
                                                                                     r += k
                                                                                     r *= 3
                                                                                     return r

The hasty program forgets that what was written first is to be done first: it is wrong wherever a multiplication follows
a sum. Owns the problems alone; the warm-up is in tiny.py. Imports neither torch nor pydantic.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from raypost.data.prompt import is_held_out

OPERATIONS = {"add": "+", "subtract": "-", "multiply by": "*"}
DRAWN = ("add", "subtract", "multiply by", "multiply by")
"""What an operation is drawn from: hasty programs are right a third of the time."""
OPERANDS = "nk123456789"
"""Without 0: what is multiplied by 0 at the end makes many a wrong program right, which teaches to end early."""
PIECES = re.compile(r"\b[nk\d]\b|(?:(?!\b[nk\d]\b)[\s\S])+")
"""An operand is a token, and so is everything between two operands, such as ", multiply by "."""
READABLE = re.compile(r"Write f\(n, k\): start with [nk\d](, (add|subtract|multiply by) [nk\d])*\.")
NUM_TESTS, LARGEST = 4, 9
"""Calls of f that a row's tests make, and the largest argument."""


class Program:
    """What one program is to compute: the first operand, and then (operation, operand)."""

    def __init__(self, rng: random.Random, terms: int) -> None:
        """Draw a program of so many operands."""
        self._first = rng.choice(OPERANDS)
        self._steps = [(rng.choice(DRAWN), rng.choice(OPERANDS)) for _ in range(terms - 1)]

    @property
    def question(self) -> str:
        """What is asked for."""
        steps = "".join(f", {operation} {operand}" for operation, operand in self._steps)
        return f"Write f(n, k): start with {self._first}{steps}."

    @property
    def hasty(self) -> str:
        """One expression without parentheses."""
        steps = "".join(f" {OPERATIONS[operation]} {operand}" for operation, operand in self._steps)
        return f"def f(n, k):\n    return {self._first}{steps}"

    @property
    def careful(self) -> str:
        """One statement for each operation."""
        steps = "".join(f"\n    r {OPERATIONS[operation]}= {operand}" for operation, operand in self._steps)
        return f"def f(n, k):\n    r = {self._first}{steps}\n    return r"

    def value(self, n: int, k: int) -> int:
        """Return what f(n, k) should be."""
        known = {"n": n, "k": k} | {str(digit): digit for digit in range(10)}
        result = known[self._first]
        for operation, operand in self._steps:
            other = known[operand]
            result = {"add": result + other, "subtract": result - other}.get(operation, result * other)
        return result


def programs(terms: int, seed: int) -> Iterator[Program]:
    """Yield programs without end."""
    rng = random.Random(f"programs/{seed}")
    while True:
        yield Program(rng, terms)


def examples(terms: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Yield (question, hasty program, careful program) without end; no question is held out."""
    for program in programs(terms, seed):
        if not is_held_out(program.question):
            yield program.question, program.hasty, program.careful


def problems(terms: int = 5, size: int = 5000, seed: int = 0) -> list[dict[str, Any]]:
    """Return `size` rows with a `prompt`, a right `answer`, and `tests`: asserts on calls of f."""
    rng, rows = random.Random(f"tests/{seed}"), []
    for _, program in zip(range(size), programs(terms, seed), strict=False):
        calls = [(rng.randint(0, LARGEST), rng.randint(0, LARGEST)) for _ in range(NUM_TESTS)]
        tests = [f"assert f({n}, {k}) == {program.value(n, k)}" for n, k in calls]
        rows.append({"prompt": program.question, "answer": program.careful, "tests": tests})
    return rows
