"""Turns: how a trajectory of several turns is recorded.

Owns the boundaries and rewards of turns, kept as plain data in `RolloutState.metadata` so that they travel and
are journaled with the trajectory. The order of turns is agent_loop/turn_loop.py's. A trajectory that was
reset keeps its record until it runs again: without tokens the record means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from raypost.types.rollout import RolloutState

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
    """The world, or the policy, ended the trajectory here."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls of tools: name, how it ended, seconds."""
    info: str = ""
    """What else the world had to say, cut."""

    def plain(self) -> dict[str, Any]:
        """Return it as plain data, with calls of its own."""
        return {name: getattr(self, name) for name in _FIELDS} | {"calls": [dict(one) for one in self.calls]}


_FIELDS = tuple(one.name for one in fields(Turn))


def recorded_turns(state: RolloutState) -> list[Turn]:
    """Return the turns so far, without an action that has no answer yet."""
    return [Turn(**record) for record in state.metadata.get(TURNS, [])]


def turns_of(state: RolloutState) -> list[Turn]:
    """Return the turns of a finished trajectory; one without a record is a single turn."""
    whole = Turn(0, state.num_tokens, state.num_tokens, state.reward or 0.0, done=True)
    return recorded_turns(state) or [whole]


def record_turns(state: RolloutState, turns: list[Turn]) -> None:
    """Make these the trajectory's turns."""
    # A new dict: siblings, and the copy that is put back after a failure, share the old one.
    state.metadata = {**state.metadata, TURNS: [turn.plain() for turn in turns]}
