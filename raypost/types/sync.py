"""A weight sync: its reports, and the protocols of the two ends of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from raypost.types.arrays import FloatArray, IntArray, Ref

if TYPE_CHECKING:
    from raypost.weights.manifest import Bytes, Manifest
    from raypost.weights.seats import Backend, Member, Seats


@dataclass(slots=True, kw_only=True, frozen=True)
class WeightReport:
    """An engine's report of the weights it holds: their version, and the digest of what it loaded."""

    version: int
    digest: str
    worker: str = ""
    load_s: float = 0.0
    verify_s: float = 0.0
    """The part of it that was spent on reading the weights back."""
    read_back: bool = False
    """Whether the digest was compared with what the model holds."""
    left_out: tuple[str, ...] = ()
    """What could not be compared, by tensor or parameter."""
    pause_s: float = 0.0
    """Until the engine stood still for it."""
    resume_s: float = 0.0
    """Until it went on, where it did."""


@dataclass(slots=True, kw_only=True, frozen=True)
class SyncReport:
    """What one weight sync did, as it is recorded."""

    version: int
    digest: str
    num_workers: int
    nbytes: int
    """Sent to each worker: what it had already is not sent again, such as tensors that did not change."""
    seconds: float
    publish_s: float
    """Gather from all ranks, pack, and put into the object store."""
    load_s: float
    """Of the slowest worker."""
    spared_nbytes: int = 0
    """Not sent to each worker, which had it."""
    verify_s: float = 0.0
    """Of `load_s`, the longest time that a worker read its weights back."""
    read_back: bool = False
    """Whether every worker did."""
    left_out: tuple[str, ...] = ()
    """What engines could not read back, by tensor or parameter."""
    transport: str = "object_store"
    """By which way it came to the engines."""
    transport_s: float = 0.0
    """Until every engine had it, verified, beside those that generated."""
    transport_failed: str = ""
    """Why it did not come by the way that was asked for."""
    pause_s: float = 0.0
    """Until the slowest worker stood still."""
    resume_s: float = 0.0
    """Until the slowest worker, which held it, went on."""
    canary_s: float = 0.0
    """Until the slowest engine had answered on the canary prompt; not part of `seconds`."""
    canary_difference: float | None = None
    """Largest logprob difference between an engine and the trainer; None when it was not compared."""


class WeightSource(Protocol):
    """Where a version of the weights comes from: the trainer group."""

    async def publish(self, version: int) -> tuple[Manifest, list[Ref[Bytes]]]:
        """Return the weights as `version`: their manifest, and one ref for each bucket."""
        ...

    async def node(self) -> str:
        """Return the address of the node that the weights come from."""
        ...

    async def open_group(self, members: Sequence[Member], backend: Backend, timeout_s: float) -> Seats:
        """Open a broadcast group to these engines, in place of the one before; return where it meets."""
        ...

    async def send(self, version: int, seats: Seats) -> str:
        """Send what was published as `version` to the group; "", or what failed."""
        ...

    async def canary(self, token_ids: IntArray) -> FloatArray:
        """Return the logprob of every token but the first under the current weights, at temperature 1."""
        ...

    async def offload(self) -> None:
        """Leave the device to others, where it is shared. Idempotent."""
        ...


class PoolHolds(NamedTuple):
    """What a rollout pool holds."""

    version: int
    digest: str
    serving: bool
    asleep: bool


class WeightSink(Protocol):
    """Where a version of the weights goes: the rollout pool."""

    async def restock(self, manifest: Manifest, buckets: list[Ref[Bytes]]) -> None:
        """Take weights that are out, or prepared, where they are not at hand any more."""
        ...

    async def stage_weights(self, manifest: Manifest, buckets: list[Ref[Bytes]]) -> None:
        """Bring a version close to the live workers while they generate. Raises WeightError if what came differs."""
        ...

    async def members(self) -> list[Member]:
        """Return the live workers, as parts of a broadcast group."""
        ...

    async def receive_weights(self, manifest: Manifest, buckets: list[Ref[Bytes]], seats: Seats) -> None:
        """As `stage_weights`, by a group, whose sender sends meanwhile; `buckets` for workers that come later."""
        ...

    async def load_weights(self, manifest: Manifest, buckets: list[Ref[Bytes]]) -> list[WeightReport]:
        """Load into every live worker; what each says it holds. Raises WeightError if that differs."""
        ...

    async def renew_weights(self, manifest: Manifest, buckets: list[Ref[Bytes]]) -> bool:
        """Take these buckets for those of the version held, if they are bitwise that; return whether they are."""
        ...

    async def canary(self, prompt_ids: IntArray) -> list[tuple[str, FloatArray]]:
        """(worker, logprobs of the prompt's tokens but the first) for every live worker."""
        ...
