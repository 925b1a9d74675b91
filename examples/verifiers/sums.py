"""A taskset of verifiers, as `vf-eval` runs it: nothing in here knows of raypost."""

# ruff: noqa: D101, D102
import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(re.findall(r"-?\d+", trace.last_reply)[-1:] == [self.data.answer])


class Sums(vf.Taskset[Sum]):
    def load(self) -> Iterator[Sum]:
        for seed in range(400):
            terms = " + ".join(map(str, random.Random(seed).choices(range(1, 10), k=3)))
            asked = f"State the final answer to the following arithmetic problem: {terms} ="
            yield Sum(SumData(prompt=asked, answer=str(sum(map(int, terms.split(" + "))))))
