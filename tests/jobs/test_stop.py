"""The loops of all jobs on scripted roles, stopped at every single call that they make."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import yaml

from jobs import colocate, colocate_lowlevel, driver, evaluate, train
from jobs import roles as module
from jobs.arguments import config_of, parser
from jobs.driver import Job
from jobs.roles import Roles
from jobs.saving import Saver
from jobs.space import Space
from jobs.wiring import checkpoints_of
from raypost.checkpoint import CheckpointDir, SavePace
from raypost.config import Config
from raypost.config.identity import differences, run_identity
from raypost.errors import ProductionError, WeightError
from raypost.types import ProduceBatchStatus, SyncReport, TakeStatus
from tests.factories import CHAIN_SUM, make_config
from tests.jobs.job import ROOT

STEPS = 3


def stop_config(tmp_path: Path, placement: str) -> Config:
    return make_config(
        runs_dir=str(tmp_path),
        placement=placement,
        tasks=[{"name": "sums", "source": CHAIN_SUM, "max_tokens": 8}],
        train={"num_steps": STEPS, "batch_size": 1},
        checkpoint={"interval": 0},
        eval={"num_prompts": 1, "interval": 1},
    )


class Scene:
    """Every role at once. Each call takes a turn of the event loop; a stop comes with the call number `stop_at`."""

    def __init__(self, cfg: Config, folder: Path, stop_at: int | None, own_engines: bool = False) -> None:
        self.cfg, self.stop, self.stop_at = cfg, asyncio.Event(), stop_at
        self.colocated = cfg.placement == "colocate"
        self.calls: list[str] = []
        self.trained, self.engines_awake, self.ranks_awake = 0, True, True
        self.publishing = False
        self.critic = None
        self.checkpoints = CheckpointDir(folder, 2, {})
        shown = ("phase", "workers", "evaluated", "step", "finish")
        everything: Any = self
        gang: Any = SimpleNamespace(saved=AsyncMock(), guard=lambda call: call())
        quiet: Any = SimpleNamespace(**dict.fromkeys(shown, lambda *_: None))
        self.roles = Roles(
            cfg=cfg,
            stop=self.stop,
            display=quiet,
            checkpoints=self.checkpoints,
            saver=Saver(
                cfg, self.checkpoints, SavePace(cfg.checkpoint.every_s), everything, everything, gang.saved
            ),
            trainer=everything,
            pool=everything,
            broadcaster=everything,
            evaluation_broadcaster=everything if own_engines else None,
            producer=everything,
            evaluator=everything,
            telemetry=everything,
            gang=gang,
            space=Space(folder, 0, lambda _: None, AsyncMock()),
        )

    @asynccontextmanager
    async def spawn(self, cfg: Config, stop: asyncio.Event) -> AsyncIterator[Roles]:
        yield self.roles
        await self.roles.evaluated()
        await self.roles.saved()
        await self.roles.finish("finished", None)

    async def _turn(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) == self.stop_at:
            self.stop.set()
        await asyncio.sleep(0)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name.startswith("_"):
            raise AttributeError(name)

        async def call(*_: Any, **__: Any) -> Any:
            await self._turn(name)

        return call

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def take_batch(self, step: int) -> tuple[TakeStatus, str]:
        await self._turn("take")
        return TakeStatus(status=ProduceBatchStatus.NORMAL, step=step, num_groups=1), "batch"

    async def produce_batch(self, step: int) -> tuple[TakeStatus, str]:
        return await self.take_batch(step)

    async def prepare(self, version: int, leave: bool = False) -> None:
        self.publishing = True
        await self._turn("prepare")
        for _ in range(9):
            await self._turn("publish")
        self.publishing = False
        if leave:
            await self.offload()

    async def swap(self, version: int, wait_s: float = 0.0) -> None:
        async with asyncio.timeout(wait_s or None):
            while wait_s and self.colocated and self.ranks_awake:
                await asyncio.sleep(0)
        assert not (self.colocated and self.ranks_awake), "ranks are on the device"
        self.engines_awake = True
        await self._turn("swap")

    async def fit(self, _: object, step: int) -> dict[str, float]:
        assert self.ranks_awake and not self.publishing and step == self.trained + 1
        self.trained = step
        await self._turn("fit")
        return {}

    async def train(self, *_: object, step: int) -> dict[str, float]:
        return await self.fit(None, step)

    async def resume(self, version: int) -> None:
        assert not (self.colocated and self.ranks_awake), "ranks are on the device"
        self.engines_awake = True
        await self._turn("resume")

    async def sleep(self, keep_weights: bool) -> None:
        self.engines_awake = False
        await self._turn("sleep")

    async def reload(self) -> None:
        assert not self.engines_awake, "engines are on the device"
        self.ranks_awake = True
        await self._turn("reload")

    async def offload(self) -> None:
        assert not self.publishing, "the ranks publish"
        self.ranks_awake = False
        await self._turn("offload")

    async def broadcast(self, version: int, check: bool = True) -> SyncReport:
        if self.colocated and self.ranks_awake:
            await self.offload()
        await self._turn("broadcast")
        return synced(version)

    async def check(self, version: int) -> SyncReport:
        await self._turn("check")
        return synced(version)

    async def snapshot(self, *_: object) -> None:
        assert self.ranks_awake and not self.publishing
        await self._turn("snapshot")

    async def write_snapshot(self, *_: object) -> bool:
        await self._turn("write")
        return True

    write_saved = write_snapshot

    async def evaluate(self, step: int) -> dict[str, float]:
        assert not (self.colocated and self.ranks_awake), "ranks are on the device"
        for _ in range(9):
            await self._turn("evaluate")
        return {"held_out": 0.5}


async def test_a_checkpoint_for_a_stop_is_due_again_once_ranks_that_left_are_back(tmp_path: Path) -> None:
    cfg = make_config(runs_dir=str(tmp_path), placement="colocate", train={"num_steps": 9, "batch_size": 1})
    scene = Scene(cfg, tmp_path / "checkpoints", None)
    scene.engines_awake = False
    await scene.roles.acknowledge(1)
    scene.stop.set()
    assert not scene.roles.save_due(1) and scene.roles.swaps(1), "ranks have left, or do just now"
    await scene.roles.swap(1)
    await scene.roles.pause(1)
    await scene.roles.engines_to_ranks(2)
    assert scene.roles.save_due(1)


async def saved(scene: Scene, step: int) -> None:
    await scene.roles.save(step)
    await scene.roles.saved()


def test_checkpoint_is_due_by_time_and_stays_so_for_its_step(tmp_path: Path) -> None:
    cfg = make_config(runs_dir=str(tmp_path), train={"num_steps": 9, "batch_size": 1})
    scene, clock = Scene(cfg, tmp_path / "checkpoints", None), [0.0]
    scene.roles.saver.pace = SavePace(60.0, lambda: clock[0])
    assert not scene.roles.save_due(1) and scene.roles.swaps(1)
    clock[0] = 60.0
    assert not scene.roles.save_due(1), "production was not paused for it"
    assert scene.roles.save_due(2) and not scene.roles.swaps(2)
    asyncio.run(saved(scene, 2))
    assert (tmp_path / "checkpoints" / "step-2").is_dir() and not scene.roles.save_due(3)
    scene.stop.set()
    assert scene.roles.save_due(3)


def test_options_of_checkpoints_are_settings_that_say_which_run_it_is(tmp_path: Path) -> None:
    argv = [
        "--config",
        str(ROOT / "jobs/recipes/quickstart.yaml"),
        "--name",
        "x",
        "--runs-dir",
        str(tmp_path),
    ]
    plain = config_of(parser(None).parse_intermixed_args(argv))
    assert plain.checkpoint.start_from is None and not plain.checkpoint.fallback
    options = ["--from", "some/step-3", "--from-optimizer", "--fallback", "train.num_steps=9"]
    cfg = config_of(parser(None).parse_intermixed_args([*argv, *options]))
    assert cfg.checkpoint.start_from == Path("some/step-3").absolute()
    assert cfg.checkpoint.start_optimizer and cfg.checkpoint.fallback and cfg.train.num_steps == 9
    [*different] = differences(run_identity(plain), run_identity(cfg))
    assert [line.partition(":")[0] for line in different] == [
        "checkpoint.start_from", "checkpoint.start_optimizer"]  # fmt: skip


@pytest.mark.parametrize("option", [["--from", "some/step-3"], ["--from-optimizer"], ["--fallback"]])
def test_an_evaluation_takes_no_option_of_training_that_it_would_not_heed(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--config", str(ROOT / "jobs/recipes/quickstart.yaml")]
    with pytest.raises(SystemExit) as ended:
        evaluate.main([*argv, *option])
    assert ended.value.code == 2 and f"unrecognized arguments: {option[0]}" in capsys.readouterr().err


def test_a_start_that_is_damaged_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = CheckpointDir(tmp_path / "other", 2, {})
    (other.begin(3) / "trainer.json").write_text("{}")
    file = other.commit(3) / "trainer.json"
    file.write_text("[]")
    recipe = str(ROOT / "jobs/recipes/quickstart.yaml")
    argv = ["--config", recipe, "--name", "new", "--runs-dir", str(tmp_path / "runs"), "--from"]
    for start, words in ((file.parent, "trainer.json is"), (tmp_path, "manifest.json cannot be read")):
        assert driver.main(train.train, [*argv, str(start)]) == driver.EXIT_REFUSED
        assert words in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_damaged_checkpoint_is_refused_before_anything_starts_or_left_out_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(ROOT / "jobs/recipes/quickstart.yaml")
    argv = ["--config", recipe, "--name", "damaged", "--runs-dir", str(tmp_path)]
    cfg = config_of(parser(None).parse_intermixed_args(argv))
    cfg.run_dir.mkdir()
    (cfg.run_dir / "config.yaml").write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    checkpoints = checkpoints_of(cfg)
    for step in (3, 5):
        (checkpoints.begin(step) / "shard.json").write_text("1")
        checkpoints.commit(step)
    (cfg.run_dir / "checkpoints" / "step-5" / "shard.json").write_text("12")

    def connect(cfg: Config) -> None:
        raise ConnectionError("there is no cluster")

    monkeypatch.setattr(driver, "connect", connect)
    assert driver.main(train.train, argv) == driver.EXIT_REFUSED
    said = capsys.readouterr().err
    assert "step-5/shard.json is" in said and "checkpoint.fallback=true" in said and "no cluster" not in said
    assert driver.main(train.train, [*argv, "checkpoint.fallback=true"]) == driver.EXIT_REFUSED
    assert "there is no cluster" in capsys.readouterr().err
    assert checkpoints.latest() == (3, cfg.run_dir / "checkpoints" / "step-3")


def synced(version: int) -> SyncReport:
    return SyncReport(
        version=version, digest="", num_workers=1, nbytes=0, seconds=0.0, publish_s=0.0, load_s=0.0
    )


class FailingScene(Scene):
    """The trainer cannot publish its second version."""

    async def prepare(self, version: int, leave: bool = False) -> None:
        await self._turn("prepare")
        if version == 2:
            raise WeightError("nothing to publish")


def test_production_is_paused_for_what_was_prepared_and_not_for_a_publication_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = stop_config(tmp_path, "separate")
    scene = FailingScene(cfg, tmp_path / "checkpoints", None)
    monkeypatch.setattr(train, "spawn", scene.spawn)
    with pytest.raises(WeightError, match="nothing to publish"):
        asyncio.run(asyncio.wait_for(train.train(cfg, scene.stop), 60))
    order = [call for call in scene.calls if call in ("prepare", "pause", "broadcast", "resume")]
    assert order == ["broadcast", "resume", "prepare", "pause", "broadcast", "resume", "prepare"]


class SlowScene(Scene):
    """The account and the record of a step take until its publication began."""

    def __init__(self, cfg: Config, folder: Path) -> None:
        super().__init__(cfg, folder, None)
        self.preparing = asyncio.Event()

    async def prepare(self, version: int, leave: bool = False) -> None:
        self.preparing.set()
        await self._turn("prepare")
        if leave:
            await self.offload()

    async def acknowledge(self, step: int, left_out: object = None) -> None:
        await self.preparing.wait()
        await self._turn("acknowledge")

    async def log(self, step: int, record: object) -> None:
        await self.preparing.wait()
        self.preparing.clear()
        await self._turn("log")


@pytest.mark.parametrize("job", [train.train, colocate.colocate])
def test_a_version_is_prepared_while_its_step_is_accounted_for_and_recorded(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = make_config(
        runs_dir=str(tmp_path),
        placement="separate" if job is train.train else "colocate",
        train={"num_steps": STEPS, "batch_size": 1},
        eval={"num_prompts": 0},
    )
    scene = SlowScene(cfg, tmp_path / "checkpoints")
    monkeypatch.setattr(train, "spawn", scene.spawn)
    monkeypatch.setattr(colocate, "spawn", scene.spawn)
    asyncio.run(asyncio.wait_for(job(cfg, scene.stop), 60))
    assert (
        scene.calls.count("prepare") == scene.calls.count("log") == scene.calls.count("log_sync") - 1 == STEPS
    )


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_sync_that_is_due_alone_is_one_call_and_what_else_is_due_pauses_production(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    task = {"name": "sums", "source": CHAIN_SUM, "max_tokens": 8, "strategy": {"kind": kind}}
    cfg = make_config(
        runs_dir=str(tmp_path),
        tasks=[task],
        train={"num_steps": 4, "batch_size": 1},
        eval={"num_prompts": 0},
        checkpoint={"interval": 2},
    )
    scene = Scene(cfg, tmp_path / "checkpoints", None)
    monkeypatch.setattr(train, "spawn", scene.spawn)
    monkeypatch.setattr(module, "CHECK_AFTER_S", 0.0)  # a step of this scene takes less
    asyncio.run(asyncio.wait_for(train.train(cfg, scene.stop), 60))
    calls = ("fit", "prepare", "swap", "pause", "save", "resume")
    order = [call for call in scene.calls if call in calls]
    saved = ["fit", "prepare", "pause", "pause", "save"]
    # What is generated in turn waits for its version at the pool.
    swapped = ["fit", *(["prepare", "swap"] if kind == "async" else ["swap", "prepare"])]
    assert order == ["resume", *swapped, *saved, "resume", *swapped, *saved]


def test_engines_that_take_turns_with_ranks_load_and_serve_in_one_call_also_after_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = make_config(
        runs_dir=str(tmp_path),
        placement="colocate",
        train={"num_steps": 4, "batch_size": 1},
        eval={"num_prompts": 1, "interval": 3},
        checkpoint={"interval": 2},
    )
    scene = Scene(cfg, tmp_path / "checkpoints", None)
    monkeypatch.setattr(colocate, "spawn", scene.spawn)
    asyncio.run(asyncio.wait_for(colocate.colocate(cfg, scene.stop), 60))
    calls = ("fit", "prepare", "offload", "swap", "broadcast", "save", "resume")
    order = " ".join(call for call in scene.calls if call in calls)
    first, saved = "fit prepare offload swap", "fit prepare save prepare offload swap"
    evaluated, last = "fit prepare offload broadcast resume", "fit prepare save offload broadcast"
    assert order.removeprefix("offload broadcast resume ") == f"{first} {saved} {evaluated} {last}"


class BrokenScene(Scene):
    """The ranks are brought back while a version is prepared, for which a load waits."""

    def __init__(self, cfg: Config, folder: Path) -> None:
        super().__init__(cfg, folder, None)
        self.staged, self.loading = asyncio.Event(), asyncio.Event()
        self.recovered = 0

    async def prepare(self, version: int, leave: bool = False) -> None:
        if version == 2 and not self.recovered:
            await self.loading.wait()
            await self.roles.settle()
            assert not self.loading.is_set(), "production can be paused"
            self.recovered += 1
        self.staged.set()
        await self._turn("prepare")

    async def swap(self, version: int, wait_s: float = 0.0) -> None:
        self.loading.set()
        try:
            async with asyncio.timeout(wait_s):
                await self.staged.wait()
        finally:
            self.loading.clear()
        self.staged.clear()
        await self._turn("swap")


def test_a_load_that_waits_for_its_version_ends_where_ranks_are_brought_back_and_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = make_config(
        runs_dir=str(tmp_path),
        tasks=[{"name": "sums", "source": CHAIN_SUM, "max_tokens": 8, "strategy": {"kind": "sync"}}],
        train={"num_steps": STEPS, "batch_size": 1},
        eval={"num_prompts": 0},
    )
    scene = BrokenScene(cfg, tmp_path / "checkpoints")
    monkeypatch.setattr(train, "spawn", scene.spawn)
    asyncio.run(asyncio.wait_for(train.train(cfg, scene.stop), 60))
    assert scene.recovered == 1
    assert [call for call in scene.calls if call in ("fit", "swap")] == ["fit", "swap", "fit", "swap", "fit"]


class UnaccountedScene(Scene):
    """The producer does not record that a step is trained."""

    async def acknowledge(self, step: int, left_out: object = None) -> None:
        for _ in range(9):
            await self._turn("acknowledge")
        raise ProductionError("the ledger cannot be written")


@pytest.mark.parametrize("job", [train.train, colocate.colocate])
def test_no_step_follows_one_that_is_not_accounted_for(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = stop_config(tmp_path, "separate" if job is train.train else "colocate")
    scene = UnaccountedScene(cfg, tmp_path / "checkpoints", None)
    monkeypatch.setattr(train, "spawn", scene.spawn)
    monkeypatch.setattr(colocate, "spawn", scene.spawn)
    with pytest.raises(ProductionError, match="cannot be written"):
        asyncio.run(asyncio.wait_for(job(cfg, scene.stop), 60))
    assert scene.trained == 1 and scene.calls.count("broadcast") == 1


class DriftingScene(Scene):
    """The engines' logprobs of the second version are wrong, as the check says some time after they serve it."""

    async def check(self, version: int) -> SyncReport:
        for _ in range(9):
            await self._turn("check")
        if version == 2:
            raise WeightError("logprobs differ")
        return synced(version)


