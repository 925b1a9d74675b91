"""The record of a session: no token is trained that was not sampled where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypost.chat.messages import Message, Tool, read_messages
from raypost.chat.record import Prepared, RecordedTurn, SessionRecord, message_of
from raypost.chat.renderer import TemplateRenderer
from raypost.types import GenerateResult, IntArray
from tests.thorough import examples
from tests.unit.chat_templates import TEMPLATES, bpe, metaspace
from tests.unit.random_sessions import drifted, state_of
from tests.unit.scripted_generator import result

ASKED = [{"role": "user", "content": "What is 3 plus 4?"}]
STOP = bpe().eos_ids[0]
TOKENIZERS = {"bpe": bpe, "metaspace": metaspace}


@given(
    st.integers(0, 2**32), st.sampled_from([*TEMPLATES]), st.sampled_from([*TOKENIZERS]), st.integers(1, 64)
)
@settings(max_examples=examples(30), deadline=None)
def test_no_session_whatever_it_does_trains_a_token_behind_ids_that_the_engine_was_not_sent(
    seed: int, template: str, tokenizer: str, length: int
) -> None:
    assert drifted(seed, template, TOKENIZERS[tokenizer](), length) == 0


class _Reencodes(SessionRecord):
    """What the field does: the whole conversation is rendered from its text for each request."""

    def prepare(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prepared:
        prepared = super().prepare(messages, tools)
        assert self._renderer is not None
        return _Rendered(
            turn=prepared.turn,
            messages=prepared.messages,
            tools=prepared.tools,
            rendered=self._renderer.render(read_messages(messages), tools=tools),
        )


class _Rendered(Prepared):
    def __init__(self, *, rendered: IntArray, **of: Any) -> None:
        super().__init__(**of)
        self.rendered = rendered

    @property
    def token_ids(self) -> IntArray:
        return np.concatenate([self.rendered, self.turn.ids])


def test_the_same_check_finds_the_drift_of_a_record_that_encodes_again() -> None:
    found = [drifted(seed, "chatml with tools", bpe(), 32, _Reencodes) > 0 for seed in range(12)]
    assert sum(found) > 3, f"{sum(found)} of {len(found)} sessions drifted"


# ---------------------------------------------------------------- what extends what


def record_of(template: str = "chatml with tools") -> SessionRecord:
    return SessionRecord(TemplateRenderer(bpe(), template=TEMPLATES[template]))


def say(record: SessionRecord, messages: list[Any], text: str = "four", stop: bool = True) -> Prepared:
    prepared = record.prepare(messages)
    ids = bpe().encode(text, add_special_tokens=False).tolist() + [STOP] * stop
    record.commit(prepared, result(ids, "stop" if stop else "length"))
    return prepared


def test_a_conversation_that_goes_on_is_one_trajectory() -> None:
    record = record_of()
    first = say(record, ASKED)
    second = say(record, [*ASKED, message_of(first.turn), *ASKED], "seven", stop=False)
    third = say(record, [*ASKED, message_of(first.turn), *ASKED, message_of(second.turn), *ASKED])
    assert [one.turn.parent is None for one in (first, second, third)] == [True, False, False]
    (one,) = record.trajectories(state_of())
    assert one.num_tokens + len(one.prompt_ids) == len(third.turn.all_ids())
    assert bpe().decode(one.response_ids[one.response_mask]) == "foursevenfour"
    text = bpe().decode(one.response_ids[~one.response_mask], skip_special_tokens=False)
    assert text.count("<|im_end|>") == 3, "two of the user, and the close of the turn that was cut"


def test_rewritten_history_begins_a_branch_and_trains_what_was_said_before_once() -> None:
    record = record_of()
    first = say(record, ASKED)
    said = message_of(first.turn)
    second = say(record, [*ASKED, said, *ASKED])
    again = say(record, [*ASKED, said, {"role": "user", "content": "Sure?"}])
    other = say(record, [*ASKED, {**said, "content": "five"}, *ASKED])
    assert [one.turn.parent is None for one in (second, again, other)] == [False, False, True]
    trajectories = record.trajectories(state_of())
    assert [int(one.response_mask.sum()) for one in trajectories] == [
        len(first.turn.ids) + len(second.turn.ids),
        len(again.turn.ids),
        len(other.turn.ids),
    ]


def test_other_tools_begin_a_branch() -> None:
    record = record_of()
    first = say(record, ASKED)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert record.prepare([*ASKED, message_of(first.turn), *ASKED], [tool]).turn.parent is None


def test_an_aborted_request_goes_on_behind_its_tokens() -> None:
    record = record_of()
    prepared = record.prepare(ASKED)
    sent = prepared.token_ids
    record.commit(prepared, result([9, 8], "abort", 1))
    assert prepared.token_ids.tolist() == [*sent.tolist(), 9, 8] and record.trajectories(state_of()) == []
    record.commit(prepared, result([7, STOP], "stop", 2))
    (one,) = record.trajectories(state_of())
    assert one.response_ids.tolist() == [9, 8, 7, STOP] and one.policy_versions.tolist() == [1, 1, 2, 2]
    with pytest.raises(ValueError, match="committed already"):
        record.commit(prepared, result([7, STOP]))


def test_what_nobody_received_is_counted_and_never_trained() -> None:
    record = record_of()
    prepared = say(record, ASKED)
    record.drop(prepared.turn)
    assert record.trajectories(state_of()) == [] and record.num_dropped_tokens == len(prepared.turn.ids)
    assert record.prepare([*ASKED, message_of(prepared.turn), *ASKED]).turn.parent is None


def test_a_turn_costs_as_much_in_a_long_session_as_in_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters rendered and encoded a turn; what a template needs to read is the new messages."""
    record, encoded = record_of(), []
    renderer = record._renderer
    assert isinstance(renderer, TemplateRenderer)
    real = renderer._encode

    def counting(text: str) -> IntArray:
        encoded.append(len(text))
        return real(text)

    monkeypatch.setattr(renderer, "_encode", counting)
    messages: list[Any] = [*ASKED]
    costs = []
    for _ in range(128):
        encoded.clear()
        prepared = say(record, messages)
        costs.append(sum(encoded))
        messages = [*messages, message_of(prepared.turn), *ASKED]
    assert costs[-1] == costs[7] < 100


