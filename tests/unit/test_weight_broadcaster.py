"""The order and the checks of a sync, with scripted trainer and pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from actors.training.broadcaster import WeightBroadcaster
from raypost.config import SyncConfig
from raypost.errors import StaleWeightsError, WeightError
from raypost.types import FloatArray, IntArray, WeightReport
from raypost.weights.manifest import DOWN, UP, Manifest, pack, pack_adapters
from raypost.weights.seats import Backend, Member, Seats

CANARY = np.arange(4, dtype=np.int32)


class ScriptedTrainer:
    def __init__(self) -> None:
        self.published: list[int] = []
        self.bits = 0

    async def publish(self, version: int) -> tuple[Manifest, list[Any]]:
        self.published.append(version)
        return pack(version, [("w", np.full(8, self.bits, np.uint8), "float32", (2,))], 1 << 20)

    async def node(self) -> str:
        return "10.0.0.1"

    async def open_group(self, members: Sequence[Member], backend: Backend, timeout_s: float) -> Seats:
        raise AssertionError("all are on one node")

    async def send(self, version: int, seats: Seats) -> str:
        raise AssertionError("all are on one node")

    async def canary(self, token_ids: IntArray) -> FloatArray:
        return np.zeros(len(token_ids) - 1, np.float32)

    async def offload(self) -> None:
        """It is on no device."""


class ScriptedPool:
    def __init__(self, drift: float = 0.0) -> None:
        self.drift = drift
        self.calls: list[str] = []
        self.spoilt = False
        self.digest = ""

    async def stage_weights(self, manifest: Manifest, buckets: list[Any]) -> None:
        self.calls.append(f"stage {manifest.version}")
        if self.spoilt:
            raise WeightError("'w' arrived otherwise")

    async def members(self) -> list[Member]:
        return [Member("rollout-0", 0, "10.0.0.1", 1)]

    async def receive_weights(self, manifest: Manifest, buckets: list[Any], seats: Seats) -> None:
        raise AssertionError("all are on one node")

    async def load_weights(self, manifest: Manifest, buckets: list[Any]) -> list[WeightReport]:
        self.calls.append(f"load {manifest.version}" + (f" epoch {manifest.epoch}" if manifest.epoch else ""))
        self.digest = manifest.digest
        return [
            WeightReport(version=manifest.version, digest=manifest.digest, worker="rollout-0", load_s=0.25)
        ]

    async def renew_weights(self, manifest: Manifest, buckets: list[Any]) -> bool:
        self.calls.append(f"renew {manifest.version}")
        return manifest.digest == self.digest

    async def restock(self, manifest: Manifest, buckets: list[Any]) -> None:
        self.calls.append(f"restock {manifest.version}")

    async def canary(self, prompt_ids: IntArray) -> list[tuple[str, FloatArray]]:
        return [("rollout-0", np.full(len(prompt_ids) - 1, self.drift, np.float32))]


def broadcaster(
    drift: float = 0.0, tolerance: float | None = 1e-3, pool: ScriptedPool | None = None
) -> tuple[WeightBroadcaster, ScriptedTrainer]:
    trainer = ScriptedTrainer()
    return WeightBroadcaster(
        trainer, pool or ScriptedPool(drift), SyncConfig(canary_tolerance=tolerance), CANARY
    ), trainer


async def test_broadcast_reports_what_was_sent_and_loaded() -> None:
    sync, _ = broadcaster()
    report = await sync.broadcast(3)
    assert (report.version, report.num_workers, report.load_s, report.canary_difference) == (3, 1, 0.25, 0.0)
    assert [span.kind for span in await sync.drain_spans()] == ["sync"]


async def test_same_version_again_sends_nothing() -> None:
    sync, trainer = broadcaster()
    assert await sync.broadcast(3) == await sync.broadcast(3)
    assert trainer.published == [3]


async def test_pool_that_lost_its_weights_is_given_those_that_are_out_and_those_that_are_prepared() -> None:
    pool = ScriptedPool()
    sync, trainer = broadcaster(pool=pool)
    await sync.restock()
    assert pool.calls == []
    await sync.broadcast(3)
    await sync.prepare(4)
    pool.calls.clear()
    await sync.restock()
    assert pool.calls == ["restock 3", "restock 4"] and trainer.published == [3, 4]


async def test_broadcaster_that_was_started_again_has_what_is_out_published_once_more() -> None:
    pool = ScriptedPool()
    sync, trainer = broadcaster(pool=pool)
    await sync.restock(3)
    await sync.restock(3)
    assert pool.calls == ["restock 3"] * 2 and trainer.published == [3]
    sync, trainer = broadcaster(pool=pool)
    await sync.prepare(4)
    pool.calls.clear()
    await sync.restock(3)
    assert pool.calls == ["restock 4"] and trainer.published == [4]


async def test_what_is_prepared_is_loaded_by_the_broadcast_and_published_once() -> None:
    pool = ScriptedPool()
    sync, trainer = broadcaster(pool=pool)
    await sync.prepare(3)
    await sync.prepare(3)
    assert (pool.calls, trainer.published) == (["stage 3"], [3])
    assert (await sync.broadcast(3)).version == 3
    await sync.prepare(3)
    assert (pool.calls, trainer.published) == (["stage 3", "load 3"], [3])
    await sync.broadcast(4)
    assert (pool.calls[2:], trainer.published) == (["stage 4", "load 4"], [3, 4])
    with pytest.raises(StaleWeightsError, match="cannot broadcast version 3: 4 is already out"):
        await sync.prepare(3)


async def test_engines_that_took_by_a_swap_what_was_prepared_acknowledge_it_before_they_are_checked() -> None:
    pool = ScriptedPool()
    sync, trainer = broadcaster(pool=pool)
    await sync.broadcast(2)
    await sync.prepare(3)
    report = await sync.check(3)
    assert (report.version, report.num_workers, report.canary_difference) == (3, 1, 0.0)
    assert await sync.check(3) == report
    assert (pool.calls[2:], trainer.published) == (["stage 3", "load 3"], [2, 3])


async def test_ranks_leave_devices_that_they_share_after_their_last_work_and_before_engines_have_the_version() -> (
    None
):
    order: list[str] = []

    class Trainer(ScriptedTrainer):
        async def canary(self, token_ids: IntArray) -> FloatArray:
            order.append("canary")
            return await super().canary(token_ids)

        async def offload(self) -> None:
            order.append("offload")

    class Pool(ScriptedPool):
        async def stage_weights(self, manifest: Manifest, buckets: list[Any]) -> None:
            order.append("stage")

    for leave in (True, False):
        sync = WeightBroadcaster(Trainer(), Pool(), SyncConfig(canary_tolerance=1e-3), CANARY, offload=True)
        await sync.prepare(1, leave)
        prepared, order = order, []
        assert prepared == (["canary", "offload", "stage"] if leave else ["canary", "stage"])
        await sync.check(1)
        assert order == ([] if leave else ["offload"])
        order = []


async def test_a_preparation_that_failed_is_made_again() -> None:
    pool = ScriptedPool()
    sync, trainer = broadcaster(pool=pool)
    pool.spoilt = True
    with pytest.raises(WeightError, match="arrived otherwise"):
        await sync.prepare(1)
    pool.spoilt = False
    assert (await sync.broadcast(1)).version == 1
    assert (pool.calls, trainer.published) == (["stage 1", "stage 1", "load 1"], [1, 1])


async def test_a_base_counts_as_sent_with_the_first_version_that_has_it() -> None:
    sync, trainer = broadcaster()
    base, buckets = pack(0, [("w", np.zeros(64, np.uint8), "float32", (4, 4))], 1 << 20)
    factors = [(f"w{part}", np.zeros(16, np.uint8), "float32", shape) for part, shape in
               ((DOWN, (1, 4)), (UP, (4, 1)))]  # fmt: skip

    async def publish(version: int) -> tuple[Manifest, list[Any]]:
        manifest, own = pack_adapters(version, base, factors, {"w": 1.0}, 1 << 20)
        return manifest, buckets + own

    trainer.publish = publish  # type: ignore[method-assign]
    assert [(await sync.broadcast(version)).nbytes for version in (0, 1, 2)] == [64 + 80, 80, 80]


async def test_versions_never_go_back() -> None:
    sync, _ = broadcaster()
    await sync.broadcast(3)
    with pytest.raises(StaleWeightsError, match="cannot broadcast version 2: 3 is already out"):
        await sync.broadcast(2)


@pytest.mark.parametrize("drift", [0.03, float("nan")])
async def test_sync_fails_when_logprobs_disagree(drift: float) -> None:
    sync, _ = broadcaster(drift)
    with pytest.raises(WeightError, match="rollout-0 says it holds version 1"):
        await sync.broadcast(1)


async def test_a_version_that_is_out_may_be_checked_later_and_once() -> None:
    pool = ScriptedPool(0.03)
    sync, _ = broadcaster(pool=pool)
    report = await sync.broadcast(1, check=False)
    assert (report.version, report.canary_difference) == (1, None)
    with pytest.raises(StaleWeightsError, match="cannot check version 2: 1 is out"):
        await sync.check(2)
    for _ in range(2):
        with pytest.raises(WeightError, match="rollout-0 says it holds version 1"):
            await sync.check(1)
    with pytest.raises(WeightError, match="rollout-0 says it holds version 1"):
        await sync.broadcast(1)
    pool.drift = 0.0
    assert (await sync.check(1)).canary_difference == 0.0
    pool.drift = 0.03
    assert (await sync.broadcast(1)).canary_difference == 0.0


async def test_a_broadcaster_that_starts_again_checks_the_version_that_is_out_by_sending_it_again() -> None:
    pool = ScriptedPool()
    first, _ = broadcaster(pool=pool)
    sent = await first.broadcast(1, check=False)
    again, _ = broadcaster(pool=pool)
    checked = await again.check(1)
    assert (checked.version, checked.digest, checked.canary_difference) == (1, sent.digest, 0.0)
    with pytest.raises(StaleWeightsError, match="cannot check version 2: 1 is out"):
        await again.check(2)


async def test_canary_can_be_switched_off() -> None:
    sync, _ = broadcaster(0.03, tolerance=None)
    assert (await sync.broadcast(1)).canary_difference is None


async def test_bits_that_the_engines_hold_are_published_again_and_not_sent() -> None:
    pool = ScriptedPool()
    sync, trainer = broadcaster(pool=pool)
    await sync.broadcast(3)
    assert await sync.renew(3)
    assert (trainer.published, pool.calls) == ([3, 3], ["stage 3", "load 3", "renew 3"])


async def test_other_bits_of_a_version_are_sent_again_under_a_new_epoch() -> None:
    pool = ScriptedPool()
    sync, trainer = broadcaster(pool=pool)
    await sync.broadcast(3)
    trainer.bits = 1
    assert not await sync.renew(3)
    report = await sync.broadcast(3, again=True)
    await sync.broadcast(3)
    assert (report.digest, report.canary_difference) == (pool.digest, 0.0)
    assert pool.calls == ["stage 3", "load 3", "renew 3", "stage 3", "load 3 epoch 1"]
    await sync.broadcast(4)
    assert pool.calls[-1] == "load 4"


async def test_what_a_dead_trainer_had_published_is_forgotten() -> None:
    pool = ScriptedPool()
    sync, trainer = broadcaster(pool=pool)
    await sync.prepare(3)
    await sync.forget()
    await sync.broadcast(3)
    assert trainer.published == [3, 3]
