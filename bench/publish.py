"""What a publication of the weights takes of the trainer's memory and time, at ZeRO 3, bucket by bucket and whole.

    python -m bench.publish --hidden 576 --layers 30 --intermediate 1536 --vocab 49152 --bucket-mb 64 4096

Real ranks of DeepSpeed on a Ray of their own publish some versions with each size of bucket; one that holds all of the
weights at once shows what the whole model on one rank would take. Prints, for each size, the megabytes by which each
rank's own memory (what it shares with nobody: not the object store) grew from before the first publication to its peak,
and the seconds of a publication, the median without the first. The least is twice the largest tensor, which DeepSpeed
gathers into a buffer and then puts in its place. Its last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray

from actors.placement import spawn
from actors.training.group import TrainerGroup
from actors.training.worker import CONCURRENCY_GROUPS, TrainerWorker
from bench.weights import make_model
from raypost.config import Config, parse_config

POLL_S = 0.001


def own_bytes(pid: int) -> int:
    """Return the memory of a process that it shares with no other."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@contextmanager
def peaks(pids: list[int]) -> Iterator[list[int]]:
    """Fill a list, once the block has ended, with the bytes by which each process had grown at most."""
    before = [own_bytes(pid) for pid in pids]
    most, ended = list(before), threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_S):
            most[:] = [max(old, own_bytes(pid)) for old, pid in zip(most, pids, strict=True)]

    found: list[int] = []
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield found
    finally:
        ended.set()
        watching.join()
        found += [peak - begin for peak, begin in zip(most, before, strict=True)]


def configuration(args: argparse.Namespace, bucket_mb: int) -> Config:
    """Two ranks that share everything; what they would train does not matter."""
    return parse_config({
        "model": {"name": "tiny", "dtype": args.dtype},
        "tasks": [{"source": {"kind": "reasoning_gym", "dataset": "chain_sum"}, "max_prompt_tokens": 16,
                   "max_tokens": 32}],
        "train": {"num_steps": 1, "batch_size": 2, "num_workers": args.ranks, "zero_stage": 3, "bucket_mb": bucket_mb},
    })  # fmt: skip


async def measure(args: argparse.Namespace, folder: str, bucket_mb: int) -> dict[str, Any]:
    """Return medians of one size of bucket."""
    config = configuration(args, bucket_mb)
    ranks = [
        spawn(TrainerWorker, config, folder, rank, name=f"{bucket_mb}-{rank}", concurrency_groups=CONCURRENCY_GROUPS)
        for rank in range(args.ranks)
    ]  # fmt: skip
    trainer = TrainerGroup(ranks, config)
    infos = await trainer.start()
    seconds, sizes = [], [0]
    with peaks([info["pid"] for info in infos]) as grown:
        for version in range(args.repeat + 1):
            begin = time.perf_counter()
            manifest, _ = await trainer.publish(version)
            seconds.append(time.perf_counter() - begin)
            sizes = [entry.nbytes for entry in manifest.tensors]
    await trainer.shutdown()
    return {
        "model_mb": sum(sizes) / 1e6,
        "largest_tensor_mb": max(sizes) / 1e6,
        "peak_mb": [nbytes / 1e6 for nbytes in grown],
        "s": statistics.median(seconds[1:]),
    }


def main() -> None:
    """Measure all sizes and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bucket-mb", type=int, nargs="+", default=[16, 4096])
    parser.add_argument("--repeat", type=int, default=4)
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="rp-", dir="/tmp")
    ray.init(
        address="local", num_cpus=args.ranks, include_dashboard=False, object_store_memory=3 << 30,
        _temp_dir=folder, log_to_driver=False,
    )  # fmt: skip
    found = {}
    try:
        make_model(args).save_pretrained(f"{folder}/model")
        for bucket_mb in args.bucket_mb:
            one = found[str(bucket_mb)] = asyncio.run(measure(args, f"{folder}/model", bucket_mb))
            peak = ", ".join(f"{mb:.0f}" for mb in one["peak_mb"])
            print(
                f"buckets of {bucket_mb} MiB: ranks grew by {peak} MB for {one['model_mb']:.0f} MB of weights "
                f"(the largest tensor {one['largest_tensor_mb']:.0f} MB), "
                f"{one['s']:.3f} s"
            )
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"by_bucket_mb": found, "load_average": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
