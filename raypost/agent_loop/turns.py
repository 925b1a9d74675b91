"""Turns: how a trajectory of several turns is recorded.

Owns the boundaries and rewards of turns, kept as plain data in `RolloutState.metadata` so that they travel and
are journaled with the trajectory. The order of turns is environment.py's. Invariants: an observation's tokens have mask
False, logprob 0 and version NO_VERSION. A trajectory that was reset keeps its record until it runs again: without
tokens the record means nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from raypost.types import NO_VERSION, IntArray, RolloutState

TURNS = "raypost.turns"
"""Key of `metadata` under which the turns are; no prompt has it of its own."""


@dataclass(slots=True, frozen=True)
class Turn:
    """One turn, as positions in `response_ids`: the action is [start, end), the observation [end, next)."""

    start: int
    end: int
    next: int
    reward: float
    done: bool
    """The environment ended the trajectory here."""


def recorded_turns(state: RolloutState) -> list[Turn]:
    """Return the turns so far, without an action that has no answer yet."""
    return [Turn(**record) for record in state.metadata.get(TURNS, [])]


def turns_of(state: RolloutState) -> list[Turn]:
    """Return the turns of a finished trajectory; one without a record is a single turn."""
    whole = Turn(0, state.num_tokens, state.num_tokens, state.reward or 0.0, done=True)
    return recorded_turns(state) or [whole]


def open_action(state: RolloutState, turns: list[Turn]) -> int:
    """Return where the action starts that follows the last observation."""
    observed = np.flatnonzero(~state.response_mask)
    return max(turns[-1].next if turns else 0, int(observed[-1]) + 1 if len(observed) else 0)


def record_turns(state: RolloutState, turns: list[Turn]) -> None:
    """Make these the trajectory's turns."""
    # A new dict: siblings, and the copy that is put back after a failure, share the old one.
    state.metadata = {**state.metadata, TURNS: [asdict(turn) for turn in turns]}


def append_observation(state: RolloutState, ids: IntArray) -> None:
    """Append tokens that no policy produced."""
    size = len(ids)
    unversioned = np.full(size, NO_VERSION, np.int32)
    state.append_segment(ids, np.zeros(size, np.float32), unversioned, np.zeros(size, np.bool_))
