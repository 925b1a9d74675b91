"""EngineConfig: what an engine is started with, derived from a run's configuration, and its environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raypost.config.resources import EnginePoolConfig
from raypost.config.rollout import CPU_BLOCK, RolloutConfig
from raypost.config.run import Config
from raypost.config.sync import VerifyWeights

QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Environment of engines unless the environment of the run says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of one engine. Only the configuration has defaults."""

    device: Literal["cpu", "cuda"]
    dtype: str
    max_model_len: int
    """Tokens of a prompt and its response."""
    seed: int
    sleep_mode: bool
    """Whether the engine's memory is freed while it sleeps. vLLM can do so on GPUs only, with an allocator of its
    own."""
    rollout: RolloutConfig
    """Size, parallelism and deadlines of the engine."""
    verify: VerifyWeights = "every"
    """Which of its loads are read back."""
    block_size: int | None = None
    """Tokens of a block of its key-value cache; None: the engine's own."""
    recompute_kv_cache: bool = False
    """Whether a load drops the keys and values of frozen requests."""

    @classmethod
    def of(cls, config: Config, pool: EnginePoolConfig | None = None) -> EngineConfig:
        """Return the settings of a pool's engines; without a pool, of those that `rollout` describes."""
        return cls(
            device=config.device,
            dtype=config.model.dtype,
            max_model_len=config.engine_model_len,
            seed=config.seed,
            sleep_mode=pool is None and config.placement == "colocate" and config.device == "cuda",
            rollout=config.rollout if pool is None else config.rollout.of_pool(pool),
            verify=config.sync.verify,
            block_size=_block_size(config),
            recompute_kv_cache=config.sync.recompute_kv_cache,
        )

    def environment(self) -> dict[str, str]:
        """Return what vLLM reads from the environment alone, for the worker's process and the engine's."""
        fixed = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if self.device == "cpu":
            # Unbound threads: bound ones of several workers, or of two runs on one machine, would share a core.
            fixed |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(self.rollout.threads)}
            # With this alone a single rank runs inside the engine's process: half the start, one process less.
            fixed["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if self.rollout.tensor_parallel_size == 1 else "1"
        return fixed


def _block_size(config: Config) -> int | None:
    own = config.rollout.block_size
    if own is None and config.device == "cpu" and any(one.shared_tokens > CPU_BLOCK for one in config.tasks):
        return CPU_BLOCK
    return own
