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
from raypost.types import SESSION, Group, GroupKey, RolloutState, Status, members_of
from raypost.types.packed import pack_groups

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
    """Mark members that cannot be trained FAILED. A session may come back as several trajectories.

    Raises ProductionError if it is not the group that was started.
    """
    came = [(state.task, state.group_id, state.sample_index) for state in group.states]
    sent = dict.fromkeys((state.task, state.group_id, state.sample_index) for state in started)
    members = group.members
    if group.key != key or list(dict.fromkeys(came)) != list(sent) or len(members) != len(sent):
        raise ProductionError(
            f"the agent loop of task {key[0]!r} was given group {key} with the samples "
            f"{[index for _, _, index in sent]} and returned {group.key} with {came!r:.200}: it must return the same "
            "members"
        )
    for member in members:
        fault = next((found for found in map(_fault, member) if found), None) or _fault_of_session(member)
        if fault is not None:
            del member[1:]
            member[0].reset()
            _blame_loop(member[0], fault)
        for state in member:
            if state.status in (Status.INIT, Status.EXPIRED):
                # Not generated although it was asked for: it waits for its turn like an interrupted one.
                state.status = Status.ABORTED
    group.states = [state for member in members for state in member]


def _fault_of_session(member: list[RolloutState]) -> str | None:
    """Say why several trajectories are no session."""
    if len({state.metadata.get(SESSION) for state in member}) > 1 or (
        len(member) > 1 and member[0].metadata.get(SESSION) is None
    ):
        return f"{len(member)} trajectories of one member do not name one {SESSION} in their metadata"
    if len({(state.status, state.reward) for state in member}) > 1:
        return f"the {len(member)} trajectories of one session differ in status or reward"
    return None


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
    members = group.members
    heads = [member[0] for member in members]
    bad = [state for state in heads if state.status is Status.FAILED]
    lost = [state for state in bad if state.num_retries >= strategy.max_retries]
    done = sum(state.status is Status.COMPLETED for state in heads)
    received = Received(
        entry,
        group,
        Status.FAILED,
        why=blame(Boundary.AGENT_LOOP, bad[0].error or "it says not why") if bad else "",
        num_tokens=group.num_tokens,
        failures=Counter(boundary_of(state.error) for state in bad),
        completed=done - sum(one[0].status is Status.COMPLETED for one in members_of(entry.last_known)),
    )
    if lost and len(members) - len(lost) < strategy.fewest_members:
        return received
    if bad:
        # A new group: what came back is decided upon once more if it could not be stored.
        kept = [member for member in members if all(member[0] is not one for one in lost)]
        states = [state for member in kept for state in played_again(member)]
        received.group = Group(task=group.task, group_id=group.group_id, states=states)
        received.dropped, received.retried = len(lost), len(bad) - len(lost)
    received.verdict = received.group.status
    if received.verdict is Status.COMPLETED and not strategy.is_valid(received.group):
        received.verdict, received.why = Status.FILTERED, "not valid for training"
    return received


def played_again(member: list[RolloutState]) -> list[RolloutState]:
    """Return a FAILED member as it is played once more, any other as it is.

    Only its judge is asked again where that failed it; else it is one trajectory that begins anew.
    """
    if member[0].status is not Status.FAILED:
        return member
    judged = boundary_of(member[0].error) in _TOKENS_KEPT
    again = [replace(state) for state in (member if judged else member[:1])]
    for state in again:
        if not judged:
            state.reset()
        state.status, state.error = Status.ABORTED, None
        state.num_retries += 1
    return again


def unstorable(one: Received, error: Exception) -> Received:
    """Return the verdict on a group with something that cannot be stored: FAILED, as it was when it started."""
    group = failed(one.entry, error)
    return Received(
        one.entry,
        group,
        Status.FAILED,
        why=next((state.error for state in group.states if state.error), ""),
        failures=Counter(boundary_of(one[0].error) for one in group.members if one[0].error),
    )


def parted(received: Sequence[Received]) -> tuple[list[Received], list[Received]]:
    """Return those that are stored, and those that are not."""
    ended = (Status.FAILED, Status.FILTERED)
    return [one for one in received if one.verdict not in ended], [
        one for one in received if one.verdict in ended
    ]


def storable(one: Received) -> Received:
    """Return it, or that it FAILED if it cannot be stored."""
    try:
        pack_groups([one.group])
    # A supervision boundary: whatever it holds, this group is named and the others are stored.
    except Exception as error:
        return unstorable(one, error)
    return one
