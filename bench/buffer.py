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
import dataclasses
import importlib.util
import json
import math
import os
import shutil
import statistics
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import psutil

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray.util.queue import Empty, Queue

from actors.placement import spawn
from actors.replay_buffer import ReplayBufferActor
from bench.figures import Foreign, cpu_seconds, spread
from raypost.packed import PackedGroups, pack_groups
from raypost.protocols import BufferBounds, TaskLimits
from raypost.types import Group, RolloutState, SampleParams, Status

GROUP_SIZE, NUM_TOKENS, PROMPT_TOKENS = 8, 512, 64
NUM_PRODUCERS, PUT_GROUPS = 4, 32
ORDER_GROUPS, AHEAD_GROUPS = 128, 2048
"""A producer is asked for so many groups at once; so many are on their way at most."""
WARM_UP_GROUPS = 4096
IDLE_S = 0.001
DEADLINE_S = 120.0


def payload() -> dict[str, np.ndarray]:
    """Return what one group is to every subject: token ids and logprobs, [group_size, num_tokens]."""
    shape = (GROUP_SIZE, NUM_TOKENS)
    return {"ids": np.full(shape, 7, np.int32), "logprobs": np.full(shape, -0.5, np.float32)}


class Subject(ABC):
    """One way from producers to a consumer. It travels to the producers by pickle."""

    name = ""
    needs: tuple[str, ...] = ()

    def start(self) -> None:
        """Start what the subject needs, in the driver."""
        return None

    def connect(self) -> None:
        """Make ready to put, in a producer."""
        return None

    @abstractmethod
    def put(self, first: int, count: int) -> None:
        """Put groups `first` to `first + count - 1`; returns when they are there."""

    @abstractmethod
    def take(self, limit: int) -> int:
        """Take up to `limit` groups in the driver and look at them; how many there were."""

    def memory(self) -> int:
        """Resident bytes of whatever holds the groups, 0 if not known."""
        return 0

    def stop(self) -> None:
        """End what was started."""
        return None


class MeasuredBuffer(ReplayBufferActor):
    """The buffer's actor, which also says how much memory it has."""

    def memory(self) -> int:
        return private_bytes()


class Raypost(Subject):
    """ReplayBufferActor with journal and leases."""

    name = "raypost buffer (journal, leases)"

    def start(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="rp-bench-")
        self.step = 1
        self.remaining = 0
        self.actor = spawn(
            MeasuredBuffer,
            {"default": TaskLimits(None)},
            BufferBounds(max_bytes=4 << 30),
            self.folder,
            uuid.uuid4().hex,
            name=f"buffer-{uuid.uuid4().hex}",
            max_restarts=-1,
        )

    def connect(self) -> None:
        self.batch = packed_batch(PUT_GROUPS)

    def put(self, first: int, count: int) -> None:
        batch = self.batch if count == PUT_GROUPS else packed_batch(count)
        batch = dataclasses.replace(batch, group_ids=np.arange(first, first + count))
        results = ray.get(self.actor.put.remote(batch, 1))
        assert all(one.stored for one in results)

    def take(self, limit: int) -> int:
        # As the driver of a job: the batch is fetched by who uses it, here and now.
        lease, batch = ray.get(self.actor.lease.remote(self.step, {"default": limit}))
        if lease is None:
            return 0
        assert batch.response_ids[-1] == 7
        # Trained: its lease ends while the next one is asked for.
        self.actor.acknowledge.remote(self.step)
        self.step += 1
        return int(batch.num_groups)

    def memory(self) -> int:
        return int(ray.get(self.actor.memory.remote()))

    def stop(self) -> None:
        ray.kill(self.actor)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"actor": self.actor}


def packed_batch(count: int) -> PackedGroups:
    """Return groups as they come from agent loops."""
    one, params = payload(), SampleParams(max_tokens=NUM_TOKENS)
    prompt = np.arange(PROMPT_TOKENS, dtype=np.int32)
    groups = []
    for n in range(count):
        metadata = {"question": f"What is {n} plus 1?", "answer": str(n + 1)}
        states = [
            RolloutState(
                task="default",
                group_id=n,
                sample_index=index,
                prompt_ids=prompt,
                sample_params=params,
                metadata=metadata,
                status=Status.COMPLETED,
                reward=1.0,
                finish_reason="stop",
                worker="rollout-0",
                response_ids=one["ids"][index],
                logprobs=one["logprobs"][index],
                policy_versions=np.zeros(NUM_TOKENS, np.int32),
                response_mask=np.ones(NUM_TOKENS, np.bool_),
            )
            for index in range(GROUP_SIZE)
        ]
        groups.append(Group(task="default", group_id=n, states=states))
    return pack_groups(groups)


