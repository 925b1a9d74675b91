"""SessionRecord: one session as a tree of turns, with the exact tokens of each.

Owns which turn a request extends, what ids it sends, and the trajectories that come of it. Pure: it knows no engine, no
HTTP and no clock. Owns neither templates (renderer.py) nor rewards (a judge, an environment, an agent).

    prepare(messages) -> the turn that they extend: its ids + bridge(new messages)      -> Prepared -> engine
                      -> none, or no bridge: a new branch, rendered whole
    extend(turn, ids) -> the same for ids that stand in no template
    commit(prepared, result) -> the turn grows; its completion id

Invariants: a recorded turn is never rendered again; `token_ids` of a request are those of the request before, what was
sampled then, and ids that no policy produced; each sampled token is trained exactly once; what a turn costs
does not depend on the number of turns before it, but for copying their ids.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from raypost.chat.messages import Message, Parsed, Tool, canonical, key_of, read_messages, reply
from raypost.chat.renderer import Renderer
from raypost.errors import AlignmentError
from raypost.types import (
    NO_VERSION,
    FloatArray,
    GenerateResult,
    IntArray,
    RolloutState,
    Status,
    status_of_finish,
)

NO_IDS: IntArray = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class RecordedTurn:
    """What the policy said once, and what stood before it."""

    number: int
    parent: RecordedTurn | None
    context: IntArray
    """Ids between the parent's last sampled token, or the beginning, and the first of this turn. No policy's."""
    segments: list[tuple[IntArray, FloatArray, IntArray]] = field(default_factory=list)
    """(ids, logprobs, versions) of each request that this turn took."""
    finish_reason: str | None = None
    reward: float | None = None
    done: bool = False
    """The world ended the trajectory here."""
    parsed: Parsed | None = None
    num_before: int = 0
    """Ids before what was sampled, the context included."""
    num_prompt: int = 0
    """Ids of the context of the first turn."""
    before: IntArray | None = None
    """Ids before what was sampled; None: they are those of the path. The last turn of a branch alone has them, so that
    they are put together once, and kept once."""

    @property
    def num_ids(self) -> int:
        """How many were sampled."""
        return sum(len(ids) for ids, _, _ in self.segments)

    @property
    def ids(self) -> IntArray:
        """What was sampled."""
        return np.concatenate([NO_IDS, *(ids for ids, _, _ in self.segments)])

    @property
    def complete(self) -> bool:
        """Whether the policy came to an end."""
        return self.finish_reason is not None and status_of_finish(self.finish_reason) is Status.COMPLETED

    @property
    def completion_id(self) -> str:
        """Its name within the session."""
        return f"turn-{self.number}"

    def path(self) -> list[RecordedTurn]:
        """Return the turns from the beginning to this one."""
        turns = [self]
        while (parent := turns[-1].parent) is not None:
            turns.append(parent)
        return turns[::-1]

    def all_ids(self) -> IntArray:
        """Return the ids from the beginning to the end of this turn."""
        if self.before is None:
            parts = [part for turn in self.path()[:-1] for part in (turn.context, turn.ids)]
            self.before = np.concatenate([NO_IDS, *parts, self.context])
        return np.concatenate([self.before, *(ids for ids, _, _ in self.segments)])


@dataclass(slots=True, kw_only=True, eq=False)
class Prepared:
    """A request to be made. After an abort `token_ids` go on where it broke off."""

    turn: RecordedTurn
    messages: tuple[Hashable, ...] = ()
    """Keys of the conversation's messages."""
    tools: tuple[Tool, ...] = ()

    @property
    def token_ids(self) -> IntArray:
        """What to send to the engine."""
        return self.turn.all_ids()


