"""The configuration of an agent loop: how a prompt becomes a trajectory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from raypost.config.embedded import read_text
from raypost.config.judges import function_file
from raypost.config.resources import ConfigModel

_OF_SESSION = ("agent", "command", "external", "host", "port")
"""Options of agent loops of kind session."""


def _folder(info: ValidationInfo) -> Path:
    return Path((info.context or {}).get("folder", "."))


def beside(folder: Path, command: Sequence[Any]) -> list[Any]:
    """Return a command with the whole paths of what lies in `folder`: it is run elsewhere."""

    def whole(place: int, part: Any) -> Any:
        if not isinstance(part, str) or not part:
            return part
        path = folder / part
        # A program without a slash is looked for in PATH. No link is followed: that of a virtual environment's
        # interpreter is what makes it one.
        ours = "/" in part if place == 0 else path.is_file()
        return os.path.abspath(path) if ours else part

    return [whole(place, part) for place, part in enumerate(command)]


class McpServer(ConfigModel):
    """The tools of an MCP server."""

    mcp: tuple[str, ...] | str
    """A program and its arguments, started in each agent-loop actor and spoken to over its standard input and output;
    or the URL of a server that runs already, over streamable HTTP. Files are found relative to the configuration's
    folder."""

    @field_validator("mcp", mode="before")
    @classmethod
    def _finds_its_files(cls, value: Any, info: ValidationInfo) -> Any:
        return beside(_folder(info), value) if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _is_named(self) -> McpServer:
        if not self.mcp or (isinstance(self.mcp, str) and not self.mcp.startswith(("http://", "https://"))):
            raise ValueError(
                f"mcp {self.mcp!r} is neither a program, as a list with its arguments, nor an URL: write "
                "mcp: [python3, server.py] or mcp: http://..."
            )
        return self


class AgentLoopConfig(ConfigModel):
    """How a prompt becomes a trajectory."""

    kind: Literal["single_turn", "environment", "tools", "session", "custom"] = "single_turn"
    """single_turn: one response, scored by the judge. environment: turns with an environment, which gives the
    rewards. tools: the policy calls functions until it answers, which the judge scores. session: an agent of yours,
    which meets the policy as OpenAI's chat completions. custom: an agent loop of yours."""
    environment: str | None = None
    """`module:function`, or `game.py:Game` relative to the configuration's folder, called with `params` for every
    trajectory, that returns an environment with `reset(metadata)` and `step(action)`."""
    loop: str | None = None
    """With kind custom: `module:Class` or `loop.py:Class`, called once in each agent-loop actor with a LoopContext and
    `params`, that returns an AgentLoop."""
    tools: tuple[str | McpServer, ...] = ()
    """With kind tools: functions that the policy may call, each `module:function`, or `tools.py:function`, of one file;
    and MCP servers, as `{mcp: [python3, server.py]}` or `{mcp: http://...}`. Schemas come from the signatures and
    docstrings of functions, and from the servers."""
    agent: str | None = None
    """With kind session: `module:function`, or `agent.py:function`, plain or async, called with a Session and `params`
    for every trajectory. A number that it returns is the reward; else the judge scores the last reply."""
    command: tuple[str, ...] = ()
    """With kind session, instead of `agent`: a program and its arguments, run for every trajectory with
    OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, RAYPOST_QUESTION, and the names of two files as its environment:
    RAYPOST_SESSION, its messages and metadata as JSON, and RAYPOST_REWARD, into which it may write its reward. Files
    are found relative to the configuration's folder."""
    external: bool = False
    """With kind session, instead of `agent`: a program of yours, which you start, opens, rewards and ends the sessions
    over HTTP. It finds where, and the admin key, in the run folder's `sessions/*.json`."""
    host: str = "127.0.0.1"
    """With kind session: address at which the endpoint listens; others than loopback are seen from other machines."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """With kind session: port of the endpoint; 0: one that is free."""
    file_source: str | None = None
    """Text of the file that `environment`, `loop`, `agent` or `tools` names, read when the configuration is loaded.
    null: a module."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `environment`, `loop` or `agent`."""
    reward_model: str | None = None
    """With kind environment: name of one of `reward_models`, with `generates: true`, that is given to the environment
    as `model`, whose `await model.answer(text, max_tokens, temperature)` is what it answers."""
    isolation: Literal["thread", "process"] | None = None
    """Where an environment lives. thread: in the agent loop's process, its plain methods in a thread. process: in a
    process of its own, for code that keeps what it needs in its process, or blocks it. null: as the environment's
    attribute `isolation` says, else thread."""
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    """Most trajectories of the task that play at once, over all agent-loop actors: for environments, tools or agents of
    which there are few. The others wait, and no deadline of theirs runs. null: all that the strategy starts."""
    max_concurrent_of: Annotated[str, Field(min_length=1)] | None = None
    """What there are so few of, such as an environment: tasks that give the same name have `max_concurrent` together.
    null: the task has them for itself."""
    max_turns: Annotated[int, Field(ge=1)] = 16
    """Most turns of a trajectory."""
    max_turn_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of a turn; null: what is left of the task's `max_tokens`, which counts observations too."""
    step_timeout_s: Annotated[float, Field(gt=0)] = 60
    """Longest time that an environment may take for `reset` or `step`, or a tool for a call, seconds."""
    session_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Longest time of a trajectory of several turns, seconds; the time that it is parked does not count. null: that of
    its group, two `rollout.request_timeout_s`."""
    park_timeout_s: Annotated[float, Field(gt=0)] = 3600
    """How long an episode that a pause interrupted is kept for its trajectory to come back, seconds."""
    thinking_retention: Literal["template", "all"] = "template"
    """What becomes of reasoning when a turn follows. template: as the chat template has it; one that strips it before a
    turn that follows cannot go on there. all: it stays."""
    tool_call_parser: str | None = None
    """With kinds tools and session: vLLM's name of a parser, such as `hermes`, that reads calls out of replies. Its
    import costs each agent-loop actor seconds, and half a gigabyte. null: calls are JSON in <tool_call> tags."""
    reasoning_parser: str | None = None
    """The same for reasoning, such as `deepseek_r1`. null: it stands in <think> tags."""
    renderer: str | None = None
    """With kinds tools and session: the name of a renderer of the package `renderers` (extra `renderers`), such as
    `qwen3`, written by hand for one family of models. It renders what follows the prompt, and reads calls and
    reasoning. null: the chat template renders."""
    max_parallel_calls: Annotated[int, Field(ge=1)] = 8
    """Most calls of tools in one turn; the policy is told that those beyond were not made."""
    max_observation_tokens: Annotated[int, Field(ge=1)] | None = 1024
    """Most tokens of what one call returns; the rest is cut. null: no bound but `max_tokens`."""
    observation_cut: Literal["end", "start", "middle"] = "end"
    """Which side of a longer one is cut."""

    @property
    def parks(self) -> bool:
        """Whether a trajectory may leave something behind that waits for it."""
        return self.kind != "single_turn"

    @property
    def named(self) -> str | None:
        """The function or class of yours that it names, the first of several."""
        functions = (tool for tool in self.tools if isinstance(tool, str))
        return self.environment or self.loop or self.agent or next(functions, None)

    @model_validator(mode="before")
    @classmethod
    def _read_file(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        folder = _folder(info)
        if isinstance(data.get("command"), list | tuple):
            data = {**data, "command": beside(folder, data["command"])}
        if data.get("file_source") is not None:
            return data
        name = next((one for one in ("environment", "loop", "agent", "tools") if data.get(one)), None)
        value = data.get(name or "")
        every = list(value) if isinstance(value, list | tuple) else [value]
        files = {file for one in every if isinstance(one, str) and (file := function_file(one))}
        if not files:
            return data
        if len(files) > 1:
            raise ValueError(f"tools {every} are in several files: put them into one, or name modules")
        (file,) = files
        path = folder / Path(file).expanduser()
        what = f"{name} {every[0]!r}"
        return {
            **data,
            "file_source": read_text(path, what, "put it into a module, and name that as module:NAME"),
        }

    @model_validator(mode="after")
    def _what_it_needs_is_named(self) -> AgentLoopConfig:
        if self.kind == "environment" and self.environment is None:
            raise ValueError("kind 'environment' needs `environment`: name its function as module:function")
        if self.kind == "custom" and self.loop is None:
            raise ValueError("kind 'custom' needs `loop`: name its class as FILE.py:CLASS or module:CLASS")
        if self.kind == "tools" and not self.tools:
            raise ValueError(
                "kind 'tools' needs `tools`: name functions as FILE.py:FUNCTION or module:FUNCTION, or an MCP server"
            )
        if self.kind == "session" and bool(self.agent) + bool(self.command) + self.external != 1:
            raise ValueError(
                "kind 'session' needs either `agent`, a function, or `command`, a program, or `external: true`"
            )
        if self.external and self.session_timeout_s is None:
            raise ValueError(
                "external sessions need session_timeout_s: nothing else ends one that no program opens, or forgets"
            )
        names = (("environment", "environment"), ("custom", "loop"), ("tools", "tools"))
        for kind, name in (*names, *(("session", name) for name in _OF_SESSION)):
            default = type(self).model_fields[name].default
            if self.kind != kind and (value := getattr(self, name)) != default:
                raise ValueError(f"{name} {value!r} is not used by kind {self.kind!r}: use {kind!r}")
        for name in ("tool_call_parser", "reasoning_parser", "renderer"):
            if getattr(self, name) is not None and self.kind not in ("tools", "session"):
                raise ValueError(
                    f"{name} {getattr(self, name)!r} is not used by kind {self.kind!r}: leave it out"
                )
        if self.renderer is not None and (self.tool_call_parser or self.reasoning_parser):
            raise ValueError(f"renderer {self.renderer!r} has parsers of its own: leave out those of vLLM")
        if self.max_concurrent is not None and self.kind in ("single_turn", "custom"):
            raise ValueError(
                f"max_concurrent {self.max_concurrent} is not used by kind {self.kind!r}: leave it out"
            )
        if self.max_concurrent_of is not None and self.max_concurrent is None:
            raise ValueError(
                f"max_concurrent_of {self.max_concurrent_of!r} needs max_concurrent: say how many play at once"
            )
        if self.reward_model is not None and (self.kind != "environment" or self.isolation == "process"):
            raise ValueError(
                f"reward_model {self.reward_model!r} is for kind 'environment' in the agent loop's own process: leave "
                "it out, or isolation"
            )
        if self.isolation is not None and self.kind != "environment":
            raise ValueError(f"isolation {self.isolation!r} is not used by kind {self.kind!r}: leave it out")
        if self.session_timeout_s is not None and self.step_timeout_s >= self.session_timeout_s:
            raise ValueError(
                f"step_timeout_s {self.step_timeout_s:g} is not below session_timeout_s {self.session_timeout_s:g}, "
                "which a single call would use up: lower it, or raise that"
            )
        return self
