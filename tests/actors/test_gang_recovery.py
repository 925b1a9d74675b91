"""Real ranks that are killed: the gang comes back with the bits that it had, and goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from actors.placement import spawn
from actors.training.answers import TrainedStep
from actors.training.group import TrainerGroup
from actors.training.worker import CONCURRENCY_GROUPS
from jobs.census import Census
from jobs.recovery import GangRecovery, Pool, Supervisor
from raypost.buffer.kept import KeptBatches
from raypost.checkpoint import CheckpointDir
from raypost.config import Config, FaultsConfig
from raypost.trainer.batch.packing import MicroBatch
from raypost.types import PoolHolds
from raypost.types.packed import PackedGroups
from tests.actors.test_trainer import GROUPS, Probe, each, make_batch, train_config
from tests.actors.test_trainer import model_path as model_path
from tests.unit.test_recovery import Record

pytestmark = pytest.mark.usefixtures("local_ray")
STEPS = 5


class Mortal(Probe):
    """A rank that ends, or stops, within its next optimizer step where a file says so."""

    def fit(self, packed: PackedGroups, step: int) -> TrainedStep:
        order = Path(os.environ["RAYPOST_TEST_ORDERS"], f"rank-{self._rank}")
        engine: Any = self._policy._engine
        memory = order.with_name("memory")
        if memory.exists():
            self._short_of_memory(int(memory.read_text()))
        if order.exists():
            number = int(order.read_text())
            order.unlink()
            engine.apply = lambda: os.kill(os.getpid(), number)
        return super().fit(packed, step)

    def _short_of_memory(self, tokens: int) -> None:
        """From now on, fail as PyTorch does where a micro-batch of rank 1 has more tokens."""
        policy: Any = self._policy
        forward = type(policy)._forward

        def short(micro: MicroBatch, *args: Any) -> Any:
            if self._rank == 1 and micro.num_inputs > tokens:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return forward(policy, micro, *args)

        policy._forward = short


class Keeper:
    """Batches as the buffer's actor keeps them."""

    def __init__(self, folder: Path) -> None:
        self.kept = KeptBatches(folder)

    async def kept_batch(self, step: int) -> ray.ObjectRef:
        return ray.put(self.kept.read(step))

    async def forget_batches(self, upto: int) -> None:
        self.kept.forget(upto)


class Engines:
    """A pool that holds a version, and says whether the gang published its bits again."""

    def __init__(self, trainer: TrainerGroup) -> None:
        self.trainer = trainer
        self.held: PoolHolds | None = None
        self.renewed: list[bool] = []

    async def take(self, version: int) -> None:
        manifest, _ = await self.trainer.publish(version)
        self.held = PoolHolds(version, manifest.digest, serving=True, asleep=False)

    async def holds(self) -> PoolHolds | None:
        return self.held

    async def forget(self) -> None:
        pass

    async def renew(self, version: int) -> bool:
        manifest, _ = await self.trainer.publish(version)
        assert self.held is not None
        self.renewed.append(manifest.digest == self.held.digest)
        return self.renewed[-1]


class World:
    """A gang of two ranks and what its recovery needs."""

    def __init__(self, config: Config, model_path: str, folder: Path) -> None:
        number = next(GROUPS)
        self.names = [f"trainer-{rank}-of-{number}" for rank in range(2)]
        self.handles = [
            spawn(
                Mortal, config, model_path, rank, name=name, concurrency_groups=CONCURRENCY_GROUPS,
                max_restarts=-1, env={"RAYPOST_TEST_ORDERS": str(folder)},
            )
            for rank, name in enumerate(self.names)
        ]  # fmt: skip
        self.folder, self.record = folder, Record()
        self.trainer = TrainerGroup(self.names, config)
        self.engines, self.keeper = Engines(self.trainer), Keeper(folder / "batches")
        self.checkpoints = CheckpointDir(folder / "checkpoints", 2, {})
        everything: Any = self.engines
        telemetry: Any = self.record
        self.census = Census()
        producer: Any = SimpleNamespace()
        self.recovery = GangRecovery(
            config, Supervisor(FaultsConfig(), telemetry), self.census, self.trainer, self.checkpoints,
            self.keeper, producer, [Pool(everything, everything)],
        )  # fmt: skip

    async def step(self, step: int) -> dict[str, float]:
        batch = make_batch(step)
        self.keeper.kept.keep(step, batch)
        return await self.trainer.fit(ray.put(batch), step)

    async def save(self, step: int) -> None:
        await self.trainer.save(self.checkpoints.begin(step))
        self.checkpoints.commit(step)
        await self.recovery.saved(step)

    async def end(self, name: str) -> tuple[str, dict[str, float], bytes]:
        """Digest of the weights, metrics of the last step, and bytes of the weights' moving average."""
        manifest, _ = await self.trainer.publish(STEPS + 1)
        metrics = await self.trainer.fit(ray.put(make_batch(STEPS)), STEPS)
        await self.trainer.save_hf(self.folder / name, ema=True)
        timed = {"step_s", "tokens_per_s"}
        files = sorted((self.folder / name).glob("*.safetensors"))
        assert files
        return (
            manifest.digest,
            {key: value for key, value in metrics.items() if key not in timed},
            b"".join(path.read_bytes() for path in files),
        )


