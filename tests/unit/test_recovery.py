"""What the driver does when a role died, on scripted roles."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jobs.recovery import GangRecovery, GuardedBroadcaster, Pool, Supervisor, is_broken
from raypost.checkpoint import CheckpointDir
from raypost.config import FaultsConfig
from raypost.errors import BatchMemoryError, CheckpointError, RankLostError, RanksLateError, RoleLostError
from raypost.faults import Failure, Incident
from raypost.types import PoolHolds, SyncReport, TelemetryRole
from tests.factories import make_config

KILLED = Failure(role="producer", actor="producer", cause="it died", at_s=0.0, last_words=("Killed",))
SYNC = SyncReport(
    version=0, digest="", num_workers=1, nbytes=1, seconds=0.0, publish_s=0.0, load_s=0.0
)  # fmt: skip


class RaisedOnARank(BatchMemoryError):
    """What Ray raises here of an error that an actor raised: it is one of that class, with a text of its own."""

    def __init__(self, cause: BatchMemoryError) -> None:
        super().__init__(
            f"ray::TrainerWorker.once() (pid=1)\n{'  File in which it went wrong' * 100}\n{cause}"
        )
        self.cause = cause


class Record:
    """A telemetry that remembers incidents."""

    def __init__(self, dead: bool = False) -> None:
        self.incidents: list[tuple[Incident, Mapping[str, Any]]] = []
        self.dead = dead

    async def log_incident(self, incident: Incident, fields: Mapping[str, Any]) -> None:
        if self.dead:
            raise ConnectionError("telemetry is dead")
        self.incidents.append((incident, fields))

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for incident, fields in self.incidents:
            counts[incident] = counts.get(incident, 0) + fields.get("count", 1)
        return counts


def supervisor(record: Record, max_failures: int = 1) -> Supervisor:
    limits = FaultsConfig(max_failures=max_failures, window_s=60)
    return Supervisor(limits, cast(TelemetryRole, record), clock=lambda: 0.0)


def test_each_failure_is_recorded_and_too_many_end_the_run_with_their_history() -> None:
    record = Record()
    one = supervisor(record)
    asyncio.run(one.died(KILLED))
    with pytest.raises(RoleLostError, match="producer failed 2 times within 60 s"):
        asyncio.run(one.died(replace(KILLED, at_s=1.0)))
    assert [incident for incident, _ in record.incidents] == [Incident.ROLE_DIED] * 2
    assert record.incidents[0][1]["last_words"] == ["Killed"]


def test_a_dead_telemetry_keeps_no_role_from_coming_back() -> None:
    asyncio.run(supervisor(Record(dead=True)).died(KILLED))


# ---------------------------------------------------------------- the gang


class Gang:
    """Ranks whose weights are the steps they trained, in order. They die at the calls that a test names."""

    def __init__(self) -> None:
        self.step = 0
        self.weights: tuple[Any, ...] = ()
        self.up = True
        self.critic = None
        self.begun_from = None
        self.micro_batch_tokens = 512
        self.memory = 512
        """Tokens of the largest micro-batch that fits."""
        self.dies_at: dict[str, int] = {}
        """By call, after how many more of them; each once."""
        self.hangs = False
        self.restarts = 0
        self.noise = ""
        """What weights trained from now on differ by."""
        self.guard: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]

    async def _call(self, name: str) -> None:
        await asyncio.sleep(0)
        left = self.dies_at.pop(name, None)
        if left is not None and left > 0:
            self.dies_at[name] = left - 1
        elif left is not None:
            self.up = self.hangs
            raise (
                RanksLateError("waited 4 s for fit of rank 1") if self.hangs else RankLostError("rank 1 died")
            )
        if not self.up:
            raise RankLostError("rank 1 is not set up")

    async def fit(self, batch: Any, step: int) -> dict[str, float]:
        async def call() -> dict[str, float]:
            await self._call("fit")
            if self.micro_batch_tokens > self.memory:
                raise RaisedOnARank(BatchMemoryError("out of memory: lower train.micro_batch_tokens"))
            if step != self.step:
                assert step == self.step + 1, "a step is trained after the one before it"
                self.weights, self.step = (*self.weights, batch), step
            return {"step": step}

        result: dict[str, float] = await self.guard(call)
        return result

    async def lost(self) -> dict[str, str]:
        return {} if self.up else {"trainer-1": "it died"}

    async def start(self) -> list[str]:
        await self._call("start")
        return ["ready"]

    async def restart(self) -> list[str]:
        await self._call("restart") if "restart" in self.dies_at else None
        self.up, self.step, self.weights, self.restarts = True, 0, (), self.restarts + 1
        return ["ready"]

    async def load(self, path: Path) -> int:
        await self._call("load")
        self.weights = tuple((path / "weights").read_text().split())
        self.step = len(self.weights)
        return self.step


class Engines:
    """A pool, its broadcaster and the producer: they hold what the gang published."""

    def __init__(self, gang: Gang) -> None:
        self.gang = gang
        self.held: PoolHolds | None = None
        self.calls: list[str] = []

    async def holds(self) -> PoolHolds | None:
        return self.held

    async def prepare(self, version: int, leave: bool = False) -> None:
        await self.gang._call("publish")

    async def broadcast(self, version: int, check: bool = True, again: bool = False) -> SyncReport:
        await self.gang._call("publish")
        self.calls.append(f"broadcast {version}" + " again" * again)
        self.held = PoolHolds(version, self.digest, serving=True, asleep=False)
        return replace(SYNC, version=version, digest=self.digest)

    async def forget(self) -> None:
        self.calls.append("forget")

    async def renew(self, version: int) -> bool:
        await self.gang._call("publish")
        assert self.held is not None
        self.calls.append(f"renew {version}")
        return self.held.digest == self.digest

    @property
    def digest(self) -> str:
        return f"{self.gang.weights}{self.gang.noise}"

    async def pause(self, mode: str) -> float:
        self.calls.append("pause")
        return 0.0

    async def resume(self, version: int) -> None:
        self.calls.append(f"resume {version}")


class World:
    """Four steps of a run: step n trains batch n, and its weights are broadcast."""

    def __init__(self, folder: Path, max_failures: int = 3) -> None:
        self.gang, self.record = Gang(), Record()
        self.engines = Engines(self.gang)
        self.checkpoints = CheckpointDir(folder, 2, {})
        self.kept: set[int] = set()
        anything: Any = self
        failure = lambda role, actor, cause, at_s: Failure(role=role, actor=actor, cause=cause, at_s=at_s)  # noqa: E731
        census: Any = SimpleNamespace(look=lambda: None, failure=failure)
        everything: Any = self.engines
        gang: Any = self.gang
        self.recovery = GangRecovery(
            make_config(), supervisor(self.record, max_failures), census, gang, self.checkpoints, anything,
            everything, [Pool(everything, everything)],
        )  # fmt: skip
        self.broadcaster = GuardedBroadcaster(everything, self.recovery.guard)

    async def kept_batch(self, step: int) -> Any:
        if step not in self.kept:
            raise CheckpointError(f"the batch of step {step} is not there")
        return str(step)

    async def forget_batches(self, upto: int) -> None:
        self.kept = {step for step in self.kept if step > upto}

    async def save(self, step: int) -> None:
        (self.checkpoints.begin(step) / "weights").write_text(" ".join(self.gang.weights))
        self.checkpoints.commit(step)
        await self.recovery.saved(step)

    async def run(self, save_at: int = 0) -> tuple[Any, ...]:
        for step in range(1, 5):
            self.kept.add(step)
            batch: Any = str(step)
            assert await self.gang.fit(batch, step) == {"step": step}
            await self.broadcaster.prepare(step)
            await self.broadcaster.broadcast(step)
            if step == save_at:
                await self.save(step)
        return self.gang.weights


@pytest.mark.parametrize("save_at", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("call", "after"), [("fit", n) for n in range(4)] + [("publish", n) for n in range(8)]
)
def test_wherever_the_gang_dies_every_step_is_in_the_model_once_and_the_call_is_made_again(
    tmp_path: Path, save_at: int, call: str, after: int
) -> None:
    world = World(tmp_path)
    world.gang.dies_at = {call: after}
    assert asyncio.run(world.run(save_at)) == ("1", "2", "3", "4")
    assert world.gang.restarts == 1
    counts = world.record.counts()
    assert (counts["role_died"], counts["role_restarted"]) == (1, 1)
    assert Incident.VERSION_REPUBLISHED not in counts
    assert world.engines.held is not None and world.engines.held.digest == world.engines.digest


def test_only_the_steps_since_the_checkpoint_are_trained_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.gang.dies_at = {"fit": 3}
    asyncio.run(world.run(save_at=2))
    (again,) = (fields for incident, fields in world.record.incidents if incident == "batches_trained_again")
    assert (again["count"], again["first"], again["last"]) == (1, 3, 3)
    assert world.kept == {3, 4}, "a checkpoint ends what is kept of the steps before it"
    assert "renew 3" in world.engines.calls, "the version that the engines hold is within reach again"


def test_a_hang_is_a_failure_of_the_whole_gang(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.gang.hangs, world.gang.dies_at = True, {"fit": 1}
    assert asyncio.run(world.run()) == ("1", "2", "3", "4")
    assert "rank 1" in world.record.incidents[0][1]["cause"]


def test_another_death_while_it_comes_back_follows_the_same_rule(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.gang.dies_at = {"fit": 2, "load": 0, "restart": 0}
    assert asyncio.run(world.run(save_at=1)) == ("1", "2", "3", "4")
    assert world.record.counts()["role_died"] == 3


def test_a_crash_loop_ends_the_run(tmp_path: Path) -> None:
    world = World(tmp_path, max_failures=1)
    world.gang.dies_at = {"fit": 2, "load": 0}
    with pytest.raises(RoleLostError, match="trainer failed 2 times"):
        asyncio.run(world.run(save_at=1))


def test_other_bits_of_the_version_held_are_sent_again_in_a_pause_and_counted(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.gang.dies_at = {"fit": 2}

    async def run() -> None:
        restart = world.gang.restart

        async def noisy() -> list[str]:
            world.gang.noise = " but for rounding"
            return await restart()

        world.gang.restart = noisy  # type: ignore[method-assign]
        await world.run()

    asyncio.run(run())
    first = world.engines.calls.index("renew 2")
    assert world.engines.calls[first : first + 4] == ["renew 2", "pause", "broadcast 2 again", "resume 2"]
    assert world.record.counts()["version_republished"] == 1


def test_engines_that_sleep_keep_their_bits_until_the_next_sync(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def run() -> None:
        await world.broadcaster.broadcast(0)
        assert world.engines.held is not None
        world.engines.held = world.engines.held._replace(digest="others", asleep=True, serving=False)
        world.gang.dies_at = {"fit": 0}
        batch: Any = "1"
        await world.gang.fit(batch, 1)

    asyncio.run(run())
    assert world.engines.calls == ["broadcast 0", "forget", "renew 0"]


def test_an_error_of_ranks_that_are_well_is_raised_and_a_lost_answer_is_asked_for_again(
    tmp_path: Path,
) -> None:
    world, calls = World(tmp_path), []

    def raising(error: Exception) -> Callable[[], Awaitable[None]]:
        async def call() -> None:
            calls.append(error)
            if len(calls) < 3 or not isinstance(error, RankLostError):
                raise error

        return call

    with pytest.raises(ValueError, match="a wrong loss"):
        asyncio.run(world.recovery.guard(raising(ValueError("a wrong loss"))))
    assert len(calls) == 1
    asyncio.run(world.recovery.guard(raising(RankLostError("the answer was lost"))))
    assert (len(calls), world.gang.restarts, world.record.incidents) == (3, 0, [])


def test_calls_that_failed_together_bring_the_gang_back_once(tmp_path: Path) -> None:
    world = World(tmp_path)

    def raising(error: Exception) -> Callable[[], Awaitable[str]]:
        async def call() -> str:
            sent_to = world.gang.restarts
            await asyncio.sleep(0)
            if sent_to == 0:
                world.gang.up = world.gang.restarts > 0
                raise error
            return "done"

        return call

    async def both() -> list[str]:
        errors = RankLostError("rank 1 died"), RuntimeError("[gloo] Connection closed by peer")
        return list(await asyncio.gather(*(world.recovery.guard(raising(error)) for error in errors)))

    assert asyncio.run(both()) == ["done", "done"]
    assert world.gang.restarts == 1


def test_micro_batches_beyond_memory_are_halved_until_they_fit(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def run() -> None:
        batch: Any = "1"
        world.kept.add(1)
        await world.gang.fit(batch, 1)
        world.gang.memory = 200
        await world.gang.fit(batch.replace("1", "2"), 2)

    asyncio.run(run())
    assert world.gang.weights == ("1", "2")
    assert world.record.counts() == {"micro_batches_halved": 2, "batches_trained_again": 1}
    halved = [fields for incident, fields in world.record.incidents if incident == "micro_batches_halved"]
    assert [(fields["before"], fields["after"]) for fields in halved] == [(512, 256), (256, 128)]
    assert {fields["cause"] for fields in halved} == {"out of memory: lower train.micro_batch_tokens"}


def test_one_trajectory_beyond_memory_ends_the_run_with_the_advice(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.gang.memory = 10
    with pytest.raises(BatchMemoryError, match=r"lower train\.micro_batch_tokens"):
        asyncio.run(world.gang.fit("1", 1))
    assert world.gang.micro_batch_tokens == make_config().max_model_len
    assert world.gang.step == 0


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp"), True),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        (CheckpointError("gloo.pt is damaged"), False),
    ],
)
def test_what_a_rank_cannot_get_over_is_told_from_mistakes(error: Exception, broken: bool) -> None:
    assert is_broken(error) == broken


@pytest.mark.parametrize("deaths", [0, 1, 2])
def test_ranks_that_die_during_their_first_start_begin_again(tmp_path: Path, deaths: int) -> None:
    world = World(tmp_path)
    world.gang.dies_at = dict.fromkeys(["start", "restart"][:deaths], 0)
    assert list[Any](asyncio.run(world.recovery.start())) == ["ready"]
    back = {Incident.ROLE_DIED: deaths, Incident.ROLE_RESTARTED: 1} if deaths else {}
    assert world.record.counts() == back and world.gang.restarts == (deaths > 0)


def test_ranks_that_die_at_each_start_end_the_run_and_what_a_living_one_cannot_start_for_is_raised(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, max_failures=1)
    world.gang.dies_at = {"start": 0, "restart": 0}
    with pytest.raises(RoleLostError, match=r"trainer failed 2 times(.|\n)*rank 1 died"):
        asyncio.run(world.recovery.start())
    world = World(tmp_path)

    async def start() -> list[str]:
        raise CheckpointError("the model is damaged")

    world.gang.start = start  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="the model is damaged"):
        asyncio.run(world.recovery.start())
    assert world.record.incidents == []
