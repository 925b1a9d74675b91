"""The scripted job with a replay buffer that forgets what it must not, and says nothing of it: what the gate must find.

python -m tests.chaos.forgetful_job ...       it comes back empty
python -m tests.chaos.forgetful_job_leases    it comes back with its groups, and without the leases of them
"""

from __future__ import annotations

import sys
from typing import Any

import jobs.launch
from actors.replay_buffer import ReplayBufferActor
from jobs.driver import main
from jobs.train import train
from raypost.buffer.replay_buffer import ReplayBuffer
from raypost.buffer.state import BufferState
from tests.chaos.job import use_scripted


class ForgetfulBuffer(ReplayBufferActor):
    """Writes a journal, which it never reads."""

    def __init__(self, *args: Any, **options: Any) -> None:
        lose = ReplayBuffer.lose
        args = (*args[:3], f"{args[3]} {id(self)}", *args[4:])
        try:
            ReplayBuffer.lose = lambda self, why: None  # type: ignore[method-assign]
            super().__init__(*args, **options)
        finally:
            ReplayBuffer.lose = lose  # type: ignore[method-assign]


class LeaselessBuffer(ReplayBufferActor):
    """Comes back without its open leases: what is being trained can be leased again."""

    def __init__(self, *args: Any, **options: Any) -> None:
        lease = BufferState._lease
        try:
            BufferState._lease = lambda self, step, keys, staleness: None  # type: ignore[method-assign]
            super().__init__(*args, **options)
        finally:
            BufferState._lease = lease  # type: ignore[method-assign]


def run(buffer: type[ReplayBufferActor]) -> int:
    """Run the job with that buffer; returns its exit code."""
    use_scripted()
    vars(jobs.launch)["ReplayBufferActor"] = buffer
    return main(train)


if __name__ == "__main__":
    sys.exit(run(ForgetfulBuffer))
