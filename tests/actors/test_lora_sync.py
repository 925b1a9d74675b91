"""Adapters from two ranks that share the weights between them (ZeRO 3) into a real engine, by both ways of sync."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import ray
from transformers import LlamaForCausalLM

from actors.placement import spawn
from actors.rollout_worker import RolloutWorker
from actors.trainer import TrainerGroup
from actors.trainer_worker import CONCURRENCY_GROUPS, TrainerWorker
from raypost.config import Config, parse_config
from raypost.packed import PackedGroups, pack_groups
from raypost.types import FloatArray, Group, RolloutState, SampleParams, Status
from tests.actors.tiny_engine import CONFIG, VOCAB, make_model

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(300)]
IDS = np.arange(40, dtype=np.int32)


def make_config() -> Config:
    return parse_config({
        "model": {"name": "tiny", "dtype": "float32"},
        "tasks": [{"source": {"kind": "reasoning_gym", "dataset": "chain_sum"},
                   "max_prompt_tokens": 16, "max_tokens": 32}],
        "train": {"num_steps": 9, "batch_size": 2, "learning_rate": 0.02, "num_workers": 2, "zero_stage": 3,
                  "lora": {"rank": 4, "alpha": 6}, "step_timeout_s": 60},
    })  # fmt: skip


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
    model = make_model(tmp_path, tied=True)
    assert isinstance(model, LlamaForCausalLM)
    model.save_pretrained(folder)
    config = make_config()
    workers = [
        spawn(Both, config, folder, rank, name=f"lora-{rank}", concurrency_groups=CONCURRENCY_GROUPS)
        for rank in range(2)
    ]
    trainer, engine = TrainerGroup(workers, config), RolloutWorker("rollout-0", folder, CONFIG, 0)
    await trainer.start()
    await engine.start()

    async def synced(version: int) -> tuple[list[ray.ObjectRef], FloatArray]:
        """The engine's logprobs under what is published now, which are the trainer's."""
        manifest, refs = await trainer.publish(version)
        report = await engine.load_weights(manifest, *ray.get(refs))
        assert (report.version, report.digest) == (version, manifest.digest)
        got = await engine.canary(IDS)
        assert np.abs(got - await trainer.canary(IDS)).max() < 1e-4
        return refs, got

    refs, before = await synced(0)
    for step in (1, 2):
        await trainer.fit(ray.put(make_batch(step)))
        later, after = await synced(step)
        assert later[:-1] == refs[:-1] and later[-1] != refs[-1], "only the factors are published again"
        assert np.abs(after - before).max() > 1e-2
        before = after
    assert sum(bucket.nbytes for bucket in ray.get(later[-1:])) < 0.4 * sum(
        b.nbytes for b in ray.get(refs[:-1])
    )

    await engine.shutdown()
    _, restarted = await synced(3)
    assert np.array_equal(restarted, after)
    await trainer._each("publish_as", "merged")
    refs, merged = await synced(4)
    assert np.abs(merged - after).max() < 1e-4 and refs[0] != later[0]

    await engine.shutdown()
    await trainer.shutdown()
    gc.collect()
