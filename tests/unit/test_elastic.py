"""The keeper of the rollout pool over a scripted pool, and what is refused before it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from typer.testing import CliRunner

from jobs.elastic import PoolKeeper
from jobs.members import Cluster
from jobs.nodes import said_meanwhile
from jobs.pool_load import PoolLoad
from raypost.cli import app
from raypost.config import Config, RolloutConfig
from raypost.config.engine import EngineConfig
from raypost.errors import ClusterError, ConfigError, WaitTimeoutError
from raypost.faults import Incident
from raypost.files.owner import owning
from raypost.plan.cluster import ClusterResources, bundles
from raypost.plan.plan import check
from raypost.report.files import CONFIG
from raypost.report.pool import PoolRecord, ask_for_size, asked_sizes, pool_record
from raypost.report.status import run_figures
from raypost.types import ProduceBatchStatus, TakeStatus, WorkerStats
from tests.factories import make_config


class World:
    """A clock, a launcher, a controller, a producer, a cluster and a record, all scripted."""

    def __init__(self, cfg: Config) -> None:
        self.cfg, self.now = cfg, 0.0
        roles = [one for one in bundles(cfg) if one.role == "rollout_worker"]
        self.states_now = {one.name: "up" for one in roles}
        self.actors = set(self.states_now)
        self.drained: set[str] = set()
        self.warm: dict[str, asyncio.Future[None]] = {}
        self.left: list[tuple[str, str, float]] = []
        self.told: list[tuple[Incident, dict[str, Any]]] = []
        self.resized: list[tuple[str, int, int, str]] = []
        self.slots = 0
        self.running = 1
        self.load = PoolLoad(
            cfg.rollout.autoscale.window_s if cfg.rollout.autoscale else 60, lambda: self.now
        )
        self.keeper = PoolKeeper(
            cfg, self, self, self, self.load, self.tell, cast(Cluster, self), lambda: self.now
        )

    def add_worker(self, number: int, pool: str) -> str:
        name = f"rollout-{pool}-{number}" if pool else f"rollout-{number}"
        assert name not in self.actors
        self.actors.add(name)
        return name

    async def start_worker(self, name: str, timeout_s: float) -> None:
        self.warm[name] = asyncio.get_running_loop().create_future()
        await self.warm[name]

    def end_worker(self, name: str) -> None:
        self.actors.remove(name)

    async def join(self, name: str) -> None:
        self.states_now[name] = "requested"

    async def leave(self, name: str, drain: str, timeout_s: float) -> None:
        self.left.append((name, drain, timeout_s))
        self.states_now.pop(name, None)

    async def states(self) -> dict[str, str]:
        return dict(self.states_now)

    async def stats(self) -> list[WorkerStats]:
        up = [name for name, state in self.states_now.items() if state == "up"]
        return [WorkerStats(worker=name, version=1, running=self.running, generated_tokens=0) for name in up]

    async def resize(self, num_slots: int) -> None:
        self.slots = num_slots

    async def tell(self, incident: Incident, **fields: Any) -> None:
        if incident is Incident.POOL_RESIZED:
            self.resized.append((fields["pool"], fields["before"], fields["target"], fields["cause"]))
        else:
            self.told.append((incident, fields))

    def draining(self) -> set[str]:
        return self.drained

    def shortage(self, names: list[str], pool: str) -> str:
        return f"{', '.join(names)} without a node"

    async def looks(self, seconds: float = 1.0, every_s: float = 1.0) -> None:
        for _ in range(int(seconds / every_s)):
            self.now += every_s
            await self.keeper.look()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    def come(self, *names: str) -> None:
        self.states_now |= dict.fromkeys(names, "up")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "mine"


def config(run_dir: Path, **rollout: Any) -> Config:
    cfg = make_config(name=run_dir.name, runs_dir=str(run_dir.parent), rollout={"num_workers": 2, **rollout})
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / CONFIG).write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    return cfg


def ask(run_dir: Path, size: Any, pool: str = "") -> None:
    with owning(run_dir):
        ask_for_size(run_dir, str(size), pool)


async def test_workers_are_added_when_more_are_asked_for_and_the_last_leave_first(run_dir: Path) -> None:
    world = World(config(run_dir))
    await world.looks()
    assert world.actors == {"rollout-0", "rollout-1"} and world.slots == 2 * 64
    ask(run_dir, 4)
    await world.looks(3)
    assert world.actors == {f"rollout-{n}" for n in range(4)}
    record = pool_record(run_dir)
    assert record is not None and (record.target, record.why) == (4, "raypost scale")
    world.come("rollout-2", "rollout-3")
    await world.looks()
    assert world.slots == 4 * 64
    assert [(kind, fields["actor"]) for kind, fields in world.told] == [
        (Incident.WORKER_JOINED, "rollout-2"), (Incident.WORKER_JOINED, "rollout-3"),
    ]  # fmt: skip
    ask(run_dir, 1)
    await world.looks(2)
    assert world.actors == {"rollout-0"}
    assert sorted(world.left) == [(f"rollout-{n}", "abort", 60.0) for n in (1, 2, 3)]
    ask(run_dir, 2)
    await world.looks()
    assert world.actors == {"rollout-0", "rollout-4"}, "no name is used twice"
    assert [size[:3] for size in world.resized] == [("rollout", 2, 4), ("rollout", 4, 1), ("rollout", 1, 2)]


async def test_workers_that_do_not_serve_yet_leave_before_those_that_do(run_dir: Path) -> None:
    world = World(config(run_dir))
    ask(run_dir, 3)
    await world.looks(2)
    ask(run_dir, 2)
    await world.looks(2)
    assert world.actors == {"rollout-0", "rollout-1"} and [name for name, *_ in world.left] == ["rollout-2"]


async def test_worker_that_gets_no_node_is_told_of_and_given_up_at_the_deadline(run_dir: Path) -> None:
    world = World(config(run_dir, start_timeout_s=30))
    ask(run_dir, 3)
    await world.looks(10)
    record = pool_record(run_dir)
    assert record is not None and record.lacking == "rollout-2 without a node"
    await world.looks(25)
    assert world.actors == {"rollout-0", "rollout-1"}
    ((kind, fields),) = world.told
    assert kind is Incident.POOL_SHORT and (fields["asked"], fields["given"]) == (3, 2)
    assert "rollout-2 without a node" in fields["cause"]
    assert world.resized == [("rollout", 2, 3, "raypost scale"), ("rollout", 3, 2, "rollout-2 did not come")]
    await world.looks(100)
    assert len(world.told) == 1 and world.actors == {"rollout-0", "rollout-1"}, "it is not asked for again"
    ask(run_dir, 4)
    await world.looks(2)
    assert len(world.actors) == 4, "until another number is"


async def test_worker_whose_engine_does_not_start_is_given_up(run_dir: Path) -> None:
    world = World(config(run_dir))
    ask(run_dir, 3)
    await world.looks(2)
    del world.states_now["rollout-2"]
    await world.looks(2)
    assert world.told[0][0] is Incident.POOL_SHORT and world.actors == {"rollout-0", "rollout-1"}


async def test_worker_that_died_and_gets_no_process_is_told_of_and_then_replaced(run_dir: Path) -> None:
    world = World(config(run_dir, start_timeout_s=30))
    await world.looks()
    world.states_now["rollout-1"] = "down"
    await world.looks(32)
    record = pool_record(run_dir)
    assert record is not None and record.lacking == "rollout-1 without a node"
    await world.looks(35)
    assert world.actors == {"rollout-0", "rollout-2"}
    assert [fields["cause"] for _, fields in world.told] == ["it died and did not come back"]


async def test_workers_on_a_node_that_is_drained_leave_at_once_and_come_back_elsewhere(run_dir: Path) -> None:
    world = World(config(run_dir))
    await world.looks()
    world.drained = {"rollout-1", "trainer-0"}
    await world.looks(2)
    assert [name for name, *_ in world.left] == ["rollout-1"]
    assert world.actors == {"rollout-0", "rollout-2"}
    assert [fields["cause"] for kind, fields in world.told if kind is Incident.WORKER_LEFT] == [
        "its node is drained"
    ]


async def test_what_goes_wrong_with_a_change_is_told_once_and_the_run_goes_on(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(config(run_dir))
    monkeypatch.setattr("jobs.elastic.POLL_S", 0.001)
    world.drained = cast(Any, None)
    running = asyncio.create_task(world.keeper.run())
    await asyncio.sleep(0.05)
    assert [kind for kind, _ in world.told] == [Incident.POOL_SHORT] and "TypeError" in world.told[0][1][
        "cause"
    ]
    world.drained = set()
    ask(run_dir, 3)
    async with asyncio.timeout(5):
        while "rollout-2" not in world.actors:
            await asyncio.sleep(0.01)
    running.cancel()


async def test_what_was_asked_for_holds_when_the_run_is_continued(run_dir: Path) -> None:
    cfg = config(run_dir)
    ask(run_dir, 3)
    world = World(cfg)
    await world.looks()
    assert len(world.actors) == 3


AUTO = {"autoscale": {"min": 1, "max": 4, "window_s": 10, "cooldown_s": 20}}


async def test_the_run_grows_its_pool_while_training_waits_and_shrinks_it_while_engines_do(
    run_dir: Path,
) -> None:
    world = World(config(run_dir, **AUTO))
    world.running = 64

    async def batch() -> tuple[TakeStatus, None]:
        await asyncio.sleep(0)
        return TakeStatus(status=ProduceBatchStatus.NORMAL, step=1, num_groups=4), None

    taken = asyncio.Event()

    async def slow() -> tuple[TakeStatus, None]:
        await taken.wait()
        return await batch()

    taking = asyncio.create_task(world.load.take(slow()))
    await asyncio.sleep(0)
    await world.looks(30)
    assert world.actors == {f"rollout-{n}" for n in range(4)}
    assert "training waits" in (pool_record(run_dir) or PoolRecord(target=0, why="")).why
    world.come("rollout-2", "rollout-3")
    taken.set()
    await taking
    world.running = 0
    await world.looks(60)
    assert len(world.actors) == 4, "it grew a moment ago"
    await world.looks(120)
    assert world.actors == {"rollout-0"}


async def test_pauses_and_a_number_that_was_asked_for_keep_the_run_from_choosing(run_dir: Path) -> None:
    world = World(config(run_dir, **AUTO))
    world.running, world.load.paused = 0, True
    await world.looks(100)
    assert len(world.actors) == 2
    world.load.paused = False
    ask(run_dir, 2)
    await world.looks(100)
    assert len(world.actors) == 2
    ask(run_dir, "auto")
    await world.looks(100)
    assert world.actors == {"rollout-0"}


# ---------------------------------------------------------------- several pools

FAR = {"name": "far", "num_workers": 1, "max_num_seqs": 16, "autoscale": {"min": 1, "max": 3}}


async def test_each_pool_has_its_own_number_and_the_producer_knows_the_slots_of_all(run_dir: Path) -> None:
    world = World(config(run_dir, num_workers=1, pools=[{**FAR, "autoscale": None}, {"name": "near"}]))
    await world.looks()
    assert world.actors == {"rollout-0", "rollout-far-0", "rollout-near-0"}
    assert world.slots == 64 + 16 + 64
    ask(run_dir, 3, "far")
    await world.looks(2)
    world.come("rollout-far-1", "rollout-far-2")
    await world.looks()
    assert world.actors == {"rollout-0", "rollout-near-0", *(f"rollout-far-{n}" for n in range(3))}
    assert world.slots == 64 + 3 * 16 + 64
    record = pool_record(run_dir)
    assert record is not None and record.target == 1
    assert record.pools == {"far": "3 wanted (raypost scale)", "near": "1 wanted (as configured)"}
    ask(run_dir, 2)
    await world.looks(2)
    assert "rollout-1" in world.actors, "what was asked of one pool holds beside what is asked of another"
    ask(run_dir, 1, "far")
    await world.looks(2)
    assert [name for name in world.actors if "far" in name] == ["rollout-far-0"]


async def test_a_pool_with_bounds_is_sized_by_its_own_engines_and_the_trainers_waits(run_dir: Path) -> None:
    bounds = {"min": 1, "max": 3, "window_s": 10, "cooldown_s": 20}
    world = World(config(run_dir, num_workers=1, pools=[{**FAR, "num_workers": 3, "autoscale": bounds}]))
    world.running = 0
    await world.looks(30)
    assert world.actors == {"rollout-0", "rollout-far-0"}


async def test_worker_that_gets_no_node_is_told_of_with_the_needs_of_its_pool(run_dir: Path) -> None:
    cfg = config(run_dir, num_workers=1, pools=[{"name": "far", "num_cpus": 4, "resources": {"far": 1}}])
    each = {pool: one.resources for pool, one in Cluster(cfg)._each.items()}
    assert each == {"": {"CPU": 1}, "far": {"CPU": 4, "far": 1}}


async def test_what_actors_wait_for_while_they_start_is_said_once_and_is_why_the_run_ends() -> None:
    def started_after(*found: str) -> tuple[asyncio.Event, Callable[[], str]]:
        """An event that is set by the last of these looks."""
        looks, loop, over = list(found), asyncio.get_running_loop(), asyncio.Event()

        def look() -> str:
            if len(looks) == 1:
                loop.call_soon_threadsafe(over.set)
            return looks.pop(0) if looks else ""

        return over, look

    said: list[str] = []
    over, look = started_after("", "one lacks", "one lacks", "two lack")
    assert await said_meanwhile(over.wait(), look, said.append, 0.001)
    assert said == ["waiting: one lacks", "waiting: two lack"]

    over, look = started_after("one lacks")

    async def too_late() -> None:
        await over.wait()
        raise WaitTimeoutError("waited 9 s for a process of rollout-0")

    with pytest.raises(ClusterError, match="waited 9 s for a process of rollout-0: one lacks"):
        await said_meanwhile(too_late(), look, said.append, 0.001)
    with pytest.raises(ZeroDivisionError):
        await said_meanwhile(asyncio.to_thread(lambda: 1 / 0), lambda: "one lacks", said.append, 0.001)


# ---------------------------------------------------------------- those that stand by


async def test_one_that_stands_by_takes_the_place_of_one_that_died_and_another_stands_by_then(
    run_dir: Path,
) -> None:
    world = World(config(run_dir, standby=1))
    await world.looks()
    assert world.actors == {"rollout-0", "rollout-1", "rollout-2"} and "rollout-2" not in world.states_now
    record = pool_record(run_dir)
    assert record is not None and record.workers["rollout-2"] == "standby, starting"
    world.states_now["rollout-1"] = "down"
    await world.looks(3)
    assert "rollout-1" in world.actors, "its engine is not started yet"
    world.warm["rollout-2"].set_result(None)
    world.states_now["rollout-1"] = "starting"
    await world.looks(2)
    assert world.states_now == {"rollout-0": "up", "rollout-2": "requested"}
    assert [name for name, *_ in world.left] == ["rollout-1"] and "rollout-1" not in world.actors
    assert "rollout-3" not in world.actors, "not before the place is taken"
    world.come("rollout-2")
    await world.looks(2)
    assert world.actors == {"rollout-0", "rollout-2", "rollout-3"}
    assert [fields["cause"] for kind, fields in world.told if kind is Incident.WORKER_LEFT] == [
        "it died, and one that stood by takes its place"
    ]


async def test_one_that_stands_by_is_the_next_that_joins(run_dir: Path) -> None:
    world = World(config(run_dir, standby=1))
    await world.looks()
    world.warm["rollout-2"].set_result(None)
    await world.looks()
    ask(run_dir, 4)
    await world.looks()
    assert world.states_now["rollout-2"] == world.states_now["rollout-3"] == "requested"
    assert len(world.actors) == 4


async def test_one_that_cannot_stand_by_is_ended_and_tried_again_later(run_dir: Path) -> None:
    world = World(config(run_dir, standby=1, start_timeout_s=30))
    await world.looks()
    world.warm["rollout-2"].set_exception(WaitTimeoutError("waited 30 s for the engine of rollout-2"))
    await world.looks(10)
    assert world.actors == {"rollout-0", "rollout-1"}
    await world.looks(30)
    assert world.actors == {"rollout-0", "rollout-1", "rollout-3"}


async def test_one_that_stood_by_and_is_found_in_the_pool_is_a_member_like_any(run_dir: Path) -> None:
    world = World(config(run_dir, standby=1))
    await world.looks()
    world.come("rollout-2")  # by a controller that was started again
    await world.looks(2)
    assert [name for name, *_ in world.left] == ["rollout-2"], "it is one too many"
    assert world.actors == {"rollout-0", "rollout-1", "rollout-3"}


@pytest.mark.parametrize(
    ("rollout", "workers", "message"),
    [
        (AUTO, "5", "--workers is 5, outside of rollout.autoscale.min 1 and rollout.autoscale.max 4"),
        ({}, "0", "a pool needs at least 1"),
        ({}, "auto", "needs rollout.autoscale"),
        ({}, "many", "give a number, or `auto`"),
        ({"pools": [FAR]}, "2 --pool fra", "--pool is 'fra', which is none of rollout.pools (far)"),
        ({"pools": [FAR]}, "4 --pool far", "outside of far.autoscale.min 1 and far.autoscale.max 3"),
        ({"pools": [{"name": "far"}]}, "auto --pool far", "needs far.autoscale"),
    ],
)
def test_a_size_that_a_run_cannot_have_is_refused_by_name(
    run_dir: Path, rollout: dict[str, Any], workers: str, message: str
) -> None:
    config(run_dir, **rollout)
    with owning(run_dir):
        found = CliRunner().invoke(app, ["scale", str(run_dir), "--workers", *workers.split()])
    assert found.exit_code == 2 and message in " ".join(found.output.split())
    assert asked_sizes(run_dir) == {}


def test_a_run_that_ended_is_not_scaled_and_one_that_goes_on_shows_its_pool(run_dir: Path) -> None:
    config(run_dir)
    found = CliRunner().invoke(app, ["scale", str(run_dir), "--workers", "3"])
    assert found.exit_code == 2 and "no run goes on" in found.output
    with owning(run_dir):
        assert CliRunner().invoke(app, ["scale", str(run_dir), "--workers", "3"]).exit_code == 0
        workers = {"rollout-0": "up", "rollout-1": "requested"}
        PoolRecord(target=3, why="raypost scale", workers=workers, lacking="1 CPU").write(run_dir)
        figures = run_figures(run_dir)
    assert asked_sizes(run_dir) == {"": 3}
    assert figures["rollout workers"] == "3 wanted (raypost scale)"
    assert figures["worker rollout-1"] == "requested" and figures["lacking"] == "1 CPU"


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"autoscale": {"min": 3, "max": 2}}, "min is 3, above max 2"),
        ({"num_workers": 5, "autoscale": {"max": 4}}, "num_workers is 5, outside of autoscale.min 1"),
        ({"autoscale": {}}, "max"),
        ({"pools": [{**FAR, "num_workers": 4}]}, "num_workers is 4, outside of autoscale.min 1"),
        ({"pools": [{"name": "far", "judge_workers": 2}]}, "judge_workers"),
    ],
)
def test_bounds_that_contradict_each_other_are_refused(rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutConfig(**rollout)


def test_the_shares_come_from_what_was_looked_at_outside_of_pauses() -> None:
    load = PoolLoad(10, lambda: 0.0)
    busy = [
        WorkerStats(worker=name, version=1, running=n, generated_tokens=0) for name, n in (("a", 4), ("b", 0))
    ]
    for at in range(6):
        load.paused = at in (2, 3)
        load.look(busy, float(at))
    found = load.stats(2, 0, 64, 5.0)
    assert found.measured_s == 2 and found.busy == 0.5 and found.requests == 4 and found.wait == 0


def test_plan_counts_what_each_pool_takes_and_those_that_stand_by() -> None:
    far = {"name": "far", "num_workers": 2, "kv_cache_gb": 3, "max_num_seqs": 8, "standby": 1}
    cfg = make_config(rollout={"num_workers": 1, "standby": 1, "pools": [far], "kv_cache_gb": 1})
    plan = check(cfg, cluster=ClusterResources([{"CPU": 16}]))
    rows = {(one.role, one.actors): one.count for one in plan.placement}
    assert rows["rollout_worker", "rollout-0"] == rows["standby_worker", "rollout-1"] == 1
    assert rows["rollout_worker", "rollout-far-0 .. rollout-far-1"] == 2
    assert rows["standby_worker", "rollout-far-2"] == 1
    memory = dict(plan.memory)
    assert memory["standing by"] == "2 engine(s), each as much as one that serves"
    assert "cache 1" in memory["each engine"] and "cache 3" in memory["each engine of far"]
    assert (
        "1 worker(s) x max_num_seqs 64, 2 worker(s) x max_num_seqs 8"
        in dict(plan.batch)["requests in flight"]
    )
    with pytest.raises(ClusterError, match="needs 6 CPU"):
        check(cfg, cluster=ClusterResources([{"CPU": 5}]))
    with pytest.raises(ConfigError, match=r"rollout\.standby is 1: set it to 0"):
        check(make_config(placement="colocate", rollout__standby=1, eval__num_prompts=0))


def test_engines_of_a_pool_are_started_with_its_own_arguments() -> None:
    far = {"name": "far", "kv_cache_gb": 3, "max_num_seqs": 8, "threads": 2, "enforce_eager": False}
    cfg = make_config(rollout={"pools": [far], "kv_cache_gb": 1, "pause_timeout_s": 7})
    made = EngineConfig.of(cfg, cfg.rollout.pools[0]).rollout
    assert (made.kv_cache_gb, made.max_num_seqs, made.threads, made.enforce_eager) == (3, 8, 2, False)
    assert made.pause_timeout_s == 7, "what is not set there is as in rollout"
    assert EngineConfig.of(cfg).rollout == cfg.rollout
    cfg = make_config(rollout={"pools": [{"name": "far"}], "reserve": "pack", "standby": 1, "drain": "wait"})
    own = cfg.rollout.by_pool()["far"]
    assert (own.reserve, own.standby, own.drain) == (None, 0, "wait"), "what is about its workers is its own"


def test_plan_says_what_the_largest_pool_needs_and_refuses_one_that_shares_devices() -> None:
    def config(**places: Any) -> Config:
        return make_config(rollout__autoscale={"max": 8}, eval__num_prompts=0, **places)

    cluster = ClusterResources([{"CPU": 4}])
    (text,) = [one for one in check(config(), cluster=cluster).warnings if "autoscale" in one]
    assert "for rollout.autoscale.max 8 the cluster must grow" in text
    assert "needs 9 CPU" in text and "the cluster has 4" in text
    assert not [one for one in check(make_config(), cluster=cluster).warnings if "autoscale" in one]
    with pytest.raises(ConfigError, match=r"rollout\.autoscale\.max is 8: remove rollout\.autoscale"):
        check(config(placement="colocate"), cluster=cluster)
