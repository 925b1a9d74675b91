"""VllmEngine: what the engines of rollout workers and of frozen models have in common.

Owns vLLM's AsyncLLM from its start to its end, and one request from its first output to its last. Owns no policy:
when to pause, load, score or end is decided by the worker that has the engine.

Imports vLLM, which reads the environment: import this module only after the environment is set.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineGenerateError

from actors.engine.life import OwnedProcess
from raypost.config.engine import EngineConfig

REFUSED = (VLLMClientError, EngineGenerateError)
"""Raised for one request that vLLM cannot run; the engine goes on."""

REAP_TIMEOUT_S = 5.0
"""How long a killed process may take to disappear."""

OutputT = TypeVar("OutputT")


class VllmEngine:
    """A started engine. Every method but the constructor belongs to one event loop."""

    def __init__(
        self, model_path: str, config: EngineConfig, extension: type[OwnedProcess], **options: Any
    ) -> None:
        """Start the engine's processes, which blocks for seconds.

        `extension`: the methods added to vLLM's worker. `options`: further arguments of AsyncEngineArgs.
        """
        rollout = config.rollout
        self.llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=model_path,
                skip_tokenizer_init=True,
                generation_config="vllm",
                dtype=config.dtype,
                seed=config.seed,
                max_model_len=config.max_model_len,
                max_num_seqs=rollout.max_num_seqs,
                tensor_parallel_size=rollout.tensor_parallel_size,
                distributed_executor_backend="uni" if rollout.tensor_parallel_size == 1 else "mp",
                enforce_eager=rollout.enforce_eager,
                gpu_memory_utilization=rollout.gpu_memory_utilization,
                kv_cache_memory_bytes=int(rollout.kv_cache_gb * 2**30) if config.device == "cpu" else None,
                disable_log_stats=True,
                worker_extension_cls=f"{extension.__module__}.{extension.__qualname__}",
                **options,
            )
        )
        self.vocab_size = int(self.llm.model_config.get_vocab_size())
        """The lowest number that is no token id: one from here on would end the engine."""

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values the engine holds at once, as it says itself; 0: it does not say."""
        return int(self.llm.vllm_config.cache_config.kv_cache_size_tokens or 0)

    async def process_ids(self) -> list[int]:
        """Return the ids of the engine's processes."""
        families = await self.llm.collective_rpc("process_ids")
        return sorted({pid for family in families for pid in family} - {os.getpid()})

    @property
    def is_dead(self) -> bool:
        """Whether the engine's processes are gone."""
        return bool(self.llm.errored)

    def shutdown(self) -> None:
        """End the engine's processes, without the seconds a graceful end takes: they hold nothing to save."""
        children = multiprocessing.active_children()
        self.llm.shutdown(timeout=0.0)
        for child in children:
            child.join(REAP_TIMEOUT_S)


async def last_of(outputs: AsyncIterator[OutputT]) -> OutputT:
    """Return the last output of a request, which is all of it."""
    final = None
    async for output in outputs:
        final = output
    assert final is not None, "vLLM ends every request with an output"
    return final
