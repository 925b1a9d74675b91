"""Who may import whom, as design.md draws it; and proof that the contracts notice when somebody does not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("raypost", "actors", "jobs")

CONTRACTS = {
    one["name"]: one["id"]
    for one in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}

# (contract, file, line added to it, what that imports)
VIOLATIONS = [
    ("layers", "raypost/errors.py", "import actors", "actors"),
    ("layers", "actors/remote.py", "import jobs.run", "jobs.run"),
    ("library-without-ray", "raypost/types/rollout.py", "import ray", "ray"),
    ("library-without-ray", "raypost/types/rollout.py", "def late():\n    from vllm import LLM", "vllm"),
    ("deepspeed-in-one-file", "raypost/types/rollout.py", "import deepspeed", "deepspeed"),
    ("deepspeed-in-one-file", "actors/remote.py", "from deepspeed.runtime import engine", "deepspeed"),
    (
        "independent-actors",
        "actors/judge.py",
        "import actors.rollout.controller",
        "actors.rollout.controller",
    ),
    (
        "independent-actors",
        "actors/rollout/worker.py",
        "import actors.training.worker",
        "actors.training.worker",
    ),
    ("independent-actors", "actors/remote.py", "import actors.judge", "actors.judge"),
    ("library-order", "raypost/types/rollout.py", "from raypost.config import Config", "raypost.config"),
    ("library-order", "raypost/observe/metrics.py", "from raypost.config import Config", "raypost.config"),
    (
        "library-order",
        "raypost/judges/rules.py",
        "import raypost.agent_loop.tools",
        "raypost.agent_loop.tools",
    ),
    ("library-order", "raypost/trainer/rank.py", "import raypost.plan.plan", "raypost.plan.plan"),
    (
        "trainer-order",
        "raypost/trainer/batch/packing.py",
        "import raypost.trainer.model.head",
        "raypost.trainer.model.head",
    ),
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


def broken(told: str) -> set[tuple[str, str, str]]:
    """(contract, importer, imported) of each import that is told."""
    told = " ".join(told.partition("Broken contracts")[2].split())
    begins = {told.find(f"{name} ---"): contract for name, contract in CONTRACTS.items()}
    imports = re.finditer(r"- (\S+) -> (\S+) \(l\.", told)
    return {(begins[max(at for at in begins if at < one.start())], one[1], one[2]) for one in imports}


def test_each_violation_breaks_its_contract_and_each_contract_has_one(copy: Path) -> None:
    expected = set()
    for contract, file, line, imported in VIOLATIONS:
        with open(copy / file, "a") as module:
            module.write(f"\n\n{line}\n")
        expected.add((contract, file.removesuffix(".py").replace("/", "."), imported))
    done = lint(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert broken(done.stdout) == expected, done.stdout
    assert {contract for contract, *_ in expected} == set(CONTRACTS.values())


def test_a_module_without_a_place_in_the_order_is_noticed(copy: Path) -> None:
    for package in ("raypost", "actors"):
        (copy / package / "orphan.py").write_text("")
    done = lint(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "- raypost.orphan" in done.stdout and "- actors.orphan" in done.stdout


def test_actor_may_import_the_shared_actor_modules(copy: Path) -> None:
    with open(copy / "actors" / "judge.py", "a") as module:
        module.write("\n\nimport actors.remote\nimport actors.placement\n")
    assert lint(copy, "independent-actors").returncode == 0
