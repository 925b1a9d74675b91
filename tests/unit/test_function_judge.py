"""Reward functions: how they are found, which arguments they are given, and what they may return."""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raypost.config import Config, JudgeConfig, load_config
from raypost.config.identity import run_identity
from raypost.data.prompt import Prompt
from raypost.errors import ConfigError, JudgeError
from raypost.judges.build import build_judge
from raypost.judges.composed import ComposedJudge
from raypost.judges.function_child import MODULE, RefusedError
from raypost.judges.task_judge import TaskJudge
from raypost.judges.trial import try_judges
from raypost.observe.metrics import JudgeFigures
from raypost.types import Group, RolloutState, Score
from raypost.types.packed import pack_groups, unpack_groups
from tests.factories import plain_config, refusal_of
from tests.unit.reward_functions import called, config_of, state_of, task_of, write

YAML = """
model: {{name: tiny}}
tasks: [{{source: {{kind: reasoning_gym, dataset: chain_sum}}, judge: {{kind: function, function: "{function}"}}}}]
train: {{num_steps: 4, batch_size: 8}}
"""


@pytest.fixture(autouse=True)
def no_module_is_left() -> Iterator[None]:
    yield
    sys.modules.pop(MODULE, None)


def configured(folder: Path, function: str) -> Config:
    (folder / "config.yaml").write_text(YAML.format(function=function))
    return load_config(folder / "config.yaml")


# ---------------------------------------------------------------- which arguments


def test_a_function_is_given_the_fields_that_it_names() -> None:
    source = """
        def score(response, answer, prompt, metadata, level, turns, response_ids, prompt_ids):
            assert prompt == "2 + 2?" and metadata["level"] == level == 3
            assert [t["role"] for t in turns] == ["user", "assistant"]
            assert (list(prompt_ids), list(response_ids)) == ([1, 2], [5, 6])
            return float(response == answer)
    """
    assert called(source, "4", "5") == [1.0, 0.0]


def test_a_function_may_ask_for_the_whole_sample_or_for_all_that_there_is() -> None:
    assert called("def score(sample): return len(sample.response)", "ab", "") == [2.0, 0.0]
    assert called("def score(response, **rest): return len(rest['turns'])", "ab") == [2.0]
    assert called("def score(response, other=5): return other", "ab") == [5.0]


def test_a_function_of_groups_is_called_once_and_gives_a_score_for_each() -> None:
    source = """
        def score(samples):
            longest = max(len(s.response) for s in samples)
            return [len(s.response) / longest for s in samples]
    """
    assert called(source, "a", "bbbb") == [0.25, 1.0]


TRL = """
    import re

    # From TRL's documentation, as it stands there.
    def reward_func(completions, ground_truth, **kwargs):
        matches = [re.search(r"\\\\boxed\\{(.*?)\\}", completion) for completion in completions]
        contents = [match.group(1) if match else "" for match in matches]
        return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]

    def format_reward_func(completions, **kwargs):
        contents = [completion[0]["content"] for completion in completions]
        return [1.0 if content.startswith("<think>") else 0.0 for content in contents]

    def everything(prompts, completions, completion_ids, level):
        assert prompts == ["2 + 2?"] * 2 and completion_ids == [[5, 6]] * 2 and level == [3, 3]
        return [0.0, 0.0]
"""


def test_functions_of_trl_run_unchanged() -> None:
    responses = [r"\boxed{4}", r"\boxed{5}"]
    assert called(TRL, *responses, name="reward_func", answer_field="ground_truth") == [1.0, 0.0]
    assert called(TRL, "<think>", "no", name="format_reward_func", chat=True) == [1.0, 0.0]
    assert called(TRL, *responses, name="everything") == [0.0, 0.0]


def test_an_argument_that_nothing_is_known_of_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(RefusedError, match=r"'solution', which is none of .*answer.*level.*response"):
        called("def score(solution): return 1", "4")


# ---------------------------------------------------------------- what may come back


def test_numbers_of_all_kinds_are_scores() -> None:
    source = """
        import numpy, torch
        given = iter([True, 2, 0.5, numpy.float32(0.25), numpy.int64(3), torch.tensor(1.5)])
        def score(response): return next(given)
    """
    assert called(source, *"abcdef") == [1.0, 2.0, 0.5, 0.25, 3.0, 1.5]
    assert called("import numpy\ndef score(samples): return numpy.ones(2)", "a", "b") == [1.0, 1.0]


