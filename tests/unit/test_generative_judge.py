"""Judges that ask a language model: what it is asked, what is a verdict, and what becomes of nonsense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypost.config import JudgeConfig, parse_config
from raypost.config.engine import EngineConfig
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError, JudgeError, RaypostError
from raypost.judges import generative
from raypost.judges.generative import PolicyModel
from raypost.judges.task_judge import TaskJudge
from raypost.types import Score
from tests.factories import plain_config, refusal_of
from tests.unit.reward_functions import state_of, task_of
from tests.unit.scripted_generator import ScriptedGenerator, result
from tests.unit.tokenizers import write_tokenizer

TEMPLATE = "Q: {prompt} A: {response} Right: {answer}. Say yes or no."
YES_NO = {
    "kind": "generative",
    "reward_model": "grader",
    "template": TEMPLATE,
    "choices": {"yes": 1.0, "no": -1.0},
}
NUMBER = {k: v for k, v in YES_NO.items() if k != "choices"} | {"answer_pattern": r"(-?[\d.]+)\s*/ 10"}


class Speaker:
    """Answers these, one after the other; the last for ever."""

    def __init__(self, *answers: str | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, int, float]] = []

    async def answer(self, message: str, max_tokens: int, temperature: float) -> str:
        self.asked.append((message, max_tokens, temperature))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def judge_of(config: dict[str, Any], speaker: Speaker) -> TaskJudge:
    return TaskJudge(task_of(JudgeConfig.model_validate(config)), language_models={"grader": speaker})


@pytest.mark.parametrize(
    ("config", "verdict", "reward"),
    [
        (YES_NO, "Yes", 1.0),
        (YES_NO, "Is it yes or no? It is NO.", -1.0),
        (YES_NO | {"choices": {"good": 1, "very good": 2}}, "very good!", 2.0),
        (YES_NO | {"choices": {"A": 1, "B": 0}}, "Answer: (B)", 0.0),
        (NUMBER, "I say 7 / 10, no, 8.5 / 10", 8.5),
        (NUMBER, "-3 / 10", -3.0),
    ],
)
async def test_a_verdict_is_read(config: dict[str, Any], verdict: str, reward: float) -> None:
    speaker = Speaker(verdict)
    (score,) = await judge_of(config, speaker).judge([state_of("four")])
    assert isinstance(score, Score) and (score, score.words, score.retries) == (reward, verdict, 0)
    assert speaker.asked == [("Q: 2 + 2? A: four Right: 4. Say yes or no.", 32, 0.0)]


async def test_what_a_response_says_is_no_part_of_the_template() -> None:
    speaker = Speaker("no")
    await judge_of(YES_NO, speaker).judge([state_of("{answer} {prompt}")])
    assert speaker.asked[0][0] == "Q: 2 + 2? A: {answer} {prompt} Right: 4. Say yes or no."


@pytest.mark.parametrize("nonsense", ["", "maybe", "yesterday", "nobody knows"])
async def test_an_unreadable_verdict_is_asked_for_again_and_never_a_score(nonsense: str) -> None:
    speaker = Speaker(nonsense, nonsense, "yes")
    (score,) = await judge_of(YES_NO | {"retries": 2}, speaker).judge([state_of("four")])
    assert isinstance(score, Score) and (score, score.retries) == (1.0, 2)
    assert [temperature for _, _, temperature in speaker.asked] == [0.0, 1.0, 1.0]

    speaker = Speaker(nonsense)
    with pytest.raises(
        JudgeError, match=r"judge: .*'grader' gave no verdict in 3 answers.*one of \['no', 'yes'\]"
    ):
        await judge_of(YES_NO | {"retries": 2}, speaker).judge([state_of("four")])
    assert len(speaker.asked) == 3
    for number in ("10", "ten / 10", ". / 10"):
        with pytest.raises(JudgeError, match="gave no verdict in 1 answers"):
            await judge_of(NUMBER | {"retries": 0}, Speaker(number)).judge([state_of("four")])


async def test_a_model_that_fails_is_a_failure_and_no_verdict() -> None:
    with pytest.raises(JudgeError, match="'grader': it is gone"):
        await judge_of(YES_NO, Speaker(RaypostError("it is gone"))).judge([state_of("four")])


async def test_it_may_be_composed_with_a_rule() -> None:
    parts = {"right": {"kind": "exact"}, "nice": YES_NO | {"weight": 0.5}}
    judge = judge_of({"kind": "composed", "parts": parts}, Speaker("yes"))
    (score,) = await judge.judge([state_of("4")])
    assert isinstance(score, Score) and score == 1.5
    assert (score.parts, score.words) == ({"right": 1.0, "nice": 1.0}, "nice: yes")


GRADER = {"name": "grader", "model": "somewhere", "generates": True}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in YES_NO.items() if key != name}


@pytest.mark.parametrize(
    ("judge", "models", "text"),
    [
        (
            without("reward_model"),
            [],
            "reward_model is null: name one of reward_models, with generates: true",
        ),
        (without("template"), [GRADER], "template is None, without {response}"),
        (YES_NO | {"template": "{prompt}?"}, [GRADER], "template is '{prompt}?', without {response}"),
        (without("choices"), [GRADER], "choices are {} and answer_pattern is None: give one of them"),
        (YES_NO | {"answer_pattern": "(.)"}, [GRADER], "give one of them"),
        (YES_NO | {"choices": {"yes": 1, "Yes": 0}}, [GRADER], "must differ by more than case"),
        (YES_NO | {"choices": {"yes": "much"}}, [GRADER], "choices.yes"),
        (YES_NO | {"choices": {"yes": float("nan")}}, [GRADER], "choices.yes"),
        (YES_NO, [], "reward_model is 'grader', but reward_models has []"),
        (YES_NO, [GRADER | {"generates": False}], "generates is false, but the judge's kind is generative"),
        (
            {"kind": "reward_model", "reward_model": "grader"},
            [GRADER],
            "generates is true, but the judge's kind is reward_model",
        ),
        ({"kind": "exact", "template": "x"}, [], "template 'x' is not used by kind 'exact'"),
    ],
)
def test_a_judge_that_cannot_ask_is_refused(judge: dict[str, Any], models: list[Any], text: str) -> None:
    found = refusal_of(plain_config(tasks__0__judge=judge, reward_models=models))
    assert text in found, found


def test_a_judge_that_can_ask_is_accepted() -> None:
    raw = plain_config(tasks__0__judge=YES_NO, reward_models=[GRADER])
    assert parse_config(raw).reward_models[0].generates
    with pytest.raises(ConfigError, match="name one of reward_models"):
        TaskJudge(task_of(JudgeConfig.model_validate(YES_NO)))


# ---------------------------------------------------------------- the policy itself


POLICY_JUDGE = YES_NO | {"reward_model": "policy", "context_tokens": 128}


def test_engines_are_long_enough_for_what_the_policy_is_asked() -> None:
    config = parse_config(plain_config(tasks__0__judge=POLICY_JUDGE))
    assert config.max_model_len < 1024
    longer = parse_config(plain_config(tasks__0__judge=POLICY_JUDGE | {"context_tokens": 1024}))
    assert EngineConfig.of(longer).max_model_len == 1024 and longer.max_model_len == config.max_model_len
    for judge, text in (
        (YES_NO | {"reward_model": "policy"}, "reward_model is 'policy' and context_tokens None"),
        (YES_NO | {"context_tokens": 9}, "reward_model is 'grader' and context_tokens 9"),
        (POLICY_JUDGE | {"context_tokens": 32}, "leave none for the message"),
    ):
        assert text in refusal_of(plain_config(tasks__0__judge=judge, reward_models=[GRADER]))


async def test_the_policy_is_asked_in_its_template_and_a_pause_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generative, "PAUSED_S", 0.0)
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))
    (first, *rest), eos = tokenizer.encode("yes", add_special_tokens=False).tolist(), tokenizer.eos_ids[0]
    answers = [result([first], "abort"), result([], "abort"), result([*rest, eos], "stop")]
    engine = ScriptedGenerator(lambda _: answers[len(engine.requests) - 1])
    policy = PolicyModel(engine, str(tmp_path), 128, 10)
    judge = TaskJudge(
        task_of(JudgeConfig.model_validate(POLICY_JUDGE | {"template": "{response}?"})),
        language_models={"policy": policy},
    )
    assert await judge.judge([state_of("4")]) == [1.0]
    asked = tokenizer.chat([{"role": "user", "content": "4?"}])
    ids = tokenizer.encode(asked, add_special_tokens=False).tolist()
    assert [one.token_ids.tolist() for one in engine.requests] == [ids, [*ids, first], [*ids, first]]
    assert [one.sample_params.max_tokens for one in engine.requests] == [32, 31, 31]
    assert {one.sample_params.temperature for one in engine.requests} == {0.0}

    with pytest.raises(JudgeError, match="longest sequence, 128, leaves 96"):
        await judge.judge([state_of("x" * 500)])
    broken = PolicyModel(ScriptedGenerator(lambda _: result([], "error")), str(tmp_path), 128, 10)
    with pytest.raises(JudgeError, match="finish reason 'error'"):
        await broken.answer("?", 8, 0.0)
    late = PolicyModel(ScriptedGenerator(lambda _: None), str(tmp_path), 128, 0.01)
    with pytest.raises(JudgeError, match="gave no verdict within"):
        await late.answer("?", 8, 0.0)
