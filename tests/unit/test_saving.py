"""A checkpoint beside the run, on scripted roles: what is waited for, what is visible when, and what failures do."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from jobs import saving
from jobs.saving import Saver
from raypost.checkpoint import CheckpointDir, SavePace, save_state
from raypost.errors import CheckpointError, RankLostError, WaitTimeoutError
from tests.factories import make_config


class Roles:
    """Trainer and producer at once. Writing waits for `disk`, after raising the `failures` one by one."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.disk = asyncio.Event()
        self.disk.set()
        self.failures: list[BaseException] = []
        self.whole = True
        self.checkpoints: CheckpointDir | None = None
        self.critic = None

    async def pause(self, mode: str) -> float:
        self.calls.append(f"pause {mode}")
        return 0.0

    def snapshot(self, folder: Path, exports: dict[str, bool]) -> Any:
        self.calls.append("snapshot")
        return asyncio.sleep(0)

    async def save(self, folder: str, step: int) -> None:
        self.calls.append("take")

    async def write_snapshot(self, folder: Path) -> bool:
        if self.failures:
            raise self.failures.pop(0)
        await self.disk.wait()
        save_state(folder, "rank", {"weights": 1})
        self.calls.append("written")
        return True

    async def durable(self, step: int) -> None:
        assert self.checkpoints is not None and self.checkpoints.durable == step
        self.calls.append(f"durable {step}")

    async def write_saved(self, folder: str) -> bool:
        return self.whole


def saver_of(tmp_path: Path, retry_s: float = 60.0) -> tuple[Saver, Roles, CheckpointDir]:
    cfg = make_config(checkpoint={"retry_s": retry_s}, eval={"num_prompts": 0})
    checkpoints, roles = CheckpointDir(tmp_path / "checkpoints", 2, {}), Roles()
    both: Any = roles
    roles.checkpoints = checkpoints
    saver = Saver(cfg, checkpoints, SavePace(None), both, both, roles.durable)
    return saver, roles, checkpoints


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "RETRY_PAUSE_S", 0.0)


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_production_and_training_go_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    saver, roles, checkpoints = saver_of(tmp_path)
    roles.disk.clear()
    await saver.save(4)
    assert roles.calls == ["pause abort", "snapshot", "take"], "the ranks are told first"
    await turns()
    assert saver.is_writing and saver.step == 4 and checkpoints.durable == 0 and not checkpoints.steps()
    saver.check()
    second = asyncio.create_task(saver.save(6))
    await turns()
    assert roles.calls[3:] == [], "the next one waits for it"
    roles.disk.set()
    await second
    assert checkpoints.durable == 4 and roles.calls[3:] == [
        "written",
        "durable 4",
        "pause abort",
        "snapshot",
        "take",
    ]
    await saver.written()
    assert checkpoints.steps() == [4, 6] and not saver.is_writing


async def test_what_cannot_be_written_is_tried_again(tmp_path: Path) -> None:
    saver, roles, checkpoints = saver_of(tmp_path)
    roles.failures = [OSError(errno.ENOSPC, "No space left on device", "rank.npy")] * 3
    await saver.save(4)
    await saver.written()
    assert checkpoints.durable == 4 and not saver.given_up


async def test_a_disk_that_stays_full_ends_the_run_with_the_file_and_what_is_whole(tmp_path: Path) -> None:
    saver, roles, checkpoints = saver_of(tmp_path, retry_s=0.0)
    await saver.save(2)
    await saver.written()
    roles.failures = [OSError(errno.ENOSPC, "No space left on device", "x/rank.npy")]
    await saver.save(4)
    await turns()
    await saver.settle()
    with pytest.raises(
        CheckpointError, match=r"step 4 .*retry_s 0 s: .*No space.*rank\.npy.*step 2 is whole"
    ):
        saver.check()
    with pytest.raises(CheckpointError, match="No space"):
        await saver.written()
    assert checkpoints.steps() == [2] and CheckpointDir(tmp_path / "checkpoints", 2, {}).latest() is not None


DEATHS = {
    "a rank, as its group says": RankLostError("trainer-1 died"),
    "an actor": ActorDiedError(),
    "none answers": WaitTimeoutError("waited 60 s"),
    "another process": None,
}


@pytest.mark.parametrize("death", DEATHS)
async def test_a_role_that_lost_its_part_costs_the_checkpoint_and_not_the_run(
    tmp_path: Path, death: str
) -> None:
    saver, roles, checkpoints = saver_of(tmp_path)
    await saver.save(2)
    await saver.written()

    def die() -> None:
        error = DEATHS[death]
        roles.failures, roles.whole = [error] if error else [], error is not None

    die()
    await saver.save(4)
    await saver.written()
    saver.check()
    assert checkpoints.steps() == [2] and saver.step == 2, "what is not whole is not committed"
    assert "step 4 was given up" in saver.given_up and "durable 4" not in roles.calls
    die()
    with pytest.raises(RankLostError, match="the last checkpoint is missing: the checkpoint of step 4"):
        await saver.take_again()
    roles.whole = True
    await saver.take_again()
    assert checkpoints.steps() == [2, 4] and not saver.given_up


async def test_a_folder_that_cannot_be_made_costs_the_checkpoint(tmp_path: Path) -> None:
    saver, roles, checkpoints = saver_of(tmp_path)
    (tmp_path / "checkpoints").write_text("")
    await saver.save(4)
    assert "File exists" in saver.given_up and "snapshot" not in roles.calls
    (tmp_path / "checkpoints").unlink()
    await saver.save(6)
    await saver.written()
    assert checkpoints.steps() == [6] and not saver.given_up


async def test_without_memory_for_a_copy_a_full_disk_costs_the_checkpoint(tmp_path: Path) -> None:
    saver, roles, checkpoints = saver_of(tmp_path)

    async def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "state-0-of-1.safetensors")

    roles.snapshot = lambda *_: full()  # type: ignore[method-assign]
    await saver.save(4)
    await saver.written()
    assert not checkpoints.steps() and "state-0-of-1" in saver.given_up


async def test_after_a_failure_of_the_run_its_checkpoint_is_written_within_a_time(tmp_path: Path) -> None:
    saver, roles, checkpoints = saver_of(tmp_path)
    await saver.save(2)
    await saver.settle(10.0)
    assert checkpoints.durable == 2
    roles.disk.clear()
    await saver.save(4)
    await saver.settle(0.01)
    assert checkpoints.durable == saver.step == 2 and not saver.is_writing and saver.given_up
    roles.disk.set()
    await turns()
    assert checkpoints.steps() == [2], "what is put off does not come later"
