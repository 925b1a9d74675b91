r"""Groups a second through the replay buffer's actor, against other queues and buffers for Ray in the same run.

    python -m bench.buffer --groups 1000 20000

Subjects take turns, five rounds or more; of each the median is printed with the lowest and the highest, and as ratio
the median of the rounds' own ratios. The last line is one JSON object, with the cores that other processes of the
machine took meanwhile.

Four producer actors put batches of 32 groups (8 responses of 512 token ids with logprobs: 33 KB) while the driver
takes them in batches of 512 (`--take`), until every group has been taken; at most 2,048 are on their way. Ours
does it with its journal on and a lease that is acknowledged for every batch, and its groups carry prompts,
versions, masks and details on top.

The peers are optional. They are not dependencies of raypost; to measure them too, install them into a folder of
their own and name it:

    pip install --no-deps --target peers torchrl==0.14.1 tensordict==0.14.3 pyvers hoptorch TransferQueue==0.1.11 \\
        pyzmq hydra-core omegaconf antlr4-python3-runtime==4.9.3
    PYTHONPATH=peers python -m bench.buffer
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray

from bench.buffer_subjects import (
    PUT_GROUPS,
    Raypost,
    RayQueue,
    Subject,
    TorchRL,
    TransferQueue,
    private_bytes,
)
from bench.figures import Foreign, cpu_seconds, spread

NUM_PRODUCERS = 4
ORDER_GROUPS, AHEAD_GROUPS = 128, 2048
"""A producer is asked for so many groups at once; so many are on their way at most."""
WARM_UP_GROUPS = 4096
IDLE_S = 0.001
DEADLINE_S = 120.0


class ProducerActor:
    """Puts its share of the groups."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        subject.connect()

    def ready(self) -> None:
        """Return when the actor is up."""

    def run(self, first: int, count: int) -> None:
        for start in range(first, first + count, PUT_GROUPS):
            self.subject.put(start, min(PUT_GROUPS, first + count - start))


def measure(subject: Subject, num_groups: int, take: int) -> dict[str, float]:
    """Measure groups a second from the first put to the last take, and how memory grew in between."""
    subject.start()
    producers = [ray.remote(num_cpus=0)(ProducerActor).remote(subject) for _ in range(NUM_PRODUCERS)]
    try:
        ray.get([one.ready.remote() for one in producers])
        stream(subject, producers, 0, WARM_UP_GROUPS, take)
        driver, held = private_bytes(), subject.memory()
        begin, used, foreign = time.perf_counter(), cpu_seconds(), Foreign()
        stream(subject, producers, WARM_UP_GROUPS, num_groups, take)
        seconds = time.perf_counter() - begin
        return {
            "groups_per_s": num_groups / seconds,
            "cpu_us": (cpu_seconds() - used) / num_groups * 1e6,
            "foreign_cores": foreign.cores(),
            "driver_mb": (private_bytes() - driver) / 2**20,
            "held_mb": held / 2**20,
            "held_growth_mb": (subject.memory() - held) / 2**20,
        }
    finally:
        for one in producers:
            ray.kill(one)
        subject.stop()


def stream(subject: Subject, producers: list[Any], first: int, num_groups: int, take: int) -> None:
    """Put and take `num_groups`, never more than AHEAD_GROUPS of them in between: as a bounded buffer has it."""
    deadline = time.monotonic() + DEADLINE_S
    ordered = taken = 0
    running: list[Any] = []
    while taken < num_groups:
        while ordered < num_groups and ordered - taken < AHEAD_GROUPS:
            count = min(ORDER_GROUPS, num_groups - ordered)
            running.append(producers[len(running) % len(producers)].run.remote(first + ordered, count))
            ordered += count
        found = subject.take(min(take, num_groups - taken))
        taken += found
        if not found:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{subject.name}: {taken} of {num_groups} groups came in {DEADLINE_S:.0f} s"
                )
            time.sleep(IDLE_S)
    ray.get(running)


def main() -> None:
    """Measure every subject that is installed and print them side by side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, nargs="+", default=[1000, 20_000])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each, in turn")
    parser.add_argument("--take", type=int, default=512, help="groups taken at once")
    parser.add_argument("--only", nargs="*", default=None, help="words of the subjects to measure")
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="rp-", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=1 << 30,
        _temp_dir=folder,
        log_to_driver=False,
    )
    try:
        found = {num_groups: table(num_groups, args) for num_groups in args.groups}
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"bench": "buffer", "rounds": args.rounds, "take": args.take, "groups": found}))


def table(num_groups: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure every subject at one number of groups, print them as a table and return them as plain data.

    They take turns, so that what else the machine does falls on all of them.
    """
    subjects: list[Subject] = [Raypost(), RayQueue(), TorchRL(num_groups + WARM_UP_GROUPS), TransferQueue()]
    chosen = [one for one in subjects if not args.only or any(word in one.name for word in args.only)]
    lacks = {
        one.name: [need for need in one.needs if importlib.util.find_spec(need) is None] for one in chosen
    }
    runs: dict[str, list[dict[str, float]]] = {one.name: [] for one in chosen}
    for _ in range(args.rounds):
        for one in chosen:
            if not lacks[one.name]:
                runs[one.name].append(measure(one, num_groups, args.take))
    print(
        f"\n{num_groups} groups of 33 KB, {NUM_PRODUCERS} producers, put by {PUT_GROUPS}, taken by {args.take}, "
        f"{args.rounds} rounds"
    )
    names = (
        "groups/s",
        "(lowest, highest)",
        "raypost is",
        "(from, to)",
        "CPU/group",
        "driver grew",
        "buffer grew",
    )
    print(" " * 34 + "".join(f"{name:>{width}}" for name, width in zip(names, _WIDTHS, strict=True)))
    found: dict[str, Any] = {}
    ours = [run["groups_per_s"] for run in runs.get(Raypost.name, ())]
    for name, each in runs.items():
        if lacks[name]:
            print(f"{name:34} skipped: {', '.join(lacks[name])} not installed (see --help)")
            continue
        figures = found[name] = _figures(each, ours)
        (rate, low, high), (ratio, least, most) = (
            figures[name].values() for name in ("groups_per_s", "raypost_is")
        )
        grew = f"{figures['held_growth_mb']:+.0f} MB" if each[0]["held_mb"] else ""
        print(
            f"{name:34}{rate:9.0f}{f'({low:.0f}, {high:.0f})':>19}{ratio:11.2f}x{f'({least:.2f}, {most:.2f})':>15}"
            f"{figures['cpu_us']:8.0f} us{figures['driver_mb']:+10.0f} MB{grew:>13}",
            flush=True,
        )
    foreign = spread(run["foreign_cores"] for each in runs.values() for run in each)
    print("other processes took {median:.2f} cores ({low:.2f} to {high:.2f})".format(**foreign))
    return {"subjects": found, "foreign_cores": foreign}


def _figures(runs: list[dict[str, float]], ours: list[float]) -> dict[str, Any]:
    """Return what the rounds of one subject came to, and how many times as fast `ours` were in the same rounds."""
    rates = [run["groups_per_s"] for run in runs]
    return {
        "groups_per_s": spread(rates),
        "raypost_is": spread([our / rate for our, rate in zip(ours, rates, strict=False)] or [math.nan]),
        "cpu_us": statistics.median(run["cpu_us"] for run in runs),
        "driver_mb": max(run["driver_mb"] for run in runs),
        "held_growth_mb": max(run["held_growth_mb"] for run in runs),
    }


_WIDTHS = (9, 19, 12, 15, 11, 13, 13)


if __name__ == "__main__":
    main()