class RayQueue(Subject):
    """ray.util.queue.Queue: items are dicts of arrays."""

    name = "ray.util.queue.Queue"

    def start(self) -> None:
        self.queue = Queue()

    def connect(self) -> None:
        self.groups = [payload() for _ in range(PUT_GROUPS)]

    def put(self, first: int, count: int) -> None:
        self.queue.put_nowait_batch([{"group_id": first + n, **self.groups[n]} for n in range(count)])

    def take(self, limit: int) -> int:
        try:
            items = self.queue.get_nowait_batch(limit)
        except Empty:
            return 0
        assert items[-1]["ids"][-1, -1] == 7
        return len(items)

    def stop(self) -> None:
        self.queue.shutdown(force=True)


class TorchRL(Subject):
    """TorchRL's RayReplayBuffer: extended by the producers, sampled without replacement by the driver."""

    name = "TorchRL RayReplayBuffer"
    needs = ("torchrl", "tensordict")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def start(self) -> None:
        from functools import partial

        from torchrl.data import LazyTensorStorage, RayReplayBuffer
        from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

        self.buffer = RayReplayBuffer(
            storage=partial(LazyTensorStorage, self.capacity),
            sampler=SamplerWithoutReplacement,
            remote_config={"num_cpus": 0},
        )
        self.rb = self.buffer.client()
        self.taken = 0

    def connect(self) -> None:
        self.made: dict[int, Any] = {}

    def put(self, first: int, count: int) -> None:
        import torch
        from tensordict import TensorDict

        if count not in self.made:
            tensors = {
                name: torch.from_numpy(array).expand(count, *array.shape) for name, array in payload().items()
            }
            self.made[count] = TensorDict(tensors, batch_size=[count]).contiguous()
        self.rb.extend(self.made[count])

    def take(self, limit: int) -> int:
        # It has no end of its stream: what may be sampled is what was put and not sampled yet.
        if len(self.rb) - self.taken < limit:
            return 0
        sample = self.rb.sample(limit)
        assert sample["ids"][-1, -1, -1] == 7
        self.taken += len(sample)
        return len(sample)

    def stop(self) -> None:
        self.buffer.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"rb": self.rb}


class TransferQueue(Subject):
    """TransferQueue with its own storage units: put by key, consumed once by a task, cleared."""

    name = "TransferQueue"
    needs = ("transfer_queue", "tensordict")

    def start(self) -> None:
        import transfer_queue
        from omegaconf import OmegaConf

        # Polling: a request that cannot be filled comes back empty, as it does everywhere else here.
        transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}}))
        self.client = transfer_queue.get_client()

    def connect(self) -> None:
        import transfer_queue

        transfer_queue.init()

    def put(self, first: int, count: int) -> None:
        import torch
        import transfer_queue
        from tensordict import TensorDict

        tensors = {
            name: torch.from_numpy(array).expand(count, *array.shape) for name, array in payload().items()
        }
        fields = TensorDict(tensors, batch_size=[count]).contiguous()
        transfer_queue.kv_batch_put([str(first + n) for n in range(count)], "train", fields)

    def take(self, limit: int) -> int:
        meta = self.client.get_meta(["ids", "logprobs"], limit, "train", task_name="bench")
        if meta.size == 0:
            return 0
        data = self.client.get_data(meta)
        assert data["ids"][-1][-1, -1] == 7
        self.client.clear_samples(meta)
        return int(meta.size)

    def stop(self) -> None:
        import transfer_queue

        transfer_queue.close()

    def __getstate__(self) -> dict[str, Any]:
        return {}


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


def private_bytes() -> int:
    """Memory of this process that is its own: pages of the object store belong to all."""
    return int(psutil.Process().memory_full_info().uss)


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