def test_a_score_has_named_parts() -> None:
    source = """
        from raypost import Score
        def score(response): return Score(1.5, {"right": 1, "short": 0.5})
    """
    (score,) = called(source, "4")
    assert isinstance(score, Score) and (score, score.reward) == (1.5, 1.5)
    assert score.parts == {"right": 1.0, "short": 0.5}
    again = pickle.loads(pickle.dumps(score, 5))
    assert type(again) is Score and (again, again.parts) == (score, score.parts)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("float('nan')", "returned nan: a score must be finite"),
        ("float('inf')", "returned inf"),
        ("None", "returned None, a NoneType: a score must be a number"),
        ("'1.0'", "returned '1.0', a str"),
        ("[1.0]", "a list: a score must be a number"),
        ("Score(1, {'a': None})", "part 'a' is None, a NoneType"),
        ("Score(1, {'a': float('nan')})", "part 'a' is nan"),
        ("Score(float('nan'))", "returned nan"),
        ("Score(1, {3: 1.0})", "named a part 3"),
    ],
)
def test_what_is_no_score_is_refused_by_value(returned: str, text: str) -> None:
    with pytest.raises(RefusedError) as caught:
        called(f"from raypost import Score\ndef score(response): return {returned}", "4")
    assert text in str(caught.value) and "reward.py:score" in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("[1.0]", "returned 1 scores for 2 responses: it must return one for each"),
        ("[1.0] * 3", "returned 3 scores for 2"),
        ("1.0", "returned a float (1.0) for 2 responses: it must return a list"),
        ("None", "returned a NoneType"),
        ("[1.0, None]", "returned None"),
        ("'ab'", "returned a str ('ab')"),
    ],
)
@pytest.mark.parametrize("parameter", ["samples", "completions"])
def test_too_few_scores_or_none_are_refused(parameter: str, returned: str, text: str) -> None:
    with pytest.raises(RefusedError) as caught:
        called(f"def score({parameter}): return {returned}", "4", "5")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def scores(): pass", "reward.py has no 'score'"),
        ("score = 3", "is a int and no function"),
        (
            "import nosuchmodule",
            "cannot be imported: ModuleNotFoundError: No module named 'nosuchmodule' (line 1 of",
        ),
        ("def score(:", "cannot be imported: SyntaxError"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        ("def score(response, /): return 1", "positional-only parameter 'response'"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_named(source: str, text: str) -> None:
    with pytest.raises(RefusedError) as caught:
        called(source, "4")
    assert text in str(caught.value)


# ---------------------------------------------------------------- the configuration


def test_a_file_is_relative_to_the_configuration_and_its_text_travels_with_it(tmp_path: Path) -> None:
    write(tmp_path, "def score(response): return 1.0")
    judge = configured(tmp_path, "reward.py:score").tasks[0].judge
    assert judge.function == "reward.py:score" and judge.function_source == "def score(response): return 1.0"
    absolute = configured(tmp_path, f"{tmp_path}/reward.py:score").tasks[0].judge
    assert absolute.function_source == judge.function_source
    assert configured(tmp_path, "rewards.words:score").tasks[0].judge.function_source is None


def test_another_reward_is_another_run_wherever_its_file_lies(tmp_path: Path) -> None:
    write(tmp_path, "def score(response): return 1.0")
    first = run_identity(configured(tmp_path, "reward.py:score"))
    (there := tmp_path / "there").mkdir()
    write(there, "def score(response): return 1.0")
    assert run_identity(configured(there, "reward.py:score")) == first
    write(there, "def score(response): return 0.0")
    assert run_identity(configured(there, "reward.py:score")) != first


@pytest.mark.parametrize(
    ("judge", "texts"),
    [
        ({"kind": "function"}, ["function is null", "FILE.py:NAME"]),
        ({"kind": "function", "function": "score"}, ["'score' names no function", "reward.py:score"]),
        (
            {"kind": "function", "function": "gone.py:score"},
            ["gone.py cannot be read", "No such file", "relative"],
        ),
        (
            {"kind": "exact", "function": "a:b"},
            ["function 'a:b' is not used by kind 'exact'", "kind 'function'"],
        ),
        (
            {"kind": "function", "function": "a:b", "answer_pattern": "(a)"},
            ["answer_pattern '(a)' is not used"],
        ),
        ({"kind": "function", "function": "a:b", "timeout_s": 0}, ["timeout_s", "greater than 0"]),
        ({"kind": "composed"}, ["parts is empty"]),
        ({"kind": "composed", "parts": {"a b": {"kind": "exact"}}}, ["parts.a b"]),
        (
            {"kind": "composed", "parts": {"a": {"kind": "exact", "weight": "x"}}},
            ["parts.a.weight", "number"],
        ),
        ({"kind": "composed", "parts": {"a": {"kind": "exact", "wait": 2}}}, ["did you mean weight?"]),
        ({"kind": "composed", "parts": {"a": {"kind": "exactly"}}}, ["parts.a.kind", "'exactly'"]),
        (
            {"kind": "composed", "parts": {"a": {"kind": "reward_model", "reward_model": "x"}}},
            ["judge.parts.a", "'x'"],
        ),
        ({"kind": "exact", "parts": {"a": {"kind": "exact"}}}, ["parts", "is not used by kind 'exact'"]),
        (
            {"kind": "composed", "parts": {"a": {"kind": "exact", "weight": float("nan")}}},
            ["parts.a.weight", "finite"],
        ),
        (
            {"kind": "composed", "combine": "function", "parts": {"a": {"kind": "exact"}}},
            ["combine is 'function' and function None", "both"],
        ),
        (
            {"kind": "composed", "function": "a:b", "parts": {"a": {"kind": "exact"}}},
            ["combine is 'sum' and function 'a:b'"],
        ),
        (
            {"kind": "composed", "route_by": "level", "combine": "min", "parts": {"a": {"kind": "exact"}}},
            ["route_by is 'level'", "combine 'min' is not used"],
        ),
    ],
)
def test_a_judge_that_cannot_work_is_refused(judge: dict[str, Any], texts: list[str]) -> None:
    found = refusal_of(plain_config(tasks__0__judge=judge))
    assert all(text in found for text in ["tasks.0" if "x" not in texts[-1] else "", *texts]), found


def test_a_file_that_is_too_long_to_travel_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "#" * 1_000_001)
    with pytest.raises(ConfigError, match=r"1000001 bytes, more than 1000000: .*module:function"):
        configured(tmp_path, "reward.py:score")


# ---------------------------------------------------------------- composed judges


class Fixed:
    """Gives these scores, or raises."""

    def __init__(self, *scores: float | Exception) -> None:
        self.scores = scores

    async def judge(self, states: list[RolloutState]) -> list[float]:
        for score in self.scores:
            if isinstance(score, Exception):
                raise score
        return [score for score in self.scores if isinstance(score, float)]


@pytest.mark.parametrize(
    ("combine", "rewards"), [("sum", [2.25, 1.0]), ("product", [0.5, 0.0]), ("min", [0.25, 0.0])]
)
async def test_parts_become_one_reward_and_keep_their_names(combine: str, rewards: list[float]) -> None:
    short = Fixed(Score(0.5, {"words": 3.0}), 0.0)
    judge = ComposedJudge({"right": (2.0, Fixed(1.0, 0.5)), "short": (0.5, short)}, combine)
    scores = await judge.judge([state_of("a"), state_of("b")])
    assert scores == rewards
    assert isinstance(scores[0], Score) and scores[0].parts == {
        "right": 1.0,
        "short": 0.5,
        "short/words": 3.0,
    }


async def test_words_of_parts_are_told_apart() -> None:
    parts = {
        "a": (1.0, Fixed(Score(1.0, words="right"))),
        "b": (1.0, Fixed(0.0)),
        "c": (1.0, Fixed(Score(1.0))),
    }
    (score,) = await ComposedJudge(parts, "sum").judge([state_of("a")])
    assert isinstance(score, Score) and score.words == "a: right"


async def test_what_a_judge_says_beside_the_reward_stays_with_the_trajectory() -> None:
    (score,) = await TaskJudge(task_of(JudgeConfig(kind="exact", answer_pattern="(.*)"))).judge(
        [state_of("4")]
    )
    assert isinstance(score, Score) and score.seconds > 0 and score.retries == 0
    score.parts, score.words, score.retries = {"right": 1.0}, "well done", 2
    state = state_of("4")
    state.set_reward(pickle.loads(pickle.dumps(score)))
    (back,) = unpack_groups(pack_groups([Group(task=state.task, group_id=state.group_id, states=[state])]))
    (member,) = back.states
    assert (member.reward, type(member.reward)) == (float(score), float)
    assert (member.reward_parts, member.judge_words) == ({"right": 1.0}, "well done")
    assert (member.judge_s, member.judge_retries) == (score.seconds, 2)
    member.reset()
    assert (member.reward, member.reward_parts, member.judge_words, member.judge_retries) == (None, {}, "", 0)


async def test_a_part_that_fails_fails_the_whole_by_name() -> None:
    judge = ComposedJudge({"right": (1.0, Fixed(1.0)), "nice": (1.0, Fixed(JudgeError("no service")))}, "sum")
    with pytest.raises(JudgeError, match="part 'nice': no service"):
        await judge.judge([state_of("a")])
    with pytest.raises(JudgeError, match="part 'right' gave 1 scores for 2"):
        await ComposedJudge({"right": (1.0, Fixed(1.0))}, "sum").judge([state_of("a"), state_of("b")])


async def test_each_response_goes_to_the_part_that_its_row_names() -> None:
    asked = dict[str, list[str]]()

    class Part(Fixed):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        async def judge(self, states: list[RolloutState]) -> list[float]:
            asked[self.name] = [state.response_text for state in states]
            return [1.0] * len(states)

    parts = {"code": (2.0, Part("code")), "default": (1.0, Part("default"))}
    judge = ComposedJudge(parts, route_by="domain")
    states = [
        state_of("a", domain="code"),
        state_of("b", domain="chess"),
        state_of("c"),
        state_of("d", domain="code"),
    ]
    scores = await judge.judge(states)
    assert scores == [2.0, 1.0, 1.0, 2.0] and asked == {"code": ["a", "d"], "default": ["b", "c"]}
    assert [score.parts for score in scores if isinstance(score, Score)][:2] == [
        {"code": 1.0},
        {"default": 1.0},
    ]
    with pytest.raises(JudgeError, match=r"its row has domain 'chess', and parts are \['code'\]"):
        await ComposedJudge({"code": parts["code"]}, route_by="domain").judge(states)


async def test_a_function_makes_one_reward_of_the_parts_scores() -> None:
    source = """
        from raypost import Score
        def combine(scores, answer, response):
            assert answer == "4"
            return Score(max(scores.values()) + len(response), {"best": max(scores.values())})
    """
    function = config_of(source, "reward.py:combine")
    parts = {"exact": {"kind": "exact"}, "math": {"kind": "exact", "answer_pattern": "(.)"}}
    config = JudgeConfig.model_validate(
        {
            "kind": "composed",
            "combine": "function",
            "function": function.function,
            "function_source": function.function_source,
            "parts": parts,
        }
    )
    judge = TaskJudge(task_of(config))
    right, wrong = await judge.judge([state_of("4"), state_of("15")])
    await judge.close()
    assert (right, wrong) == (2.0, 2.0)
    assert isinstance(right, Score) and right.parts == {"exact": 1.0, "math": 1.0, "best": 1.0}
    assert list(try_judges(task_of(config), [Prompt("2 + 2?", {"question": "2 + 2?", "answer": "4"})])) == []
    broken = config.model_copy(update={"function_source": "def combine(scores): return scores['gone']"})
    (problem,) = try_judges(task_of(broken), [Prompt("2 + 2?", {"question": "2 + 2?", "answer": "4"})])
    assert "KeyError: 'gone'" in problem


async def test_a_configuration_of_parts_is_built_with_its_weights() -> None:
    config = JudgeConfig.model_validate(
        {
            "kind": "composed",
            "parts": {
                "right": {"kind": "exact", "answer_pattern": r"(\d)", "weight": 2},
                "inner": {"kind": "composed", "combine": "min", "parts": {"whole": {"kind": "exact"}}},
            },
        }
    )
    scores = await build_judge(task_of(config)).judge([state_of("it is 4"), state_of("4")])
    assert scores == [2.0, 3.0]
    assert isinstance(scores[0], Score) and scores[0].parts == {
        "right": 1.0,
        "inner": 0.0,
        "inner/whole": 0.0,
    }


def test_figures_add_up_and_begin_again() -> None:
    figures, all_of_them = JudgeFigures(), JudgeFigures()
    figures.count(1.0)
    figures.count(3.0, num_failed=4)
    figures.count_parts({"a": 1.0})
    figures.count_parts({"a": 0.5, "b": 2.0})
    assert figures.metrics("words") == {
        "judge_s/words": 2.0,
        "judge_s_max/words": 3.0,
        "judge_failed/words": 4,
        "judge_retries/words": 0,
        "reward_part/words/a": 0.75,
        "reward_part/words/b": 2.0,
    }
    all_of_them.add(figures.drain())
    assert (figures, figures.drain()) == (JudgeFigures(), JudgeFigures())
    all_of_them.add(all_of_them)
    assert (all_of_them.calls, all_of_them.failed, all_of_them.seconds_max) == (4, 8, 3.0)
    assert all_of_them.part_means() == {"a": 0.75, "b": 2.0} and math.isclose(all_of_them.seconds, 8.0)
