"""Judges that ask a reward model, and what a reward model reads.

Owns the text that is scored, its tokens and the error of a failure. Owns no model: the judge is given one.

    prompt, response -> conversation in the reward model's own chat template -> its own tokens -> score
                        (one after the other, where its tokenizer has no template)

Invariants: the score is the model's output as it is, neither squashed nor scaled; nothing is cut to fit; a response
that cannot be scored raises JudgeError and never gets a score.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from raypost.config import RewardModelConfig, TaskConfig
from raypost.data.prompt import prompt_text
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError, JudgeError, RaypostError
from raypost.types import IntArray, RolloutState

_SCORES = "ForSequenceClassification"
"""Ending of the names of sequence classifiers in Transformers."""
_SPEAKS = "ForCausalLM"


class RewardModel(Protocol):
    """A model that scores one response at a time; many are asked at once."""

    async def score(self, prompt: str, response: str) -> float:
        """Return how good the response is. Raises RaypostError if it cannot be scored."""
        ...


async def each(score: Callable[[RolloutState], Awaitable[float]], states: list[RolloutState]) -> list[float]:
    """Return every state's score, asked for at once. When all are done, raises what the first failure raised."""
    scores = []
    for done in await asyncio.gather(*map(score, states), return_exceptions=True):
        if isinstance(done, BaseException):
            raise done
        scores.append(done)
    return scores


class RewardModelJudge:
    """Gives the score of a reward model for the task's prompt and the response."""

    def __init__(self, model: RewardModel, task: TaskConfig, name: str | None = None) -> None:
        """Read prompts as `task` makes them. `name`: the model's, in errors; None: that of the task's judge."""
        self._model = model
        self._task = task
        self._name = name or task.judge.reward_model

    async def judge(self, states: list[RolloutState]) -> list[float]:
        """Return one score for each state. Raises JudgeError naming the first without one."""
        return await each(self._score, states)

    async def _score(self, state: RolloutState) -> float:
        who = (
            f"task {state.task!r}, group {state.group_id}, sample {state.sample_index}: "
            f"reward model {self._name!r}"
        )
        if "question" not in state.metadata:
            raise JudgeError(f"{who} has no prompt to read: the trajectory's metadata lacks 'question'")
        prompt = prompt_text(self._task, state.metadata)
        try:
            score = float(await self._model.score(prompt, state.response_text))
        except RaypostError as error:
            raise JudgeError(f"{who}: {error}") from error
        if not math.isfinite(score):
            raise JudgeError(f"{who} gave {score}; a score must be finite")
        return score


class RewardModelInput:
    """Turns a prompt and a response into the tokens that one reward model reads."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, pad_id: int | None = None) -> None:
        """`pad_id`: the model's padding token, of which none may end the input."""
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._pad_id = pad_id

    @classmethod
    def load(cls, folder: Path | str, max_tokens: int) -> RewardModelInput:
        """Load the tokenizer of the model in a Hugging Face folder. Raises ConfigError without one."""
        return cls(Tokenizer.load(folder), max_tokens, _read_config(Path(folder)).get("pad_token_id"))

    def ids(self, prompt: str, response: str) -> IntArray:
        """Return token ids.

        Raises JudgeError when there are none or more than `max_tokens`, and ConfigError when the chat template
        refuses the conversation.
        """
        if self._tokenizer.has_chat_template:
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            text = self._tokenizer.chat(messages, add_generation_prompt=False)
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = self._tokenizer.encode(prompt + response)
        ids = self._without_padding(ids)
        if not len(ids):
            raise JudgeError("prompt and response are empty: there is nothing to score")
        if len(ids) > self._max_tokens:
            raise JudgeError(
                f"prompt and response have {len(ids)} of its tokens, more than its max_model_len "
                f"{self._max_tokens}: raise that, or lower the task's max_tokens"
            )
        return ids

    def _without_padding(self, ids: IntArray) -> IntArray:
        """Cut padding off: Transformers reads the score at the last token before it, engines at the very last."""
        if self._pad_id is None:
            return ids
        kept = np.flatnonzero(ids != self._pad_id)
        return ids[: kept[-1] + 1] if len(kept) else ids


def check_reward_model(model: RewardModelConfig, folder: Path) -> None:
    """Check that the model in `folder` is a sequence classifier with one output that reads `max_model_len` tokens.

    Raises ConfigError.
    """
    where, config = _checked(
        model, folder, _SCORES, f"give no score: use a model whose architecture ends in {_SCORES}"
    )
    # Transformers leaves both out where there are two.
    outputs = len(config["id2label"]) if "id2label" in config else config.get("num_labels", 2)
    if outputs != 1:
        raise ConfigError(
            f"{where} has {outputs} outputs, but a reward is one number: use a model with num_labels 1"
        )


def check_language_model(model: RewardModelConfig, folder: Path) -> None:
    """Check that the model in `folder` is a causal language model that reads `max_model_len` tokens.

    Raises ConfigError.
    """
    fix = f"use a model whose architecture ends in {_SPEAKS}, or leave out generates"
    _checked(model, folder, _SPEAKS, f"say nothing: {fix}")


def _checked(model: RewardModelConfig, folder: Path, kind: str, otherwise: str) -> tuple[str, dict[str, Any]]:
    """Return how errors name the model, and its config.json, once architecture, length and tokenizer will do."""
    where, config = f"reward_models {model.name!r}: {folder}", _read_config(folder)
    architectures = config.get("architectures") or []
    if not any(name.endswith(kind) for name in architectures):
        raise ConfigError(f"{where} has architectures {architectures}, which {otherwise}")
    positions = config.get("max_position_embeddings")
    if positions is not None and positions < model.max_model_len:
        raise ConfigError(
            f"{where} has {positions} positions (max_position_embeddings), fewer than max_model_len "
            f"{model.max_model_len}: lower that"
        )
    Tokenizer.load(folder)
    return where, config


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error}): a reward model is a Hugging Face folder"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold a mapping, got {type(config).__name__}")
    return config
