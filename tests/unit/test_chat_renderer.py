"""Messages to ids and back: what may be bridged is proved, and everything else is rendered anew."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pytest

from raypost.chat.messages import PROBE_TOOL, key_of, read_messages
from raypost.chat.renderer import TemplateRenderer, parse_text
from tests.unit.chat_templates import TEMPLATES, bpe, metaspace

ASKED = [{"role": "user", "content": "What is 3 plus 4?"}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"x": "3+4"}}\n</tool_call>'
RESULT = {"role": "tool", "tool_call_id": "a", "name": "look", "content": "7"}


def renderer(name: str, **options: object) -> TemplateRenderer:
    return TemplateRenderer(bpe(), template=TEMPLATES[name], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "tool", "user", "user_after_thinking"),
    [
        ("chatml with tools", True, True, True),
        ("default system", True, True, True),
        ("strips thinking", True, True, False),
        ("results together", True, True, True),
        ("no end of turn", False, False, False),
        ("counts messages", False, False, False),
    ],
)
def test_each_continuation_is_proved_by_itself(
    template: str, tool: bool, user: bool, user_after_thinking: bool
) -> None:
    found = renderer(template)
    assert found.proves(["tool"], True) is tool and found.proves(["tool", "tool"], True) is tool
    assert found.proves(["user"], False) is user
    assert found.proves(["user"], False, thinking=True) is user_after_thinking
    assert not found.proves(["assistant"], False) and not found.proves(["user", "tool"], True)


def test_a_bridge_is_what_stands_between_the_turns_of_the_whole_conversation() -> None:
    one = renderer("results together")
    prompt = one.render(ASKED, tools=[PROBE_TOOL])
    said = np.asarray([*bpe().encode(CALL, add_special_tokens=False), bpe().eos_ids[0]], np.int32)
    bridge = one.bridge(np.concatenate([prompt, said]), [RESULT, RESULT], tools=[PROBE_TOOL])
    assert bridge is not None
    assert bpe().decode(bridge, skip_special_tokens=False) == (
        "\n<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_turn_that_its_length_cut_is_closed_by_the_bridge() -> None:
    one = renderer("chatml with tools")
    bridge = one.bridge(one.render(ASKED), ASKED)
    assert bridge is not None and bridge[0] == bpe().eos_ids[0]
    assert bpe().decode(bridge, skip_special_tokens=False).startswith("<|im_end|>\n<|im_start|>user")


def test_reasoning_that_the_template_strips_prevents_a_bridge_unless_all_of_it_is_to_stay() -> None:
    said = bpe().encode("<think>\nhm\n</think>\n\nfour", add_special_tokens=False)
    ids = np.asarray([*said, bpe().eos_ids[0]], np.int32)
    assert renderer("strips thinking").bridge(ids, ASKED) is None
    assert renderer("strips thinking").bridge(ids, [RESULT], tools=[PROBE_TOOL]) is not None
    assert renderer("strips thinking", thinking_retention="all").bridge(ids, ASKED) is not None


def test_a_template_that_leaves_tools_out_says_so() -> None:
    assert renderer("chatml with tools").renders_tools() and not renderer("default system").renders_tools()


def test_a_tokenizer_that_merges_over_words_is_bridged_where_ids_agree() -> None:
    one = TemplateRenderer(metaspace(), template=TEMPLATES["chatml with tools"])
    proved, ids = one.proves(["user"], False), one.render(ASKED)
    assert (one.bridge(ids, ASKED) is not None) is proved


# ---------------------------------------------------------------- replies


def test_calls_are_read_from_their_tags() -> None:
    said = parse_text(f"I look.\n{CALL}\n{CALL}")
    assert said.content == "I look." and said.complete
    assert [(call.name, call.arguments, call.error) for call in said.tool_calls] == [
        ("look", '{"x": "3+4"}', None)
    ] * 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<tool_call>{</tool_call>", "no JSON"),
        ("<tool_call>[1]</tool_call>", "must be"),
        ('<tool_call>{"name": 3}</tool_call>', "must be"),
        ('<tool_call>{"name": "f", "arguments": []}</tool_call>', "no object"),
        ('<tool_call>{"name": "f"}', "no end"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "no JSON"),
    ],
)
def test_a_call_that_is_none_says_why(text: str, why: str) -> None:
    (call,) = parse_text(text).tool_calls
    assert why in str(call.error)


def test_reasoning_is_kept_apart() -> None:
    said = parse_text("<think>\nhm\n</think>\n\nfour")
    assert (said.reasoning_content, said.content, said.complete) == ("hm", "four", True)
    assert not parse_text("<think>hm").complete
    assert parse_text("hm</think>four", thinking=True).reasoning_content == "hm"


# ---------------------------------------------------------------- messages


def test_messages_that_say_the_same_are_equal() -> None:
    def of(arguments: object, content: object) -> Hashable:
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return key_of(read_messages([{"role": "assistant", "content": content, "tool_calls": [call]}])[0])

    assert of('{"a": 1, "b": 2}', None) == of({"b": 2, "a": 1}, "")
    assert of("{}", [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]) == of({}, "xy")
    assert of("{}", "x") != of("{}", "y") and of('{"a": 1}', "x") != of('{"a": 2}', "x")


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ("hello", "must be a list"),
        ([], "must be a list"),
        (["hello"], "messages[0]: it is 'hello'"),
        ([{"role": "robot", "content": ""}], "role is 'robot'"),
        ([{"role": "user", "content": 3}], "content is 3"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only text"),
        ([{"role": "tool", "content": "7", "tool_call_id": "a"}], "no call before it"),
        ([{"role": "assistant", "content": "", "tool_calls": ["f"]}], "tool_calls has 'f'"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
            "without id",
        ),
    ],
)
def test_what_is_no_conversation_is_refused(messages: object, why: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        read_messages(messages)
    assert why in str(caught.value)