class SessionRecord:
    """The turns of one session."""

    def __init__(self, renderer: Renderer | None = None) -> None:
        """Begin without a turn. `renderer` None: only `extend` works."""
        self._renderer = renderer
        self._turns: dict[str, RecordedTurn] = {}
        self._made = 0
        self._next: dict[tuple[int, Hashable], int] = {}
        """(place in the tree of messages, key of a message) -> the place behind it; 0 is the beginning."""
        self._ends: dict[int, RecordedTurn] = {}
        """The turn whose reply ends at a place."""
        self._dropped = 0

    @property
    def turns(self) -> list[RecordedTurn]:
        """All turns, in the order of their requests."""
        return list(self._turns.values())

    @property
    def last(self) -> RecordedTurn | None:
        """The turn that began to be recorded last."""
        return next(reversed(self._turns.values()), None)

    @property
    def num_dropped_tokens(self) -> int:
        """Tokens that were sampled for replies that nobody received."""
        return self._dropped

    # ---------------------------------------------------------------- requests

    def prepare(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prepared:
        """Return the request for this conversation. Raises ValueError for what is no conversation, and ConfigError."""
        return self.prepare_read(read_messages(messages), tools)

    def prepare_read(self, read: Sequence[Message], tools: Sequence[Tool] = ()) -> Prepared:
        """Return the same for messages as `read_messages` gives them."""
        assert self._renderer is not None, "a record without a renderer takes ids alone"
        keys = (canonical(list(tools)) if tools else "", *map(key_of, read))
        known, length = self._longest(keys)
        if known is not None and length < len(read):
            bridge = self._renderer.bridge(known.all_ids(), read[length:], tools=tools)
            if bridge is not None:
                return self._prepared(known, bridge, keys, tuple(tools))
        return self._prepared(None, self._renderer.render(read, tools=tools), keys, tuple(tools))

    def extend(self, parent: RecordedTurn | None, context: IntArray) -> Prepared:
        """Return a request for the ids of `parent` and these. None: a branch that begins with them."""
        return self._prepared(parent, context, (), ())

    def commit(self, prepared: Prepared, result: GenerateResult, *, stop: Sequence[str] = ()) -> str:
        """Take what the engine sampled; return the completion's id.

        `stop`: texts at which the reply's words end; their tokens were sampled, and stay. After an abort the same
        request goes on, and is committed again. Raises AlignmentError if the result's lengths differ.
        """
        turn = prepared.turn
        lengths = {len(result.response_ids), len(result.logprobs), len(result.policy_versions)}
        if len(lengths) != 1:
            raise AlignmentError(f"{turn.completion_id}: ids, logprobs and versions have lengths {lengths}")
        if turn.complete:
            raise ValueError(f"{turn.completion_id} is committed already")
        self._turns[turn.completion_id] = turn
        segment = (
            np.asarray(result.response_ids, np.int32),
            np.asarray(result.logprobs, np.float32),
            np.asarray(result.policy_versions, np.int32),
        )
        turn.segments.append(segment)
        turn.finish_reason = result.finish_reason
        complete: bool = turn.complete
        if complete and prepared.messages and self._renderer is not None:
            parsed = self._renderer.parse(turn.ids, prompt_ids=turn.context, tools=prepared.tools)
            ends = [place for one in stop if (place := parsed.content.find(one)) >= 0]
            turn.parsed = replace(parsed, content=parsed.content[: min(ends)]) if ends else parsed
            place = self._insert((*prepared.messages, key_of(read_reply(turn))))
            self._ends[place] = turn
        return turn.completion_id

    def drop(self, turn: RecordedTurn) -> None:
        """Forget a reply that nobody received: it is never trained."""
        if self._turns.pop(turn.completion_id, None) is not None:
            self._dropped += len(turn.ids)
        self._ends = {place: end for place, end in self._ends.items() if end is not turn}

    def find(self, completion_id: str) -> RecordedTurn:
        """Return a turn. Raises KeyError, which says so, for an id that is none."""
        if completion_id not in self._turns:
            raise KeyError(f"no completion {completion_id!r} in this session")
        return self._turns[completion_id]

    def _prepared(
        self,
        parent: RecordedTurn | None,
        context: IntArray,
        keys: tuple[Hashable, ...],
        tools: tuple[Tool, ...],
    ) -> Prepared:
        turn = RecordedTurn(self._made, parent, np.asarray(context, np.int32))
        turn.num_before = turn.num_prompt = len(context)
        if parent is not None:
            turn.num_before += parent.num_before + parent.num_ids
            turn.num_prompt = parent.num_prompt
            turn.before = np.concatenate([parent.all_ids(), turn.context])
            parent.before = None
        self._made += 1
        return Prepared(turn=turn, messages=keys, tools=tools)

    def _longest(self, keys: Sequence[Hashable]) -> tuple[RecordedTurn | None, int]:
        """Return the recorded turn with most of these messages before and in it, and how many those are."""
        place: int | None = 0
        found: tuple[RecordedTurn | None, int] = (None, 0)
        for number, key in enumerate(keys):
            assert place is not None
            place = self._next.get((place, key))
            if place is None:
                break
            if place in self._ends:
                found = (self._ends[place], number)
        return found

    def _insert(self, keys: Sequence[Hashable]) -> int:
        place = 0
        for key in keys:
            place = self._next.setdefault((place, key), len(self._next) + 1)
        return place

    # ---------------------------------------------------------------- rewards and trajectories

    def set_reward(self, completion_id: str, reward: float) -> None:
        """Give a completion its reward, once. Raises KeyError and ValueError."""
        turn = self.find(completion_id)
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise ValueError(f"the reward of {completion_id} is {reward!r:.40}: it must be a finite number")
        if turn.reward is not None:
            raise ValueError(
                f"{completion_id} has a reward already, {turn.reward:g}; the second is {reward:g}"
            )
        turn.reward = float(reward)

    def set_last_reward(self, reward: float) -> None:
        """Give the last completion its reward. Raises KeyError without one, and ValueError."""
        if not self._turns:
            raise KeyError("no completion was made in this session")
        self.set_reward(next(reversed(self._turns)), reward)

    @property
    def leaves(self) -> list[RecordedTurn]:
        """The complete turns that no other complete turn extends."""
        complete = [turn for turn in self._turns.values() if turn.complete]
        parents = {id(turn.parent) for turn in complete}
        return [turn for turn in complete if id(turn) not in parents]

    def trajectories(self, of: RolloutState) -> list[RolloutState]:
        """Return a trajectory for each leaf, in the order of their ends, and otherwise as `of`."""
        trained: set[int] = set()
        found = []
        for leaf in self.leaves:
            state = replace(of, prompt_ids=leaf.path()[0].context, metadata=dict(of.metadata))
            write_path(state, leaf, trained=trained)
            trained.update(id(turn) for turn in leaf.path())
            found.append(state)
        return found


def read_reply(turn: RecordedTurn) -> dict[str, Any]:
    """Return the message that a turn is, as `read_messages` gives it. Ids of its calls are unique in the session."""
    return read_messages([message_of(turn)])[0]


def message_of(turn: RecordedTurn) -> dict[str, Any]:
    """Return the message that a turn is, as a client gets it."""
    assert turn.parsed is not None, "only complete turns of a conversation are messages"
    # Nine letters and digits: some templates refuse any other id.
    return reply(turn.parsed, [f"{turn.number:05x}{k:04x}" for k in range(len(turn.parsed.tool_calls))])


def write_path(state: RolloutState, leaf: RecordedTurn, *, trained: Collection[int] = ()) -> None:
    """Make the tokens of `state` those from its prompt to `leaf`. Turns whose id() is in `trained` are context here."""
    parts: list[tuple[IntArray, FloatArray, IntArray, bool]] = []
    for number, turn in enumerate(leaf.path()):
        context = turn.context if number else turn.context[len(state.prompt_ids) :]
        parts.append(_untrained(context))
        for ids, logprobs, versions in turn.segments:
            again = id(turn) in trained
            parts.append(_untrained(ids) if again else (ids, logprobs, versions, True))
    sizes = [len(ids) for ids, _, _, _ in parts]
    state.response_ids = np.concatenate([ids for ids, _, _, _ in parts])
    state.logprobs = np.concatenate([logprobs for _, logprobs, _, _ in parts])
    state.policy_versions = np.concatenate([versions for _, _, versions, _ in parts])
    state.response_mask = np.repeat(np.asarray([mask for _, _, _, mask in parts], np.bool_), sizes)
    state.finish_reason = leaf.finish_reason
    state.check_aligned()


def _untrained(ids: IntArray) -> tuple[IntArray, FloatArray, IntArray, bool]:
    return (
        np.asarray(ids, np.int32),
        np.zeros(len(ids), np.float32),
        np.full(len(ids), NO_VERSION, np.int32),
        False,
    )
