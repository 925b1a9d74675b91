"""The trial of agent loops of the user's: they are made, and play the first prompt. Environments: user_code.py."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from raypost.agent_loop.custom import CustomAgentLoop, LoopContext
from raypost.chat.renderer import task_renderer
from raypost.config import Config, TaskConfig
from raypost.config.imports import load_function
from raypost.data.functions import function_tools
from raypost.data.prompt import Prompt, render
from raypost.data.task_source import check_source
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError, RaypostError
from raypost.production.verdict import check_members
from raypost.sandbox import why_not
from raypost.sandbox.tools import LIMITS
from raypost.types import GenerateRequest, GenerateResult, Group, RolloutState, SampleParams

TRIAL_S = 15.0
"""Longest time of a trial, imports included."""
PARSERS_S = 60.0
"""On top of it where vLLM's parsers are imported."""
NUM_MEMBERS = 2
SANDBOXED = "raypost.sandbox.tools:"


def loop_problems(task: TaskConfig, config: Config, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield what is wrong with the task's own agent loop. Without a tokenizer it is imported, but not played."""
    options = task.agent_loop
    yield from _deadlines(task, config)
    limit_s = TRIAL_S + PARSERS_S * bool(
        options.tool_call_parser or options.reasoning_parser or options.renderer
    )
    if options.kind == "tools":
        problem = _bounded(lambda: _try_tools(task, tokenizer), limit_s)
        if problem is not None:
            yield (
                problem if problem.startswith("task ") else f"task {task.name!r}: agent_loop.tools: {problem}"
            )
    if options.kind == "session":
        if config.train.advantage.session_reward == "sum":
            yield (
                f"task {task.name!r}: train.advantage.session_reward is sum, but each branch of a session has the "
                "reward of the whole session: use last or mean"
            )
        yield from _address(task, config)
        problem = _bounded(lambda: _try_agent(task, tokenizer), limit_s)
        if problem is not None:
            yield problem if problem.startswith("task ") else f"task {task.name!r}: agent_loop: {problem}"
    if options.kind != "custom":
        return
    prompt = check_source(task, config.seed, tokenizer)[0]
    problem = _bounded(lambda: _try_loop(task, config, prompt, tokenizer), limit_s)
    if problem is not None:
        prefix = f"task {task.name!r}: agent_loop.loop"
        yield problem if problem.startswith(prefix) else f"{prefix} {options.loop!r}: {problem}"


def _deadlines(task: TaskConfig, config: Config) -> Iterator[str]:
    """Yield the deadlines of several turns that do not nest: call < session < group."""
    options, group_s = task.agent_loop, 2 * config.rollout.request_timeout_s
    if options.kind not in ("environment", "tools") and options.session_timeout_s is None:
        yield from _turns(task, config, "rollout.request_timeout_s", group_s / 2)
        return
    inner = "step_timeout_s" if options.session_timeout_s is None else "session_timeout_s"
    bound = options.session_timeout_s or options.step_timeout_s
    yield from _turns(task, config, inner, bound)
    if bound >= group_s:
        yield (
            f"task {task.name!r}: agent_loop.{inner} is {bound:g}, but a group is given up after {group_s:g} s, two "
            "rollout.request_timeout_s: lower it, or raise that"
        )


def _address(task: TaskConfig, config: Config) -> Iterator[str]:
    """Yield what is wrong with where a session's endpoint listens."""
    options, place = task.agent_loop, f"task {task.name!r}: agent_loop"
    actors = config.num_agent_loops
    listening = actors * sum(other.agent_loop.port == options.port for other in config.tasks)
    if options.port and listening > 1:
        yield (
            f"{place}.port is {options.port}, at which {listening} endpoints would listen, one of each task in each of "
            f"{actors} agent-loop actors: leave it out"
        )
    try:
        socket.getaddrinfo(options.host, options.port)
    except OSError as error:
        yield f"{place}.host is {options.host!r}, which is no address: {error}"


def _turns(task: TaskConfig, config: Config, inner: str, bound: float) -> Iterator[str]:
    """Yield what is wrong with `max_concurrent`: no turn for each actor, or a group that waits longer than it may."""
    most, workers = task.agent_loop.max_concurrent, config.num_agent_loops
    if most is None:
        return
    if most < workers:
        yield (
            f"task {task.name!r}: agent_loop.max_concurrent is {most}, less than the {workers} agent-loop actors "
            "(rollout.agent_workers, and one more with eval.pool), each of which must have one: raise it, or lower that"
        )
    evaluated = config.eval.samples if config.eval.num_prompts else 0
    size, group_s = max(task.group_size, evaluated), 2 * config.rollout.request_timeout_s
    # Those of other tasks may stand before it.
    rounds = -(-size // max(1, most // workers)) * max(1, len(config.sharing(task)))
    if rounds * bound >= group_s > bound:
        yield (
            f"task {task.name!r}: with agent_loop.max_concurrent {most} a group of {size} plays in {rounds} "
            f"rounds, each for at most {inner} {bound:g} s, but is given up after {group_s:g} s, two "
            "rollout.request_timeout_s: lower one, or raise that"
        )


def _try_agent(task: TaskConfig, tokenizer: Tokenizer | None) -> str | None:
    options = task.agent_loop
    if options.agent:
        agent = load_function(options.agent, f"task {task.name!r}: agent_loop.agent", options.file_source)
        try:
            inspect.signature(agent).bind(None, **options.params)
        except TypeError as error:
            return f"agent {options.agent!r} cannot be called with a session and {options.params!r:.200}: {error}"
    elif not options.external and shutil.which(options.command[0]) is None:
        return f"command: there is no program {options.command[0]!r} on this machine"
    if (
        tokenizer is not None
        and task_renderer(task, tokenizer).render([{"role": "user", "content": "?"}]).size == 0
    ):
        return "the chat template renders nothing"
    return None


def _try_tools(task: TaskConfig, tokenizer: Tokenizer | None) -> str | None:
    function_tools(task)
    if any(str(tool).startswith(SANDBOXED) for tool in task.agent_loop.tools) and (
        problem := why_not(LIMITS)
    ):
        return problem
    if tokenizer is None:
        return None
    renderer = task_renderer(task, tokenizer)
    if not renderer.renders_tools():
        return (
            "the chat template leaves out what tools there are: name one that renders them with chat_template; "
            "docs/agents.md has one"
        )
    if not renderer.proves(["tool"], True):
        return (
            "the chat template gives no ids that may follow a call: what was said before changes when a result "
            "follows, or no token of the tokenizer ends a turn; name another one with chat_template"
        )
    return None


def _bounded(trial: Callable[[], str | None], limit_s: float) -> str | None:
    """Return what a trial finds, in a thread that is left behind if it hangs."""
    found = [
        f"it takes longer than {limit_s:g} s to import, make and begin: move what takes long into its first call"
    ]

    def run() -> None:
        try:
            found[:] = [problem] if (problem := trial()) is not None else []
        # It is the user's code, which may raise anything, and even leave.
        except BaseException as error:
            text = str(error) if isinstance(error, RaypostError) else f"{type(error).__name__}: {error}"
            found[:] = [text]

    thread = threading.Thread(target=run, name="trial", daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0] if found else None


class _Stops:
    """Answers every request with the token that ends a response."""

    def __init__(self, stop_id: int) -> None:
        self._ids = np.asarray([stop_id], np.int32)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        zeros = np.zeros(1, np.int32)
        return GenerateResult(
            response_ids=self._ids,
            logprobs=zeros.astype(np.float32),
            policy_versions=zeros,
            finish_reason="stop",
            worker="trial",
        )


class _Zero:
    async def judge(self, states: list[RolloutState]) -> list[float]:
        return [0.0] * len(states)


def _try_loop(task: TaskConfig, config: Config, prompt: Prompt, tokenizer: Tokenizer | None) -> str | None:
    if tokenizer is None:
        load_function(
            task.agent_loop.loop or "", f"task {task.name!r}: agent_loop.loop", task.agent_loop.file_source
        )
        return None
    generator = _Stops(tokenizer.eos_ids[0])
    loop = CustomAgentLoop(
        LoopContext(
            task=task, rollout=config.rollout, generator=generator, judge=_Zero(), tokenizer=tokenizer
        )
    )
    params = SampleParams(max_tokens=task.max_tokens, stop_token_ids=task.stop_ids(tokenizer.eos_ids))
    states = [
        RolloutState(
            task=task.name,
            group_id=0,
            sample_index=index,
            prompt_ids=render(prompt, tokenizer, task),
            sample_params=params,
            metadata=dict(prompt.metadata),
        )
        for index in range(NUM_MEMBERS)
    ]
    started = [dataclasses.replace(state) for state in states]
    group: Any = asyncio.run(loop.run(Group(task=task.name, group_id=0, states=states)))
    if not isinstance(group, Group):
        return f"it returned a {type(group).__name__} and no Group"
    try:
        check_members((task.name, 0), started, group)
    except RaypostError as error:
        raise ConfigError(str(error)) from error
    wrong = [state.error for state in group.states if state.error and state.error.startswith("agent_loop:")]
    return f"it played the first prompt, with an engine that ends at once: {wrong[0]}" if wrong else None
