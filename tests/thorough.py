"""How many histories a property test tries: enough for every day at each run, ten times as many in `make test-all`."""

from __future__ import annotations

import os

THOROUGH = "RAYPOST_THOROUGH"
"""Environment variable: so many times the histories of every day."""


def examples(every_day: int) -> int:
    """Return how many to try now."""
    return every_day * int(os.environ.get(THOROUGH, "1"))
