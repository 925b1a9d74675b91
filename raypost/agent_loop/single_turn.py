"""SingleTurnAgentLoop: one prompt, one response, one reward.

Owns the order of generating and judging. Owns neither routing (the generator) nor scoring (the judge).

    INIT, ABORTED, EXPIRED -> generate -> finished -> judged -> COMPLETED
                                  |          +- a sibling or judging interrupted -> ABORTED, tokens kept
                                  +- pause -> ABORTED          +- JudgeError -> FAILED

Of a pause, "keep" and "wait" concern the generator alone: judging goes on during the one and is waited for by
the other. "abort" also calls `interrupt`, again and again, because judging may begin between two calls.

Invariants: those of GroupLoop; a COMPLETED member is neither generated nor judged again; members that were generated
together or one after the other are judged in one call.
"""

from __future__ import annotations

from collections.abc import Callable

from raypost.agent_loop.group_loop import GroupLoop, MemberFailedError, fail, stopped
from raypost.agent_loop.judging import Judging
from raypost.config import RolloutConfig, StrategyConfig
from raypost.types import Generator, Group, IntArray, Judge, RolloutState, Status


class SingleTurnAgentLoop(GroupLoop):
    """Generates every unfinished member of a group at once, then judges the new responses."""

    def __init__(
        self,
        generator: Generator,
        judge: Judge,
        decode: Callable[[IntArray], str],
        *,
        rollout: RolloutConfig | None = None,
        strategy: StrategyConfig | None = None,
    ) -> None:
        """`decode` turns response ids into the text that is judged.

        Uses `request_timeout_s` and `pause_timeout_s` of `rollout`, and `enable_partial_rollout` of `strategy`.
        """
        super().__init__(generator, decode, rollout, strategy)
        self._judging = Judging(
            judge, self._until_interrupted, lambda state: self._decode(state.response_ids)
        )

    async def run(self, group: Group) -> Group:
        """Generate and judge every member that is not COMPLETED; return the same group, statuses set.

        Raises only errors that are no member's: a generator or judge whose process is gone, or a bug.
        """
        # Not COMPLETED before it is judged: cancelled here, a member must not look finished.
        finished = await self._each(group, self._respond)
        await self._judging.end(group, finished)
        return group

    async def _respond(self, state: RolloutState) -> bool:
        """Bring one member to the end of its response; return whether it got there and awaits its judge."""
        if state.status is Status.EXPIRED:
            state.reset()
        if self._is_finished(state):
            return True
        if not self._enable_partial_rollout:
            state.reset()
        try:
            # Nothing happens before the last sibling has ended: then all are judged.
            group = f"{state.task}/{state.group_id}"
            status = await self._generate(state, state.remaining_tokens, group)
        except MemberFailedError as error:
            fail(state, str(error))
            return False
        if status is Status.COMPLETED or self._is_finished(state):
            return True
        self._abort(state)
        return False

    def _is_finished(self, state: RolloutState) -> bool:
        return state.num_tokens > 0 and (stopped(state) or state.remaining_tokens <= 0)
