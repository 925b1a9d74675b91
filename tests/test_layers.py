"""Who may import whom, as design.md draws it; and proof that the contracts notice when somebody does not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("raypost", "actors", "jobs")

# (contract, file, line added to it)
VIOLATIONS = [
    ("layers", "raypost/errors.py", "import actors"),
    ("layers", "actors/remote.py", "import jobs.run"),
    ("library-without-ray", "raypost/types/rollout.py", "import ray"),
    ("library-without-ray", "raypost/types/rollout.py", "def late():\n    from vllm import LLM"),
    ("deepspeed-in-one-file", "raypost/types/rollout.py", "import deepspeed"),
    ("deepspeed-in-one-file", "actors/remote.py", "from deepspeed.runtime import engine"),
    ("independent-actors", "actors/judge.py", "import actors.rollout.controller"),
    ("independent-actors", "actors/rollout/worker.py", "import actors.training.worker"),
    ("independent-actors", "actors/remote.py", "import actors.judge"),
    ("library-order", "raypost/types/rollout.py", "from raypost.config import Config"),
    ("library-order", "raypost/observe/metrics.py", "from raypost.config import Config"),
    ("library-order", "raypost/judges/rules.py", "import raypost.agent_loop.tools"),
    ("library-order", "raypost/trainer/rank.py", "import raypost.plan.plan"),
    ("trainer-order", "raypost/trainer/batch/packing.py", "import raypost.trainer.model.head"),
]


def lint(folder: Path, contract: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the contracts on the packages in `folder`."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    if contract is not None:
        command += ["--contract", contract]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The packages and their contracts, to be broken."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_every_contract_holds() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("contract", "file", "line"), VIOLATIONS, ids=lambda value: str(value).split("\n")[0]
)
def test_violation_breaks_its_contract(copy: Path, contract: str, file: str, line: str) -> None:
    with open(copy / file, "a") as module:
        module.write(f"\n\n{line}\n")
    done = lint(copy, contract)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "0 kept, 1 broken" in done.stdout


@pytest.mark.parametrize("new", ["raypost/orphan.py", "actors/orphan.py"])
def test_a_module_without_a_place_in_the_order_is_noticed(copy: Path, new: str) -> None:
    (copy / new).write_text("")
    done = lint(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "orphan" in done.stdout


def test_actor_may_import_the_shared_actor_modules(copy: Path) -> None:
    with open(copy / "actors" / "judge.py", "a") as module:
        module.write("\n\nimport actors.remote\nimport actors.placement\n")
    assert lint(copy, "independent-actors").returncode == 0
