"""FrozenEngine: vLLM with weights that never change, which scores sequences, gives logprobs of tokens, or generates.

Owns the translation to and from vLLM. It reads the weights from a folder. FrozenHost decides when it starts and ends.

Imports vLLM, which reads the environment: import this module only after the environment is set.
"""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
from transformers import AutoConfig
from vllm import PoolingParams, SamplingParams
from vllm.config import PoolerConfig
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind

from actors.engine.life import OwnedProcess
from actors.engine.vllm_base import REFUSED, VllmEngine, last_of
from raypost.config.engine import EngineConfig
from raypost.errors import RaypostError
from raypost.types import FloatArray, IntArray


class FrozenEngine(VllmEngine):
    """An engine that scores, gives logprobs, or generates."""

    def __init__(
        self, model_path: str, config: EngineConfig, logits_mb: int | None, *, speaks: bool = False
    ) -> None:
        """Start the engine's processes, which blocks for seconds.

        With `logits_mb` (a bound of the logits that exist at a time, MiB of float32) it is a language model and gives
        logprobs; with None it is a sequence classifier and gives scores, or if it `speaks` a language model that
        generates.
        """
        self._speaks = speaks
        self._scores = logits_mb is None and not speaks
        if speaks:
            kind: dict[str, Any] = {"runner": "generate"}
        else:
            kind = _scores() if logits_mb is None else _logprobs(model_path, config, logits_mb)
        super().__init__(model_path, config, OwnedProcess, use_tqdm_on_load=False, **kind)

    async def warm_up(self) -> None:
        """Compute once: the first time costs seconds."""
        ids = np.zeros(2, np.int32)
        if self._speaks:
            await self.generate(ids, 1, 0.0, ())
        else:
            await (self.score(ids) if self._scores else self.logprobs(ids))

    async def score(self, token_ids: IntArray) -> float:
        """Return the classifier's one logit for a sequence. Raises RaypostError if vLLM refuses it."""
        params = PoolingParams(task="classify", use_activation=False)
        try:
            prompt = tokens_input(token_ids.tolist())
            final = await last_of(self.llm.encode(prompt, params, uuid.uuid4().hex))
        except REFUSED as error:
            raise RaypostError(
                f"vLLM cannot score {len(token_ids)} tokens: {error.__cause__ or error}"
            ) from error
        (score,) = final.outputs.data.flatten().tolist()
        return float(score)

    async def generate(
        self, token_ids: IntArray, max_tokens: int, temperature: float, stop_ids: tuple[int, ...]
    ) -> IntArray:
        """Return what follows a sequence, up to one of `stop_ids`; greedy at temperature 0.

        Raises RaypostError if vLLM refuses the sequence.
        """
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            stop_token_ids=list(stop_ids),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        try:
            prompt = tokens_input(token_ids.tolist())
            final = await last_of(self.llm.generate(prompt, params, uuid.uuid4().hex))
        except REFUSED as error:
            raise RaypostError(
                f"vLLM cannot continue {len(token_ids)} tokens: {error.__cause__ or error}"
            ) from error
        generated = np.asarray(final.outputs[0].token_ids, np.int32)
        ends = len(generated) > 0 and int(generated[-1]) in stop_ids
        return generated[:-1] if ends else generated

    async def logprobs(self, token_ids: IntArray) -> FloatArray:
        """Return log softmax of the logits at every token but the first; length n - 1, for n of 2 or more.

        Raises RaypostError if vLLM refuses the sequence.
        """
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
        try:
            final = await last_of(self.llm.generate(tokens_input(given), params, uuid.uuid4().hex))
        except REFUSED as error:
            raise RaypostError(
                f"vLLM cannot compute the logprobs of {len(token_ids)} tokens: {error.__cause__ or error}"
            ) from error
        of_given, of_last = final.prompt_logprobs, final.outputs[0].logprobs
        assert isinstance(of_given, FlatLogprobs) and isinstance(of_last, FlatLogprobs), "both were asked for"
        return np.asarray([*of_given.logprobs, *of_last.logprobs], np.float32)


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
        "max_num_batched_tokens": max(logits_mb * 2**20 // row, config.rollout.max_num_seqs),
    }
