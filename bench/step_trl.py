"""TRL's sides of bench/step.py: GRPOTrainer, and AsyncGRPOTrainer with a vLLM server, on CPU.

Both are TRL's own; what has no CPU form of theirs is replaced by the same thing that has one. The colocated vLLM gets
an executor that is there, and takes weights by vLLM's own reload. The asynchronous trainer's attention kernel
(FlashAttention 3) becomes PyTorch's attention, its weight transfer (NCCL) the shared memory that raypost uses, and
its chat template, which a model of sums has not, is left out. Each request has the length that `length_of` says.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterable
from typing import Any

import torch
from trl.experimental.async_grpo import async_rollout_worker as theirs

from bench.step_sides import LENGTHS, PROMPT_TOKENS, PROMPTS, REWARD, Setup, Turns, length_of, number_of

_RIGHT = re.compile(REWARD)


def rewards(completions: list[Any], **_: Any) -> list[float]:
    """Return what raypost's judge gives, of texts or of messages."""
    texts = (one if isinstance(one, str) else one[-1]["content"] for one in completions)
    return [float(bool(_RIGHT.search(text))) for text in texts]


def _callback(turns: Turns, transfer: Any = None) -> Any:
    from transformers import TrainerCallback

    class Turn(TrainerCallback):  # type: ignore[misc]  # transformers has no types
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            """Freeze the server, if there is one, while it is another's turn."""
            if transfer is None or not turns.ends():
                turns.step_begins()
                return
            transfer.pause()
            turns.step_begins()
            transfer.resume()

    return Turn()


def _common(setup: Setup) -> dict[str, Any]:
    return {
        "output_dir": str(setup.folder / "trl"), "use_cpu": True, "bf16": False, "report_to": [],
        "disable_tqdm": True, "gradient_checkpointing": False, "max_steps": 10**6, "save_strategy": "no",
        "logging_steps": 10**6, "per_device_train_batch_size": setup.groups * setup.group_size,
        "num_generations": setup.group_size, "learning_rate": 1e-6, "lr_scheduler_type": "constant",
    }  # fmt: skip


# ---------------------------------------------------------------- synchronous


def synchronous(setup: Setup, turns: Turns, colocated_vllm: bool) -> None:
    """Run GRPOTrainer, generating with transformers or with a vLLM in its own process."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    if colocated_vllm:
        _vllm_on_cpu()
    options = {"min_tokens" if colocated_vllm else "min_new_tokens": setup.max_tokens}
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.float32),
        args=GRPOConfig(
            **_common(setup), shuffle_dataset=False, max_completion_length=setup.max_tokens,
            generation_kwargs=options, beta=0.0, loss_type="dapo", use_vllm=colocated_vllm, vllm_mode="colocate",
            vllm_max_model_length=PROMPT_TOKENS + setup.max_tokens,
        ),
        processing_class=AutoTokenizer.from_pretrained(setup.model),
        reward_funcs=rewards,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        callbacks=[_callback(turns)],
    )  # fmt: skip
    trainer.train()


def _vllm_on_cpu() -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    import trl.generation.vllm_generation as generation
    from vllm import LLM

    def on_cpu(**options: Any) -> Any:
        options |= {"distributed_executor_backend": "uni", "dtype": "float32", "enforce_eager": True,
                    "kv_cache_memory_bytes": 2**28}  # fmt: skip
        return LLM(**options)

    def sync_weights(self: Any) -> None:
        worker = self.llm.llm_engine.model_executor.driver_worker
        worker.model_runner.reload_weights(weights_iterator=self._iter_named_params())
        self.llm.reset_prefix_cache()

    generation.LLM = on_cpu
    generation.VLLMGeneration.sync_weights = sync_weights


# ---------------------------------------------------------------- asynchronous


def asynchronous(setup: Setup, turns: Turns) -> None:
    """Run AsyncGRPOTrainer with its own bound of staleness, beside a vLLM server."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    packing.tree_attention = attention_on_cpu
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    server = _start_server(setup, url)
    try:
        tokenizer = AutoTokenizer.from_pretrained(setup.model)
        tokenizer.response_template = {"none": "is read"}
        theirs.AsyncRolloutWorker._loop_cls = Lengths
        prompts = [[{"role": "user", "content": text}] for text in PROMPTS]
        transfer = SharedMemory(url)
        trainer = AsyncGRPOTrainer(
            model=setup.model,
            args=AsyncGRPOConfig(
                **_common(setup), dtype="float32", max_completion_length=max(LENGTHS), vllm_server_base_url=url,
                max_staleness=4, request_timeout=3600, token_budget=PROMPT_TOKENS + 64 * max(LENGTHS),
            ),
            processing_class=tokenizer,
            reward_funcs=rewards,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            weight_transfer=transfer,
            callbacks=[_callback(turns, transfer)],
        )  # fmt: skip
        trainer.train()
    finally:
        server.terminate()


