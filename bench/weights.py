"""How long a new version takes from the trainer's memory into a rollout worker, against one copy of its bytes.

    python -m bench.weights --hidden 576 --layers 30 --intermediate 1536 --vocab 49152 --dtype bfloat16

Prints the medians, in seconds, of packing (copy and digests), loading (copy into shared memory, digests
again, vLLM's reload) and a plain copy of the same bytes, with the ratio of each to that copy.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.rollout_worker import EngineConfig, RolloutWorker
from raypost.weights import Bytes, Manifest, pack

BUCKET_BYTES = 256 << 20


def publish(model: LlamaForCausalLM, version: int, dtype: str) -> tuple[Manifest, list[Bytes]]:
    """All parameters of the model as one version."""
    tensors = (
        (name, parameter.detach().reshape(-1).view(torch.uint8).numpy(), dtype, tuple(parameter.shape))
        for name, parameter in model.named_parameters()
    )
    return pack(version, tensors, BUCKET_BYTES)


async def measure(args: argparse.Namespace) -> dict[str, float]:
    """Medians over `args.repeat` versions."""
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        tie_word_embeddings=True,
    )
    config.architectures = ["LlamaForCausalLM"]
    model = LlamaForCausalLM(config).to(getattr(torch, args.dtype))
    times: dict[str, list[float]] = {"copy": [], "pack": [], "load": []}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        engine = EngineConfig(device=args.device, dtype=args.dtype, max_model_len=128, kv_cache_gb=0.1)
        worker = RolloutWorker("rollout-0", folder, engine, worker_index=0)
        await worker.start()
        for version in range(args.repeat + 1):
            begin = time.perf_counter()
            manifest, buckets = publish(model, version, args.dtype)
            times["pack"].append(time.perf_counter() - begin)
            times["load"].append((await worker.load_weights(manifest, *buckets)).load_s)
            begin = time.perf_counter()
            copies = [np.copy(bucket) for bucket in buckets]
            times["copy"].append(time.perf_counter() - begin)
            del copies
        await worker.shutdown()
    print(f"{sum(manifest.bucket_sizes) / 1e6:.1f} MB in {len(manifest.tensors)} tensors")
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def main() -> None:
    """Measure one size and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--intermediate", type=int, default=384)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeat", type=int, default=5)
    medians = asyncio.run(measure(parser.parse_args()))
    for name, seconds in medians.items():
        print(f"{name:5} {seconds:.4f} s  {seconds / medians['copy']:6.1f} x one copy")


if __name__ == "__main__":
    main()
