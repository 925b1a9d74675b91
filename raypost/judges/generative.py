"""GenerativeJudge: asks a language model for a verdict in words, and reads a number out of it.

Owns the text that the model is asked, and what of its answer is a verdict. Owns no model: the judge is given one.

    template with prompt, response, answer -> the model, greedy -> verdict -> a choice's score, or a number
                                                +- unparsable: asked again, not greedy; then JudgeError

Invariants: nothing in a response is taken for a part of the template; a verdict that cannot be read is never a score.
"""

from __future__ import annotations

import asyncio
import math
import re
import uuid
from collections.abc import Callable
from typing import Protocol

import numpy as np

from raypost.config import JudgeConfig, TaskConfig
from raypost.data.prompt import prompt_text
from raypost.data.tokenizer import Tokenizer
from raypost.errors import JudgeError, RaypostError
from raypost.judges.reward_model import each
from raypost.types import (
    GenerateRequest,
    Generator,
    IntArray,
    RolloutState,
    SampleParams,
    Score,
    Status,
    status_of_finish,
)

PAUSED_S = 0.2
"""After which the policy is asked again when a pause interrupted it."""
AGAIN_TEMPERATURE = 1.0
"""Of a verdict that is asked for again: a greedy one would be the same."""
_PLACES = re.compile(r"\{(prompt|response|answer)\}")


class LanguageModel(Protocol):
    """A model that answers one message at a time; many are asked at once."""

    async def answer(self, message: str, max_tokens: int, temperature: float) -> str:
        """Return the text of an answer, greedy at temperature 0. Raises RaypostError if there is none."""
        ...


class GenerativeJudge:
    """Gives the score that a language model says."""

    def __init__(
        self,
        model: LanguageModel,
        task: TaskConfig,
        config: JudgeConfig,
        on_retry: Callable[[], None] | None = None,
    ) -> None:
        """`config`: the task's judge, or a part of it. `on_retry` is told of each verdict that is asked for again."""
        assert config.template is not None, "the configuration requires it"
        self._model = model
        self._task = task
        self._config = config
        self._template = config.template
        self._on_retry = on_retry or (lambda: None)

    async def judge(self, states: list[RolloutState]) -> list[float]:
        """Return one Score for each state, its words the verdict. Raises JudgeError naming the first without one."""
        return await each(self._score, states)

    async def _score(self, state: RolloutState) -> Score:
        message, config = self._message(state), self._config
        who = f"task {state.task!r}, group {state.group_id}, sample {state.sample_index}: {config.reward_model!r}"
        verdict = ""
        for attempt in range(config.retries + 1):
            temperature = max(config.temperature, AGAIN_TEMPERATURE) if attempt else config.temperature
            try:
                verdict = await self._model.answer(message, config.verdict_tokens, temperature)
            except RaypostError as error:
                raise JudgeError(f"{who}: {error}") from error
            reward = read_verdict(verdict, config)
            if reward is not None:
                return Score(reward, words=verdict.strip())
            if attempt < config.retries:
                self._on_retry()
        wanted = (
            f"one of {sorted(config.choices)}" if config.choices else f"what {config.answer_pattern} finds"
        )
        raise JudgeError(
            f"{who} gave no verdict in {config.retries + 1} answers, the last {verdict!r:.200}: it must say {wanted}"
        )

    def _message(self, state: RolloutState) -> str:
        texts = {
            "prompt": prompt_text(self._task, state.metadata),
            "response": state.response_text,
            "answer": str(state.metadata.get("answer", "")),
        }
        return _PLACES.sub(lambda place: texts[place[1]], self._template)


def read_verdict(verdict: str, config: JudgeConfig) -> float | None:
    """Return the score of the last choice, or the last number, that the verdict has; None without one."""
    if config.choices:
        scores = {choice.lower(): score for choice, score in config.choices.items()}
        # Of choices that begin alike the longest is meant.
        words = "|".join(re.escape(choice) for choice in sorted(scores, key=len, reverse=True))
        found = re.findall(rf"(?<!\w)(?:{words})(?!\w)", verdict.lower())
        return scores[found[-1]] if found else None
    assert config.answer_pattern is not None, "the configuration requires one of them"
    matches = list(re.finditer(config.answer_pattern, verdict))
    try:
        number = float(matches[-1].group(1)) if matches else math.nan
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


class PolicyModel:
    """The policy itself as a language model: on the engines of production, with the weights of the moment."""

    def __init__(self, generator: Generator, model_path: str, max_model_len: int, timeout_s: float) -> None:
        """`model_path`: a folder with the tokenizer. `timeout_s`: longest time of an answer, pauses included."""
        self._generator = generator
        self._model_path = model_path
        self._max_model_len = max_model_len
        self._timeout_s = timeout_s
        self._tokenizer: Tokenizer | None = None

    async def answer(self, message: str, max_tokens: int, temperature: float) -> str:
        """Return the text of an answer; what a pause interrupts goes on after it. Raises RaypostError."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.load(self._model_path)
        tokenizer = self._tokenizer
        ids = message_ids(tokenizer, message, self._max_model_len, max_tokens)
        answered = np.empty(0, np.int32)
        try:
            async with asyncio.timeout(self._timeout_s):
                while len(answered) < max_tokens:
                    params = SampleParams(
                        max_tokens=max_tokens - len(answered),
                        temperature=temperature,
                        stop_token_ids=tokenizer.eos_ids,
                    )
                    result = await self._generator.generate(
                        GenerateRequest(
                            request_id=f"judge-{uuid.uuid4().hex}",
                            token_ids=np.concatenate([ids, answered]),
                            sample_params=params,
                        )
                    )
                    answered = np.concatenate([answered, result.response_ids])
                    status = status_of_finish(result.finish_reason)
                    if status is Status.FAILED:
                        raise JudgeError(result.error or f"finish reason {result.finish_reason!r}")
                    if status is Status.COMPLETED:
                        break
                    await asyncio.sleep(PAUSED_S)
        except TimeoutError as error:
            raise JudgeError(
                str(error) or f"the policy gave no verdict within {self._timeout_s:.0f} s"
            ) from error
        ends = len(answered) > 0 and int(answered[-1]) in tokenizer.eos_ids
        return tokenizer.decode(answered[:-1] if ends else answered)


def message_ids(tokenizer: Tokenizer, message: str, max_model_len: int, max_tokens: int) -> IntArray:
    """Return the tokens of one message in the model's chat template, if it has one.

    Raises JudgeError if they leave no `max_tokens` of `max_model_len` for the answer.
    """
    if tokenizer.has_chat_template:
        text = tokenizer.chat([{"role": "user", "content": message}])
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(message)
    left = max_model_len - max_tokens
    if not 0 < len(ids) <= left:
        raise JudgeError(
            f"the message has {len(ids)} of its tokens, and its longest sequence, {max_model_len}, leaves {left} "
            f"beside judge.verdict_tokens {max_tokens}: raise max_model_len or context_tokens, or shorten "
            "the template or the task's max_tokens"
        )
    return ids
