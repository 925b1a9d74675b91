"""ComposedJudge: several judges of one response, and the one reward that their scores become.

all parts -> sum, product or minimum of weight x score, or what a function makes of the scores
routed    -> the one part that a column of the response's row names
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from raypost.errors import JudgeError, at
from raypost.types import Judge, RolloutState, Score

COMBINE: dict[str, Callable[[Sequence[float]], float]] = {"sum": math.fsum, "product": math.prod, "min": min}
"""By the names of JudgeConfig.combine."""
SCORES = "scores"
"""What a function that combines asks for."""
DEFAULT = "default"
"""The part of rows that name none."""


class ComposedJudge:
    """Asks its parts at once. A part that fails fails the whole: a reward without it would be another reward."""

    def __init__(
        self,
        parts: Mapping[str, tuple[float, Judge]],
        combine: str = "sum",
        *,
        function: Judge | None = None,
        route_by: str | None = None,
    ) -> None:
        """`parts`: (weight, judge) by name. `combine`: one of COMBINE, unless there is a `function`.

        `function` scores a response with SCORES in its metadata. `route_by`: name of the column that names the part.
        """
        self._parts = dict(parts)
        self._combine = COMBINE.get(combine, math.fsum)
        self._function = function
        self._route_by = route_by

    async def judge(self, states: list[RolloutState]) -> list[float]:
        """Return one Score for each state, with every part's own score by name. Raises JudgeError naming the part."""
        places: dict[str, list[int]] = defaultdict(list)
        for place, state in enumerate(states):
            for name in self._names(state):
                places[name].append(place)
        asked = [self._ask(name, [states[place] for place in of]) for name, of in places.items()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        scores: list[dict[str, float]] = [{} for _ in states]
        for (name, of), answer in zip(places.items(), answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            for place, score in zip(of, answer, strict=True):
                scores[place][name] = score
        if self._function is not None:
            return await self._combined(self._function, states, scores)
        return [self._score(one) for one in scores]

    def _names(self, state: RolloutState) -> list[str]:
        if self._route_by is None:
            return list(self._parts)
        given = state.metadata.get(self._route_by)
        name = str(given) if str(given) in self._parts else DEFAULT
        if name not in self._parts:
            raise JudgeError(
                f"group {state.group_id}: its row has {self._route_by} {given!r:.80}, and parts are "
                f"{sorted(self._parts)}: name a part so, or one {DEFAULT!r}"
            )
        return [name]

    async def _ask(self, name: str, states: list[RolloutState]) -> list[float]:
        try:
            scores = await self._parts[name][1].judge(states)
        except JudgeError as error:
            raise JudgeError(at(f"part {name!r}", str(error))) from error
        if len(scores) != len(states):
            raise JudgeError(f"part {name!r} gave {len(scores)} scores for {len(states)} responses")
        return scores

    def _score(self, scores: Mapping[str, float]) -> Score:
        parts, words = _told(scores)
        return Score(self._combine([self._parts[name][0] * scores[name] for name in scores]), parts, words)

    async def _combined(
        self, function: Judge, states: list[RolloutState], scores: list[dict[str, float]]
    ) -> list[float]:
        seen = [
            replace(
                state, metadata={**state.metadata, SCORES: {name: float(one) for name, one in of.items()}}
            )
            for state, of in zip(states, scores, strict=True)
        ]
        combined = []
        for reward, of in zip(await function.judge(seen), scores, strict=True):
            parts, words = _told(of)
            given = reward if isinstance(reward, Score) else Score(reward)
            combined.append(
                Score(reward, {**parts, **given.parts}, "\n".join(filter(None, [words, given.words])))
            )
        return [*combined]


def _told(scores: Mapping[str, float]) -> tuple[dict[str, float], str]:
    """Return all parts of parts by name, and what was said of them."""
    parts, words = {}, []
    for name, score in scores.items():
        parts[name] = float(score)
        if isinstance(score, Score):
            parts |= {f"{name}/{inner}": value for inner, value in score.parts.items()}
            words += [f"{name}: {score.words}"] if score.words else []
    return parts, "\n".join(words)
