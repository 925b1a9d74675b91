"""What is done when a role of a run died: a pure policy, and the names of what happened.

    decide(failure, history, limits) -> Restart | End(reason)

Owns the decision and its words. Owns no clock (`Failure.at_s` is given) and carries nothing out: the driver does
(jobs/recovery.py).

Invariant: whatever fails, a role is brought back at most `limits.max_failures` times in any `limits.window_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class Incident(StrEnum):
    """What happened to a run and did not end it: an event of its record, counted in its report."""

    ROLE_DIED = "role_died"
    ROLE_RESTARTED = "role_restarted"
    BATCHES_TRAINED_AGAIN = "batches_trained_again"
    """Batches, kept on disk, that a restarted trainer trained to be where it was."""
    VERSION_REPUBLISHED = "version_republished"
    """Weights of a version that were sent again, since those trained again are not bitwise the same."""
    WORKER_SLOW = "worker_slow"
    """A rollout worker that is slow beside its siblings is given less."""
    WORKER_JOINED = "worker_joined"
    """A rollout worker that was asked for while the run goes on serves."""
    WORKER_LEFT = "worker_left"
    POOL_RESIZED = "pool_resized"
    """A rollout pool is to have another number of workers."""
    POOL_SHORT = "pool_short"
    """A rollout worker that was asked for did not come: the cluster has nothing for it, or it does not start."""
    MICRO_BATCHES_HALVED = "micro_batches_halved"
    GROUPS_REGENERATED = "groups_regenerated"
    BUFFER_CUT = "buffer_cut"
    """The replay buffer came back without all that it held; what is lost is generated again."""
    DISK_REFUSED = "disk_refused"
    """Time in which the run folder could not be written, and production stood still."""
    TRANSPORT_FAILED = "transport_failed"
    """A version that came by the object store, since the broadcast that was asked for failed."""
    SETTINGS_CHANGED = "settings_changed"


class Limits(Protocol):
    """When failures of one role are a crash loop; config.FaultsConfig has these."""

    @property
    def max_failures(self) -> int:
        """Failures of one role within the window that are followed by a restart."""
        ...

    @property
    def window_s(self) -> float:
        """Length of the window, seconds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One end of a role that was not asked for."""

    role: str
    """What restarts as one, such as `trainer`."""
    actor: str
    """Name of the actor that failed first, such as `trainer-1`."""
    cause: str
    at_s: float
    """When it was noticed; any clock that does not go back."""
    node: str | None = None
    pid: int | None = None
    exit_cause: str | None = None
    """What the system says of the end of its process."""
    last_words: tuple[str, ...] = ()
    """The last lines of its own log."""

    def __str__(self) -> str:
        """Name role, actor, process, node and cause in one sentence."""
        place = ", ".join(
            text
            for text in (
                f"process {self.pid}" if self.pid is not None else "",
                f"node {self.node}" if self.node is not None else "",
            )
            if text
        )
        ended = f"; its process ended: {self.exit_cause}" if self.exit_cause else ""
        return f"{self.role}: {self.actor}{f' ({place})' if place else ''} failed: {self.cause}{ended}"

    @property
    def story(self) -> str:
        """The sentence, and the last lines of the actor's log below it."""
        words = "".join(f"\n    | {line}" for line in self.last_words)
        return f"{self}{f'. Last lines of its log:{words}' if words else ''}"


@dataclass(slots=True)
class FaultHistory:
    """The failures of a run so far, oldest first."""

    failures: list[Failure] = field(default_factory=list)

    def add(self, failure: Failure) -> None:
        """Remember a failure."""
        self.failures.append(failure)

    def of(self, role: str, since_s: float) -> list[Failure]:
        """Return the failures of a role after `since_s`."""
        return [one for one in self.failures if one.role == role and one.at_s > since_s]


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the role again: where it was, or on another node that has room for it where its own is gone."""


@dataclass(frozen=True, slots=True)
class End:
    """End the run."""

    reason: str
    """Cause and history."""


Decision = Restart | End


def decide(failure: Failure, history: FaultHistory, limits: Limits) -> Decision:
    """Return what is done about `failure`; `history` has those before it, of all roles.

    A role that failed more than `limits.max_failures` times within `limits.window_s`, this one included, ends the run.
    """
    recent = [*history.of(failure.role, failure.at_s - limits.window_s), failure]
    if len(recent) > limits.max_failures:
        first = "\n".join(
            f"  {failure.at_s - one.at_s:.0f} s before: {one}"
            if one is not failure
            else f"  now: {one.story}"
            for one in recent
        )
        return End(
            f"{failure.role} failed {len(recent)} times within {limits.window_s:g} s, more than "
            f"faults.max_failures {limits.max_failures}:\n{first}\nThe run can be continued by the same command from "
            "its last checkpoint, once the cause is gone"
        )
    return Restart()
