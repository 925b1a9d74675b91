"""The trial of agent loops of the user's: they are made, and play the first prompt. Environments: user_code.py."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from raypost.agent_loop.custom import CustomAgentLoop, LoopContext
from raypost.config import Config, TaskConfig
from raypost.config.imports import load_function
from raypost.data.prompt import Prompt, render
from raypost.data.task_source import check_source
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError, RaypostError
from raypost.production.verdict import check_members
from raypost.types import GenerateRequest, GenerateResult, Group, RolloutState, SampleParams

TRIAL_S = 15.0
"""Longest time of a trial, imports included."""
NUM_MEMBERS = 2


def loop_problems(task: TaskConfig, config: Config, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield what is wrong with the task's own agent loop. Without a tokenizer it is imported, but not played."""
    options = task.agent_loop
    if options.kind != "custom":
        return
    prompt = check_source(task, config.seed, tokenizer)[0]
    problem = _bounded(lambda: _try_loop(task, config, prompt, tokenizer))
    if problem is not None:
        prefix = f"task {task.name!r}: agent_loop.loop"
        yield problem if problem.startswith(prefix) else f"{prefix} {options.loop!r}: {problem}"


def _bounded(trial: Callable[[], str | None]) -> str | None:
    """Return what a trial finds, in a thread that is left behind if it hangs."""
    found = [
        f"it takes longer than {TRIAL_S:g} s to import, make and begin: move what takes long into its first call"
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
    thread.join(TRIAL_S)
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
