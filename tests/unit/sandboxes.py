"""What tests of the sandbox share: whether there is one here, and Python programs in it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import pytest

from raypost.sandbox import Limits, Outcome, python, run, why_not

WHY_NOT = why_not(Limits())
needs_sandbox = pytest.mark.skipif(WHY_NOT is not None, reason=f"NO SANDBOX IS TESTED HERE: {WHY_NOT}")
LIMITS = Limits(cpu_s=5, wall_s=20)


async def run_python(
    source: str, limits: Limits = LIMITS, see: Sequence[str] = (), **options: Any
) -> Outcome:
    """How a Python program with this text ends."""
    path, needed = python()
    argv = [path, "-I", "-S", "-c", textwrap.dedent(source)]
    return await run(argv, see=[*needed, *see], limits=limits, **options)
