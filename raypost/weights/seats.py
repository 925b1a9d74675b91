"""Who is in a broadcast group and where it meets: what passes between the processes before they join it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

Backend = Literal["gloo", "nccl"]
"""What carries the bytes. NCCL has not been run: no machine with two GPUs was at hand."""


class Member(NamedTuple):
    """A rollout worker as a part of a group."""

    worker: str
    incarnation: int
    """How often it was brought back: it is another member then."""
    node: str
    """Address of its node."""
    ranks: int
    """Processes with a part of the model."""


@dataclass(frozen=True, slots=True)
class Seats:
    """Who is in a group and where it meets."""

    address: str
    port: int
    backend: Backend
    timeout_s: float
    """Longest time to wait for the others to join, and for each bucket."""
    workers: tuple[tuple[str, int], ...]
    """Names, in order of their ranks, and how many ranks each has."""
    first_bucket: int = 0
    """Buckets before it are with all workers already."""

    @property
    def size(self) -> int:
        """Ranks of the group; rank 0 is the trainer's."""
        return 1 + sum(ranks for _, ranks in self.workers)

    def rank_of(self, worker: str, engine_rank: int) -> int:
        """Return the rank of a process of a worker, which has a seat."""
        names = [name for name, _ in self.workers]
        return 1 + sum(ranks for _, ranks in self.workers[: names.index(worker)]) + engine_rank

    def encoded(self) -> str:
        """Return it as text, for a process that is reached by text only."""
        return json.dumps(asdict(self))

    @classmethod
    def decoded(cls, text: str) -> Seats:
        """Return what `encoded` wrote."""
        fields: dict[str, Any] = json.loads(text)
        workers = tuple((name, ranks) for name, ranks in fields["workers"])
        return cls(**{**fields, "workers": workers})

    @property
    def meeting(self) -> tuple[str, int]:
        """What tells one group from another."""
        return self.address, self.port
