"""The trial of a task's judges before a run: functions are called, services are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from raypost.config import JudgeConfig, TaskConfig
from raypost.data.prompt import Prompt
from raypost.errors import JudgeError
from raypost.judges.function import sample_of, try_function
from raypost.judges.service import HttpJudge

SERVICE_S = 5.0
"""Longest time that a service may take in the trial, if its own bound is not shorter."""


def try_judges(task: TaskConfig, prompts: Sequence[Prompt], *, offline: bool = False) -> Iterator[str]:
    """Yield what is wrong with the task's judges. `offline`: no service is asked."""
    for place, judge in task.judge.every():
        problem = None
        if judge.kind in ("function", "math") or judge.combine == "function":
            problem = try_function(task, judge, prompts)
        elif judge.kind == "http" and not offline:
            problem = _try_service(task, judge, prompts)
        if problem is not None:
            yield (
                f"task {task.name!r}: {place}.{judge.kind}: {problem}. It must give a finite number for any response: "
                "a wrong answer is a low score; docs/judges.md has the forms of functions and of services' answers"
            )


def _try_service(task: TaskConfig, config: JudgeConfig, prompts: Sequence[Prompt]) -> str | None:
    async def ask() -> str | None:
        bounds = {"retries": 0, "timeout_s": min(config.timeout_s, SERVICE_S)}
        judge = HttpJudge(task, config.model_copy(update=bounds))
        no_ids = np.empty(0, np.int32)
        try:
            await judge.score(
                [
                    sample_of(task, prompt.metadata, response, no_ids, no_ids)
                    for prompt in prompts
                    for response in (str(prompt.metadata.get("answer", "")), "")
                ]
            )
        except JudgeError as error:
            return str(error)
        finally:
            await judge.close()
        return None

    # A thread, because the caller may have a running event loop of its own.
    with ThreadPoolExecutor(1, "trial") as thread:
        return thread.submit(asyncio.run, ask()).result()
