"""RewardModelWorker: one engine that scores responses with a reward model. RewardModelPool: all of them as one.

    JudgeWorker -> RewardModelJudge -> RewardModelPool.score --(least loaded)--> RewardModelWorker.score -> its engine

Owns the reward model's tokenizer. Owns no reward: that is the judge's. The weights come from the model's folder and
take no part in weight syncs.
"""

from __future__ import annotations

from dataclasses import replace

from actors.frozen.pool import FrozenPool
from actors.frozen.worker import FrozenWorker
from raypost.config import Config, RewardModelConfig
from raypost.config.engine import EngineConfig
from raypost.errors import JudgeError
from raypost.judges.reward_model import RewardModelInput

MANY = {"score": 64}
"""Scores that travel together at most: those of some eight groups."""


def reward_engine(config: Config, model: RewardModelConfig) -> EngineConfig:
    """Return the settings of a reward model's engines; what it does not set is as in `rollout`."""
    return replace(EngineConfig.of(config, model), max_model_len=model.max_model_len)


class RewardModelWorker(FrozenWorker):
    """One engine with a reward model."""

    def __init__(self, name: str, model_path: str, engine: EngineConfig) -> None:
        """`model_path`: a folder with a sequence classifier of one output, and its tokenizer."""
        super().__init__(name, model_path, engine)
        self._input = RewardModelInput.load(model_path, engine.max_model_len)

    async def score(self, prompt: str, response: str) -> float:
        """Return the model's output for the response. Raises RaypostError, JudgeError if it is too long."""
        ids = self._input.ids(prompt, response)
        engine = await self._engine()
        if ids.max() >= engine.vocab_size:
            raise JudgeError(
                f"its tokenizer gives token id {ids.max()}, outside its vocabulary of {engine.vocab_size}: the folder "
                "holds the tokenizer of another model"
            )
        return await self._life.alive(engine.score(ids))


class RewardModelPool(FrozenPool):
    """A RewardModel over a pool of workers, for use inside another actor."""

    def __init__(self, workers: list[str], timeout_s: float) -> None:
        """`workers`: names of RewardModelWorker actors; `timeout_s` as for FrozenPool."""
        super().__init__(workers, timeout_s, MANY)

    async def score(self, prompt: str, response: str) -> float:
        """Return the least loaded worker's score. Raises RaypostError if none comes within the deadline."""
        return float(await self._ask("score", prompt, response))
