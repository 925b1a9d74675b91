"""RolloutEngine: vLLM in raypost's terms, requests and results as arrays, versions as numbers.

Owns the translation to and from vLLM, the sending half of a weight transfer (the receiving half is
vllm_weights.py), and which of the engine's memory sleeps. Owns no other state: when to pause, load or serve is the
rollout worker's.

Imports vLLM, which reads the environment: import this module only after the environment is set.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from io import FileIO
from typing import Any, Literal

import numpy as np
from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from actors.engine.vllm_base import REFUSED, VllmEngine, last_of
from actors.rollout.vllm_weights import BACKEND, WeightExtension
from actors.rollout.weights import Says
from raypost.config.engine import EngineConfig
from raypost.errors import AlignmentError, NotStagedError, WeightError
from raypost.types import (
    EVALUATION_PRIORITY,
    NO_VERSION,
    FloatArray,
    GenerateRequest,
    GenerateResult,
    IntArray,
    SampleParams,
)
from raypost.weights.held import ReadBack
from raypost.weights.manifest import Bytes, Manifest
from raypost.weights.seats import Seats

Memory = Literal["weights", "kv_cache"]
"""Parts of the device's memory that an engine gives back while it sleeps, under vLLM's names."""

CANARY_PRIORITY = EVALUATION_PRIORITY - 1


class RolloutEngine(VllmEngine):
    """An engine that generates, and whose weights are replaced by the trainer's."""

    def __init__(self, model_path: str, config: EngineConfig) -> None:
        """Start the engine's processes, which blocks for seconds. Weights are random until the first load."""
        self._asleep: set[Memory] = set()
        self.verify = config.verify
        """Which loads are read back."""
        self.recompute_kv_cache = config.recompute_kv_cache
        """Whether a load drops the keys and values of frozen requests."""
        self._anew: set[str] = set()
        """Requests that were given up in the engine, to begin again."""
        self._loads = 0
        """Names what weights made keys and values."""
        self._staged: Manifest | None = None
        self._held: Manifest | None = None
        """What was loaded last, if it is there still."""
        self._version = NO_VERSION
        """With which tokens are marked."""
        super().__init__(
            model_path,
            config,
            WeightExtension,
            # Weights always come from the trainer, so no time is spent reading others from disk.
            load_format="dummy",
            scheduling_policy="priority",
            block_size=config.block_size,
            max_num_batched_tokens=config.rollout.max_num_batched_tokens,
            enable_sleep_mode=config.sleep_mode,
            # Of the distribution sampled from: log softmax(logits / temperature), as in training.
            logprobs_mode="processed_logprobs",
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        )

    async def warm_up(self) -> None:
        """Generate once, because the first generation costs seconds; then pause."""
        await self._run(np.zeros(2, np.int32), _sampling(SampleParams(max_tokens=2)), "warm-up")
        await self.pause("abort")

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Run one request to its end or to an abort; a request that vLLM refuses is an "error" result.

        Raises what vLLM raises when the engine is dead. Cancelling it aborts the request in the engine.
        """
        try:
            sampling = _sampling(request.sample_params)
            final = await self._run(request.token_ids, sampling, request.request_id, request.priority)
        except REFUSED as error:
            return GenerateResult.nothing(
                "error", error=f"{request.request_id}: {error.__cause__ or error!s}"
            )
        return _result(final.outputs[0], request.request_id)

    async def prompt_logprobs(self, prompt_ids: IntArray, resume: bool = False) -> FloatArray:
        """Return log softmax of the logits at every token of the prompt but the first; length P - 1.

        The request goes before all others. `resume` resumes a paused engine once the request is queued, so
        that frozen requests do not take all the places first; the caller pauses again.
        """
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = tokens_input(prompt_ids.tolist(), cache_salt=str(self._loads))
        queue = await self.llm.add_request("prompt-logprobs", prompt, params, priority=CANARY_PRIORITY)
        try:
            if resume:
                await self.resume()
            final = await queue.get()
        except BaseException:
            await self.llm.abort(queue.request_id, internal=True)
            raise
        assert isinstance(final, RequestOutput), "a model that generates"
        flat = final.prompt_logprobs
        assert isinstance(flat, FlatLogprobs), "flat_logprobs was asked for"
        return np.asarray(flat.logprobs, np.float32)

    async def _run(
        self, token_ids: IntArray, params: SamplingParams, request_id: str, priority: int = 0
    ) -> RequestOutput:
        try:
            while True:
                # Requests share keys and values of the same weights only, also where a load leaves older ones in the
                # cache.
                prompt = tokens_input(token_ids.tolist(), cache_salt=str(self._loads))
                final = await last_of(self.llm.generate(prompt, params, request_id, priority=priority))
                if request_id not in self._anew:
                    return final
                self._anew.discard(request_id)
        finally:
            self._anew.discard(request_id)

    async def _begin_anew(self) -> None:
        """Have requests without a token begin again: what is computed of their prompt, older weights made.

        Their tokens would carry the new version alone.
        """
        states = self.llm.output_processor.request_states
        early = {
            name: one.external_req_id
            for name, one in states.items()
            if not one.detokenizer.num_output_tokens()
        }
        self._anew.update(early.values())
        await self.llm.abort(list(early), internal=True)

    async def pause(self, mode: Literal["abort", "keep"], clear_cache: bool = True) -> None:
        """Abort the requests in the engine, or freeze them; then drop all cached keys and values. Later ones queue.

        Without `recompute_kv_cache` those that are frozen keep theirs.
        Returns once the engine is idle. Every token has left the engine by then, with the version it was sampled
        under, so none of them can take on a version that is loaded afterwards. What the engine gave back may still be
        on its way to those who asked for it: wait for their answers.
        """
        # AsyncLLM.pause_generation sleeps 20 ms after this call, for those who do not wait for answers, and before it
        # empties a cache of images, which no request here has.
        kept = mode == "keep" and not self.recompute_kv_cache
        await self.llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache and not kept)

    async def resume(self) -> None:
        """Let requests run again."""
        await self.llm.resume_generation()

    @property
    def asleep(self) -> bool:
        """Whether any of the engine's memory sleeps."""
        return bool(self._asleep)

    async def sleep(self, keep_weights: bool) -> None:
        """Give the memory of a paused engine without requests back to the device.

        Weights go to main memory, or are forgotten; cached keys and values are dropped. Without
        `EngineConfig.sleep_mode`, on CPU for instance, no memory is freed; weights that are forgotten only count as
        no version.
        """
        if not keep_weights:
            # A base that adapters are added to lies beside the model, and stays.
            self._held = self._held and replace(self._held, tensors=())
            await self.llm.collective_rpc("forget_weights")
        if "weights" not in self._asleep:
            self._asleep = {"weights", "kv_cache"}
            # vLLM's levels: 1 copies the weights to main memory, 2 drops them.
            await self.llm.sleep(level=1 if keep_weights else 2, mode="abort")

    async def wake(self, *memory: Memory) -> None:
        """Take memory back, all of it unless named. vLLM lets requests run once all of it is awake."""
        woken = [one for one in sorted(self._asleep, reverse=True) if not memory or one in memory]
        if woken:
            await self.llm.wake_up(list(woken))
            self._asleep.difference_update(woken)

    async def stage(self, manifest: Manifest, buckets: Sequence[Bytes]) -> None:
        """Bring a version's bytes into the engine's processes, verify them there and prepare what a load can then take.

        Requests may run meanwhile.

        Takes the place of what was staged before; the same version again does nothing. `buckets` may lack the first
        ones, if the engine has what is in them. Raises NotStagedError if it has not, and what vLLM raises, the cause in
        the text: then nothing is staged.
        """
        if self._staged == manifest:
            return
        needed = len(manifest.bucket_sizes) - manifest.spares(self._held)
        if len(buckets) < needed:
            raise NotStagedError(f"version {manifest.version} is not staged here: send all of its bytes")
        self._staged = None
        await self._until_verified("stage_weights", manifest, buckets[len(buckets) - needed :])

    async def receive(self, manifest: Manifest, seats: Seats, worker: str) -> None:
        """Have the engine's processes take their seats in a group and receive a version there; all else as `stage`.

        `worker`: the name by which they have seats. What is staged already comes again: the sender waits for all.
        """
        self._staged = None
        await self._until_verified("receive_weights", manifest, [], seats.encoded(), worker)

    async def _until_verified(
        self, method: str, manifest: Manifest, buckets: Sequence[Bytes], *args: str
    ) -> None:
        reader, writer = (FileIO(end, mode) for end, mode in zip(os.pipe(), "rw", strict=True))
        with reader:
            with ExitStack() as files:
                answers = files.enter_context(writer)
                copies = [files.enter_context(await asyncio.to_thread(_copy, one)) for one in buckets]
                paths = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (answers, *copies)]
                await self.llm.collective_rpc(method, args=(manifest.encoded(), self.verify, *paths, *args))
            # Until every rank has closed it. Not by a call, which a busy engine answers between two steps only.
            problems = await asyncio.to_thread(reader.readall)
        if problems:
            raise WeightError(problems.decode())
        self._staged = manifest

    async def load(self, manifest: Manifest) -> tuple[ReadBack | None, Says]:
        """Load the version that is staged into a paused engine; return what was read back of it, by all ranks.

        None: it was not asked for. With it comes what the engine then says it holds. Raises what vLLM raises, the cause
        in the text.

        Frozen requests that have no token yet begin again. The others keep the keys and values that older weights made;
        with `recompute_kv_cache` they lose them: vLLM preempts these requests, and when they go on, it first runs
        prompt and response so far through the new weights.
        """
        self._staged = self._held = None
        done: list[Any] = await asyncio.gather(
            self.llm.collective_rpc("load_staged", args=(manifest.version, manifest.digest)),
            # The engine does them in this order; it stands still for each answer that is waited for.
            self.llm.update_weight_version(str(manifest.version)),
            *([self.llm.reset_prefix_cache(reset_running_requests=True)] if self.recompute_kv_cache else []),
            return_exceptions=True,
        )
        failed = [one for one in done if isinstance(one, BaseException)]
        if failed:
            await self.llm.update_weight_version(str(self._version))
            raise failed[0]
        self._held, self._version, self._loads = manifest, manifest.version, self._loads + 1
        if not self.recompute_kv_cache:
            await self._begin_anew()
        read = [ReadBack(*one) for one, _ in done[0] if one is not None]
        return ReadBack.of_ranks(read) if read else None, _agreed(says for _, says in done[0])

    async def held(self) -> Says:
        """Return (version, digest, touched) as the process with the model says. WeightError if ranks differ."""
        return _agreed(await self.llm.collective_rpc("held_weights"))