def test_ids_are_put_together_once_a_turn_and_kept_by_the_last_turn_of_a_branch_alone() -> None:
    record, turns = SessionRecord(), list[RecordedTurn]()

    def take(parent: RecordedTurn | None, *context: int) -> RecordedTurn:
        prepared = record.extend(parent, np.asarray(context, np.int32))
        for ids, reason in (([8], "abort"), ([9, len(turns)], "stop")):
            assert prepared.token_ids.tolist()[-len(context) :] == list(context) or prepared.turn.segments
            record.commit(prepared, result(ids, reason))
        turns.append(prepared.turn)
        return prepared.turn

    first = take(None, 1, 2)
    second = take(first, 3)
    third = take(second, 4)
    other = take(first, 5)  # of a turn that gave its ids away
    assert third.all_ids().tolist() == [1, 2, 8, 9, 0, 3, 8, 9, 1, 4, 8, 9, 2]
    assert other.all_ids().tolist() == [1, 2, 8, 9, 0, 5, 8, 9, 3]
    assert [turn.before is not None for turn in turns] == [False, False, True, True]
    assert second.all_ids().tolist() == [1, 2, 8, 9, 0, 3, 8, 9, 1]


# ---------------------------------------------------------------- rewards


def test_a_reward_is_a_finite_number_once_for_a_completion_that_is() -> None:
    record = record_of()
    with pytest.raises(KeyError, match="no completion was made"):
        record.set_last_reward(1.0)
    name = say(record, ASKED).turn.completion_id
    for reward in (float("nan"), float("inf"), "1", None, True):
        with pytest.raises(ValueError, match="finite number"):
            record.set_reward(name, reward)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="no completion 'x'"):
        record.set_reward("x", 1.0)
    record.set_last_reward(0.5)
    with pytest.raises(ValueError, match=r"reward already, 0\.5"):
        record.set_reward(name, 1.0)


def test_a_result_whose_lengths_differ_is_refused() -> None:
    record = record_of()
    bad = GenerateResult(
        response_ids=np.zeros(2, np.int32),
        logprobs=np.zeros(1, np.float32),
        policy_versions=np.zeros(2, np.int32),
        finish_reason="stop",
        worker="w",
    )
    with pytest.raises(Exception, match="lengths"):
        record.commit(record.prepare(ASKED), bad)
