"""Verdicts: what becomes of a group that ended, decided from the group alone.

Owns who is blamed for a member that cannot be trained, and whether it is played again, left out, or takes its group
with it. Owns neither the moves of groups (context.py) nor when failures end production (failures.py).

    FAILED, played again less than max_retries   ABORTED: it starts again, or only its judge is asked again
    FAILED for good, drop_member                 left out of the group, if enough are left
    FAILED for good                              the group is FAILED

Invariants: a COMPLETED member keeps what it has; a failure never becomes a reward.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Real

from raypost.errors import AlignmentError, Boundary, ProductionError, blame, boundary_of
from raypost.production.pending import PendingGroup
from raypost.production.strategy import AsyncProduceStrategy
from raypost.types import Group, GroupKey, RolloutState, Status

_RETURNED = (Status.INIT, Status.COMPLETED, Status.ABORTED, Status.EXPIRED, Status.FAILED, Status.FILTERED)
"""What a member may be when its agent loop returns it."""
_TOKENS_KEPT = (Boundary.JUDGE, Boundary.SANDBOX)
"""A member that these failed has its whole response: only its judge is asked again."""


@dataclass(slots=True)
class Received:
    """What is to become of a group that ended."""

    entry: PendingGroup
    group: Group
    """As it came back; as it was when it started, if it is put back."""
    verdict: Status
    why: str = ""
    back: bool = False
    """It is put back, to be started again."""
    dispatches: int = 0
    """How often its host died."""
    num_tokens: int = 0
    """Response tokens it came back with."""
    failures: Counter[Boundary] = field(default_factory=Counter)
    """Members that failed, by who failed them."""
    retried: int = 0
    """Those of them that are played again."""
    dropped: int = 0
    """Those of them that the group goes on without."""
    completed: int = 0
    """Members that were completed."""


def failed(entry: PendingGroup, error: Exception) -> Group:
    """Return the group as it was when it started, its unfinished members FAILED by the agent loop that raised."""
    group = entry.as_started()
    for state in group.states:
        if state.status is not Status.COMPLETED:
            _blame_loop(state, f"{type(error).__name__}: {error!s:.500}")
    return group


def check_members(key: GroupKey, started: Sequence[RolloutState], group: Group) -> None:
    """Mark members that cannot be trained FAILED. Raises ProductionError if it is not the group that was started."""
    came = [(state.task, state.group_id, state.sample_index) for state in group.states]
    sent = [(state.task, state.group_id, state.sample_index) for state in started]
    if group.key != key or came != sent:
        raise ProductionError(
            f"the agent loop of task {key[0]!r} was given group {key} with the samples "
            f"{[index for _, _, index in sent]} and returned {group.key} with {came!r:.200}: it must return the same "
            "trajectories"
        )
    for state in group.states:
        fault = _fault(state)
        if fault is not None:
            state.reset()
            _blame_loop(state, fault)
        elif state.status in (Status.INIT, Status.EXPIRED):
            # Not generated although it was asked for: it waits for its turn like an interrupted one.
            state.status = Status.ABORTED


def _fault(state: RolloutState) -> str | None:
    if state.status not in _RETURNED:
        return f"the agent loop returned it with status {state.status!s:.80}"
    try:
        state.check_aligned()
    except (AlignmentError, TypeError) as error:
        return f"the agent loop returned token fields that do not fit: {error}"
    reward: object = state.reward
    if state.status is Status.COMPLETED and not (isinstance(reward, Real) and math.isfinite(reward)):
        return f"completed with reward {reward!r:.80}"
    return None


def _blame_loop(state: RolloutState, text: str) -> None:
    state.status = Status.FAILED
    state.set_reward(None)
    state.error = blame(Boundary.AGENT_LOOP, text)


def decide(entry: PendingGroup, group: Group, strategy: AsyncProduceStrategy) -> Received:
    """Return the verdict on a group whose members are checked. Raises what the user's filter raises."""
    bad = [state for state in group.states if state.status is Status.FAILED]
    lost = [state for state in bad if state.num_retries >= strategy.max_retries]
    done = sum(state.status is Status.COMPLETED for state in group.states)
    received = Received(
        entry,
        group,
        Status.FAILED,
        why=blame(Boundary.AGENT_LOOP, bad[0].error or "it says not why") if bad else "",
        num_tokens=group.num_tokens,
        failures=Counter(boundary_of(state.error) for state in bad),
        completed=done - sum(state.status is Status.COMPLETED for state in entry.last_known),
    )
    if lost and len(group.states) - len(lost) < strategy.fewest_members:
        return received
    if bad:
        # A new group: what came back is decided upon once more if it could not be stored.
        kept = [state for state in group.states if all(state is not one for one in lost)]
        states = [_played_again(state) if state.status is Status.FAILED else state for state in kept]
        received.group = Group(task=group.task, group_id=group.group_id, states=states)
        received.dropped, received.retried = len(lost), len(bad) - len(lost)
    received.verdict = received.group.status
    if received.verdict is Status.COMPLETED and not strategy.is_valid(received.group):
        received.verdict, received.why = Status.FILTERED, "not valid for training"
    return received


def _played_again(state: RolloutState) -> RolloutState:
    judged = boundary_of(state.error) in _TOKENS_KEPT
    again = replace(state)
    if not judged:
        again.reset()
    again.status, again.error = Status.ABORTED, None
    again.num_retries += 1
    return again


def unstorable(one: Received, error: Exception) -> Received:
    """Return the verdict on a group with something that cannot be stored: FAILED, as it was when it started."""
    group = failed(one.entry, error)
    return Received(
        one.entry,
        group,
        Status.FAILED,
        why=next((state.error for state in group.states if state.error), ""),
        failures=Counter(boundary_of(state.error) for state in group.states if state.error),
    )
