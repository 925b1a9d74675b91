"""`raypost init`, and which run a command of a project continues, owns or is refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jobs import run as launcher
from raypost import cli
from raypost.config import Config, load_config
from raypost.data.task_source import check_source, held_out
from raypost.errors import ConfigError
from raypost.files.owner import OWNER, owner, owning
from raypost.plan.checks import run_dir_problems
from raypost.plan.plan import check
from raypost.report import files

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project that `raypost init` wrote, as the current folder."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["init", "mine"])
    assert result.exit_code == 0, result.output
    monkeypatch.chdir("mine")
    return tmp_path / "mine"


def test_project_is_one_that_the_plan_accepts_and_has_a_held_out_part(project: Path) -> None:
    config = load_config(Path("config.yaml"))
    assert config.name == "mine" and check(config).run_dir == Path("runs/mine")
    [task] = config.tasks
    assert len(held_out(task, 0, config.eval.num_prompts)) == config.eval.num_prompts == 128
    for prompt in check_source(task, 0):
        text = prompt.metadata["question"].split(":")[1].removesuffix("=")
        assert prompt.metadata["answer"] == str(eval(text))
    assert {path.name for path in project.iterdir()} == {
        ".gitignore",
        "README.md",
        "config.yaml",
        "data.jsonl",
        "reward.py",
    }
    assert "mine" in (project / "README.md").read_text()


EXAMPLES = sorted((ROOT / "examples").glob("*/config.yaml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: str(file.parent.name))
def test_every_example_is_one_that_the_plan_accepts_and_says_how_it_is_run(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    name = file.parent.name
    # Its interpreter is in an environment that its README has the user make.
    made = ["tasks.0.agent_loop.command.0=python3"] if name == "verifiers" else []
    config = load_config(file, [f"runs_dir={tmp_path}", *made])
    assert config.name == name
    assert check(config).run_dir == tmp_path / name
    text = (file.parent / "README.md").read_text()
    assert f"make run RECIPE=examples/{name}/config.yaml" in text and len(text.splitlines()) <= 15


def test_command_of_the_venv_runs_the_checkout_that_it_is_reached_through(tmp_path: Path) -> None:
    # Two checkouts share a venv by a link, as worktrees may.
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "raypost").mkdir()
        (tmp_path / name / "raypost" / "__main__.py").write_text(
            f"import sys; print({name!r}, *sys.argv[1:])"
        )
        (tmp_path / name / "Makefile").symlink_to(ROOT / "Makefile")
    venv = tmp_path / "one" / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "installed.lock").write_text("")
    (venv / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (venv / "bin" / "python").chmod(0o755)
    make = ["make", "-s", "-o", ".venv/installed.lock", ".venv/bin/raypost"]
    subprocess.run(make, cwd=tmp_path / "one", check=True, timeout=240)
    (tmp_path / "two" / ".venv").symlink_to(venv)

    def shown(command: str, folder: str) -> str:
        call = [str(tmp_path / command / ".venv/bin/raypost"), "plan", "a b"]
        done = subprocess.run(call, cwd=tmp_path / folder, capture_output=True, text=True, timeout=240)
        return done.stdout.strip() + done.stderr

    # From elsewhere the command's own checkout, from a checkout's root that one.
    assert [shown(name, ".") for name in ("one", "two")] == ["one plan a b", "two plan a b"]
    assert [shown("one", name) for name in ("one", "two")] == ["one plan a b", "two plan a b"]


def test_project_is_written_over_nothing_and_needs_a_name_that_a_run_can_have(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("")
    for name, part in (("full", "has files (mine.txt)"), ("a b", "names the run too")):
        result = CliRunner().invoke(cli.app, ["init", str(tmp_path / name)])
        assert result.exit_code == 2
        assert part in result.stderr
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]


def own(run_dir: Path, told: Connection) -> None:
    with owning(run_dir):
        told.send("owned")
        told.recv()


def test_run_that_lives_is_refused_by_name_until_its_process_ends_however_it_ends(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "one"
    assert owner(run_dir) is None
    here, there = multiprocessing.Pipe()
    first = multiprocessing.get_context("spawn").Process(target=own, args=(run_dir, there))
    first.start()
    assert here.recv() == "owned"
    assert (owner(run_dir) or "").startswith(f"process {first.pid} on ")
    with (
        pytest.raises(ConfigError, match=f"belongs to process {first.pid} on .*another --name"),
        owning(run_dir),
    ):
        pass
    config = load_config(ROOT / "jobs/recipes/quickstart.yaml", ["name=one", f"runs_dir={tmp_path / 'runs'}"])
    [problem] = run_dir_problems(config)
    assert f"belongs to process {first.pid}" in problem
    first.kill()
    first.join()
    # Its file is left behind, and means nothing.
    assert (run_dir / OWNER).exists() and owner(run_dir) is None
    assert run_dir_problems(config) == []
    for _ in range(2):
        with owning(run_dir):
            assert f"process {os.getpid()} " in (owner(run_dir) or "")
    assert owner(run_dir) is None


def make_run(runs: Path, name: str, age: int, status: str | None) -> None:
    (runs / name).mkdir(parents=True)
    config = runs / name / files.CONFIG
    config.write_text("")
    os.utime(config, (1e9 - age, 1e9 - age))
    if status is not None:
        (runs / name / files.REPORT_JSON).write_text(json.dumps({"status": status}))


def test_resume_takes_the_last_unfinished_run_of_the_recipe(tmp_path: Path) -> None:
    make_run(tmp_path, "sums-20260101-000000-aaaa", 5, None)
    make_run(tmp_path, "sums-20260102-000000-bbbb", 4, "stopped")
    make_run(tmp_path, "sums-20260103-000000-cccc", 3, "finished")
    make_run(tmp_path, "sums-other", 1, None)
    assert launcher.unfinished_run(tmp_path, "sums") == "sums-20260102-000000-bbbb"
    with pytest.raises(ConfigError, match=r"no unfinished run of 'code' \(0 finished\)"):
        launcher.unfinished_run(tmp_path, "code")
    make_run(tmp_path, "sums", 0, "failed")
    assert launcher.unfinished_run(tmp_path, "sums") == "sums"


def resolved(*arguments: str) -> Config:
    return launcher.configured(launcher.arguments(list(arguments)))


def test_runs_folder_is_the_one_that_is_said_last_and_overrides_stand_anywhere(project: Path) -> None:
    assert resolved("runs_dir=a", "--name", "x", "seed=3").run_dir == project / "a" / "x"
    config = resolved("train.num_steps=5", "--runs-dir", "b", "runs_dir=a", "--name", "x", "seed=3")
    assert (config.run_dir, config.train.num_steps, config.seed) == (project / "b" / "x", 5, 3)
    assert resolved().name.startswith("mine-20")


def test_command_of_a_checkout_works_in_any_folder_that_hides_none_of_its_packages(project: Path) -> None:
    command = [sys.executable, "-m", "raypost", "run", "no_such_key=1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no_such_key: unknown key" in done.stderr and "Traceback" not in done.stderr
    (project / "jobs").mkdir()
    (project / "jobs" / "__init__.py").write_text("")
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 2 and "has a package 'jobs', which hides" in done.stderr


def test_reward_function_is_tried_once_by_what_starts_the_job(project: Path) -> None:
    (project / "reward.py").write_text(
        f"open({str(project / 'calls')!r}, 'a').write('imported ')\n\ndef score(response, answer):\n    return 0.5\n"
    )
    config = load_config(Path("config.yaml"))
    check(config)
    once = (project / "calls").read_text()
    assert once.count("imported") == 1
    check(config, tried=True)
    assert (project / "calls").read_text() == once
