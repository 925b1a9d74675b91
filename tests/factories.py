"""What many tests begin with: a configuration that works, changed where a test says so."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from raypost.config import Config, parse_config
from raypost.errors import ConfigError

CHAIN_SUM = {"kind": "reasoning_gym", "dataset": "chain_sum", "size": 200}
SMALLEST: dict[str, Any] = {
    "model": {"name": "tiny"},
    "tasks": [{"source": CHAIN_SUM}],
    "train": {"num_steps": 4, "batch_size": 8},
}
"""All that is required of a configuration."""


def plain_config(**places: Any) -> dict[str, Any]:
    """SMALLEST as plain data, with values set at places such as train__num_steps or tasks__0__group_size."""
    raw = copy.deepcopy(SMALLEST)
    for place, value in places.items():
        node: Any = raw
        *parents, last = place.split("__")
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        node[int(last) if isinstance(node, list) else last] = value
    return raw


def make_config(**places: Any) -> Config:
    """The configuration of `plain_config`."""
    return parse_config(plain_config(**places))


def refusal_of(raw: dict[str, Any]) -> str:
    """The message with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    return str(caught.value)


def everything_below(folder: Path) -> dict[str, int]:
    """Every path below a folder, and when it was changed: equal if nothing was written."""
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}
