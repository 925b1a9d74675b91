"""`raypost chaos`: which kills a seed makes, which actors play which role, and what is refused. No cluster."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from jobs.chaos import CHAOS, ROLES, Kill, Victim, kill_all, main, parser, role_of, schedule
from jobs.launch import EVALUATION, PRODUCTION
from raypost.errors import ConfigError
from raypost.files.owner import OWNER, owning
from raypost.plan import plan
from tests.factories import make_config

NAMES = {
    "producer": "producer",
    "replay-buffer": "buffer",
    "weight-broadcaster": "broadcaster",
    "evaluation-broadcaster": "broadcaster",
    "evaluation-loop": "agent-loop",
    "evaluator": "evaluator",
    "telemetry": "telemetry",
    PRODUCTION: "controller",
    EVALUATION: "controller",
}


def test_a_seed_makes_the_same_kills_and_another_one_others() -> None:
    kills = list(schedule(7, 30, 10.0, [*ROLES]))
    assert kills == list(schedule(7, 30, 10.0, [*ROLES])) != list(schedule(8, 30, 10.0, [*ROLES]))


def test_every_role_is_killed_as_often_as_the_others_and_the_pace_is_what_was_asked_for() -> None:
    kills = list(schedule(0, 400, 10.0, [*ROLES]))
    assert set(Counter(kill.role for kill in kills).values()) == {400 // len(ROLES)}
    assert 9 < sum(kill.after_s for kill in kills) / 400 < 11
    assert all(isinstance(kill, Kill) and 0 <= kill.choice < 1 for kill in kills)


def test_every_actor_of_a_run_plays_one_role() -> None:
    config = make_config(
        train__critic={"name": "tiny"}, train__num_workers=2, train__advantage={"kind": "gae"},
        rollout__num_workers=3, rollout__agent_workers=2, rollout__judge_workers=2,
    )  # fmt: skip
    of_bundle = {
        "rollout_worker": "engine", "trainer_worker": "trainer", "critic_worker": "trainer",
        "agent_loop": "agent-loop", "judge": "judge",
    }  # fmt: skip
    bundles = [bundle for bundle in plan.bundles(config) if bundle.role in of_bundle]
    assert {bundle.role for bundle in bundles} == {*of_bundle}
    for bundle in bundles:
        assert role_of(bundle.name) == of_bundle[bundle.role], bundle.name
    for name, role in NAMES.items():
        assert role_of(name) == role
    assert role_of("prepare-models") is None


def test_a_folder_in_which_no_run_goes_on_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--kills", "1"]) == 2
    assert f"no run goes on in {tmp_path}" in capsys.readouterr().err


def test_a_driver_that_names_no_cluster_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with owning(tmp_path):
        said = json.loads((tmp_path / OWNER).read_text())
        (tmp_path / OWNER).write_text(json.dumps(said | {"host": "elsewhere"}))
        assert main([str(tmp_path)]) == 2
    assert "give --address" in capsys.readouterr().err
    assert "RAY_ADDRESS" not in os.environ


def test_an_unknown_role_is_refused_with_those_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path), "--roles", "gpu"])
    assert end.value.code == 2 and "broadcaster" in capsys.readouterr().err


def test_numbers_that_make_no_schedule_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in (["--kills", "0"], ["--every-s", "0"], ["--wait-s", "-1"]):
        with pytest.raises(SystemExit) as end:
            main([str(tmp_path), *wrong])
        assert end.value.code == 2 and "must be above 0" in capsys.readouterr().err


class Actors:
    """Stands for Cluster: two engines and a buffer, of which the engine-1 does not come back."""

    def __init__(self) -> None:
        self.killed: list[str] = []

    def victims(self) -> list[Victim]:
        names = ("engine-0", "engine-1", "replay-buffer")
        pid = 100 + len(self.killed)
        return [Victim(role_of(name) or "", name, name, pid, True) for name in names]

    def kill(self, victim: Victim) -> str:
        self.killed.append(victim.name)
        return "SIGKILL"

    def back_s(self, victim: Victim, timeout_s: float) -> float | None:
        return None if victim.name == "engine-1" else 0.5


def options(folder: Path, *more: str) -> argparse.Namespace:
    return parser().parse_args([str(folder), "--every-s", "0.001", *more])


def test_every_kill_is_a_line_of_the_run_folder(tmp_path: Path) -> None:
    actors = Actors()
    with owning(tmp_path):
        assert kill_all(options(tmp_path, "--kills", "8", "--roles", "engine", "buffer"), actors) == 8
    lines = [json.loads(line) for line in (tmp_path / CHAOS).read_text().splitlines()]
    assert [line["actor"] for line in lines] == actors.killed
    assert Counter(line["role"] for line in lines) == {"engine": 4, "buffer": 4}
    assert [line["pid"] for line in lines] == list(range(100, 108))
    assert {line["actor"]: line["back_s"] for line in lines} == {
        name: None if name == "engine-1" else 0.5 for name in actors.killed
    }


def test_a_role_that_the_run_does_not_have_is_refused_if_it_was_asked_for(tmp_path: Path) -> None:
    actors = Actors()
    with owning(tmp_path):
        with pytest.raises(ConfigError, match="no judge: it has buffer, engine"):
            kill_all(options(tmp_path, "--roles", "judge", "buffer"), actors)
        assert not actors.killed
        assert kill_all(options(tmp_path, "--kills", "4"), actors) == 4, "all roles: those there are"


def test_kills_end_with_the_run(tmp_path: Path) -> None:
    assert kill_all(options(tmp_path, "--kills", "4", "--roles", "engine"), Actors()) == 0
