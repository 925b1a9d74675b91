"""Types reach what matters most: the calls of the roles in the main loop, and the arithmetic on tensors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("raypost", "actors", "jobs")
CACHE = ".mypy_cache"

# (file, a line of it, what it becomes, the errors that are expected there)
MISTAKES = [
    (
        "jobs/train.py",
        "await roles.acknowledge(step)",
        "await roles.acknowlege(stpe=step)",
        '"Roles" has no attribute "acknowlege"; maybe "acknowledge"?  [attr-defined]',
    ),
    (
        "jobs/train.py",
        "await roles.broadcast(version=step)",
        "await roles.broadcast(verison=step)",
        'Unexpected keyword argument "verison" for "broadcast" of "Roles"; did you mean "version"?  [call-arg]',
    ),
    (
        "jobs/roles.py",
        "await self.broadcaster.broadcast(version, check=not at_once)",
        "await self.broadcaster.broadcast(str(version), check=not at_once)",
        'Argument 1 to "broadcast" of "BroadcasterRole" has incompatible type "str"; expected "int"  [arg-type]',
    ),
    (
        "raypost/trainer/algorithm/losses.py",
        "free_T = ratio_T * advantages_T",
        "free_T = ratio_T.no_such_method() * advantages_T",
        '"Tensor" has no attribute "no_such_method"  [attr-defined]',
    ),
]


@pytest.mark.timeout(600)
def test_planted_mistakes_are_the_only_type_errors(tmp_path: Path) -> None:
    """In these files and all that they import. A run of `make check` before this one leaves a cache."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    has_cache = (ROOT / CACHE).is_dir()
    if has_cache:
        shutil.copytree(ROOT / CACHE, tmp_path / CACHE)
    expected = set()
    for name, line, mistake, error in MISTAKES:
        path = tmp_path / name
        before, found, after = path.read_text().partition(line)
        assert found, f"{name} has no line {line!r}"
        path.write_text(before + mistake + after)
        expected.add(f"{name}:{before.count(chr(10)) + 1}: error: {error}")
    command = [sys.executable, "-m", "mypy", "--no-pretty", "--hide-error-context"]
    command += {name for name, *_ in MISTAKES}
    if not has_cache:
        command.append(f"--cache-dir={os.devnull}")  # Nobody reads what this run would write.
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    errors = {line for line in done.stdout.splitlines() if ": error: " in line}
    assert errors == expected, done.stdout + done.stderr
