"""What a run folder says of the rollout pool: what was asked of it while the run goes on, and what it is.

    RUN/scale.json   how many workers are wanted in which pool: written by `raypost scale`, read by the driver
    RUN/pool.json    how many there are to be and why, the state of each, and what the cluster does not give: the
                     driver's

Files, as a run's driver may be on another node of the file system that all share.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from raypost.config import Config, load_config
from raypost.errors import ConfigError
from raypost.files.owner import owner
from raypost.report.files import CONFIG, write_json

SCALE = "scale.json"
POOL = "pool.json"
Size = int | Literal["auto"]
"""Of a pool: a number of workers, or what the run chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRecord:
    """A rollout pool at some time."""

    target: int
    """Workers that it is to have, without those of `rollout.pools`."""
    why: str
    pools: dict[str, str] = field(default_factory=dict)
    """How many workers each of `rollout.pools` is to have and why, by name."""
    workers: dict[str, str] = field(default_factory=dict)
    """State of each by name."""
    lacking: str = ""
    """What was asked of the cluster, what it gave, and why; empty: nothing lacks."""

    def write(self, run_dir: Path) -> None:
        """Replace the record in a run folder."""
        write_json(run_dir / POOL, asdict(self))

    def figures(self) -> dict[str, Any]:
        """Return the record as `raypost status` shows it."""
        told: dict[str, Any] = {"rollout workers": f"{self.target} wanted ({self.why})"}
        told |= {f"pool {name}": wanted for name, wanted in self.pools.items()}
        told |= {f"worker {name}": state for name, state in self.workers.items()}
        return told | ({"lacking": self.lacking} if self.lacking else {})


def pool_record(run_dir: Path) -> PoolRecord | None:
    """Return the pool's record; None if there is none."""
    try:
        return PoolRecord(**json.loads((run_dir / POOL).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def asked_sizes(run_dir: Path) -> dict[str, Size]:
    """Return the size that was asked for last by pool; that of `rollout` itself has an empty name."""
    try:
        asked = json.loads((run_dir / SCALE).read_text())["workers"]
        return {str(pool): "auto" if size == "auto" else int(size) for pool, size in asked.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def ask_for_size(run_dir: Path, workers: str, pool: str = "") -> None:
    """Ask a run that goes on for so many rollout workers, a number or `auto`, in one of its pools.

    Raises ConfigError if it cannot have them, or does not go on.
    """
    config = load_config(run_dir / CONFIG)
    if owner(run_dir) is None:
        raise ConfigError(
            f"no run goes on in {run_dir}, so there is nothing to scale: the command that started it continues it, "
            "and rollout.num_workers=N begins with N workers"
        )
    if workers != "auto" and not workers.isdecimal():
        raise ConfigError(f"--workers is {workers!r}: give a number, or `auto`")
    size: Size = "auto" if workers == "auto" else int(workers)
    if problem := size_problem(config, size, pool):
        raise ConfigError(problem)
    write_json(run_dir / SCALE, {"workers": {**asked_sizes(run_dir), pool: size}})


def size_problem(config: Config, size: Size, pool: str = "") -> str:
    """Return why a pool of a run cannot have this size; empty if it can."""
    if config.placement == "colocate":
        return "placement is colocate, where each engine shares the device of a trainer rank: their number is fixed"
    pools = config.rollout.by_pool()
    if pool not in pools:
        named = ", ".join(filter(None, pools)) or "none"
        return f"--pool is {pool!r}, which is none of rollout.pools ({named}); without --pool it is `rollout` itself"
    bounds, place = pools[pool].autoscale, f"{pool}.autoscale" if pool else "rollout.autoscale"
    if size == "auto":
        missing = f"--workers auto needs {place} with its bounds, which this run does not have: name a number"
        return "" if bounds is not None else missing
    if size < 1:
        return f"--workers is {size}: a pool needs at least 1"
    own = pools[pool]
    if own.reserve and size < own.num_workers:
        return (
            f"--workers is {size}, but {pool or 'rollout'}.reserve holds the places of {own.num_workers}, and an empty "
            "one would keep its node: ask for as many or more"
        )
    if bounds is not None and not bounds.min <= size <= bounds.max:
        return (
            f"--workers is {size}, outside of {place}.min {bounds.min} and {place}.max {bounds.max}: choose between "
            "them"
        )
    return ""
