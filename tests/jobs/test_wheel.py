"""The wheel, installed into a venv of its own: a project anywhere plans, and trains, without a checkout of raypost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["model.options.steps=60", "train.num_steps=2", "train.batch_size=4", "eval.num_prompts=8"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The venv's bin folder. It has the wheel, and by a path this environment's packages, raypost not among them."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=240)
    [wheel] = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, timeout=240)
    return python.parent


def call(
    command: Path, *arguments: str, folder: Path, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run the installed command as a user does in whose shell the venv is active, and nothing else is set."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["PATH"] = f"{command}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        [str(command / "raypost"), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.fixture
def project(installed: Path, tmp_path: Path) -> Path:
    done = call(installed, "init", "mine", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    # Names that are the user's in the user's own project.
    for name in ("jobs", "actors"):
        (tmp_path / "mine" / name).mkdir()
        (tmp_path / "mine" / name / "__init__.py").write_text(
            "raise ImportError('this one is not raypost\\'s')\n"
        )
    return tmp_path / "mine"


def test_wheel_plans_and_refuses_in_an_empty_folder(installed: Path, project: Path) -> None:
    done = call(installed, "plan", "train.num_steps=5", "--cluster", "none", "seed=2", folder=project)
    assert done.returncode == 0, done.stderr
    assert "5 steps" in done.stdout and "1 of sums" not in done.stdout
    (project / "filters.py").write_text("def keep(group):\n    return True\n")
    done = call(installed, "run", "train.num_workers=3", "--config", "config.yaml", folder=project)
    assert done.returncode == 2 and "not divisible by train.num_workers 3" in done.stderr, done.stderr
    done = call(installed, "submit", "--address", "http://127.0.0.1:1", folder=project)
    assert done.returncode == 2 and "no cluster answers at" in done.stderr, done.stderr
    text = "import raypost, raypost_runtime.jobs.train as t; print(raypost.__file__, t.spawn.__module__)"
    found = subprocess.run(
        [str(installed / "python"), "-c", text], cwd=project, capture_output=True, text=True
    )
    assert str(ROOT) not in found.stdout and found.stdout.split()[1] == "raypost_runtime.jobs.wiring", (
        found.stderr
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_wheel_trains_a_project_and_says_how_to_train_on(
    installed: Path, project: Path, tmp_path: Path
) -> None:
    cache = f"model.cache_dir={tmp_path / 'cache'}"
    # A module of the project, which actors import: the judge, and the producer's filter.
    (project / "filters.py").write_text("def keep(group):\n    return True\n")
    own = "tasks.0.strategy.is_valid=filters:keep"
    done = call(installed, "run", *SMALL, cache, own, "--name", "first", folder=project, timeout_s=500)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((project / "runs" / "first" / "report.json").read_text())
    assert (report["status"], report["steps"], report["groups"]["lost"]) == ("finished", 2, 0)
    assert "to train on: raypost run --config config.yaml --name first" in done.stdout.splitlines()[-1]
