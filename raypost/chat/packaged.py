"""PackagedRenderer: a renderer of the package `renderers`, written by hand for one family of models, behind Renderer.

Owns the way there and back: the package's own names, and the place in recorded ids where the last turn began, which
the package wants to know. What it renders and parses is its own business; a bridge of its that changes what was said
before is none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from raypost.chat.messages import PROBE_TOOL, Message, Parsed, Tool, ToolCall, read_messages, stand_in
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError
from raypost.types import IntArray

ASKED = ({"role": "user", "content": "?"},)


class PackagedRenderer:
    """Renders as the renderer with a name does."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        name: str,
        *,
        variables: Mapping[str, Any] | None = None,
        keep_thinking: bool = False,
    ) -> None:
        """`variables`: of the chat template, where the renderer knows them.

        Raises ConfigError if the package is not installed, knows no such renderer, or has none for this tokenizer.
        """
        try:
            package, configs = import_module("renderers"), import_module("renderers.configs")
            adapter: Any = import_module("pydantic").TypeAdapter(configs.RendererConfig)
            auto: Any = import_module("transformers").AutoTokenizer
        except ImportError as error:
            raise ConfigError(
                f"agent_loop.renderer {name!r} needs a package: pip install raypost[renderers] ({error})"
            ) from error
        self._tokenizer = tokenizer
        try:
            config = adapter.validate_python(
                {"name": name, **({"thinking_retention": "all"} if keep_thinking else {})}
            )
            own = auto.from_pretrained(tokenizer.origin, local_files_only=True)
            self._renderer: Any = package.create_renderer(
                own, config, chat_template_kwargs=dict(variables or {})
            )
            self._stops = {int(one) for one in self._renderer.get_stop_token_ids()}
            self._speaks = self._opening()
        # It refuses names, tokenizers and variables in many ways.
        except Exception as error:
            raise ConfigError(
                f"agent_loop.renderer {name!r} does not fit: {type(error).__name__}: {error!s:.300}"
            ) from error

    def render(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> IntArray:
        """See Renderer. Raises ConfigError when it refuses the messages."""
        try:
            ids = self._renderer.render_ids(
                read_messages(list(messages)), tools=_specs(tools), add_generation_prompt=True
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"the renderer refuses the messages: {error!s:.300}") from error
        return np.asarray(ids, np.int32)

    def parse(self, ids: IntArray, *, prompt_ids: IntArray, tools: Sequence[Tool] = ()) -> Parsed:
        """See Renderer."""
        found = self._renderer.parse_response(
            ids.tolist(), prompt_ids=prompt_ids.tolist(), tools=_specs(tools)
        )
        stopped = len(ids) > 0 and int(ids[-1]) in self._stops
        open_calls = any(call.status == "unclosed_block" for call in found.tool_calls)
        return Parsed(
            content=found.content,
            reasoning_content=found.reasoning_content,
            tool_calls=tuple(map(_call, found.tool_calls)),
            text=self._tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=False),
            complete=found.reasoning_complete is not False and not open_calls,
        )

    def bridge(
        self, previous_ids: IntArray, messages: Sequence[Message], *, tools: Sequence[Tool] = ()
    ) -> IntArray | None:
        """See Renderer."""
        before = previous_ids.tolist()
        began = self._turn_began(before)
        if began is None:
            return None
        # Results follow calls.
        _, *new = read_messages([stand_in(messages, "That."), *messages])
        try:
            made = self._renderer.bridge_to_next_turn(
                before[:began], before[began:], new, tools=_specs(tools)
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        if made is None or list(made.token_ids[: len(before)]) != before:
            return None
        return np.asarray(made.token_ids[len(before) :], np.int32)

    def renders_tools(self) -> bool:
        """Whether the policy is shown what tools it has."""
        return len(self.render(ASKED, tools=[PROBE_TOOL])) > len(self.render(ASKED))

    def proves(self, roles: Sequence[str], with_tools: bool) -> bool:
        """Whether a message of each of these roles can be bridged to."""
        tools = [PROBE_TOOL] if with_tools else []
        said = self._tokenizer.encode("That.", add_special_tokens=False)
        before = np.concatenate([self.render(ASKED, tools=tools), said])
        messages = [{"role": role, "content": "four", "tool_call_id": "1", "name": "look"} for role in roles]
        turns = (np.append(before, np.int32(stop)) for stop in self._stops)
        return any(self.bridge(turn, messages, tools=tools) is not None for turn in turns)

    def _opening(self) -> list[int]:
        """Return the ids with which the policy is given its turn."""
        closed, opened = (
            self._renderer.render_ids(list(ASKED), add_generation_prompt=speaks) for speaks in (False, True)
        )
        opening = list(opened[len(closed) :])
        if list(opened[: len(closed)]) != list(closed) or not opening:
            raise ValueError("nothing marks where the policy speaks")
        return opening

    def _turn_began(self, ids: list[int]) -> int | None:
        """Return where the last turn begins that the policy was given, None if there is none."""
        size = len(self._speaks)
        places = range(len(ids), size - 1, -1)
        return next((end for end in places if ids[end - size : end] == self._speaks), None)


def _specs(tools: Sequence[Tool]) -> list[Any] | None:
    """Return the tools as the package has them: what stands under `function`."""
    return [tool["function"] for tool in tools] or None


def _call(call: Any) -> ToolCall:
    if str(call.status) not in ("ok", "unknown_tool"):
        return ToolCall(call.name or "", call.raw, f"it is no call: {call.status}")
    given = call.arguments
    return ToolCall(
        call.name or "", given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
    )
