"""How long a new version takes from the trainer's memory into a rollout worker, against vLLM's own reload.

    python -m bench.weights --hidden 576 --layers 30 --intermediate 1536 --vocab 49152 --dtype bfloat16

Prints the medians, in seconds, of packing (copy and digests), staging (copy into shared memory, digests again, while
the engine may run), loading (what it must stand still for), a reload by vLLM alone of weights that lie in its memory,
and a plain copy of the same bytes, with the ratio of each to that reload. Then the same model with adapters (LoRA):
bytes that travel, packing and loading, of merged weights and of adapters alone, one after the other in turn, with the
ratio of the two. Its last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.rollout.worker import RolloutWorker
from raypost.config import LoraConfig, RolloutConfig
from raypost.config.engine import EngineConfig
from raypost.trainer.model.lora import (
    Weight,
    adapter_factors,
    adapter_scales,
    add_adapters,
    base_weights,
    merged_weights,
)
from raypost.weights.manifest import Bytes, Given, Manifest, pack, pack_adapters
from raypost.weights.tensors import as_bytes

BUCKET_BYTES = 256 << 20

Times = dict[str, list[float]]


def computed(weights: Iterable[tuple[str, Weight]]) -> Given:
    """Weights in the form in which they are packed."""
    return as_bytes((name, weight.value()) for name, weight in weights)


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """Make a Llama with random weights."""
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
    return LlamaForCausalLM(config).to(getattr(torch, args.dtype))


def reload(vllm_worker: Any, path: str) -> float:
    """Return the seconds in which vLLM alone reloads the weights of a file; runs in the engine's process."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    weights, model = torch.load(path), vllm_worker.model_runner.get_model()
    begin = time.perf_counter()
    with set_current_vllm_config(vllm_worker.vllm_config):
        initialize_layerwise_reload(model)
        model.load_weights(weights.items())
        finalize_layerwise_reload(model, vllm_worker.vllm_config.model_config)
    return time.perf_counter() - begin


async def whole(worker: RolloutWorker, model: LlamaForCausalLM, repeat: int, folder: Path) -> Times:
    """Versions 0 to `repeat` of all weights, every one of them changed; the last one's size is printed."""
    engine = worker._life.engine
    assert engine is not None, "it was started"
    torch.save(dict(model.named_parameters()), folder / "weights")
    times: Times = defaultdict(list)
    for version in range(repeat + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.001)
        begin = time.perf_counter()
        manifest, buckets = pack(version, computed(base_weights(model)), BUCKET_BYTES)
        times["pack"].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        await worker.stage_weights(manifest, *buckets)
        times["stage"].append(time.perf_counter() - begin)
        times["reload"] += await engine.llm.collective_rpc(reload, args=(str(folder / "weights"),))
        times["load"].append((await worker.load_weights(manifest, *buckets)).load_s)
        begin = time.perf_counter()
        copies = [np.copy(bucket) for bucket in buckets]
        times["copy"].append(time.perf_counter() - begin)
        del copies
    print(f"{sum(manifest.bucket_sizes) / 1e6:.1f} MB in {len(manifest.tensors)} tensors")
    return times


async def adapted(
    worker: RolloutWorker, model: LlamaForCausalLM, first: int, rank: int, repeat: int
) -> dict[str, Times]:
    """Versions from `first` on, of adapters that change: merged and alone in turn."""
    add_adapters(model, LoraConfig(rank=rank))
    base, kept = pack(0, computed(base_weights(model)), BUCKET_BYTES)

    def merged(version: int) -> tuple[Manifest, list[Bytes]]:
        return pack(version, computed(merged_weights(model)), BUCKET_BYTES)

    def alone(version: int) -> tuple[Manifest, list[Bytes]]:
        factors, scales = computed(adapter_factors(model)), adapter_scales(model)
        return pack_adapters(version, base, factors, scales, BUCKET_BYTES)

    ways: dict[str, tuple[Callable[[int], tuple[Manifest, list[Bytes]]], list[Bytes]]] = {
        "merged": (merged, []),
        "adapter": (alone, kept),
    }
    times: dict[str, Times] = {name: defaultdict(list) for name in ways}
    for number in range(2 * repeat + 2):
        name = list(ways)[number % 2]
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.01)
        publish, before = ways[name]
        begin = time.perf_counter()
        manifest, buckets = publish(first + number)
        times[name]["pack"].append(time.perf_counter() - begin)
        times[name]["load"].append((await worker.load_weights(manifest, *before, *buckets)).load_s)
        times[name]["sync"].append(times[name]["pack"][-1] + times[name]["load"][-1])
        times[name]["megabytes"].append(sum(bucket.nbytes for bucket in buckets) / 1e6)
    return times


async def measure(args: argparse.Namespace) -> None:
    """Run one engine through all of it, and print."""
    model = make_model(args)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        engine = EngineConfig(
            device=args.device,
            dtype=args.dtype,
            max_model_len=128,
            seed=0,
            sleep_mode=False,
            rollout=RolloutConfig(kv_cache_gb=0.1),
        )
        worker = RolloutWorker("rollout-0", folder, engine, worker_index=0)
        await worker.start()
        times = await whole(worker, model, args.repeat, Path(folder))
        by_way = await adapted(worker, model, args.repeat + 1, args.rank, args.repeat)
        await worker.shutdown()
    # The first of each is not like the others: it meets cold memory, and sends the base.
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    for name, seconds in medians.items():
        print(f"{name:6} {seconds:.4f} s  {seconds / medians['reload']:6.2f} x vLLM's reload")
    print(f"adapters of rank {args.rank}: merged, adapter, ratio")
    for name in ("megabytes", "pack", "load", "sync"):
        merged, alone = (statistics.median(by_way[way][name][1:]) for way in ("merged", "adapter"))
        unit = "MB" if name == "megabytes" else "s"
        print(f"{name:9} {merged:9.4f} {unit:2} {alone:9.4f} {unit:2} {alone / merged:6.3f}")
    ranges = {name: [min(values[1:]), max(values[1:])] for name, values in times.items()}
    print(json.dumps({"s": medians, "range_s": ranges, "load_average": os.getloadavg()[0]}))


def main() -> None:
    """Measure one size and print it."""
    # For `reload`, which is sent to the engine's process.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--intermediate", type=int, default=384)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeat", type=int, default=5)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
