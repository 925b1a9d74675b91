"""Pause modes and deadlines: which mode overrules which, and how the waits of a pause nest.

    driver        producer.pause(mode)
    producer      close the gate for new groups -> drain (production/): ask the pool, again every resend_s
    controller    close the gate for requests -> RolloutWorker.pause on every worker (pool_s)
    worker        EngineGate.close: the stricter mode holds -> EngineGate.stop (worker_s; "wait" runs out in run_out_s)
    engine        vLLM's pause_generation: nothing generates when it returns

The answers go the same way back. Which of two modes holds is decided in one place, the worker's EngineGate, which
every pause reaches and which knows whether its engine runs; the pool keeps the mode that the workers answer.

Owns no state and stops nothing: engines are stopped by the rollout worker, judging by the agent loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PauseMode = Literal["abort", "keep", "wait"]
"""How a pause treats open requests: give them back with their tokens, freeze them, or let them end."""

_GENTLEST_FIRST: tuple[PauseMode, ...] = ("wait", "keep", "abort")


def stricter(held: PauseMode | None, asked: PauseMode) -> PauseMode:
    """Return the mode in force when `asked` follows `held`, which is None if nothing is paused.

    A pause is never softened: what was frozen or aborted does not run again before a resume.
    """
    return asked if held is None else max(held, asked, key=_GENTLEST_FIRST.index)


@dataclass(frozen=True, slots=True)
class PauseDeadlines:
    """Every wait of a pause as a share of `rollout.pause_timeout_s`, which is the producer's own.

    Invariant: judge_grace_s < resend_s < run_out_s < worker_s < pool_s < pause_timeout_s. An inner wait that
    outlived the one around it would be cut off just before it ended, and would report nothing.
    """

    pause_timeout_s: float

    @property
    def judge_grace_s(self) -> float:
        """How long judging may go on after it was interrupted."""
        return self.pause_timeout_s / 24

    @property
    def resend_s(self) -> float:
        """How often the producer repeats a pause: judging that began since is interrupted by the next one."""
        return self.pause_timeout_s / 12

    @property
    def run_out_s(self) -> float:
        """How long "wait" lets requests run before it aborts them."""
        return self.pause_timeout_s / 2

    @property
    def worker_s(self) -> float:
        """How long one worker may take to stop, in any mode; "wait" included."""
        return self.pause_timeout_s * 7 / 8

    @property
    def pool_s(self) -> float:
        """How long the pool waits for one worker's answer."""
        return self.pause_timeout_s * 15 / 16
