"""Renderer: messages to ids and back. TemplateRenderer does it by a chat template.

Owns the rendering of a conversation, the parsing of a reply, and the bridge: the ids between a sampled turn and the
next one. Owns neither the record of what was sampled (record.py) nor the template's text (data/chat_template.py).

A bridge is the template's own text behind a reply, after a stand-in for the conversation before it. That this text
does not depend on the conversation, that its ids do not depend on the ids before, and that the template leaves what
was said before as it was, is proved by rendering probes for every kind of continuation before it is used; where one
fails there is no bridge, and the conversation is rendered anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from raypost.chat.messages import PROBE_TOOL, Message, Parsed, Tool, ToolCall, read_messages, stand_in
from raypost.chat.packaged import PackagedRenderer
from raypost.chat.vllm_parsers import VllmParsers
from raypost.config import TaskConfig
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError
from raypost.types import IntArray

ThinkingRetention = Literal["template", "all"]
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_CALL = re.compile(f"{CALL_OPEN}(.*?)(?:{CALL_CLOSE}|$)", re.DOTALL)
_MARK = "zmarkz"


class Renderer(Protocol):
    """Messages to ids and back."""

    def render(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> IntArray:
        """Return the ids of a conversation, up to where the policy speaks."""
        ...

    def parse(self, ids: IntArray, *, prompt_ids: IntArray, tools: Sequence[Tool] = ()) -> Parsed:
        """Return what the policy said with these ids, behind the ids of its prompt."""
        ...

    def bridge(
        self, previous_ids: IntArray, messages: Sequence[Message], *, tools: Sequence[Tool] = ()
    ) -> IntArray | None:
        """Return what to append to ids that end in a sampled turn, so that `messages` follow and the policy speaks.

        None: it cannot be proved that this is what the template means.
        """
        ...


class TemplateRenderer:
    """Renders by a chat template; calls are JSON in tags, reasoning stands in <think> tags."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        thinking_retention: ThinkingRetention = "template",
        parsers: VllmParsers | None = None,
    ) -> None:
        """`template` None: the tokenizer's own. `thinking_retention` all: keep reasoning that the template would strip.

        `parsers` None: calls are JSON in tags, reasoning stands in <think> tags.

        Raises ConfigError without a template.
        """
        if template is None and not tokenizer.has_chat_template:
            tokenizer.chat([])
        self._tokenizer = tokenizer
        self._template = template
        self._variables = variables
        self._parsers = parsers
        self._keep_thinking = thinking_retention == "all"
        self._stops = {tokenizer.decode([id_], skip_special_tokens=False): id_ for id_ in tokenizer.eos_ids}
        self._think_ids = tokenizer.encode(THINK_OPEN, add_special_tokens=False)
        self._proofs: dict[tuple[tuple[str, ...], bool, bool], bool] = {}
        self._close, self._close_id = self._closing()

    # ---------------------------------------------------------------- rendering

    def render(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> IntArray:
        """See Renderer. Raises ConfigError when the template refuses the messages."""
        return self._encode(self._text(messages, tools))

    def renders_tools(self) -> bool:
        """Whether the template shows the policy what tools it has."""
        asked = [{"role": "user", "content": "?"}]
        return "look" in self._text(asked, [PROBE_TOOL]) and "look" not in self._text(asked, ())

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], *, speaks: bool = True) -> str:
        return self._tokenizer.chat(
            read_messages(list(messages)),
            add_generation_prompt=speaks,
            template=self._template,
            tools=tools,
            variables=self._variables,
        )

    def _encode(self, text: str) -> IntArray:
        return self._tokenizer.encode(text, add_special_tokens=False)

    # ---------------------------------------------------------------- parsing

    def parse(self, ids: IntArray, *, prompt_ids: IntArray, tools: Sequence[Tool] = ()) -> Parsed:
        """See Renderer."""
        stopped = len(ids) > 0 and int(ids[-1]) in self._stops.values()
        text = self._tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=False)
        thinking = self._is_thinking(prompt_ids)
        return parse_text(text, thinking=thinking, parsers=self._parsers, tools=tools)

    def _is_thinking(self, prompt_ids: IntArray) -> bool:
        """Whether the prompt has opened the policy's reasoning, as some templates do."""
        tail = self._tokenizer.decode(prompt_ids[-8:], skip_special_tokens=False)
        return tail.rstrip().endswith(THINK_OPEN)

    # ---------------------------------------------------------------- the bridge

    def bridge(
        self, previous_ids: IntArray, messages: Sequence[Message], *, tools: Sequence[Tool] = ()
    ) -> IntArray | None:
        """See Renderer. Costs as much as the new messages do, however long the conversation is."""
        if self._close_id is None or not messages:
            return None
        thinking = not self._keep_thinking and _contains(previous_ids, self._think_ids)
        if not self.proves(tuple(message["role"] for message in messages), bool(tools), thinking):
            return None
        closed = len(previous_ids) > 0 and int(previous_ids[-1]) == self._close_id
        try:
            text = self._behind(messages, tools)
        except (ConfigError, ValueError):
            return None
        return None if text is None else self._encode(text if closed else self._close + text)

    def proves(self, roles: Sequence[str], with_tools: bool, thinking: bool = False) -> bool:
        """Return whether messages of these roles can be bridged to. `thinking`: behind a turn with reasoning."""
        kind = tuple(role for place, role in enumerate(roles) if place == 0 or role != roles[place - 1])
        name = (kind, with_tools, thinking)
        if name not in self._proofs:
            try:
                self._proofs[name] = self._prove(*name)
            except (ConfigError, ValueError):
                self._proofs[name] = False
        return self._proofs[name]

    def _closing(self) -> tuple[str, int | None]:
        """Return what the template puts behind a reply, up to the token that ends it, and that token."""
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        try:
            text = self._text(said, (), speaks=False)
        except ConfigError:
            return "", None
        if _MARK not in text:
            return "", None
        end, stop = self._first_stop(text, text.rindex(_MARK))
        return (text[text.rindex(_MARK) + len(_MARK) : end], stop) if stop is not None else ("", None)

    def _first_stop(self, text: str, start: int) -> tuple[int, int | None]:
        """Return where the first text of a stop token behind `start` ends, and its id."""
        found = [(text.find(stop, start), stop) for stop in self._stops if stop]
        places = [(place + len(stop), self._stops[stop]) for place, stop in found if place >= 0]
        return min(places) if places else (len(text), None)

    def _behind(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str | None:
        """Return the text behind the stop token of a reply that `messages` follow."""
        mark = _MARK
        while any(mark in str(message.get("content")) for message in messages):
            mark += "z0z"
        said = [{"role": "user", "content": "?"}, stand_in(messages, mark)]
        text = self._text([*said, *messages], tools)
        if mark not in text:
            return None
        end, stop = self._first_stop(text, text.rindex(mark))
        return text[end:] if stop == self._close_id else None

    def _prove(self, roles: tuple[str, ...], with_tools: bool, thinking: bool) -> bool:
        if (
            self._close_id is None
            or any(role not in ("tool", "user", "system", "developer") for role in roles)
            or "tool" in roles[1:]
        ):
            return False
        tools = [PROBE_TOOL] if with_tools else []
        return all(
            self._holds(before, messages, tools, thinking)
            for messages in _probe_messages(roles)
            for before in _probe_conversations(with_tools)
        )

    def _holds(
        self, before: list[dict[str, Any]], messages: list[dict[str, Any]], tools: list[Tool], thinking: bool
    ) -> bool:
        """Whether the whole conversation's ids are those before, the reply's, and the bridge's."""
        said = stand_in(messages, _MARK)
        reasoning = f"{THINK_OPEN}\nhm\n{THINK_CLOSE}\n\n" if thinking else ""
        said["content"] = reasoning + said["content"]
        asked = self._text(before, tools)
        text = self._text([*before, said, *messages], tools)
        behind = self._behind(messages, tools)
        if behind is None or _MARK not in text or not text.endswith(behind):
            return False
        head, whole = text[: len(text) - len(behind)], self._encode(text)
        kept = self._keep_thinking or (head.startswith(asked) and reasoning.strip() in head[len(asked) :])
        same = np.array_equal(np.concatenate([self._encode(head), self._encode(behind)]), whole)
        # A turn that its length cut: the reply's own close belongs to the bridge.
        if messages[0]["role"] != "tool":
            cut = head[: len(head) - len(self._close)]
            parts = [self._encode(cut), self._encode(self._close + behind)]
            same = same and head.endswith(self._close) and np.array_equal(np.concatenate(parts), whole)
        return bool(kept and same and self._first_stop(head, head.rindex(_MARK))[0] == len(head))


def task_renderer(task: TaskConfig, tokenizer: Tokenizer) -> TemplateRenderer | PackagedRenderer:
    """Return the renderer of a task that is a chat.

    Raises ConfigError without a template, or for parsers or a renderer that are not there or do not fit.
    """
    options = task.agent_loop
    if options.renderer is not None:
        return PackagedRenderer(
            tokenizer,
            options.renderer,
            variables=task.chat_template_kwargs,
            keep_thinking=options.thinking_retention == "all",
        )
    named = options.tool_call_parser or options.reasoning_parser
    parsers = VllmParsers(tokenizer, options.tool_call_parser, options.reasoning_parser) if named else None
    return TemplateRenderer(
        tokenizer,
        template=task.chat_template_source,
        variables=task.chat_template_kwargs,
        thinking_retention=options.thinking_retention,
        parsers=parsers,
    )


def parse_text(
    text: str, *, thinking: bool = False, parsers: VllmParsers | None = None, tools: Sequence[Tool] = ()
) -> Parsed:
    """Return what a reply says. `thinking`: its reasoning was opened before it began."""
    split = None if parsers is None else parsers.reasoning(text)
    reasoning, rest, closed = _split(text, thinking) if split is None else (*split, True)
    found = None if parsers is None else parsers.calls(rest, tools)
    content, calls, whole = _calls(rest) if found is None else (*found, True)
    return Parsed(
        content=content.strip() if calls or reasoning is not None else content,
        reasoning_content=None if reasoning is None else reasoning.strip(),
        tool_calls=calls,
        text=text,
        complete=closed and whole,
    )


def _split(text: str, thinking: bool) -> tuple[str | None, str, bool]:
    """Return the reasoning in its tags, what follows it, and whether it came to its end."""
    opened = text.lstrip().startswith(THINK_OPEN)
    if not opened and not thinking:
        return None, text, True
    inner = text.lstrip()[len(THINK_OPEN) :] if opened else text
    reasoning, closed, rest = inner.partition(THINK_CLOSE)
    return reasoning, rest, bool(closed)


def _calls(text: str) -> tuple[str, tuple[ToolCall, ...], bool]:
    """Return a reply's words without its calls in their tags, those, and whether each came to its end."""
    calls, complete = [], True
    for found in _CALL.finditer(text):
        closed = found.group().endswith(CALL_CLOSE)
        complete = complete and closed
        calls.append(_read_call(found.group(1)) if closed else ToolCall("", found.group(1), "it has no end"))
    return _CALL.sub("", text), tuple(calls), complete


def _read_call(text: str) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall("", text, f"it is no JSON: {error}"[:200])
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", text, 'it must be {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], text, "its arguments are no object")
    return ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False))


