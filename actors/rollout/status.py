"""What passes between a controller and its rollout workers: what one is, and what it was sent."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from actors.rollout.loads import Room
from raypost.errors import WeightError
from raypost.types import Ref, WeightReport
from raypost.types.pause import PauseMode
from raypost.weights.manifest import Bytes, Manifest


class Held(NamedTuple):
    """The weights that an engine holds."""

    version: int
    digest: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What a worker is, once what it was told before is done."""

    has_engine: bool
    is_whole: bool = True
    """Whether the engine is not left half loaded."""
    serving: bool = False
    """Whether its gate is open."""
    mode: PauseMode | None = None
    """Of the pause in force."""
    held: Held | None = None
    """None: it holds no weights."""
    asleep: bool = False
    room: Room | None = None
    """What its engine holds at once."""


@dataclass(slots=True, frozen=True)
class SentWeights:
    """A version that was sent to a pool, or is staged there."""

    manifest: Manifest
    buckets: list[Ref[Bytes]] = field(repr=False)
    received: bool = False
    """Whether the workers took it from a group, so that its buckets need not come to their nodes."""

    @property
    def least(self) -> list[Ref[Bytes]]:
        """The buckets for workers that hold the version before."""
        return [] if self.received else self.buckets[self.manifest.base_buckets :]

    def verify(self, report: WeightReport) -> None:
        """Raise WeightError if a worker says that it holds something else."""
        sent = self.manifest
        if (report.version, report.digest) != (sent.version, sent.digest):
            raise WeightError(
                f"{report.worker} holds version {report.version} with digest {report.digest}, but version "
                f"{sent.version} with digest {sent.digest} was sent"
            )


class Swapped(NamedTuple):
    """What workers said they hold once they served a version that a swap brought."""

    manifest: Manifest | None = None
    reports: Sequence[WeightReport] = ()

    def of(self, manifest: Manifest, workers: Collection[str]) -> list[WeightReport]:
        """Return what these workers said of a version; nothing if another was swapped in last."""
        if manifest != self.manifest:
            return []
        return [report for report in self.reports if report.worker in workers]
