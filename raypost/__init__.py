"""raypost: post-train language models by reinforcement learning, every role a Ray actor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypost.version import __version__ as __version__

if TYPE_CHECKING:
    from raypost.collector import collect as collect


def __getattr__(name: str) -> object:
    # Light actors import raypost too: what few need is loaded when it is asked for.
    if name == "collect":
        from raypost.collector import collect

        return collect
    raise AttributeError(f"module 'raypost' has no attribute {name!r}")
