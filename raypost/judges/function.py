"""FunctionJudge: a judge that asks a reward function of the user's, and its trial before a run.

Owns what a function sees of a trajectory. Owns neither its process (function_process.py) nor how it is called
(function_child.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from raypost.config import JudgeConfig, TaskConfig
from raypost.data.prompt import Prompt, conversation, prompt_text
from raypost.errors import JudgeError, at
from raypost.judges.composed import SCORES
from raypost.judges.function_child import FunctionSpec
from raypost.judges.function_process import LOAD_S, FunctionProcess
from raypost.types import RolloutState, Sample

MATH_FUNCTION = "raypost.judges.math_rule:score"
TRIAL_LOAD_S, TRIAL_S = 20.0, 10.0
"""Longest times that a trial takes to import a function, which may need torch, and to call it."""


class FunctionJudge:
    """Scores all states of a call with one function, in a process of its own."""

    def __init__(
        self,
        task: TaskConfig,
        config: JudgeConfig,
        on_retry: Callable[[], None] | None = None,
        load_s: float = LOAD_S,
    ) -> None:
        """Start nothing yet. `config`: the task's judge, or a part of it, of kind function or math."""
        self._task = task
        self._process = FunctionProcess(_spec(task, config, config.timeout_s), on_retry, load_s)

    async def judge(self, states: list[RolloutState]) -> list[float]:
        """Return one Score for each state. Raises JudgeError naming the group."""
        samples = [
            sample_of(self._task, state.metadata, state.response_text, state.prompt_ids, state.response_ids)
            for state in states
        ]
        try:
            return [*await self._process.call(samples)]
        except JudgeError as error:
            raise JudgeError(
                at(f"task {states[0].task!r}, group {states[0].group_id}", str(error))
            ) from error

    async def close(self) -> None:
        """End the function's process."""
        await self._process.close()


def _spec(task: TaskConfig, config: JudgeConfig, timeout_s: float) -> FunctionSpec:
    function = MATH_FUNCTION if config.kind == "math" else config.function
    assert function is not None, "the configuration requires it"
    return FunctionSpec(
        function=function,
        source=config.function_source,
        timeout_s=timeout_s,
        answer_field=task.source.answer_field or "answer",
        chat=task.chat,
    )


def sample_of(
    task: TaskConfig,
    metadata: dict[str, object],
    response: str,
    prompt_ids: np.ndarray,
    response_ids: np.ndarray,
) -> Sample:
    """Return what a judge of the user's sees of a response."""
    prompt, answer = prompt_text(task, metadata), metadata.get("answer")
    return Sample(
        prompt=prompt,
        response=response,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        answer=None if answer is None else str(answer),
        metadata=dict(metadata),
        turns=[*conversation(task, prompt, metadata), {"role": "assistant", "content": response}],
    )


def try_function(task: TaskConfig, config: JudgeConfig, prompts: Sequence[Prompt]) -> str | None:
    """Call the function for each prompt with two responses, its answer and an empty one; return what is wrong.

    One that combines the scores of parts is given zeros.

    Takes at most some TRIAL_LOAD_S and TRIAL_S, whatever the function does.
    """
    # A thread, because the caller may have a running event loop of its own.
    with ThreadPoolExecutor(1, "trial") as thread:
        return thread.submit(asyncio.run, _trial(task, config, prompts)).result()


async def _trial(task: TaskConfig, config: JudgeConfig, prompts: Sequence[Prompt]) -> str | None:
    process = FunctionProcess(_spec(task, config, min(config.timeout_s, TRIAL_S)), load_s=TRIAL_LOAD_S)
    no_ids = np.empty(0, np.int32)
    where = ""
    try:
        await process.start()
        async with asyncio.timeout(TRIAL_S):
            for number, prompt in enumerate(prompts, 1):
                where = f" (on prompt {number}, with its answer and with an empty response)"
                responses = (str(prompt.metadata.get("answer", "")), "")
                metadata = {
                    **prompt.metadata,
                    **({SCORES: dict.fromkeys(config.parts, 0.0)} if config.parts else {}),
                }
                samples = [sample_of(task, metadata, one, no_ids, no_ids) for one in responses]
                await process.call(samples)
    except JudgeError as error:
        return f"{error}{where}"
    except TimeoutError:
        return f"{config.function or config.kind} took longer than {TRIAL_S:g} s for {len(prompts)} prompts{where}"
    finally:
        await process.close()
    return None
