"""TRL's sides of bench/step.py: GRPOTrainer on CPU, generating with transformers or with a vLLM in its own process.

All of it is TRL's own, but that the colocated vLLM gets an executor that is there on CPU, and takes weights by vLLM's
own reload. AsyncGRPOTrainer is not among the sides: its attention kernel and its weight transfer need GPUs.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from bench.step_sides import PROMPT_TOKENS, PROMPTS, REWARD, Setup, Turns

_RIGHT = re.compile(REWARD)


def rewards(completions: list[Any], **_: Any) -> list[float]:
    """Return what raypost's judge gives, of texts or of messages."""
    texts = (one if isinstance(one, str) else one[-1]["content"] for one in completions)
    return [float(bool(_RIGHT.search(text))) for text in texts]


def _callback(turns: Turns) -> Any:
    from transformers import TrainerCallback

    class Turn(TrainerCallback):  # type: ignore[misc]  # transformers has no types
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.step_begins()

    return Turn()


def _common(setup: Setup) -> dict[str, Any]:
    return {
        "output_dir": str(setup.folder / "trl"), "use_cpu": True, "bf16": False, "report_to": [],
        "disable_tqdm": True, "gradient_checkpointing": False, "max_steps": 10**6, "save_strategy": "no",
        "logging_steps": 10**6, "per_device_train_batch_size": setup.groups * setup.group_size,
        "num_generations": setup.group_size, "learning_rate": 1e-6, "lr_scheduler_type": "constant",
    }  # fmt: skip


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