def test_nothing_is_trained_by_what_engines_make_before_their_weights_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = stop_config(tmp_path, "separate")
    cfg = cfg.model_copy(update={"eval": cfg.eval.model_copy(update={"num_prompts": 0})})
    scene = DriftingScene(cfg, tmp_path / "checkpoints", None)
    monkeypatch.setattr(train, "spawn", scene.spawn)
    with pytest.raises(WeightError, match="logprobs differ"):
        asyncio.run(asyncio.wait_for(train.train(cfg, scene.stop), 60))
    assert scene.trained == 2
    order = [call for call in scene.calls if call in ("fit", "check", "resume", "swap")]
    checks = ["check"] * 9
    assert order == ["resume", *checks, "fit", "swap", *checks, "fit", "swap", *checks]


@pytest.mark.parametrize("interval", [1, 0])
@pytest.mark.parametrize(
    ("module", "job", "own_engines"),
    [
        (train, train.train, False),
        (train, train.train, True),
        (colocate, colocate.colocate, False),
        (colocate, colocate_lowlevel.colocate_lowlevel, False),
    ],
)
def test_whenever_a_job_is_stopped_its_last_step_is_saved(
    module: Any, job: Job, own_engines: bool, interval: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`interval`: of evaluations; 0: after the last step alone, so that nothing but a sync is due between."""
    cfg = stop_config(tmp_path, "separate" if module is train else "colocate")
    cfg = cfg.model_copy(update={"eval": cfg.eval.model_copy(update={"interval": interval})})

    def run(name: str, stop_at: int | None) -> Scene:
        async def main() -> Scene:
            scene = Scene(cfg, tmp_path / name, stop_at, own_engines)
            monkeypatch.setattr(module, "spawn", scene.spawn)
            await asyncio.wait_for(job(cfg, scene.stop), 60)
            return scene

        return asyncio.run(main())

    whole = run("whole", None)
    assert whole.trained == STEPS and whole.calls.count("evaluate") == 9 * (STEPS * interval or 1) + 9
    trained = []
    for number in range(1, len(whole.calls) + 1):
        stopped = run(f"at-{number}", number)
        saved = stopped.checkpoints.latest()
        assert stopped.trained == (0 if saved is None else saved[0]), (number, stopped.calls)
        trained.append(stopped.trained)
    assert trained == sorted(trained) and (trained[0], trained[-1]) == (0, STEPS)
