"""Where the jobs are: in the checkout that this package belongs to, or in `raypost_runtime`, which the wheel adds.

A wheel cannot carry packages called `jobs` and `actors`: a user's folder of that name would hide them. They are
`raypost_runtime.jobs` and `raypost_runtime.actors` there (hatch_build.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from raypost.errors import ConfigError

HOME = Path(__file__).resolve().parents[2]
"""The checkout, or the folder of installed packages."""
INSTALLED = (HOME / "raypost_runtime").is_dir()


def job_module(job: str) -> str:
    """Return the name under which the module `job` of jobs/ is imported here."""
    return f"raypost_runtime.jobs.{job}" if INSTALLED else f"jobs.{job}"


def become(job: str, arguments: Sequence[str]) -> NoReturn:
    """Go on as `python -m` that module, in the current folder. Raises ConfigError where that would be another one."""
    here = Path.cwd()
    hiding = [name for name in ("actors", "jobs") if (here / name / "__init__.py").is_file()]
    if not INSTALLED and here != HOME and hiding and not (here / "jobs" / "run.py").is_file():
        raise ConfigError(
            f"{here} has a package {hiding[0]!r}, which hides the one of the checkout {HOME}: rename it, or install "
            "raypost's wheel, which has no such names"
        )
    paths = [str(HOME), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | ({} if INSTALLED else {"PYTHONPATH": os.pathsep.join(paths)})
    os.execve(sys.executable, [sys.executable, "-m", job_module(job), *arguments], environment)
