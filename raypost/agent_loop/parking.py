"""Parking: episodes that outlive a pause in their worker, from one run of their group to the next.

Owns where a parked episode is found again, and its end when nobody comes for it. What is written in a trajectory's
metadata is plain data, so that it travels and is journaled with it. Invariant: an episode goes on only with the very
tokens that it was parked with; whatever else came of its trajectory, it is closed.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from raypost.agent_loop.group_loop import GroupLoop
from raypost.types import GroupKey, IntArray, RolloutState

log = logging.getLogger(__name__)

PARKED = "raypost.parked"
"""Key of `metadata` under which [name of the worker, name of the episode] are."""


class Episodic(Protocol):
    """What can be parked."""

    @property
    def token_ids(self) -> IntArray:
        """Ids of the prompt and the response so far."""
        ...

    async def close(self) -> None:
        """End it."""
        ...


E = TypeVar("E", bound=Episodic)


class Parking(Generic[E]):
    """The parked episodes of one agent loop."""

    def __init__(self, worker: str, timeout_s: float) -> None:
        """`worker`: by which production finds the way back. `timeout_s`: how long an episode is kept."""
        self._worker = worker
        self._timeout_s = timeout_s
        self._episodes: dict[str, tuple[E, asyncio.TimerHandle, GroupKey]] = {}
        """By name: the episode, what ends it, and its group."""
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """How many are parked."""
        return len(self._episodes)

    def put(self, state: RolloutState, episode: E) -> None:
        """Keep an episode until its trajectory comes back."""
        name = uuid.uuid4().hex
        timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expire, name)
        self._episodes[name] = (episode, timer, (state.task, state.group_id))
        # A new dict: siblings, and the copy that is put back after a failure, share the old one.
        state.metadata = {**state.metadata, PARKED: [self._worker, name]}

    async def take(self, state: RolloutState) -> E | None:
        """Return the trajectory's episode; None if there is none, or it went on without its trajectory."""
        parked = state.metadata.get(PARKED)
        if parked is None:
            return None
        state.metadata = {name: value for name, value in state.metadata.items() if name != PARKED}
        kept = self._episodes.pop(parked[1], None)
        if kept is None:
            return None
        episode, timer, _ = kept
        timer.cancel()
        if np.array_equal(episode.token_ids, np.concatenate([state.prompt_ids, state.response_ids])):
            return episode
        await episode.close()
        return None

    def forget(self, keys: Collection[GroupKey]) -> None:
        """End the episodes of these groups."""
        gone = [name for name, (_, _, key) in self._episodes.items() if key in keys]
        for name in gone:
            episode, timer, _ = self._episodes.pop(name)
            timer.cancel()
            self._spawn(episode.close())

    def _expire(self, name: str) -> None:
        episode, *_ = self._episodes.pop(name)
        log.warning(
            "an episode was parked for %g s, and is closed: its trajectory did not come back", self._timeout_s
        )
        self._spawn(episode.close())

    async def close(self) -> None:
        """End all of them."""
        parked = list(self._episodes.values())
        self._episodes.clear()
        for _, timer, _ in parked:
            timer.cancel()
        await asyncio.gather(*(episode.close() for episode, *_ in parked), *self._ending)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


class ParkingLoop(GroupLoop, Generic[E]):
    """Base of agent loops whose episodes outlive a pause; they set `_parking`."""

    _parking: Parking[E]

    @property
    def num_parked(self) -> int:
        """Episodes that wait for their trajectory to come back."""
        return len(self._parking)

    async def forget(self, keys: Sequence[GroupKey]) -> None:
        """Close the parked episodes of these groups."""
        self._parking.forget(frozenset(keys))

    async def close(self) -> None:
        """End the parked episodes."""
        await self._parking.close()


def worker_of(states: list[RolloutState]) -> str | None:
    """Return the worker that parked an episode of these; None if none did."""
    parked = (state.metadata.get(PARKED) for state in states)
    return next((str(place[0]) for place in parked if place), None)