def _probe_messages(roles: tuple[str, ...]) -> list[list[dict[str, Any]]]:
    """Return messages of these roles: each once, each twice, and with texts at whose edges tokens might merge."""

    def one(role: str, text: str, place: int) -> dict[str, Any]:
        extra = {"tool_call_id": f"00000000{place}", "name": "look"} if role == "tool" else {}
        return {"role": role, "content": text, **extra}

    return [
        [one(role, text, place) for role in roles for place in range(times)]
        for times in (1, 2)
        for text in ("four", " 4\n", "\n\n{}", "naïve 東京 🙂")
    ]


def _probe_conversations(with_tools: bool) -> list[list[dict[str, Any]]]:
    asked: dict[str, Any] = {"role": "user", "content": "What is it?"}
    system: dict[str, Any] = {"role": "system", "content": "Be brief."}
    answered: dict[str, Any] = {"role": "assistant", "content": "That."}
    found = [[asked], [system, asked], [asked, answered, asked]]
    if with_tools:
        call = {"id": "000000009", "type": "function", "function": {"name": "look", "arguments": {"x": "y"}}}
        used = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "000000009", "name": "look", "content": "7"}
        found.append([asked, used, result])
    return found


def _contains(ids: IntArray, part: IntArray) -> bool:
    """Whether `part` occurs in `ids`."""
    if not len(part) or len(ids) < len(part):
        return False
    starts = np.flatnonzero(ids[: len(ids) - len(part) + 1] == part[0])
    return any(np.array_equal(ids[start : start + len(part)], part) for start in starts)
