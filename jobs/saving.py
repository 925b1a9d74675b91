"""Saving: a checkpoint of the whole run, written while the run goes on.

    in the pause     production's state is taken, and the ranks are told to take theirs before any other call
    beside the run   ranks and producer write, each its own; then all of it is committed at once

Owns the checkpoint under way, of which there is one at most; where one is due before it is written, it is waited for.
What cannot be written, for a full disk or a quota, is tried again for `checkpoint.retry_s`. If a role dies that had
taken its part, the checkpoint is given up: the one before it is still there, and the next one follows.

Invariant: a checkpoint is visible only when every file of it is durable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from actors.remote import ACTOR_ERRORS, raised
from actors.training.group import TrainerGroup
from raypost.checkpoint import HF, HF_AVERAGE, CheckpointDir, SavePace
from raypost.config import Config
from raypost.errors import CheckpointError, RankLostError, WaitTimeoutError
from raypost.types import ProducerRole

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 5.0
"""Time between two attempts to write what could not be written."""
SETTLE_S = 30.0
"""What a checkpoint under way is given to be written, once something else has failed."""


class Saver:
    """Takes checkpoints, and writes them beside the run."""

    def __init__(
        self,
        cfg: Config,
        checkpoints: CheckpointDir,
        pace: SavePace,
        trainer: TrainerGroup,
        producer: ProducerRole,
        on_durable: Callable[[int], Awaitable[None]],
    ) -> None:
        """Nothing is saved yet. `on_durable` is told the step of each checkpoint once it cannot be lost."""
        self._cfg = cfg
        self._checkpoints = checkpoints
        self.pace = pace
        """When one is due by time."""
        self._trainer = trainer
        self._producer = producer
        self._on_durable = on_durable
        self.step = 0
        """Of the newest checkpoint that is there or under way: at 0 there is nothing to lose."""
        self.given_up = ""
        """Why the newest checkpoint that was taken is not there; empty: it is, or is under way."""
        self._given_up_step = 0
        self._problem = ""
        self._writing: asyncio.Task[None] | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is not written yet."""
        return self._writing is not None and not self._writing.done()

    async def save(self, step: int) -> None:
        """Take a checkpoint; returns when production may go on, while the checkpoint is still being written.

        Production must be paused; what it froze is aborted. Waits for the checkpoint before, and raises as `written`.
        """
        await self.written()
        start = time.monotonic()
        await self._producer.pause("abort")
        try:
            folder = self._checkpoints.begin(step)
        except OSError as error:
            return self._give_up(step, str(error))
        taking = asyncio.ensure_future(self._trainer.snapshot(folder, self._exports))
        await self._producer.save(str(folder), step)
        if self._cfg.placement == "colocate" or self._cfg.eval_due(step):
            # Others than this driver call the ranks next: to offload, or to publish for evaluation's engines.
            await asyncio.wait([taking])
        self.step, self.given_up = step, ""
        self._writing = asyncio.create_task(self._write(step, folder, taking, start), name="checkpoint")

    @property
    def _exports(self) -> dict[str, bool]:
        """Hugging Face folders of a checkpoint, and which of them is the average of the weights."""
        if not self._cfg.checkpoint.hf:
            return {}
        return {HF: False} | ({HF_AVERAGE: True} if self._cfg.train.ema_decay is not None else {})

    async def written(self) -> None:
        """Wait for the checkpoint under way, if there is one. Raises CheckpointError if it could not be written."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    def check(self) -> None:
        """Raise what ended the writing of a checkpoint, if anything did; waits for nothing."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def take_again(self) -> None:
        """Take the checkpoint that was given up again, and wait for it. Raises RankLostError if it is given up too."""
        await self.save(self._given_up_step)
        await self.written()
        if self.given_up:
            raise RankLostError(f"the last checkpoint is missing: {self.given_up}")

    async def settle(self, timeout_s: float = SETTLE_S) -> None:
        """Give the checkpoint under way so long to be written, whatever else has failed; never raises."""
        if (writing := self._writing) is None:
            return
        await asyncio.wait([writing], timeout=timeout_s)
        if not writing.done():
            self._writing = None
            writing.cancel()
            await asyncio.wait([writing])
            self._give_up(self.step, f"it was not written {timeout_s:.0f} s after something else failed")

    async def _write(self, step: int, folder: Path, taking: Awaitable[object], start: float) -> None:
        until = time.monotonic() + self._cfg.checkpoint.retry_s
        try:
            try:
                await taking
            except OSError as error:
                # Memory was too short for a copy, and the ranks go on.
                return self._give_up(step, str(raised(error)))
            while not await self._written_once(step, folder):
                if time.monotonic() >= until:
                    raise CheckpointError(
                        f"the checkpoint of step {step} could not be written for checkpoint.retry_s "
                        f"{self._cfg.checkpoint.retry_s:.0f} s: {self._problem}; the one of step "
                        f"{self._checkpoints.durable} is whole: make room, and continue with the same command"
                    )
                await asyncio.sleep(RETRY_PAUSE_S)
        except (*ACTOR_ERRORS, RankLostError) as error:
            self._give_up(step, f"{type(error).__name__}: {error}".partition("\n")[0])
        self.pace.saved(time.monotonic() - start)

    async def _written_once(self, step: int, folder: Path) -> bool:
        """Try to write and commit; False if files cannot be written now. A role that lost its part ends it."""
        try:
            outcomes = await asyncio.gather(
                self._trainer.write_snapshot(folder),
                self._producer.write_saved(str(folder)),
                return_exceptions=True,  # nobody writes any more when it is tried again
            )
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
            if not all(outcomes):
                self._give_up(step, "a role that had taken its part began anew before it was written")
                return True
            await asyncio.to_thread(self._checkpoints.commit, step)
        except WaitTimeoutError as error:
            self._give_up(step, str(error))
            return True
        except OSError as error:
            self._problem = str(raised(error))
            log.warning("the checkpoint of step %d cannot be written yet: %s", step, self._problem)
            return False
        try:
            await self._on_durable(step)
        except ACTOR_ERRORS as error:
            log.warning("what the checkpoint of step %d makes needless is still there: %s", step, error)
        return True

    def _give_up(self, step: int, why: str) -> None:
        self.step, self._given_up_step = self._checkpoints.durable, step
        self.given_up = f"the checkpoint of step {step} was given up: {why}"
        log.warning("%s; the one of step %d stays the newest", self.given_up, self.step)
