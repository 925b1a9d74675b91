"""RewardModelWorker: one engine that scores responses with a reward model, and RewardModelPool, all of them as one.

    JudgeWorker -> RewardModelJudge -> RewardModelPool.score --(least loaded)--> RewardModelWorker.score -> its engine

Owns the reward model's tokenizer and how long a score is waited for. Owns no reward: the judge does. The weights come
from the model's folder and never change, so syncs pass it by; a worker that died is asked again once Ray has started
it again.
"""

from __future__ import annotations

from typing import Any

from actors.frozen.host import FrozenHost
from actors.remote import ACTOR_ERRORS, CallBatches, RemotePool, within
from raypost.config import Config, RewardModelConfig
from raypost.config.engine import EngineConfig
from raypost.errors import JudgeError
from raypost.judges.reward_model import RewardModelInput

MANY = {"score": 64}
"""Scores asked for together at most: those of some eight groups."""
TRIES = 60
"""How often a score is asked for while workers are away: for a quarter of an hour, which no deadline reaches."""


def reward_engine(config: Config, model: RewardModelConfig) -> EngineConfig:
    """What the engines of a reward model need to know; what it does not say is as in `rollout`."""
    rollout = config.rollout
    return EngineConfig(
        device=config.device,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        tensor_parallel_size=model.tensor_parallel_size,
        threads=model.threads,
        kv_cache_gb=model.kv_cache_gb,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        seed=config.seed,
    )


class RewardModelWorker(CallBatches):
    """One engine with a reward model. Owns no state, so a call may be dispatched again anywhere."""

    def __init__(self, name: str, model_path: str, engine: EngineConfig) -> None:
        """`model_path`: a folder with a sequence classifier of one output, and its tokenizer."""
        super().__init__()
        self._name = name
        self._input = RewardModelInput.load(model_path, engine.max_model_len)
        self._host = FrozenHost(name, model_path, engine)

    def __repr__(self) -> str:
        return self._name

    async def start(self) -> dict[str, Any]:
        """Start the engine; without this the first call does. {pid, engine_pids, init_s}. Raises RaypostError."""
        return await self._host.start()

    async def score(self, prompt: str, response: str) -> float:
        """The model's output for the response. Raises RaypostError, such as JudgeError if it is too long."""
        ids = self._input.ids(prompt, response)
        engine = await self._host.engine()
        if ids.max() >= engine.vocab_size:
            raise JudgeError(
                f"its tokenizer gives token id {ids.max()}, outside its vocabulary of {engine.vocab_size}: the folder "
                "holds the tokenizer of another model"
            )
        return await self._host.alive(engine.score(ids))

    async def shutdown(self) -> None:
        """End the engine's processes. The actor itself is the caller's to end."""
        self._host.shutdown()


class RewardModelPool:
    """A RewardModel over a pool of workers, for use inside another actor."""

    def __init__(self, name: str, workers: list[str], timeout_s: float) -> None:
        """`name`: as in `reward_models`. `workers`: names of RewardModelWorker actors. `timeout_s`: longest time a
        score may take, a worker's restart included."""
        self._name = name
        self._workers = list(workers)
        self._timeout_s = timeout_s
        self._pool = RemotePool(self._workers, timeout_s, tries=TRIES, many=MANY)

    async def score(self, prompt: str, response: str) -> float:
        """The score from the least loaded worker. Raises RaypostError if it cannot be had within the deadline."""
        scoring = self._pool.score(prompt, response)
        try:
            score: float = await within(scoring, self._timeout_s, f"one of {', '.join(self._workers)}")
        except ACTOR_ERRORS as error:
            raise JudgeError(
                f"none of {', '.join(self._workers)} came back ({type(error).__name__})"
            ) from error
        return score
