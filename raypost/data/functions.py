"""Functions as tools: the schema that a signature and its docstring give, and a call with a policy's arguments.

Owns what a policy may be told of a function, and whether what it passes fits. Does not own where the call runs
(agent_loop/tools.py).
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable
from typing import Any, get_type_hints

import pydantic

from raypost.config import TaskConfig
from raypost.config.agent_loops import McpServer
from raypost.config.imports import load_function
from raypost.config.judges import function_file
from raypost.data.mcp_tools import BadArgumentsError, McpConnection, McpTool
from raypost.errors import ConfigError

_ARGUMENT = re.compile(r"^\s+(\w+)(?: \(.*?\))?:\s*(.+(?:\n\s{8,}.+)*)", re.MULTILINE)


class FunctionTool:
    """One function that a policy may call."""

    def __init__(self, function: Callable[..., Any], what: str) -> None:
        """Raise ConfigError, which calls it `what`, for a function that no JSON can call."""
        self.function = function
        self.name = getattr(function, "__name__", "")
        words = inspect.cleandoc(function.__doc__ or "")
        if not words:
            raise ConfigError(f"{what} has no docstring: what it says tells the policy what the tool is for")
        self._model = _model(function, self.name, what)
        about, _, arguments = (
            re.split(r"(\n\s*Args:\s*\n)", words, maxsplit=1) if "Args:" in words else (words, "", "")
        )
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": about.strip(),
                "parameters": _parameters(self._model, dict(_ARGUMENT.findall(arguments))),
            },
        }
        """As chat templates and OpenAI's API want it."""

    def arguments(self, text: str) -> dict[str, Any]:
        """Return the arguments in a JSON object. Raises BadArgumentsError."""
        try:
            model = self._model.model_validate_json(text)
        except pydantic.ValidationError as error:
            wrong = [
                f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in error.errors()
            ]
            raise BadArgumentsError(f"bad arguments for {self.name}: {'; '.join(wrong)}"[:500]) from None
        return {name: getattr(model, name) for name in type(model).model_fields}

    async def close(self) -> None:
        """Have nothing to end."""


Tool = FunctionTool | McpTool


def _model(function: Callable[..., Any], name: str, what: str) -> type[pydantic.BaseModel]:
    try:
        hints = get_type_hints(function)
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigError(f"{what} has the parameter {parameter}: only named ones have a schema")
            if parameter.name not in hints:
                raise ConfigError(f"{what} has no type for its parameter {parameter.name!r}: annotate it")
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (hints[parameter.name], default)
        config = pydantic.ConfigDict(extra="forbid", strict=False)
        model: type[pydantic.BaseModel] = pydantic.create_model(name, __config__=config, **fields)
        model.model_json_schema()
    except ConfigError:
        raise
    # Types of the user's may be anything.
    except Exception as error:
        raise ConfigError(f"{what} has a signature without schema: {error!s:.300}") from error
    return model


def _parameters(model: type[pydantic.BaseModel], descriptions: dict[str, str]) -> dict[str, Any]:
    schema = model.model_json_schema()
    schema.pop("title", None)
    schema.pop("additionalProperties", None)
    for name, one in schema.get("properties", {}).items():
        one.pop("title", None)
        if name in descriptions:
            one["description"] = " ".join(descriptions[name].split())
    schema.setdefault("properties", {})
    return schema


def function_tools(task: TaskConfig) -> tuple[Tool, ...]:
    """Return the tools of a task, none for one without. Raises ConfigError."""
    return _tools(task.name, task.agent_loop.tools, task.agent_loop.file_source)


@functools.lru_cache(maxsize=64)
def _tools(task: str, named: tuple[str | McpServer, ...], source: str | None) -> tuple[Tool, ...]:
    tools: dict[str, Tool] = {}
    for one in named:
        what = f"task {task!r}: agent_loop.tools {one if isinstance(one, str) else one.mcp!r}"
        if isinstance(one, str):
            text = source if function_file(one) else None
            found: list[Tool] = [FunctionTool(load_function(one, what, text), what)]
        else:
            found = [*McpConnection(one, what).load()]
        for tool in found:
            if tool.name in tools:
                raise ConfigError(f"{what} is the second tool called {tool.name!r}: rename one")
            tools[tool.name] = tool
    return tuple(tools.values())


def tool_schemas(task: TaskConfig) -> tuple[dict[str, Any], ...]:
    """Return the schemas that the task's chat template is given."""
    return tuple(tool.schema for tool in function_tools(task)) or task.tools


def observed(value: Any) -> str:
    """Return what a tool gave as the text that the policy reads. Raises TypeError for what is none."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"it returned {len(value)} bytes: return text")
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"it returned a {type(value).__name__}, which is neither text nor JSON: {error}"
        ) from error
