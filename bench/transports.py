"""How long a version takes from the trainer's buckets into the own memory of 1, 2 and 4 processes, by each transport.

    python -m bench.transports --megabytes 538

The transports take turns, so that all meet the same machine. Each ends when every receiver has a copy of its own:

    object store   put, then each receiver maps it and copies
    shared memory  write into a file in memory, then each receiver maps it and copies
    gloo           raypost's broadcast group, from the trainer's rank 0
    memcpy         one copy within the sender, the least that any of them could take

Prints medians in milliseconds and, for each transport, the ratio to the best of the others that run on one machine. Its
last line is one JSON object. NCCL needs a machine with several GPUs, and is not measured.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray

from raypost.weights.group import BroadcastGroup, Host
from raypost.weights.manifest import Bytes
from raypost.weights.seats import Member, Seats

BUCKET_BYTES = 256 << 20
TIMEOUT_S = 60.0


class Receiver:
    """One process with memory of its own for the buckets, written once before."""

    def __init__(self, sizes: list[int]) -> None:
        self.own = [np.ones(size, np.uint8) for size in sizes]
        self.group: BroadcastGroup | None = None

    def copy(self, *buckets: Bytes) -> None:
        """Copy what Ray mapped."""
        for own, bucket in zip(self.own, buckets, strict=True):
            own[:] = bucket

    def map(self, paths: list[str]) -> None:
        """Map files and copy them."""
        for own, path in zip(self.own, paths, strict=True):
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
                own[:] = np.frombuffer(memory, np.uint8)

    def receive(self, seats: Seats, rank: int) -> None:
        """Receive from a group, joined at the first call."""
        if self.group is None or self.group.seats.meeting != seats.meeting:
            self.group = BroadcastGroup(seats, rank)
        for own in self.own:
            self.group.broadcast(own)


class Sender:
    """The trainer's rank 0, in this process."""

    def __init__(self, buckets: list[Bytes], receivers: list[Any], folder: str) -> None:
        self.buckets, self.receivers = buckets, receivers
        self.paths = [os.path.join(folder, str(number)) for number in range(len(buckets))]
        self.kept: list[Any] = []
        names = [f"r{number}" for number in range(len(receivers))]
        self.host = Host("127.0.0.1", "gloo", TIMEOUT_S, [Member(name, 0, "", 1) for name in names])
        self.spare = [np.ones_like(bucket) for bucket in buckets]

    def object_store(self) -> None:
        """As raypost does: the version before the last gives its pages to this one."""
        refs = [ray.put(bucket) for bucket in self.buckets]
        ray.get([one.copy.remote(*refs) for one in self.receivers])
        self.kept = refs

    def shared_memory(self) -> None:
        """Write into files that were written before."""
        for path, bucket in zip(self.paths, self.buckets, strict=True):
            with open(path, "r+b" if os.path.exists(path) else "w+b") as file:
                file.write(bucket.data)
        ray.get([one.map.remote(self.paths) for one in self.receivers])

    def gloo(self) -> None:
        """Send to all."""
        taken = [one.receive.remote(self.host.seats, 1 + i) for i, one in enumerate(self.receivers)]
        for bucket in self.buckets:
            self.host.send(bucket)
        ray.get(taken)

    def memcpy(self) -> None:
        """Copy once, here."""
        for own, bucket in zip(self.spare, self.buckets, strict=True):
            own[:] = bucket


def measure(megabytes: int, counts: list[int], repeat: int) -> dict[str, dict[str, float]]:
    """Return milliseconds by number of receivers and transport: medians. Ray must run."""
    total = megabytes * 10**6
    sizes = [min(BUCKET_BYTES, total - begin) for begin in range(0, total, BUCKET_BYTES)]
    buckets = [np.random.default_rng(0).integers(0, 256, size, np.uint8) for size in sizes]
    found = {}
    actor: Any = ray.remote(num_cpus=0)(Receiver)
    for count in counts:
        receivers = [actor.remote(sizes) for _ in range(count)]
        folder = tempfile.mkdtemp(prefix="rp-", dir="/dev/shm")
        try:
            sender = Sender(buckets, receivers, folder)
            ways: list[Callable[[], None]] = [
                sender.object_store,
                sender.shared_memory,
                sender.gloo,
                sender.memcpy,
            ]
            times: dict[str, list[float]] = defaultdict(list)
            # The first two rounds meet cold memory, and make the group.
            for number in range(repeat + 2):
                for way in ways:
                    begin = time.perf_counter()
                    way()
                    if number > 1:
                        times[way.__name__].append(1e3 * (time.perf_counter() - begin))
            found[str(count)] = {name: statistics.median(ms) for name, ms in times.items()}
        finally:
            shutil.rmtree(folder)
            for one in receivers:
                ray.kill(one)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=538)
    parser.add_argument("--receivers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="rp-", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=(4 * args.megabytes) << 20,
        _temp_dir=folder,
        log_to_driver=False,
    )
    try:
        found = measure(args.megabytes, args.receivers, args.repeat)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    ratios = {}
    for count, ms in found.items():
        best = min(value for name, value in ms.items() if name != "memcpy")
        ratios[count] = {name: round(value / best, 3) for name, value in ms.items()}
        for name, value in ms.items():
            print(f"{count} receivers  {name:14} {value:7.1f} ms  {value / best:5.2f} x the best transport")
    figures = {"megabytes": args.megabytes, "ms": found, "ratio_to_best": ratios}
    print(json.dumps(figures | {"load_average": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