@pytest.fixture
def world(model_path: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    config = train_config(
        num_workers=2, zero_stage=2, num_steps=STEPS + 1, lr_schedule="cosine", warmup_steps=2, ema_decay=0.9,
        num_minibatches=2, loss={"kind": "tests.actors.random_loss:random_loss"}, **request.param,
    )  # fmt: skip
    world = World(config, model_path, tmp_path)
    yield world
    asyncio.run(world.trainer.shutdown())


async def death_of(handle: ActorHandle) -> RayActorError:
    """What a call raises once the actor is gone, which takes a moment."""
    for _ in range(300):
        try:
            await handle.facts.remote()
        except RayActorError as error:
            return error
        await asyncio.sleep(0.1)
    raise AssertionError("it lives")


@pytest.mark.parametrize("world", [{}], indirect=True)
@pytest.mark.parametrize("saved", [2, pytest.param(0, marks=pytest.mark.slow)])
async def test_a_rank_that_is_killed_in_a_step_leaves_no_trace_in_the_weights(
    world: World, saved: int
) -> None:
    """Steps 1 to 3 are trained, and rank 1 dies in step 4: those since the checkpoint, or all, are trained again."""
    await world.trainer.start()
    world.census.look()
    for step in range(1, 4):
        await world.step(step)
        if step == saved:
            await world.save(step)
    await world.engines.take(3)
    (world.folder / "rank-1").write_text(str(int(signal.SIGKILL)))
    await world.step(4)
    await world.step(5)
    seen = await world.end("disturbed")

    (died,) = (fields for incident, fields in world.record.incidents if incident == "role_died")
    assert died["actor"] == world.names[1] and died["pid"] and died["node"] and "killed" in died["exit_cause"]
    again = {"role_died": 1, "role_restarted": 1, "batches_trained_again": 3 - saved}
    assert world.record.counts() == again
    assert world.engines.renewed == [True], "what engines hold is published again, bit for bit"
    assert world.keeper.kept.steps() == list(range(saved + 1, 6))

    await each(world.trainer, "renew")  # an undisturbed run, in the same processes
    world.trainer.step = 0
    for step in range(1, STEPS + 1):
        await world.step(step)
    assert await world.end("undisturbed") == seen

    ray.kill(world.handles[0])
    told = str(world.census.explained(await death_of(world.handles[0])))
    for text in (f"{world.names[0]} (process ", "node ", "it died", "same command continues"):
        assert text in told
    mistake = ValueError("a mistake")
    assert world.census.explained(mistake) is mistake


@pytest.mark.slow
@pytest.mark.parametrize("world", [{"step_timeout_s": 40}], indirect=True)
async def test_a_rank_that_hangs_is_named_ended_and_replaced(world: World) -> None:
    await world.trainer.start()
    world.census.look()
    await world.step(1)
    (world.folder / "rank-1").write_text(str(int(signal.SIGSTOP)))
    await world.step(2)
    assert (await world.trainer.fit(ray.put(make_batch(3)), 3))["num_samples"] == 16
    (died,) = (fields for incident, fields in world.record.incidents if incident == "role_died")
    assert died["actor"] == world.names[1] and "to say that it is alive" in died["cause"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [{"micro_batch_tokens": 96}], indirect=True)
async def test_a_micro_batch_beyond_one_ranks_memory_is_halved_on_all_ranks(world: World) -> None:
    await world.trainer.start()
    await world.step(1)
    (world.folder / "memory").write_text("60")
    await world.step(2)
    ((incident, fields), *_) = world.record.incidents
    assert incident == "micro_batches_halved" and (fields["before"], fields["after"]) == (96, 48)
    assert "rank 1: out of memory in a micro-batch of" in fields["cause"]
    assert world.record.counts()["batches_trained_again"] >= 1 and world.trainer.step == 2
