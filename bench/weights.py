"""How long a new version takes from the trainer's memory into a rollout worker, against vLLM's own reload.

    python -m bench.weights --hidden 576 --layers 30 --intermediate 1536 --vocab 49152 --dtype bfloat16

Prints the medians, in seconds, of packing (copy and digests), staging (copy into shared memory, digests again, while
the engine may run), loading (what it must stand still for), loading with `sync.verify: every`, the part of it that only
reads back, a reload by vLLM alone of weights that lie in its memory, and a plain copy of the same bytes, with the ratio
of each to that reload. Then the same model with adapters (LoRA):
bytes that travel, packing and loading, of merged weights and of adapters alone, one after the other in turn, with the
ratio of the two; and the same of versions in which only the attention of each layer changed, whole and without what did
not change. Its last line is one JSON object, with the ratios to vLLM's reload.
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
from raypost.weights.delta import DeltaPacker
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
    methods = {module.quant_method for module in model.modules() if hasattr(module, "quant_method")}
    # What raypost does before a layer is packed is no part of it.
    ours = {one: vars(one).pop("process_weights_after_loading", None) for one in methods}
    begin = time.perf_counter()
    with set_current_vllm_config(vllm_worker.vllm_config):
        initialize_layerwise_reload(model)
        model.load_weights(weights.items())
        finalize_layerwise_reload(model, vllm_worker.vllm_config.model_config)
    seconds = time.perf_counter() - begin
    for method, own in ours.items():
        if own is not None:
            method.process_weights_after_loading = own
    return seconds


async def whole(worker: RolloutWorker, model: LlamaForCausalLM, repeat: int, folder: Path) -> Times:
    """Versions 0 to `repeat` of all weights, every one of them changed; the last one's size is printed."""
    engine = worker._life.engine
    assert engine is not None, "it was started"
    torch.save(dict(model.named_parameters()), folder / "weights")
    times: Times = defaultdict(list)
    for version in range(2 * repeat + 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.001)
        begin = time.perf_counter()
        manifest, buckets = pack(version, computed(base_weights(model)), BUCKET_BYTES)
        times["pack"].append(time.perf_counter() - begin)
        # In turn, so that neither is measured on another machine than the other.
        engine.verify = "off" if version % 2 else "every"
        begin = time.perf_counter()
        await worker.stage_weights(manifest, *buckets)
        times["stage"].append(time.perf_counter() - begin)
        times["reload"] += await engine.llm.collective_rpc(reload, args=(str(folder / "weights"),))
        report = await worker.load_weights(manifest, *buckets)
        times["load" if version % 2 else "load, verified"].append(report.load_s)
        if report.read_back:
            times["read back"].append(report.verify_s)
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


async def changed_in_part(
    worker: RolloutWorker, model: LlamaForCausalLM, first: int, repeat: int
) -> dict[str, Times]:
    """Versions from `first` on, in which some blocks change: whole and without the others in turn."""
    deltas = DeltaPacker(BUCKET_BYTES, np.copy)
    times: dict[str, Times] = {"whole": defaultdict(list), "changed": defaultdict(list)}
    for number in range(2 * repeat + 4):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "self_attn" in name:
                    parameter.add_(0.001)
        is_delta = number < 2 or number % 2
        begin = time.perf_counter()
        if is_delta:
            manifest, buckets = deltas.pack(first + number, computed(base_weights(model)))
        else:
            manifest, buckets = pack(first + number, computed(base_weights(model)), BUCKET_BYTES)
        packed_s = time.perf_counter() - begin
        begin = time.perf_counter()
        sent = buckets[manifest.base_buckets :]
        await worker.stage_weights(manifest, *sent)
        staged_s = time.perf_counter() - begin
        load_s = (await worker.load_weights(manifest, *sent)).load_s
        if number > 3:  # those before tell what rests, and pack it
            found = {"megabytes": sum(one.nbytes for one in sent) / 1e6, "pack": packed_s, "stage": staged_s,
                     "load": load_s}  # fmt: skip
            for part, value in found.items():
                times["changed" if is_delta else "whole"][part].append(value)
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
        version = 2 * args.repeat + 2
        in_part = await changed_in_part(worker, model, version, args.repeat)
        by_way = await adapted(worker, model, version + 2 * args.repeat + 4, args.rank, args.repeat)
        await worker.shutdown()
    # The first of each is not like the others: it meets cold memory, and sends the base.
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    for name, seconds in medians.items():
        print(f"{name:14} {seconds:.4f} s  {seconds / medians['reload']:6.2f} x vLLM's reload")
    print(f"adapters of rank {args.rank}: merged, adapter, ratio")
    for name in ("megabytes", "pack", "load", "sync"):
        merged, alone = (statistics.median(by_way[way][name][1:]) for way in ("merged", "adapter"))
        unit = "MB" if name == "megabytes" else "s"
        print(f"{name:9} {merged:9.4f} {unit:2} {alone:9.4f} {unit:2} {alone / merged:6.3f}")
    print("only the attention changed: whole, what changed, ratio")
    for name in in_part["whole"]:
        all_of_it, changed = (statistics.median(in_part[way][name]) for way in ("whole", "changed"))
        unit = "MB" if name == "megabytes" else "s"
        print(f"{name:9} {all_of_it:9.4f} {unit:2} {changed:9.4f} {unit:2} {changed / all_of_it:6.3f}")
    ratios = {name: round(seconds / medians["reload"], 3) for name, seconds in medians.items()}
    ranges = {name: [min(values[1:]), max(values[1:])] for name, values in times.items()}
    figures = {"s": medians, "range_s": ranges, "ratio_to_reload": ratios}
    print(json.dumps(figures | {"load_average": os.getloadavg()[0]}))


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
