"""What a rank answers to its group."""

from __future__ import annotations

from typing import NamedTuple

import ray

from raypost.types import GroupKey
from raypost.weights.manifest import Manifest


class Publication(NamedTuple):
    """One version of the weights in the object store, kept alive by rank 0."""

    manifest: Manifest
    buckets: list[ray.ObjectRef]


class TrainedStep(NamedTuple):
    """What one train step of the policy came to."""

    metrics: dict[str, float]
    left_out: dict[GroupKey, str]
    """Groups that were not trained, and why."""


class RankFacts(NamedTuple):
    """The process of a rank."""

    pid: int
    node: str
    ready: bool
    """Whether it is set up; False in a process that was started again."""
