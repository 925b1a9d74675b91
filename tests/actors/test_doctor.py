"""Hangs of real processes: each is named for what it is. Only the driver's own record is made up."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.actor import ActorHandle
from typer.testing import CliRunner

from actors.placement import Home, spawn
from raypost.cli import app
from raypost.doctor.diagnosis import Diagnosis
from raypost.doctor.examine import examine
from raypost.doctor.presence import PROCESSES, started_s
from tests.actors.hanging import Hanging, HangingRank

pytestmark = pytest.mark.usefixtures("local_ray")
DEADLINE_S = 240.0


class Run:
    """The folder of a run, and its actors."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, Home(folder, 600.0)
        self.actors: list[ActorHandle] = []

    def spawn(self, cls: type, name: str, *args: Any, **options: Any) -> ActorHandle:
        self.actors.append(spawn(cls, *args, name=name, home=self.home, **options))
        return self.actors[-1]

    def chain(self, last: str, how: str) -> None:
        """A driver that waits for the producer, which waits for an agent loop, which waits for the last one."""
        names = list(dict.fromkeys(["producer", "agent-loop-0", last]))
        actors = [
            self.spawn(Hanging, name, following, how if following is None else "", str(self.folder))
            for name, following in zip(names, [*names[1:], None], strict=True)
        ]
        actors[0].work.remote()
        self.drive("producer.take_batch")

    def drive(self, what: str) -> None:
        """Write the driver's record: this process."""
        process = psutil.Process()
        wait = {"what": what, "age_s": 0.0, "limit_s": 60.0, "outside": None, "group": None}
        record = {
            "name": "driver", "host": socket.gethostname(), "pid": process.pid, "started_s": started_s(process.pid),
            "beat_s": 600.0, "logs": [], "at_s": time.time(), "blocked_s": 0.0, "blocked_in": [], "waits": [wait],
        }  # fmt: skip
        (self.folder / PROCESSES).mkdir(exist_ok=True)
        (self.folder / PROCESSES / "driver.json").write_text(json.dumps(record))

    def until(self, beginning: str) -> Diagnosis:
        """What is found once the first line begins so."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            found = examine(self.folder)
            if found.diagnosis.headline.startswith(beginning):
                print(found.diagnosis.headline)
                return found.diagnosis
            time.sleep(0.2)
        raise AssertionError(found.report)

    def end(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    made = Run(tmp_path)
    yield made
    made.end()


def test_a_judge_that_never_answers_and_a_role_that_no_node_can_give(run: Run) -> None:
    run.spawn(Hanging, "rollout-9", resources={"unobtainable": 2.0})
    file = run.folder / PROCESSES / "rollout-9.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"at_s": time.time() - 30}))
    run.chain("judge-0", "judge")
    found = run.until("the judge does not answer: judge-0, group words/40 has waited ")
    assert [step.name for step in found.cause.chain] == ["driver", "producer", "agent-loop-0", "judge-0"]
    assert "http://127.0.0.1:" in found.headline
    assert [one.text.partition(" after")[0] for one in found.also] == ["rollout-9 has no process"]
    run.drive("the engine of rollout-9 to start")
    assert run.until("rollout-9 has no process").headline.endswith("no node has given it 2 unobtainable")
    done = CliRunner().invoke(app, ["doctor", str(run.folder), "--keep"])
    assert done.exit_code == 0
    assert "rollout-9 has no process" in done.output.splitlines()[0]
    (kept,) = run.folder.glob("doctor-*.txt")
    assert "rollout-9 has no process" in kept.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "how", "beginning"),
    [
        ("agent-loop-0", "environment", "the environment does not answer: agent-loop-0, group sums/40 has waited "),
        ("replay-buffer", "file system", "the file system does not answer replay-buffer: "),
        ("judge-0", "spin", "judge-0 is blocked for "),
    ],
)  # fmt: skip
def test_what_hangs_at_the_end_of_a_chain_is_named(run: Run, last: str, how: str, beginning: str) -> None:
    run.chain(last, how)
    headline = run.until(beginning).headline
    named = {"environment": "Maze.step", "file system": "ledger.jsonl", "spin": "spin (actors/hanging.py:"}
    assert named[how] in headline


@pytest.mark.slow
@pytest.mark.parametrize(
    ("collectives", "beginning"),
    [
        ([["all_reduce"], ["sleep"]], "trainer-1 does not come to the collective that trainer-0 (all_reduce) waits in"),
        ([["all_reduce"], ["barrier"]], "all ranks wait in different collectives for each other: "),
        (
            [["all_reduce"] * 2, ["all_reduce", "barrier"], ["all_reduce"] * 2],
            "trainer-1 is in another collective than the other ranks (all_reduce): trainer-1 is in the ",
        ),
    ],
)  # fmt: skip
def test_a_collective_that_not_all_ranks_come_to_is_named(
    run: Run, collectives: list[list[str]], beginning: str
) -> None:
    for rank, names in enumerate(collectives):
        actor = run.spawn(HangingRank, f"trainer-{rank}")
        actor.fit.remote(rank, len(collectives), str(run.folder / "store"), names)
    run.drive("fit of trainer-0, trainer-1, trainer-2")
    headline = run.until(beginning).headline
    assert "hanging.py" in headline


@pytest.mark.slow
@pytest.mark.parametrize(("process", "name"), [("gcs_server", "Ray's GCS"), ("raylet", "Ray's raylet")])
def test_ray_itself_is_named_when_it_is_stopped(run: Run, process: str, name: str) -> None:
    run.chain("judge-0", "judge")
    run.until("the judge does not answer")
    session = ray._private.worker.global_worker.node.get_session_dir_path()
    (found,) = [
        one for one in psutil.process_iter(["name"])
        if one.info["name"] == process and session in " ".join(one.cmdline())
    ]  # fmt: skip
    found.suspend()
    try:
        run.until(f"{name} is stopped by a signal (process {found.pid}")
    finally:
        found.resume()


def test_a_signal_is_sent_to_nobody_who_would_die_of_it(run: Run) -> None:
    from raypost.doctor.examine import _catches

    assert not _catches(os.getppid())
