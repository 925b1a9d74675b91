"""EngineConfig: what one rollout engine needs to know, and the environment it must be started in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raypost.config.run import Config

QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Environment for engines, unless whoever started the run wants more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What one engine needs to know."""

    device: Literal["cpu", "cuda"]
    dtype: str
    max_model_len: int
    max_num_seqs: int = 64
    tensor_parallel_size: int = 1
    threads: int = 1
    kv_cache_gb: float = 1.0
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = True
    seed: int = 0
    pause_timeout_s: float = 60.0
    sleep_mode: bool = False
    """Whether the engine's memory is freed while it sleeps. vLLM can do so on GPUs only, with an allocator of its
    own."""

    @classmethod
    def of(cls, config: Config) -> EngineConfig:
        """The engines' part of a run's configuration."""
        rollout = config.rollout
        return cls(
            device=config.device,
            dtype=config.model.dtype,
            max_model_len=config.max_model_len,
            max_num_seqs=rollout.max_num_seqs,
            tensor_parallel_size=rollout.tensor_parallel_size,
            threads=rollout.threads,
            kv_cache_gb=rollout.kv_cache_gb,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            enforce_eager=rollout.enforce_eager,
            seed=config.seed,
            pause_timeout_s=rollout.pause_timeout_s,
            sleep_mode=config.placement == "colocate" and config.device == "cuda",
        )

    def environment(self) -> dict[str, str]:
        """What vLLM takes from the environment alone, for the worker's process and the engine's, which inherit
        it."""
        fixed = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if self.device == "cpu":
            # Unbound threads: bound ones of several workers, or of two runs on one machine, would share a core.
            fixed |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(self.threads)}
            # With this alone a single rank runs inside the engine's process: half the start, one process less.
            fixed["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if self.tensor_parallel_size == 1 else "1"
        return fixed
