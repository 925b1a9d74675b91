"""One vLLM engine with weights that never change: it reads them from a folder, and scores sequences or gives the
logprobs of their tokens.

Owns the translation to and from vLLM. Owns no process: frozen_engine.py builds it and ends with it.

Imports vLLM, which reads the environment: import this module only after the environment is set.
"""

from __future__ import annotations

import os
import uuid
from typing import Any

import numpy as np
from transformers import AutoConfig
from vllm import PoolingParams, SamplingParams
from vllm.config import PoolerConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineGenerateError

from actors.engine_life import OwnedProcess, end_at_once
from raypost.config.engine import EngineConfig
from raypost.errors import RaypostError
from raypost.types import FloatArray, IntArray


class FrozenEngine:
    """A started engine. Every method but the constructor belongs to one event loop."""

    def __init__(self, model_path: str, config: EngineConfig, logits_mb: int | None) -> None:
        """Start the engine's processes; blocks for seconds. With `logits_mb` (a bound of the logits that exist at a
        time, MiB of float32) it is a language model and gives logprobs; with None it is a sequence classifier and
        gives scores."""
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=model_path,
                use_tqdm_on_load=False,
                skip_tokenizer_init=True,
                generation_config="vllm",
                dtype=config.dtype,
                seed=config.seed,
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                tensor_parallel_size=config.tensor_parallel_size,
                distributed_executor_backend="uni" if config.tensor_parallel_size == 1 else "mp",
                enforce_eager=config.enforce_eager,
                gpu_memory_utilization=config.gpu_memory_utilization,
                kv_cache_memory_bytes=int(config.kv_cache_gb * 2**30) if config.device == "cpu" else None,
                disable_log_stats=True,
                worker_extension_cls=f"{OwnedProcess.__module__}.{OwnedProcess.__qualname__}",
                **(_scores() if logits_mb is None else _logprobs(model_path, config, logits_mb)),
            )
        )
        self._scores = logits_mb is None
        self._vocab_size = int(self._llm.model_config.get_vocab_size())

    @property
    def vocab_size(self) -> int:
        """A token id from here on would end the engine."""
        return self._vocab_size

    async def prepare(self) -> list[int]:
        """Tie the engine's processes to this one; their ids."""
        me = os.getpid()
        await self._llm.collective_rpc("end_with", args=(me,))
        families = await self._llm.collective_rpc("process_ids")
        return sorted({pid for family in families for pid in family} - {me})

    async def warm_up(self) -> None:
        """Compute once: the first time costs seconds."""
        ids = np.zeros(2, np.int32)
        await (self.score(ids) if self._scores else self.logprobs(ids))

    async def score(self, token_ids: IntArray) -> float:
        """The classifier's one output for a sequence: its logit, as it is. Raises RaypostError if vLLM refuses it."""
        params = PoolingParams(task="classify", use_activation=False)
        final = None
        try:
            prompt = tokens_input(token_ids.tolist())
            async for output in self._llm.encode(prompt, params, uuid.uuid4().hex):
                final = output
        except (VLLMClientError, EngineGenerateError) as error:
            raise RaypostError(
                f"vLLM cannot score {len(token_ids)} tokens: {error.__cause__ or error}"
            ) from error
        assert final is not None, "vLLM ends every request with an output"
        (score,) = final.outputs.data.flatten().tolist()
        return float(score)

    async def logprobs(self, token_ids: IntArray) -> FloatArray:
        """Log softmax of the logits at every token but the first; length n - 1, for n of 2 or more. Raises
        RaypostError if vLLM refuses it."""
        *given, last = token_ids.tolist()
        params = SamplingParams(
            max_tokens=1,
            # Given too, the last token would need a place for one more; so it is sampled, with no other allowed.
            allowed_token_ids=[last],
            logprobs=0,
            prompt_logprobs=0,
            flat_logprobs=True,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        final = None
        try:
            async for output in self._llm.generate(tokens_input(given), params, uuid.uuid4().hex):
                final = output
        except (VLLMClientError, EngineGenerateError) as error:
            raise RaypostError(
                f"vLLM cannot compute the logprobs of {len(token_ids)} tokens: {error.__cause__ or error}"
            ) from error
        assert isinstance(final, RequestOutput), "vLLM ends every request with an output"
        of_given, of_last = final.prompt_logprobs, final.outputs[0].logprobs
        assert isinstance(of_given, FlatLogprobs) and isinstance(of_last, FlatLogprobs), "both were asked for"
        return np.asarray([*of_given.logprobs, *of_last.logprobs], np.float32)

    @property
    def is_dead(self) -> bool:
        """Whether the engine's processes are gone."""
        return self._llm.errored

    def shutdown(self) -> None:
        """End the engine's processes."""
        end_at_once(self._llm)


def _scores() -> dict[str, Any]:
    return {"runner": "pooling", "pooler_config": PoolerConfig(use_activation=False)}


def _logprobs(model_path: str, config: EngineConfig, logits_mb: int) -> dict[str, Any]:
    # The logits of all tokens of a step exist at once.
    row = 4 * AutoConfig.from_pretrained(model_path).get_text_config().vocab_size
    return {
        "runner": "generate",
        "logprobs_mode": "raw_logprobs",
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": max(logits_mb * 2**20 // row, config.max_num_seqs),
    }
