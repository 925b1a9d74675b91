"""The random state of a process: Python's, NumPy's and PyTorch's generators, those of its devices included.

Raypost itself draws from seeds and steps; a loss or a filter that a configuration names may draw from any of these.

    path/random-<rank>.json, .npy        plain data, as raypost.checkpoint writes it
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raypost.checkpoint import load_state, save_state
from raypost.errors import CheckpointError


def seed_everything(seed: int) -> None:
    """Have all generators begin anew, so that a rank that is started again draws what it drew."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Return this process's state, as plain data."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state().numpy(),
        "devices": [one.numpy() for one in devices],
    }


def save_random_state(path: Path, rank: int, state: dict[str, Any]) -> None:
    """Write what `random_state` returned below `path`."""
    save_state(path, f"random-{rank}", state)


def load_random_state(path: Path, rank: int) -> bool:
    """Restore what `save_random_state` wrote; False, and nothing changed, if there was no such rank.

    Raises CheckpointError if it is damaged.
    """
    name = f"random-{rank}"
    if not (path / f"{name}.json").exists():
        return False
    state = load_state(path, name)
    try:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(torch.from_numpy(state["torch"]))
        # A run may go on with another number of devices.
        for device, one in enumerate(state["devices"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(torch.from_numpy(one), device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path / name}.json holds no random state: {error!r}") from error
    return True
