"""A rollout worker on a real engine with a random model, small enough to compare with transformers."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.rollout.worker import RolloutWorker
from raypost.config import RolloutConfig
from raypost.config.engine import EngineConfig
from raypost.types import FloatArray, GenerateRequest, GenerateResult, IntArray, SampleParams, WeightReport
from raypost.weights.manifest import Bytes, Given, Manifest, pack

VOCAB = 50
CONFIG = EngineConfig(
    device="cpu",
    dtype="float32",
    max_model_len=256,
    seed=0,
    sleep_mode=False,
    rollout=RolloutConfig(max_num_seqs=32, kv_cache_gb=0.1, max_num_batched_tokens=256),
    block_size=32,
    recompute_kv_cache=True,  # so that each token is what its version alone gives
)
PROMPT = np.asarray([3, 7, 11, 2, 5], np.int32)
TOLERANCE = 1e-3


def make_model(folder: Path, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return LlamaForCausalLM(config).eval()


def change(model: LlamaForCausalLM) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def publish(model: LlamaForCausalLM, version: int) -> tuple[Manifest, list[Bytes]]:
    """The model's weights in several buckets."""
    return pack(version, flat_tensors(model), bucket_bytes=100_000)


def flat_tensors(model: LlamaForCausalLM) -> Given:
    """The model's weights as they are packed."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach().numpy().reshape(-1).view(np.uint8), "float32", tuple(parameter.shape)


def expected_logprobs(model: LlamaForCausalLM, ids: IntArray, temperature: float = 1.0) -> FloatArray:
    """Logprob of every token but the first."""
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens).logits[0, :-1] / temperature, -1)
    gathered: FloatArray = logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy()
    return gathered


def request(
    name: str, max_tokens: int = 16, ids: IntArray = PROMPT, priority: int = 0, **params: Any
) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        token_ids=ids,
        sample_params=SampleParams(max_tokens=max_tokens, **params),
        priority=priority,
    )


def difference(model: LlamaForCausalLM, result: GenerateResult, temperature: float = 1.0) -> float:
    """Largest gap between the engine's logprobs of a result for PROMPT and transformers'."""
    ids = np.concatenate([PROMPT, result.response_ids])
    expected = expected_logprobs(model, ids, temperature)[len(PROMPT) - 1 :]
    return float(np.max(np.abs(expected - result.logprobs)))


class Bench:
    """One worker, the model whose weights it should hold, and the version they have."""

    def __init__(self, worker: RolloutWorker, model: LlamaForCausalLM) -> None:
        self.worker, self.model, self.version = worker, model, -1
        self.history: dict[int, LlamaForCausalLM] = {}
        """The model as it was at every version."""

    @property
    def llm(self) -> Any:
        """The worker's AsyncLLM."""
        assert self.worker._life.engine is not None
        return self.worker._life.engine.llm

    async def sync(self) -> None:
        """Change the weights and bring them into the worker, which then serves."""
        await self.worker.pause()
        await self.load()
        await self.worker.resume(self.version)

    async def load(self) -> None:
        """Change the weights and bring them into the paused worker."""
        manifest, buckets = self.publish()
        report = await self.worker.load_weights(manifest, *buckets)
        assert (report.version, report.digest) == (self.version, manifest.digest)

    async def swap(self) -> WeightReport:
        """Change the weights and bring them into the worker that serves, in one call."""
        manifest, buckets = self.publish()
        await self.worker.stage_weights(manifest, *buckets)
        return await self.worker.swap(manifest, *buckets)

    def publish(self) -> tuple[Manifest, list[Bytes]]:
        """Change the weights, and publish them as the next version."""
        change(self.model)
        self.version += 1
        self.history[self.version] = copy.deepcopy(self.model)
        return publish(self.model, self.version)

    async def progress(self, count: int) -> None:
        """Wait until so many requests have each got a token more than they have now."""

        def tokens() -> dict[str, int]:
            states = self.llm.output_processor.request_states
            return {name: one.detokenizer.num_output_tokens() for name, one in states.items()}

        before = tokens()
        async with asyncio.timeout(240):
            while sum(now > before.get(name, 0) for name, now in tokens().items()) < count:
                await asyncio.sleep(0.002)

    async def assert_serves(self, version: int) -> None:
        """The engine's logprobs are those of the model as it is now, under this version."""
        result = await self.worker.generate(request("serves"))
        assert set(result.policy_versions) == {version}
        assert difference(self.model, result) < TOLERANCE

    def gaps(self, result: GenerateResult) -> FloatArray:
        """Per token of a result for PROMPT: how far its logprob is from the one that transformers computes over
        the whole prefix, with the weights of the token's version."""
        ids = np.concatenate([PROMPT, result.response_ids])
        expected = np.empty(len(result.response_ids), np.float32)
        for version in set(result.policy_versions.tolist()):
            chosen = result.policy_versions == version
            expected[chosen] = expected_logprobs(self.history[version], ids)[len(PROMPT) - 1 :][chosen]
        distance: FloatArray = np.abs(expected - result.logprobs)
        return distance


@contextlib.asynccontextmanager
async def started(folder: Path, tied: bool) -> AsyncIterator[Bench]:
    """A worker with its engine up, serving nothing yet. No process of it is left at the end."""
    model = make_model(folder, tied)
    worker = RolloutWorker("rollout-0", str(folder), CONFIG, worker_index=0)
    info = await worker.start()
    yield Bench(worker, model)
    await worker.shutdown()
    # vLLM's engine is part of a cycle, and complains when it is collected at the interpreter's end.
    gc.collect()
    assert not any(Path(f"/proc/{pid}").exists() for pid in info.engine_pids)
