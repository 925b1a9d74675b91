"""Reward models as judges see them: what is read, what is scored as it is, and what never gets a score."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypost.config import RewardModelConfig, TaskConfig, parse_config
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError, JudgeError, WaitTimeoutError
from raypost.judges import RewardModelJudge, build_judge
from raypost.judges.reward_model import RewardModelInput, check_reward_model
from raypost.types import RolloutState, SampleParams
from tests.factories import plain_config
from tests.unit.tokenizers import write_tokenizer

TASK = TaskConfig.model_validate({
    "name": "sums",
    "source": {"kind": "reasoning_gym", "dataset": "chain_sum"},
    "judge": {"kind": "reward_model", "reward_model": "tutor"},
    "prompt_template": "Work it out: {question}",
})  # fmt: skip
QUESTION, ANSWER = "What is 3 plus 4?", "seven"


def state(response: str, sample_index: int = 0, **metadata: Any) -> RolloutState:
    return RolloutState(
        task="sums",
        group_id=7,
        sample_index=sample_index,
        prompt_ids=np.zeros(1, np.int32),
        sample_params=SampleParams(max_tokens=8),
        metadata={"question": QUESTION} | metadata,
        response_text=response,
    )


class Scripted:
    """Scores a response by what stands in `scores`; whoever is asked with "slow" is waited for."""

    def __init__(self, **scores: float | Exception) -> None:
        self.scores = scores
        self.asked: list[tuple[str, str]] = []
        self.ended: list[str] = []

    async def score(self, prompt: str, response: str) -> float:
        self.asked.append((prompt, response))
        try:
            await asyncio.sleep(60 if response == "hang" else 0.01)
        finally:
            self.ended.append(response)
        score = self.scores[response]
        if isinstance(score, Exception):
            raise score
        return score


async def test_scores_come_back_as_they_are_in_the_order_of_the_responses() -> None:
    model = Scripted(good=7.25, bad=-31.5, none=0.0)
    judge = build_judge(TASK, {"tutor": model, "other": Scripted()})
    assert await judge.judge([state(text) for text in ("bad", "good", "none")]) == [-31.5, 7.25, 0.0]
    assert model.asked[0] == ("Work it out: What is 3 plus 4?", "bad")


@pytest.mark.parametrize(
    ("score", "part"),
    [
        (JudgeError("5000 of its tokens"), "5000 of its tokens"),
        (WaitTimeoutError("waited 9 s for reward-tutor-0"), "waited 9 s for reward-tutor-0"),
        (float("nan"), "gave nan"),
        (float("inf"), "gave inf"),
    ],
)
async def test_response_without_a_score_is_a_failure_that_names_group_sample_and_model(
    score: float | Exception, part: str
) -> None:
    model = Scripted(good=1.0, bad=score)
    with pytest.raises(JudgeError, match=rf"task 'sums', group 7, sample 3: reward model 'tutor'.*{part}"):
        await RewardModelJudge(model, TASK).judge([state("good"), state("bad", 3), state("good")])
    assert len(model.ended) == 3, "nobody is left behind"


async def test_bug_of_a_reward_model_is_no_judgement() -> None:
    with pytest.raises(ZeroDivisionError):
        await RewardModelJudge(Scripted(bad=ZeroDivisionError()), TASK).judge([state("bad")])


async def test_interrupted_judging_asks_for_nothing_more() -> None:
    model = Scripted(good=1.0)
    judging = asyncio.create_task(RewardModelJudge(model, TASK).judge([state("hang"), state("hang")]))
    await asyncio.sleep(0.01)
    judging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await judging
    assert model.ended == ["hang", "hang"]


async def test_trajectory_that_does_not_know_its_prompt_is_a_failure() -> None:
    broken = state("good")
    broken.metadata = {}
    with pytest.raises(JudgeError, match="metadata lacks 'question'"):
        await RewardModelJudge(Scripted(good=1.0), TASK).judge([broken])


def test_reward_model_that_nobody_hosts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"judge.reward_model is 'tutor', but there are \['critic'\]"):
        build_judge(TASK, {"critic": Scripted()})


# ---------------------------------------------------------------- what a reward model reads


def test_prompt_and_response_are_a_conversation_in_the_models_own_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, config={})
    tokenizer = Tokenizer.load(tmp_path)
    ids = RewardModelInput.load(tmp_path, 500).ids(QUESTION, ANSWER)
    text = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n{ANSWER}<|im_end|>\n"  # no prompt behind it
    assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False).tolist()


def test_without_a_template_the_response_follows_the_prompt(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"eos_token": "<|im_end|>"}, config={})
    ids = RewardModelInput.load(tmp_path, 500).ids(QUESTION, ANSWER)
    assert ids.tolist() == Tokenizer.load(tmp_path).encode(QUESTION + ANSWER).tolist()
    assert ids[0] == 1, "with what the tokenizer puts in front of a text"


def test_padding_behind_the_text_is_not_where_the_score_is_read(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"eos_token": "<|im_end|>"}, config={"pad_token_id": 0})
    reads = RewardModelInput.load(tmp_path, 500)
    plain = reads.ids(QUESTION, ANSWER).tolist()
    assert 0 not in plain and reads.ids(QUESTION, ANSWER + "<pad><pad>").tolist() == plain
    assert 0 in reads.ids(QUESTION, "<pad>" + ANSWER)


def test_text_is_never_cut_and_never_empty(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"eos_token": "<|im_end|>"}, config={})
    length = len(RewardModelInput.load(tmp_path, 500).ids(QUESTION, ANSWER))
    assert len(RewardModelInput.load(tmp_path, length).ids(QUESTION, ANSWER)) == length
    with pytest.raises(JudgeError, match=f"{length} of its tokens, more than its max_model_len {length - 1}"):
        RewardModelInput.load(tmp_path, length - 1).ids(QUESTION, ANSWER)
    silent = RewardModelInput(_Silent(tmp_path), 500)
    with pytest.raises(JudgeError, match="there is nothing to score"):
        silent.ids("", "")


class _Silent(Tokenizer):
    """A tokenizer that puts nothing in front of a text."""

    def __init__(self, folder: Path) -> None:
        self.__dict__.update(Tokenizer.load(folder).__dict__)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Any:
        return super().encode(text, add_special_tokens=False)


# ---------------------------------------------------------------- which models can be one

CLASSIFIER = {
    "architectures": ["LlamaForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
    "max_position_embeddings": 64,
}


def check(folder: Path, max_model_len: int = 64, **config: Any) -> None:
    kept = {name: value for name, value in (CLASSIFIER | config).items() if value is not None}
    write_tokenizer(folder, config=kept)
    check_reward_model(
        RewardModelConfig(name="tutor", model=str(folder), max_model_len=max_model_len), folder
    )


def test_classifier_with_one_output_can_be_a_reward_model(tmp_path: Path) -> None:
    check(tmp_path)
    check(tmp_path, id2label=None, num_labels=1)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"\['LlamaForCausalLM'\], which give no score"),
        ({"architectures": None}, "which give no score"),
        ({"id2label": {"0": "no", "1": "yes"}}, "2 outputs, but a reward is one number"),
        ({"id2label": None}, "2 outputs"),
        ({"max_position_embeddings": 63}, "63 positions .*fewer than max_model_len 64"),
    ],
)
def test_model_that_gives_no_single_score_is_refused(
    tmp_path: Path, config: dict[str, Any], part: str
) -> None:
    with pytest.raises(ConfigError, match=f"reward_models 'tutor': .*{part}"):
        check(tmp_path, **config)


def test_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    model = RewardModelConfig(name="tutor", model=str(tmp_path))
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        check_reward_model(model, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="must hold a mapping, got list"):
        check_reward_model(model, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CLASSIFIER | {"max_position_embeddings": 4096}))
    with pytest.raises(ConfigError, match="tokenizer"):
        check_reward_model(model, tmp_path)


# ---------------------------------------------------------------- the configuration

GOOD = plain_config(
    tasks__0__judge={"kind": "reward_model", "reward_model": "tutor"},
    train__loss={"kl": {"coefficient": 0.1, "pool": {"name": "ref"}}},
    reward_models=[{"name": "tutor", "model": "./tutor"}],
)


def test_reward_model_and_reference_on_engines_of_their_own_are_accepted() -> None:
    config = parse_config(GOOD)
    assert config.reward_models[0].max_model_len == 4096
    assert config.train.loss.kl.pool is not None


@pytest.mark.parametrize(
    ("judge", "models", "part"),
    [
        ({"kind": "reward_model"}, None, "reward_model is null: name one"),
        ({"kind": "exact", "reward_model": "tutor"}, None, "'tutor' is not used by kind 'exact'"),
        (
            {"kind": "reward_model", "reward_model": "tutor", "answer_pattern": "(x)"},
            None,
            "'(x)' is not used by kind 'reward_model'",
        ),
        ({"kind": "reward_model", "reward_model": "other"}, None, "but reward_models has ['tutor']"),
        ({"kind": "exact"}, None, "which no task's judge.reward_model or agent_loop.reward_model names"),
        (
            {"kind": "reward_model", "reward_model": "tutor"},
            2,
            "need different names, got ['tutor', 'tutor']",
        ),
    ],
)
def test_judge_and_reward_models_that_do_not_fit_are_refused(
    judge: dict[str, str], models: int | None, part: str
) -> None:
    raw = GOOD | {"tasks": [GOOD["tasks"][0] | {"judge": judge}]}
    raw["reward_models"] = GOOD["reward_models"] * (models or 1)
    with pytest.raises(ConfigError) as error:
        parse_config(raw)
    assert part in str(error.value)


def test_reference_that_no_loss_asks_for_is_refused() -> None:
    raw = GOOD | {"train": GOOD["train"] | {"loss": {"kl": {"pool": {"name": "ref"}}}}}
    with pytest.raises(ConfigError, match=r"kl\.pool is 'ref', but kl\.coefficient is 0"):
        parse_config(raw)
