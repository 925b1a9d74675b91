"""LanguageModelWorker: one engine that answers judges in words. LanguageModelPool: all of them as one.

    JudgeWorker -> GenerativeJudge -> LanguageModelPool.answer --(least loaded)--> LanguageModelWorker -> its engine

Owns the model's tokenizer. Owns no verdict: that is the judge's. The weights come
from the model's folder and take no part in weight syncs.
"""

from __future__ import annotations

from actors.frozen.pool import FrozenPool
from actors.frozen.worker import FrozenWorker
from raypost.config.engine import EngineConfig
from raypost.data.tokenizer import Tokenizer
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


class LanguageModelPool(FrozenPool):
    """A LanguageModel over a pool of workers, for use inside another actor."""

    def __init__(self, workers: list[str], timeout_s: float) -> None:
        """`workers`: names of LanguageModelWorker actors; `timeout_s` as for FrozenPool."""
        super().__init__(workers, timeout_s, MANY)

    async def answer(self, message: str, max_tokens: int, temperature: float) -> str:
        """Return the least loaded worker's answer. Raises RaypostError if none comes within the deadline."""
        return str(await self._ask("answer", message, max_tokens, temperature))
