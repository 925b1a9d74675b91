"""What is read of the records that the processes of a run leave, those of another machine and damaged ones included."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raypost.cli import app
from raypost.doctor.diagnosis import Severity
from raypost.doctor.examine import examine
from raypost.doctor.presence import PROCESSES, Presence, announce, forget_all
from raypost.errors import RunFilesError
from raypost.observe.waits import waiting


def record(folder: Path, name: str, *waits: str, age_s: float = 1.0, **changes: Any) -> None:
    """Write what a process on another machine would."""
    log = folder / f"{name}.log"
    log.write_text(":actor_name:x\n\nfirst\nlast words of " + name + "\n")
    plain = {
        "name": name, "host": "elsewhere", "pid": 7, "started_s": 0.0, "beat_s": 2.0, "logs": [str(log)],
        "at_s": time.time() - age_s, "blocked_s": 0.0, "blocked_in": [],
        "waits": [{"what": w, "age_s": 30.0, "limit_s": 60.0, "outside": None, "group": None} for w in waits],
    }  # fmt: skip
    (folder / PROCESSES).mkdir(exist_ok=True)
    (folder / PROCESSES / f"{name}.json").write_text(json.dumps(plain | changes))


def test_a_process_of_another_machine_that_fell_silent_is_found_with_its_log(tmp_path: Path) -> None:
    record(tmp_path, "driver", "producer.take_batch", age_s=5.0)
    record(tmp_path, "producer", age_s=40.0)
    (tmp_path / PROCESSES / "judge-0.json").write_text('{"name": "ju')
    found = examine(tmp_path, wait_s=0.0)
    assert found.diagnosis.headline.startswith("producer, or its node gave no sign of life for 40 s")
    assert found.diagnosis.waited_s == pytest.approx(35, abs=2), "since it last wrote, too"
    assert "first\nlast words of producer" in found.report
    assert ":actor_name" not in found.report


def test_what_the_driver_gave_up_leads_on_although_it_waits_no_more(tmp_path: Path) -> None:
    record(tmp_path, "driver")
    announce(tmp_path, "rollout-1", {"GPU": 8})
    file = tmp_path / PROCESSES / "rollout-1.json"
    file.write_text(file.read_text().replace('"at_s": ', '"at_s": 1'))  # long ago
    plain = json.loads(file.read_text())
    file.write_text(json.dumps(plain | {"at_s": time.time() - 31}))
    given_up = "waited 30 s for the engine of rollout-1 to start"
    found = examine(tmp_path, wait_s=0.0, gave_up=given_up).diagnosis
    assert found.headline == "rollout-1 has no process after 31 s: no node has given it 8 GPU"
    assert found.cause.chain[0].wait is not None and found.cause.chain[0].wait.what == given_up


def test_a_record_has_the_waits_that_are_open_and_is_gone_with_the_next_session(tmp_path: Path) -> None:
    with waiting("judge-0.judge", 60.0, "judge"):
        plain = Presence("agent-loop-0", tmp_path).record()
    assert [one["what"] for one in plain["waits"]][-1] == "judge-0.judge"
    assert (plain["blocked_s"], plain["blocked_in"]) == (0.0, [])
    announce(tmp_path, "agent-loop-0", {})
    forget_all(tmp_path)
    with pytest.raises(RunFilesError, match="no record of a process"):
        examine(tmp_path, wait_s=0.0)


def test_a_run_whose_driver_is_gone_is_said_to_have_ended(tmp_path: Path) -> None:
    record(tmp_path, "producer", "agent-loop-0.run")
    assert examine(tmp_path, wait_s=0.0).diagnosis.cause.severity is Severity.IDLE


def test_of_a_run_that_ended_no_process_is_asked_for_its_stack(tmp_path: Path) -> None:
    for name in ("driver", "trainer-0"):
        record(tmp_path, name, host=socket.gethostname(), started_s=-100.0)  # another process has its number
    report = examine(tmp_path, wait_s=0.0).report
    assert report.startswith("the run has ended: none of its 2 processes is there")
    assert "====" not in report


def test_the_doctor_needs_the_folder_of_a_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", str(tmp_path / "none")])
    assert (done.exit_code, "is no folder of a run that has begun" in done.stderr) == (2, True)
