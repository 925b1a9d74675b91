"""Adapters from two ranks that share the weights between them (ZeRO 3) into a real engine, by both ways of sync."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.actor import ActorHandle

from actors.placement import spawn
from actors.rollout.worker import RolloutWorker
from actors.training.group import TrainerGroup
from actors.training.worker import CONCURRENCY_GROUPS, TrainerWorker
from raypost.config import Config
from raypost.types import FloatArray, Group, RolloutState, SampleParams, Status
from raypost.types.packed import PackedGroups, pack_groups
from raypost.weights.manifest import Manifest
from tests.actors.tiny_engine import CONFIG, VOCAB, make_model
from tests.factories import CHAIN_SUM, make_config

pytestmark = pytest.mark.usefixtures("local_ray")
IDS = np.arange(40, dtype=np.int32)


def lora_config() -> Config:
    return make_config(
        tasks=[{"source": CHAIN_SUM, "max_prompt_tokens": 16, "max_tokens": 32}],
        train={"num_steps": 9, "batch_size": 2, "learning_rate": 0.02, "num_workers": 2, "zero_stage": 3,
               "lora": {"rank": 4, "alpha": 6}, "step_timeout_s": 60},
    )  # fmt: skip


def make_batch(seed: int) -> PackedGroups:
    rng = np.random.default_rng(seed)
    groups = []
    for group_id in range(2):
        states = [
            RolloutState(
                task="task", group_id=group_id, sample_index=index, prompt_ids=np.arange(5, dtype=np.int32),
                sample_params=SampleParams(max_tokens=32), status=Status.COMPLETED, reward=float(index),
            )
            for index in range(2)
        ]  # fmt: skip
        for state in states:
            ids = rng.integers(0, VOCAB, 12).astype(np.int32)
            state.append_segment(ids, np.full(12, -3.9, np.float32), np.zeros(12, np.int32))
        groups.append(Group(task="task", group_id=group_id, states=states))
    return pack_groups(groups)


class Both(TrainerWorker):
    """A rank whose way of publishing can be changed."""

    def publish_as(self, sync: str) -> None:
        lora = self._config.train.lora
        assert lora is not None
        train = self._config.train.model_copy(update={"lora": lora.model_copy(update={"sync": sync})})
        self._config = self._config.model_copy(update={"train": train})


async def test_adapter_sync_and_merged_sync_give_the_engine_the_trainers_logprobs(tmp_path: Path) -> None:
    folder = str(tmp_path)
    make_model(tmp_path, tied=True).save_pretrained(folder)
    config = lora_config()
    ranks = [
        spawn(Both, config, folder, rank, name=f"lora-{rank}", concurrency_groups=CONCURRENCY_GROUPS)
        for rank in range(2)
    ]
    trainer = TrainerGroup(ranks, config)
    engine = spawn(RolloutWorker, "rollout-0", folder, CONFIG, 0, name="rollout-0")
    await asyncio.gather(trainer.start(), engine.start.remote())

    async def load(worker: ActorHandle, manifest: Manifest, refs: list[ray.ObjectRef]) -> FloatArray:
        """The engine's logprobs under these weights, which are the trainer's."""
        report = await worker.load_weights.remote(manifest, *refs)
        assert (report.version, report.digest) == (manifest.version, manifest.digest)
        got: FloatArray = await worker.canary.remote(IDS)
        assert np.abs(got - await trainer.canary(IDS)).max() < 1e-4
        return got

    manifest, base = await trainer.publish(0)
    before = await load(engine, manifest, base)
    for step in (1, 2):
        await trainer.fit(ray.put(make_batch(step)))
        manifest, refs = await trainer.publish(step)
        after = await load(engine, manifest, refs)
        assert refs[:-1] == base[:-1] and refs[-1] != base[-1], "only the factors are published again"
        assert np.abs(after - before).max() > 1e-2
        before = after
    assert manifest.bucket_sizes[-1] < 0.4 * sum(manifest.bucket_sizes[:-1])

    # An engine that has nothing of it yet.
    await engine.shutdown.remote()
    await engine.start.remote()
    assert np.array_equal(await load(engine, manifest, refs), after)
    await trainer.each("publish_as", "merged")
    merged, buckets = await trainer.publish(3)
    assert np.abs(await load(engine, merged, buckets) - after).max() < 1e-4 and buckets[0] != base[0]
    assert {entry.added for entry in merged.tensors} == {None} and merged.base_buckets == 0
    # Norms and the embedding have no adapter: they are sent with the first two versions and not again.
    for step in (4, 5):
        await trainer.fit(ray.put(make_batch(step)))
        merged, buckets = await trainer.publish(step)
        await load(engine, merged, buckets[merged.base_buckets :])
    resting = {entry.name for entry in merged.tensors if entry.bucket < merged.base_buckets}
    assert any("norm" in name for name in resting) and any("embed" in name for name in resting)
    assert not any("proj" in name for name in resting)

    await engine.shutdown.remote()
    await trainer.shutdown()
