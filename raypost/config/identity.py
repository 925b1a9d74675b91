"""Which configurations describe the same run, and which the same recipe.

Two questions with two answers. A run folder and its checkpoints belong to one run: another seed is another run, more
steps are not, so that a run can be continued. A report names its recipe: runs of it differ in their seed alone.
Neither depends on where files lie.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from raypost.config.run import Config

_PLACES: dict[str, Any] = {
    "name": True,
    "runs_dir": True,
    "keep_samples": True,
    "trackers": True,
    "model": {"cache_dir"},
    "tasks": {"__all__": {"source": {"index_dir"}}},
    "eval": {"source": {"index_dir"}},
}


def run_identity(config: Config) -> dict[str, Any]:
    """Return what makes a run this run, as plain data: all but its name, folders, records and number of steps."""
    return config.model_dump(mode="json", exclude=_PLACES | {"train": {"num_steps"}})


def run_digest(config: Config) -> str:
    """Return 16 hex digits of `run_identity`; checkpoints carry them."""
    return _digest(run_identity(config), 16)


def recipe_digest(config: Config) -> str:
    """Return 12 hex digits, equal for runs that differ in nothing but name, folders and seed."""
    return _digest(config.model_dump(mode="json", exclude=_PLACES | {"seed": True}), 12)


def _digest(plain: dict[str, Any], num_digits: int) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:num_digits]
