"""The replay buffer as others see it: what goes in, what it holds, and what it hands out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from raypost.types.packed import PackedGroups
from raypost.types.rollout import GroupKey, Status

T = TypeVar("T")


BatchT_co = TypeVar("BatchT_co", covariant=True)
"""A batch as its buffer hands it out: PackedGroups in one process, a Ref of them from another. Production passes it
on and cannot open it."""


class ExpiredGroup(NamedTuple):
    """A group that grew too old; `stored` if it stays in the buffer to be generated again."""

    key: GroupKey
    stored: bool
    mean_tokens: float
    """Mean response length of its members before they were reset: dropping by age favours short answers."""


@dataclass(slots=True, kw_only=True, frozen=True)
class PutResult:
    """What became of a group that was put: its status, its staleness, and whether it was stored."""

    status: Status
    staleness: int
    stored: bool
    too_old: bool = False
    """Whether age is what made it EXPIRED; otherwise it was interrupted too often."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Lease(Generic[BatchT_co]):
    """A batch taken for `step`. It stays in the buffer until `acknowledge(step)`."""

    step: int
    keys: tuple[GroupKey, ...]
    staleness: tuple[int, ...]
    """Per group, at `step`."""
    num_samples: int
    """Members of its groups."""
    batch: BatchT_co

    def with_batch(self, batch: T) -> Lease[T]:
        """Return the lease with its batch in another form."""
        return Lease(
            step=self.step,
            keys=self.keys,
            staleness=self.staleness,
            num_samples=self.num_samples,
            batch=batch,
        )


@dataclass(slots=True, frozen=True)
class TaskLimits:
    """How one task's groups expire in the buffer; both thresholds in train steps, None: never."""

    stale_threshold: int | None
    token_stale_threshold: int | None = None
    retry: bool = False
    """Keep an expired group, to be generated again."""
    max_tries: int | None = None
    """Interruptions of one trajectory after which its group is kept as EXPIRED, tokens and all."""


@dataclass(slots=True, frozen=True)
class BufferBounds:
    """High-water marks of the buffer; `low_water` is the fraction of them at which it is no longer full."""

    max_groups: int | None = None
    max_bytes: int | None = None
    low_water: float = 0.8


@dataclass(slots=True, kw_only=True, frozen=True)
class BufferCounts:
    """What the buffer holds now, by task and status. Every task is in both."""

    groups: dict[str, dict[Status, int]]
    """Leased groups count as ARCHIVED until acknowledged; popped ones are not here but in flight."""
    nbytes: dict[str, dict[Status, int]]
    """Bytes of token arrays that they pin; popped groups count as INIT here, since they still pin theirs."""
    is_full: bool = False
    """Above a high-water mark, and since then not yet below the low-water mark."""
    room: int | None = None
    """Groups until the high-water mark; None: there is no such mark."""
    oldest: dict[str, dict[Status, dict[int, int]]] = field(default_factory=dict)
    """COMPLETED and ABORTED groups of each task by the version of their oldest token, NEVER without one."""
    expires_at: int
    """First train step at which `refresh` finds something expired; NEVER: at none."""


class OpenLease(NamedTuple):
    """The batch of a step that is not acknowledged yet."""

    keys: tuple[GroupKey, ...]
    staleness: tuple[int, ...]


@dataclass(slots=True, kw_only=True, frozen=True)
class BufferContents:
    """Which groups the buffer holds when none is handed out."""

    groups: dict[GroupKey, Status]
    """Those that are not leased."""
    leases: dict[int, OpenLease]
    """By step."""
    acknowledged: int
    """Last step that is."""
    dropped: tuple[GroupKey, ...]
    """What the last `refresh` dropped, which who asked for it may not have heard."""
    cut: str = ""
    """What is lost of the buffer's journal; it waits for `mend` then. "" if nothing is."""


class Buffer(Protocol[BatchT_co]):
    """Groups by (task, status), between production and training. Every method is idempotent."""

    async def put(self, packed: PackedGroups, train_step: int, claim: int = 0) -> list[PutResult]:
        """Store groups as of `train_step`; returns one result each, in order.

        A key that is known is replaced and keeps its place in the order; one that is leased or trained changes
        nothing. FAILED and FILTERED groups are not stored, and a popped group put as one of these is gone. `claim`: the
        holder's last; 0: none.
        """
        ...

    async def refresh(self, train_step: int, claim: int = 0) -> list[ExpiredGroup]:
        """Expire what is too old at `train_step`; returns what newly expired. `claim` as in `pop`; 0: none."""
        ...

    async def pop(self, task: str, sources: Sequence[Status], limit: int, claim: int) -> PackedGroups | None:
        """Hand out up to `limit` groups to be continued; None if there are none.

        All of the first status come first, then the next, each in the buffer's order. They stay journaled until they
        are put again or dropped. `claim` grows with every new request; the last one asked again gives the same groups.
        """
        ...

    async def drop(self, keys: Sequence[GroupKey]) -> None:
        """Forget popped groups that ended untrained. Unknown keys are ignored."""
        ...

    async def reclaim(self, claim: int) -> BufferContents:
        """Take back all popped groups as they were: their holder is gone. Returns what the buffer holds.

        The next holder's claims are above `claim`, and calls that claim less are refused from here on.
        """
        ...

    async def mend(
        self, claim: int, living: Collection[GroupKey], leases: Mapping[int, OpenLease], acknowledged: int
    ) -> BufferContents:
        """Make a buffer whose journal was cut agree with the ledger; until then it answers nothing but `reclaim`.

        `living`: the groups that have not ended. `leases`: the open ones, which it makes again where it has their
        groups. `acknowledged`: last step that is trained. Returns what it holds.
        """
        ...

    async def lease(self, step: int, per_task: dict[str, int]) -> Lease[BatchT_co] | None:
        """Lease exactly that many COMPLETED groups a task in the buffer's order, or None and change nothing.

        Tokens at or above the task's token threshold are masked in the batch alone. Asked again for a step whose
        lease is open, it returns the same lease.
        """
        ...

    async def acknowledge(self, step: int) -> tuple[GroupKey, ...]:
        """End all leases up to `step`: these groups are trained. Returns their keys; () when repeated."""
        ...

    async def counts(self) -> BufferCounts:
        """Return groups and bytes by task and status, and whether the buffer is full."""
        ...

    async def then_counts(self, method: str, *args: Any) -> tuple[Any, BufferCounts]:
        """Return the answer to one of the calls above, and the counts after it, in one round trip."""
        ...

    async def state_dict(self) -> dict[str, Any]:
        """Return everything needed to restore the buffer, as plain data and NumPy arrays."""
        ...

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore into an empty buffer. Raises CheckpointError if it is not empty or the state is foreign."""
        ...
