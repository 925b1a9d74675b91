"""ReplayBufferActor: hosts the replay buffer. Groups arrive by value, so they outlive who made them."""

from __future__ import annotations

from raypost.replay_buffer import ReplayBuffer


class ReplayBufferActor(ReplayBuffer):
    """The buffer under a name that can be read in the dashboard."""

    def __repr__(self) -> str:
        return "replay-buffer"
