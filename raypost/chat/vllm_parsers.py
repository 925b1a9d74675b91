"""vLLM's parsers of calls and of reasoning, by their names, for models whose form is not JSON in tags.

Owns how they are found and asked. They are imported when a task names one: that costs its processes some five seconds
and half a gigabyte.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Sequence
from typing import Any

from raypost.chat.messages import Tool, ToolCall, canonical
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError

log = logging.getLogger(__name__)
MAX_TOOLSETS = 16
"""Parsers are kept for so many sets of tools."""


class VllmParsers:
    """Parses replies with one or both of the parsers that a task names."""

    def __init__(
        self, tokenizer: Tokenizer, tool_call_parser: str | None, reasoning_parser: str | None
    ) -> None:
        """Import them and try them with this tokenizer. Raises ConfigError."""
        self.names = tool_call_parser, reasoning_parser
        try:
            tools, reasoning, protocol = map(
                importlib.import_module,
                (
                    "vllm.tool_parsers",
                    "vllm.reasoning",
                    "vllm.entrypoints.openai.chat_completion.protocol",
                ),
            )
            auto: Any = importlib.import_module("transformers").AutoTokenizer
        except ImportError as error:
            raise ConfigError(
                f"parsers by vLLM's names need vLLM, which cannot be imported: {error}"
            ) from error
        self._request_type: Any = protocol.ChatCompletionRequest
        self._tools = _named("tool_call_parser", tool_call_parser, tools.ToolParserManager, "get_tool_parser")
        self._reasoning = _named(
            "reasoning_parser", reasoning_parser, reasoning.ReasoningParserManager, "get_reasoning_parser"
        )
        self._tokenizer = auto.from_pretrained(tokenizer.origin, local_files_only=True)
        self._made: dict[str, tuple[Any, Any, Any]] = {}
        try:
            self._parsers(())
        # They refuse a tokenizer in many ways.
        except Exception as error:
            raise ConfigError(
                f"agent_loop.tool_call_parser {tool_call_parser!r}, reasoning_parser {reasoning_parser!r}: they do not "
                f"fit the model's tokenizer: {type(error).__name__}: {error!s:.300}"
            ) from error

    def reasoning(self, text: str) -> tuple[str | None, str] | None:
        """Return the reasoning in a reply, and what follows; None: no parser of reasoning is named."""
        if self._reasoning is None:
            return None
        _, parser, request = self._parsers(())
        try:
            found, rest = parser.extract_reasoning(text, request)
        # The policy's words may be anything: what no parser reads is what it said.
        except Exception as error:
            log.debug("reasoning_parser %s: %r", self.names[1], error)
            return None, text
        return found, rest or ""

    def calls(self, text: str, tools: Sequence[Tool]) -> tuple[str, tuple[ToolCall, ...]] | None:
        """Return the words and the calls of a reply without reasoning; None: no parser of calls is named."""
        if self._tools is None:
            return None
        parser, _, request = self._parsers(tools)
        try:
            found = parser.extract_tool_calls(text, request)
        except Exception as error:
            return text, (ToolCall("", text, f"{self.names[0]} cannot read it: {error!r:.200}"),)
        if not found.tools_called:
            return text, ()
        return found.content or "", tuple(map(_read, found.tool_calls))

    def _parsers(self, tools: Sequence[Tool]) -> tuple[Any, Any, Any]:
        name = canonical(list(tools))
        if name not in self._made:
            if len(self._made) >= MAX_TOOLSETS:
                self._made.clear()
            given: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "?"}]}
            request = self._request_type(**given, **({"tools": list(tools)} if tools else {}))
            calls = self._tools(self._tokenizer, request.tools) if self._tools is not None else None
            reasoning = self._reasoning(self._tokenizer) if self._reasoning is not None else None
            self._made[name] = calls, reasoning, request
        return self._made[name]


def _named(option: str, name: str | None, manager: Any, method: str) -> Any:
    if name is None:
        return None
    try:
        return getattr(manager, method)(name)
    except (KeyError, ImportError, ValueError) as error:
        known = ", ".join(manager.list_registered())
        raise ConfigError(
            f"agent_loop.{option} is {name!r}, which vLLM has not ({error}): there are {known}"
        ) from None


def _read(call: Any) -> ToolCall:
    name, text = str(call.function.name), str(call.function.arguments or "{}")
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(name, text, f"its arguments are no JSON: {error}"[:200])
    if not isinstance(arguments, dict):
        return ToolCall(name, text, "its arguments are no object")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
