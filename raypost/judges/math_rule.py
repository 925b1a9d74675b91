"""The function of judge.kind math: whether a response says the answer, compared as mathematics by math-verify.

It runs as a reward function does, in a process of its own: math-verify bounds its own time with a signal, which only
the main thread of a process can have, and some formulas take it long.
"""

from __future__ import annotations

from math_verify import parse, verify

_DELIMITERS = ("$", "\\(", "\\[", "\\boxed")
"""What a text has that says itself where its mathematics is."""


def score(response: str, answer: str) -> float:
    r"""Return 1 if the response's last \boxed{}, formula or number equals the answer, else 0.

    A response without mathematics is wrong. Raises ValueError for an answer without.
    """
    delimited = any(mark in answer for mark in _DELIMITERS)
    gold = parse(answer if delimited else f"${answer}$")
    if not gold:
        raise ValueError(f"math-verify finds no mathematics in the answer {answer!r:.80}")
    return float(verify(gold, parse(response)))
