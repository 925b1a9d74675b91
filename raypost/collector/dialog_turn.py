"""DialogTurn: one turn of a finished trajectory, as a collector delivers it.

Owns what a turn shows; the boundaries are those that the agent loop recorded.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import numpy as np

from raypost.types import FloatArray, IntArray, RolloutState
from raypost.types.turns import Turn

PolicyVersion = int | uuid.UUID
"""The name of a version in what is delivered: the number, or a UUID that is unique to the collector."""


@dataclass(slots=True, kw_only=True, frozen=True, eq=False)
class DialogTurn:
    """One turn of a finished trajectory: an action, and how the environment answered it."""

    trajectory: RolloutState
    index: int
    turn: Turn
    is_last: bool
    policy_version: PolicyVersion | None
    """Of the oldest token of the action; None if it has none."""

    @property
    def prompt_ids(self) -> IntArray:
        """Everything before the action."""
        return np.concatenate([self.trajectory.prompt_ids, self.trajectory.response_ids[: self.turn.start]])

    @property
    def response_ids(self) -> IntArray:
        """The action."""
        return self.trajectory.response_ids[self.turn.start : self.turn.end]

    @property
    def logprobs(self) -> FloatArray:
        """Of the action's tokens."""
        return self.trajectory.logprobs[self.turn.start : self.turn.end]

    @property
    def observation_ids(self) -> IntArray:
        """What was observed; empty in the last turn."""
        return self.trajectory.response_ids[self.turn.end : self.turn.next]

    @property
    def reward(self) -> float:
        """Reward of the turn."""
        return self.turn.reward

    @property
    def truncated(self) -> bool:
        """The trajectory ends here, but not because the environment said so."""
        return self.is_last and not self.turn.done


Item = DialogTurn | RolloutState
