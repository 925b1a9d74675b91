"""What a local run shows of its driver's log, and what is said of a run that failed."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from jobs import driver, run, stopping, wiring
from jobs import roles as module
from jobs.private_cluster import PrivateCluster
from jobs.records import Records
from jobs.roles import Roles
from jobs.submitted_job import DriverLog, end_of_driver
from raypost.types import GroupCounts, TelemetryRole

SETUP = "2026-01-02 11:22:58,454\tINFO job_manager.py:581 -- Runtime env is setting up.\n"
ENTRYPOINT = "Running entrypoint for job a: cd /x && exec python -m jobs.train\n"


@pytest.mark.parametrize(
    "log",
    [
        SETUP + ENTRYPOINT + "step 1\nstep 2\n",
        # Ray writes its line when the driver runs already.
        SETUP + "step 1\n" + ENTRYPOINT + "step 2\n",
        "step 1\nstep 2\n" + SETUP + ENTRYPOINT,
    ],
)
def test_all_that_the_driver_writes_is_shown_whenever_ray_writes(
    log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = DriverLog()
    for line in log.splitlines(keepends=True):
        shown.feed(line)
    assert capsys.readouterr().out == "step 1\nstep 2\n"
    assert list(shown.tail) == ["step 1", "step 2"] and shown.seen == len(log)


def test_what_ray_says_is_the_cause_of_a_driver_that_never_ran(capsys: pytest.CaptureFixture[str]) -> None:
    shown = DriverLog()
    shown.feed(SETUP)
    assert capsys.readouterr().out == "" and shown.tail[-1].endswith("Runtime env is setting up.")


@pytest.mark.parametrize(
    ("status", "tail", "code", "cause"),
    [
        (
            1,
            ["step 3", "traceback: t.txt", "failed: WaitTimeoutError: too late"],
            1,
            "WaitTimeoutError: too late",
        ),
        (
            1,
            ["failed: RoleLostError: trainer", "  now: it died"],
            1,
            "RoleLostError: trainer\n  now: it died",
        ),
        (2, ["refused: seed: must be >= 0"], 2, "refused: seed: must be >= 0"),
        (
            -9,
            ["step 41/60  reward 0.5"],
            137,
            "ended by SIGKILL (by hand, or by the system because memory ran out",
        ),
        (137, ["step 41/60  reward 0.5"], 137, "its last line was: step 41/60  reward 0.5"),
        (-11, [], 139, "ended by SIGSEGV and could say nothing; its last line was: Job failed"),
        (1, ["KeyError: 'x'"], 1, "KeyError: 'x'"),
        (None, [], 1, "Job failed"),
    ],
)
def test_the_cause_is_what_the_driver_said_or_what_ended_it(
    status: int | None, tail: list[str], code: int, cause: str
) -> None:
    found, text = end_of_driver(status, tail, "Job failed")
    assert (found, cause in text) == (code, True), text


async def test_the_cause_is_said_first_and_nothing_that_fails_later_hides_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "REPORT_S", 0.01)
    said: list[str] = []

    async def hangs(status: str, text: str) -> None:
        assert (status, said) == ("failed", ["the run ends, its report is written: ValueError: first"])
        await asyncio.sleep(60)

    async def fails(status: str, text: str) -> None:
        raise OSError(28, "No space left on device")

    for finish in (hangs, fails):
        said.clear()
        roles = SimpleNamespace(finish=finish, display=SimpleNamespace(phase=said.append))
        await wiring._report_failure(cast(Roles, roles), ValueError("first"))
    assert "the report is not written: TimeoutError" in caplog.text and "No space left" in caplog.text


async def test_a_role_that_hangs_or_fails_at_the_end_keeps_no_report_from_being_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for one in (module, stopping):
        monkeypatch.setattr(one, "LAST_CALL_S", 0.01)
    written: list[object] = []

    class Producer:
        async def counts(self) -> GroupCounts:
            await asyncio.sleep(60)
            raise AssertionError

    class Telemetry:
        async def log_sync(self, report: object) -> None:
            raise OSError(28, "No space left on device")

        async def finish(self, *end: object) -> dict[str, object]:
            written.append(end)
            return {}

    roles, nothing = object.__new__(Roles), cast(Any, None)
    records = Records(nothing, nothing, cast(TelemetryRole, Telemetry()))
    vars(records)["_recording"] = asyncio.get_running_loop().create_future()
    vars(roles).update(
        producer=Producer(),
        telemetry=Telemetry(),
        records=records,
        saver=SimpleNamespace(settle=AsyncMock()),
        display=SimpleNamespace(finish=lambda *_: None),
        cfg=SimpleNamespace(run_dir=None),
        _sync=object(),
        _deaths=[],
    )
    await roles.finish("failed", "why")
    assert written == [("failed", "why", None)]
    # Counts of a production that was never restored say nothing of the run.
    monkeypatch.setattr(Producer, "counts", AsyncMock(return_value=GroupCounts()))
    await roles.finish("failed", "why")
    assert written[1] == ("failed", "why", None)


def test_a_full_disk_hides_no_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def fails() -> None:
        raise OSError(28, "No space left on device", "ledger.jsonl")

    kept = tmp_path / "a file" / "traceback.txt"
    kept.parent.write_text("")
    assert asyncio.run(driver._until_it_ends(fails(), asyncio.Event(), "", kept)) == 1
    said = capsys.readouterr().err
    assert said.splitlines()[-1] == "failed: OSError: [Errno 28] No space left on device: 'ledger.jsonl'"


def test_logs_that_cannot_be_kept_hide_no_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def full(_: Path) -> None:
        raise shutil.Error([("a", "b", "[Errno 28] No space left on device")])

    run._keep_logs(cast(PrivateCluster, SimpleNamespace(save_logs=full)), tmp_path)
    assert "not all logs of the actors could be kept" in capsys.readouterr().err
