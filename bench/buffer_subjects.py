"""What bench/buffer.py compares: ways of groups from producers to a consumer."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import uuid
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import psutil
import ray
from ray.util.queue import Empty, Queue

from actors.placement import spawn
from actors.replay_buffer import ReplayBufferActor
from raypost.types import BufferBounds, Group, RolloutState, SampleParams, Status, TaskLimits
from raypost.types.packed import PackedGroups, pack_groups

GROUP_SIZE, NUM_TOKENS, PROMPT_TOKENS = 8, 512, 64
PUT_GROUPS = 32
"""Groups that are put at once."""


def private_bytes() -> int:
    """Memory of this process that is its own: pages of the object store belong to all."""
    return int(psutil.Process().memory_full_info().uss)


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
