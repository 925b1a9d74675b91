"""Judges that score by rule: extracting the answer, the scorers, and what fails."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from raypost.config import JudgeConfig, SourceConfig, TaskConfig
from raypost.data.sources import Stream
from raypost.data.task_source import build_source
from raypost.errors import JudgeError
from raypost.judges import RuleJudge, build_judge
from raypost.judges.rules import extract_answer
from raypost.types import RolloutState, SampleParams

LAST_NUMBER = r"(-?\d+)\s*$"


def state(response: str, metadata: Mapping[str, object]) -> RolloutState:
    return RolloutState(
        task="sums",
        group_id=7,
        sample_index=1,
        prompt_ids=np.zeros(1, np.int32),
        sample_params=SampleParams(max_tokens=8),
        metadata=dict(metadata),
        response_text=response,
    )


def sums(**judge: Any) -> TaskConfig:
    return TaskConfig(
        source=SourceConfig(kind="reasoning_gym", dataset="chain_sum"), judge=JudgeConfig(**judge)
    )


@pytest.mark.parametrize(
    ("response", "answer"),
    [("\n7 - 9 =\n-2", "-2"), (" 12 ", "12"), ("12 apples", None), ("", None), ("3\n4", "4")],
)
def test_the_last_match_of_the_pattern_is_the_answer(response: str, answer: str | None) -> None:
    assert extract_answer(response, re.compile(LAST_NUMBER)) == answer


def test_of_several_matches_the_last_one_counts() -> None:
    assert extract_answer("3 or rather 4, says he", re.compile(r"(\d+)")) == "4"


def test_without_a_pattern_the_whole_response_is_the_answer() -> None:
    assert extract_answer(" sun \n", None) == "sun"


async def test_right_and_wrong_answers_are_scored_by_the_datasets_own_scorer_in_order() -> None:
    task = sums(answer_pattern=LAST_NUMBER)
    source = build_source(task, 0)
    assert not isinstance(source, Stream)
    metadata = source.sample(0).metadata
    right = metadata["answer"]
    responses = [f"\n1 =\n{right}", " no idea", "", f"{right}00"]
    scores = await build_judge(task).judge([state(response, metadata) for response in responses])
    assert scores[:3] == [1.0, 0.0, 0.0]
    assert 0 < scores[3] < 1


async def test_exact_judge_compares_with_the_answer_and_nothing_else() -> None:
    judge = build_judge(sums(kind="exact", answer_pattern=LAST_NUMBER))
    metadata = {"answer": 5}
    assert await judge.judge([state(" 5", metadata), state(" 15", metadata)]) == [1.0, 0.0]


async def test_a_scorer_that_fails_raises_and_names_the_group() -> None:
    def broken(answer: str, metadata: dict[str, object]) -> float:
        raise ZeroDivisionError("oops")

    with pytest.raises(JudgeError, match=r"group 7, sample 1.*ZeroDivisionError: oops"):
        await RuleJudge(broken).judge([state("5", {})])


async def test_a_score_that_is_no_number_is_a_failure() -> None:
    with pytest.raises(JudgeError, match="nan"):
        await RuleJudge(lambda answer, metadata: float("nan")).judge([state("5", {})])


async def test_an_entry_missing_from_the_metadata_is_a_failure_and_not_a_zero() -> None:
    with pytest.raises(JudgeError, match="KeyError"):
        await build_judge(sums()).judge([state("5", {})])