def _agreed(answers: Iterable[Sequence[Any]]) -> Says:
    different = {(version, digest, touched) for version, digest, touched in answers}
    if len(different) != 1:
        raise WeightError(f"the ranks of one engine hold different weights: {sorted(different)}")
    return different.pop()


def _copy(bucket: Bytes) -> FileIO:
    """Return a memory file with the bucket's bytes, which nobody can change: what is verified stays as it was.

    It has no name, so it does not stay behind, however this process ends.
    """
    file = FileIO(os.memfd_create("raypost-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb")
    rest = bucket.data
    while rest:
        rest = rest[file.write(rest) :]
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return file


def _sampling(params: SampleParams) -> SamplingParams:
    # No seed: one per request ends the CPU engine. No text, and no stop token but those given by id.
    return SamplingParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _result(output: CompletionOutput, request_id: str) -> GenerateResult:
    """Tokens with their logprobs and versions. Raises AlignmentError if a token lacks either."""
    ids = np.asarray(output.token_ids, np.int32)
    flat = output.logprobs
    assert flat is None or isinstance(flat, FlatLogprobs), "flat_logprobs was asked for"
    # An aborted request may carry the logprob of a token that it does not return.
    logprobs = np.asarray(flat.logprobs[: len(ids)] if flat is not None else [], np.float32)
    versions = np.full(len(ids), NO_VERSION, np.int32)
    for span in output.weight_versions or []:
        versions[span.start : span.end] = int(span.version)
    if len(logprobs) != len(ids) or (versions == NO_VERSION).any():
        raise AlignmentError(
            f"{request_id}: the engine returned {len(ids)} tokens with {len(logprobs)} logprobs and the "
            f"versions {output.weight_versions}"
        )
    return GenerateResult(
        response_ids=ids,
        logprobs=logprobs,
        policy_versions=versions,
        finish_reason=output.finish_reason or "error",
        worker="",
    )
