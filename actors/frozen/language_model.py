"""LanguageModelWorker: one engine that answers judges in words. LanguageModelPool: all of them as one.

    JudgeWorker -> GenerativeJudge -> LanguageModelPool.answer --(least loaded)--> LanguageModelWorker -> its engine

Owns the model's tokenizer and how long an answer is waited for. Owns no verdict: that is the judge's. The weights come
from the model's folder and take no part in weight syncs.
"""

from __future__ import annotations

from actors.frozen.reward_model import TRIES
from actors.frozen.worker import FrozenWorker
from actors.remote import ACTOR_ERRORS, RemotePool, within
from raypost.config.engine import EngineConfig
from raypost.data.tokenizer import Tokenizer
from raypost.errors import JudgeError
from raypost.judges.generative import message_ids

MANY = {"answer": 64}
"""Answers that travel together at most."""


class LanguageModelWorker(FrozenWorker):
    """One engine with a language model."""

    def __init__(self, name: str, model_path: str, engine: EngineConfig) -> None:
        """`model_path`: a folder with a causal language model and its tokenizer."""
        super().__init__(name, model_path, engine, speaks=True)
        self._tokenizer = Tokenizer.load(model_path)
        self._max_tokens = engine.max_model_len

    async def answer(self, message: str, max_tokens: int, temperature: float) -> str:
        """Return what the model answers to a message. Raises RaypostError, JudgeError if it is too long."""
        tokenizer = self._tokenizer
        ids = message_ids(tokenizer, message, self._max_tokens, max_tokens)
        engine = await self._engine()
        generated = await self._life.alive(engine.generate(ids, max_tokens, temperature, tokenizer.eos_ids))
        return tokenizer.decode(generated)


class LanguageModelPool:
    """A LanguageModel over a pool of workers, for use inside another actor."""

    def __init__(self, workers: list[str], timeout_s: float) -> None:
        """`workers`: names of LanguageModelWorker actors.

        `timeout_s`: longest time an answer may take, a worker's restart included.
        """
        self._workers = list(workers)
        self._timeout_s = timeout_s
        self._pool = RemotePool(self._workers, timeout_s, tries=TRIES, many=MANY)

    async def answer(self, message: str, max_tokens: int, temperature: float) -> str:
        """Return the least loaded worker's answer. Raises RaypostError if none comes within the deadline."""
        answering = self._pool.answer(message, max_tokens, temperature)
        try:
            text: str = await within(answering, self._timeout_s, f"one of {', '.join(self._workers)}")
        except ACTOR_ERRORS as error:
            raise JudgeError(
                f"none of {', '.join(self._workers)} came back ({type(error).__name__})"
            ) from error
        return text
