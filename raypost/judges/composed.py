"""ComposedJudge: several judges of one response, and the one reward that their scores become."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence

from raypost.errors import JudgeError
from raypost.protocols import Judge
from raypost.types import RolloutState, Score

COMBINE: dict[str, Callable[[Sequence[float]], float]] = {"sum": math.fsum, "product": math.prod, "min": min}
"""By the names of JudgeConfig.combine."""


class ComposedJudge:
    """Asks all its parts at once. A part that fails fails the whole: a reward without it would be another reward."""

    def __init__(self, parts: Mapping[str, tuple[float, Judge]], combine: str) -> None:
        """`parts`: (weight, judge) by name. `combine`: one of COMBINE."""
        self._parts = dict(parts)
        self._combine = COMBINE[combine]

    async def judge(self, states: list[RolloutState]) -> list[float]:
        """Return one Score for each state, with every part's own score by name. Raises JudgeError naming the part."""
        asked = [self._ask(name, judge, states) for name, (_, judge) in self._parts.items()]
        scores = await asyncio.gather(*asked, return_exceptions=True)
        for score in scores:
            if isinstance(score, BaseException):
                raise score
        by_part = {name: one for name, one in zip(self._parts, scores, strict=True) if isinstance(one, list)}
        return [self._score({name: one[n] for name, one in by_part.items()}) for n in range(len(states))]

    async def _ask(self, name: str, judge: Judge, states: list[RolloutState]) -> list[float]:
        try:
            scores = await judge.judge(states)
        except JudgeError as error:
            raise JudgeError(f"part {name!r}: {error}") from error
        if len(scores) != len(states):
            raise JudgeError(f"part {name!r} gave {len(scores)} scores for {len(states)} responses")
        return scores

    def _score(self, scores: Mapping[str, float]) -> Score:
        parts, words = {}, []
        for name, score in scores.items():
            parts[name] = float(score)
            if isinstance(score, Score):
                parts |= {f"{name}/{inner}": value for inner, value in score.parts.items()}
                words += [f"{name}: {score.words}"] if score.words else []
        reward = self._combine([self._parts[name][0] * scores[name] for name in scores])
        return Score(reward, parts, "\n".join(words))
