"""EngineWeights: which weights one engine holds, how it gets others, and whether it is whole.

Owns the version, what makes an engine unusable, and which of its memory must be awake; the rollout worker owns the
order of pause, load and serve, and takes its locks around every call.

Invariants: an engine that is left half loaded, or whose change was interrupted, is broken until another is built; the
version is that of a whole load, which the engine itself said it holds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from actors.engine.life import EngineLife
from raypost.errors import EngineLostError, NotStagedError, StaleWeightsError, WeightError
from raypost.types import NO_VERSION, WeightReport
from raypost.weights.held import ReadBack
from raypost.weights.manifest import Bytes, Manifest
from raypost.weights.seats import Seats

if TYPE_CHECKING:
    from actors.rollout.vllm_engine import Memory, RolloutEngine


Says = tuple[int, str, bool]
"""Version and digest that an engine says it holds, -1 and "" for none, and whether it is half loaded."""


class EngineWeights:
    """The weights of the engine in `life`, which may be none."""

    def __init__(self, name: str, life: EngineLife[RolloutEngine]) -> None:
        """`name`: of the worker, for messages."""
        self._name = name
        self._life = life
        self.broken: str | None = None
        """Why the engine must be built anew."""
        self.version = NO_VERSION
        self.epoch = 0
        """Of that version: see Manifest."""
        self._load_s = 0.0
        """How long the last load took."""
        self._read_back: ReadBack | None = None
        self.pause_s = self.resume_s = 0.0
        """How long the engine took to stand still for the last load, and to go on after it."""

    @property
    def engine(self) -> RolloutEngine:
        """The engine. Raises EngineLostError if there is none."""
        if self._life.engine is None:
            raise EngineLostError(f"{self._name} has no engine: start it first")
        return self._life.engine

    @property
    def usable(self) -> RolloutEngine:
        """The engine, if it is whole. Raises WeightError if it is not."""
        engine = self.engine
        if self.broken is not None:
            raise WeightError(f"{self._name} is half loaded: {self.broken}; load a version again")
        return engine

    def is_newer(self, manifest: Manifest) -> bool:
        """Whether it is not what the engine holds, but newer."""
        return (manifest.version, manifest.epoch) > (self.version, self.epoch)

    @contextlib.contextmanager
    def whole(self, doing: str) -> Iterator[None]:
        """Mark the engine as broken until the block has ended well; a cancellation leaves it broken too."""
        self.broken = f"{doing} was interrupted"
        try:
            yield
        except Exception as error:
            self.broken = f"{doing} failed: {error}"
            raise WeightError(f"{self._name}: {self.broken}; the next load builds its engine anew") from error
        self.broken = None

    async def sleep(self, keep_weights: bool) -> None:
        """Give the paused engine's device to others."""
        if not keep_weights:
            self.version = NO_VERSION
        with self.whole("falling asleep"):
            await self._life.alive(self.engine.sleep(keep_weights))

    async def wake(self, *memory: Memory) -> None:
        """Take memory back, all of it unless named, if any sleeps."""
        engine = self.usable
        if engine.asleep:
            with self.whole("waking"):
                await self._life.alive(engine.wake(*memory))

    async def check_holds(self, version: int) -> None:
        """Raise StaleWeightsError unless the engine itself says that it holds `version`."""
        held, _, _ = await self._life.alive(self.usable.held())
        if held != version:
            raise StaleWeightsError(
                f"{self._name} holds version {held} and was asked to serve {version}: load it"
            )

    async def stage(self, manifest: Manifest, buckets: Sequence[Bytes]) -> None:
        """Bring a version into the engine's processes, unless there is no whole engine or the version is held."""
        engine = self._life.engine
        if engine is None or self.broken is not None or not self.is_newer(manifest):
            return
        try:
            await self._life.alive(engine.stage(manifest, buckets))
        except NotStagedError:
            raise
        except Exception as error:
            raise WeightError(f"{self._name} did not stage version {manifest.version}: {error}") from error

    async def receive(self, manifest: Manifest, seats: Seats) -> None:
        """As `stage`, by a group in which this worker has seats. Raises WeightError if it cannot take part."""
        engine = self.usable
        try:
            await self._life.alive(engine.receive(manifest, seats, self._name))
        except Exception as error:
            raise WeightError(f"{self._name} did not receive version {manifest.version}: {error}") from error

    async def hold(self, manifest: Manifest, buckets: Sequence[Bytes]) -> WeightReport:
        """Load a version, unless it is held already; return what the engine then says it holds."""
        if manifest.version < self.version:
            raise StaleWeightsError(
                f"{self._name} holds version {self.version}: version {manifest.version} is older"
            )
        is_new = self.is_newer(manifest)
        if is_new:
            begin = time.monotonic()
            says = await self._load(manifest, buckets)
            self.resume_s = 0.0
            self._load_s = time.monotonic() - begin
            report = self._report(says)
        else:
            report = await self.report()
        if not is_new and report.digest != manifest.digest:
            raise WeightError(
                f"{self._name} holds version {report.version} with digest {report.digest}, and was sent the same "
                f"version with digest {manifest.digest}: publish changed weights as a new version"
            )
        return report

    async def _load(self, manifest: Manifest, buckets: Sequence[Bytes]) -> Says:
        """Load a version; return what the engine says after it."""
        engine = self.usable
        await self.wake("weights")
        try:
            await self._life.alive(engine.stage(manifest, buckets))
            # As in `whole`; but an error that leaves the old weights untouched leaves the engine whole.
            self.broken = f"loading version {manifest.version} was interrupted"
            self.version = NO_VERSION
            self._read_back, says = await self._life.alive(engine.load(manifest))
        except NotStagedError:
            raise
        except Exception as error:
            self.version, _, touched = await self._life.alive(engine.held())
            kept = "its old weights are untouched" if self.version >= 0 else "it holds no version"
            if touched:
                kept = "its engine is half loaded and must be built anew"
            self.broken = f"loading version {manifest.version} failed: {error}" if touched else None
            raise WeightError(
                f"{self._name} did not load version {manifest.version}: {error}; {kept}"
            ) from error
        self.broken = None
        self.version, self.epoch = manifest.version, manifest.epoch
        return says

    async def report(self) -> WeightReport:
        """Return what the engine says it holds; version -1 for nothing."""
        return self._report(await self._life.alive(self.usable.held()))

    def _report(self, says: Says) -> WeightReport:
        version, digest, _ = says
        read = self._read_back
        return WeightReport(
            version=version,
            digest=digest,
            worker=self._name,
            load_s=self._load_s,
            pause_s=self.pause_s,
            resume_s=self.resume_s,
            verify_s=0.0 if read is None else read.seconds,
            read_back=read is not None,
            left_out=() if read is None else read.left_out,
        )

    def forget(self) -> None:
        """Take note that the engine was given up."""
        self.version = NO_VERSION

    def check_awake(self) -> None:
        """Raise StaleWeightsError if the engine gave up its weights when it fell asleep."""
        if self.usable.asleep and self.version == NO_VERSION:
            raise StaleWeightsError(f"{self._name} gave up its weights when it fell asleep: load a version")
