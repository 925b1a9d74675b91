"""What this run is rewarded for: the right number at the end of a response."""

import re

from raypost import Score


def score(response: str, answer: str) -> Score:
    """Return 1 for a right answer, and how many lines of working the response has, which is only watched."""
    numbers = re.findall(r"-?\d+", response.rsplit("\n", 1)[-1])
    right = float(bool(numbers) and numbers[-1] == answer)
    return Score(right, {"right": right, "lines": response.count("\n")})