def _start_server(setup: Setup, url: str) -> subprocess.Popen[bytes]:
    host, port = url.removeprefix("http://").split(":")
    more = {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }  # fmt: skip
    return subprocess.Popen(
        [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", setup.model, "--host", host,
            "--port", port, "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "128", "--max-model-len",
            str(PROMPT_TOKENS + max(LENGTHS)), "--kv-cache-memory-bytes", str(3 * 2**27),
            "--disable-log-stats", "--disable-uvicorn-access-log", "--generation-config", "vllm",
            "--logprobs-mode", "processed_logprobs", "--distributed-executor-backend", "uni",
            "--worker-extension-cls", "actors.rollout.vllm_weights.WeightExtension",
            "--weight-transfer-config", '{"backend": "raypost"}',
        ],
        env=os.environ | more,
    )  # fmt: skip


class SharedMemory:
    """TRL's WeightTransferProtocol by vLLM's calls, the bytes in shared memory."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._versions = itertools.count(1)

    def init_weight_transfer(self) -> None:
        """Do nothing: the trainer has asked the server for its length, so it answers."""

    def pause(self) -> None:
        self._post("pause?mode=keep")

    def resume(self) -> None:
        self._post("resume")

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        from raypost.weights.manifest import pack
        from raypost.weights.tensors import as_bytes

        version = next(self._versions)
        manifest, buckets = pack(version, as_bytes((name, one.detach()) for name, one in iterator), 2**28)
        files = [os.memfd_create("bench-weights") for _ in buckets]
        for file, bucket in zip(files, buckets, strict=True):
            os.write(file, bucket.data)
        info = {"manifest": manifest.encoded(), "paths": [f"/proc/{os.getpid()}/fd/{file}" for file in files]}
        self._post("start_weight_update", {"is_checkpoint_format": True})
        self._post("update_weights", {"update_info": info})
        self._post("finish_weight_update")
        for file in files:
            os.close(file)

    def destroy(self) -> None:
        """Do nothing: there is no connection."""

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(f"{self._url}/{path}", data, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=300).read()


def attention_on_cpu(
    module: Any, query: Any, key: Any, value: Any, _: Any, *, tree_kv_index: Any, tree_cu_seqlens_q: Any,
    tree_cu_seqlens_k: Any, scaling: float | None = None, **__: Any,
) -> tuple[Any, None]:  # fmt: skip
    """Attend as TRL's tree attention does: each segment to the path that leads to it, causally from its end."""
    from torch.nn.functional import scaled_dot_product_attention

    starts, paths = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    parts = []
    for (a, b), (c, d) in zip(itertools.pairwise(starts), itertools.pairwise(paths), strict=True):
        seen = tree_kv_index[c:d]
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        parts.append(
            scaled_dot_product_attention(
                query[:, :, a:b],
                key[:, :, seen],
                value[:, :, seen],
                attn_mask=mask,
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(parts, 2).transpose(1, 2), None


class Lengths(theirs._AsyncRolloutLoop):  # type: ignore[misc]  # TRL has no types
    """TRL's rollout loop, which runs in a child process of its own, with the lengths of this bench."""

    async def _generate_one(
        self, prompt: list[dict[str, str]], tool_dict: Any, tools: Any, group_id: int = 0
    ) -> Any:
        """Send a prompt as it is, for a response as long as its number says."""
        text = prompt[0]["content"]
        ids = self.tokenizer(text)["input_ids"]
        answer = await self._post(
            "/v1/completions",
            {
                "model": self._request_model, "prompt": ids, "max_tokens": length_of(number_of(text)),
                "temperature": self.temperature, "top_p": 1.0, "top_k": 0, "n": 1, "return_token_ids": True,
                "logprobs": 0, "ignore_eos": True,
            },
            self.request_timeout,
        )  # fmt: skip
        choice = answer["choices"][0]
        turn = theirs.TurnRecord(ids, choice["token_ids"], choice["logprobs"]["token_logprobs"])
        sequences, _ = theirs._chain_to_sequences([turn], uuid.uuid4().hex, self._fork_threshold_tokens)
        said = [{"role": "assistant", "content": self.tokenizer.decode(choice["token_ids"])}]
        return said, choice["token_ids"], sequences, 0, 0, None
