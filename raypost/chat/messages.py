"""Messages of a conversation: what is one, what makes two of them equal, and how a reply is parsed.

Messages have the form of OpenAI's chat completions. Two are equal when they say the same: parts of content are one
text, and the arguments of a call are compared as JSON, not as text. Nothing here knows of token ids.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
"""A tool's schema, {"type": "function", "function": {...}}."""

PROBE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
"""What templates and renderers are tried with."""

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy made."""

    name: str
    arguments: str
    """JSON of an object; the text as it stands if `error` is set."""
    error: str | None = None
    """What is wrong with it, as the policy is told; None: it is a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What a policy said."""

    content: str
    """Its words, without calls and reasoning."""
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    text: str
    """All of it, calls and reasoning included, without the token that ended it."""
    complete: bool = True
    """Whether every call and the reasoning came to their end."""


def reply(parsed: Parsed, call_ids: Sequence[str]) -> dict[str, Any]:
    """Return the message of the assistant that says this. A call that is none leaves all of it plain text."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning_content is not None:
        message["reasoning_content"] = parsed.reasoning_content
    if any(call.error is not None for call in parsed.tool_calls):
        return {**message, "content": parsed.text}
    if parsed.tool_calls:
        message["tool_calls"] = [
            {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for name, call in zip(call_ids, parsed.tool_calls, strict=True)
        ]
    return message


def content_text(content: Any) -> str:
    """Return content as one text. Raises ValueError for anything but a text, parts of text, and None."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = []
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(text, str):
                raise ValueError(
                    f"content has the part {part!r:.80}, which is no text: only text is supported"
                )
            texts.append(text)
        return "".join(texts)
    raise ValueError(f"content is {content!r:.80}: it must be a text, or a list of parts with text")


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Return a conversation as templates want it: contents as texts, arguments of calls as objects.

    Raises ValueError, which names the message, for what is no conversation.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages must be a list with at least one message, got {messages!r:.80}")
    known: set[str] = set()
    read = []
    for number, message in enumerate(messages):
        try:
            one = _read(message, known)
        except ValueError as error:
            raise ValueError(f"messages[{number}]: {error}") from None
        read.append(one)
    return read


def _read(message: Any, known: set[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"it is {message!r:.80}: it must be an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"role is {role!r:.40}: it must be one of {', '.join(ROLES)}")
    if len(message) == 2 and role != "tool" and isinstance(message.get("content"), str):
        return dict(message)  # Most are words alone, and a long conversation comes back with every request.
    one = {name: value for name, value in message.items() if value is not None}
    one["content"] = content_text(message.get("content"))
    if role == "tool":
        answered = message.get("tool_call_id")
        if answered not in known:
            raise ValueError(f"tool_call_id is {answered!r:.40}, and no call before it has this id")
    elif role != "assistant":
        one.pop("tool_calls", None)
    elif calls := message.get("tool_calls"):
        one["tool_calls"] = (
            [_read_call(call) for call in calls] if isinstance(calls, list) else _no_call(calls)
        )
        known.update(call["id"] for call in one["tool_calls"])
    else:
        one.pop("tool_calls", None)
    return one


def _read_call(call: Any) -> dict[str, Any]:
    function: Any = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        _no_call(call)
    if not isinstance(call.get("id"), str):
        raise ValueError(f"a tool call without id: {call!r:.80}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # What is no JSON is compared, and rendered, as the text that it is.
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _no_call(call: Any) -> Any:
    raise ValueError(f"tool_calls has {call!r:.80}: a call is {{id, type, function: {{name, arguments}}}}")


def canonical(value: Any) -> str:
    """Return JSON that is equal for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def key_of(message: Message) -> Hashable:
    """Return what is equal for messages, as `read_messages` gives them, that say the same.

    Reasoning is left out, which most clients do not send back.
    """
    calls: tuple[Hashable, ...] = ()
    if "tool_calls" in message:
        calls = tuple(
            (call["id"], call["function"]["name"], canonical(call["function"]["arguments"]))
            for call in message["tool_calls"]
        )
    answered, name = _plain(message.get("tool_call_id")), _plain(message.get("name"))
    return (message["role"], message["content"], calls, answered, name)


def _plain(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else canonical(value)


def stand_in(messages: Sequence[Message], mark: str) -> dict[str, Any]:
    """Return a reply that `messages` may follow, with `mark` in all that it says."""
    answered = [str(m.get("tool_call_id")) for m in messages if m["role"] == "tool"]
    calls = [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": {"x": mark}}}
        for name in answered
    ]
    return {"role": "assistant", "content": mark, **({"tool_calls": calls} if calls else {})}
