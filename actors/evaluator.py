"""Evaluator: scores one version of the weights on held-out problems.

Owns the held-out problems, when the pool is open for them, and the check that every scored token came from the version
asked for; the statistics are in raypost/report/eval_statistics.py. The pool and the agent loop are given:
production's own, which must then be paused, or a pool for evaluation alone, while production goes on. Nothing here
differs between the two.

Invariants: the pool serves the evaluator during `evaluate` only, and is paused again whatever happens; a score comes
from one version; one evaluation runs at a time.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
from collections import defaultdict

from raypost.config import Config, TaskConfig
from raypost.data.prompt import render
from raypost.data.task_source import evaluation_prompts
from raypost.data.tokenizer import Tokenizer
from raypost.errors import RaypostError, StaleWeightsError, WaitTimeoutError
from raypost.observe.metrics import EVAL_TOKENS_MEAN
from raypost.observe.spans import EVALUATE, Span, SpanLog
from raypost.observe.waits import waiting
from raypost.production.verdict import played_again
from raypost.report.eval_statistics import Rewards, scores
from raypost.types import (
    EVALUATION_PRIORITY,
    NO_VERSION,
    AgentLoop,
    Group,
    RolloutControl,
    RolloutState,
    SampleParams,
    Status,
)

log = logging.getLogger(__name__)

TRIES = 5
"""How often a group is run again after the pool was interrupted under it."""
NAMED = 4
"""How many groups the error of a late evaluation names at most."""


class Evaluator:
    """Scores `eval.samples` responses to each of `eval.num_prompts` held-out problems of every task."""

    def __init__(
        self, config: Config, model_path: str, agent_loop: AgentLoop, control: RolloutControl
    ) -> None:
        """`model_path`: a folder with the tokenizer. `control`: the pool that `agent_loop` generates at."""
        self._config = config
        self._agent_loop = agent_loop
        self._control = control
        self._tokenizer = Tokenizer.load(model_path)
        self._spans = SpanLog("evaluator")
        self._groups = [group for task in config.tasks for group in self._held_out_groups(task)]
        self._max_retries = {task.name: task.strategy.max_retries for task in config.tasks}
        self._running: int | None = None

    def __repr__(self) -> str:
        """Return the role's name."""
        return "evaluator"

    def _held_out_groups(self, task: TaskConfig) -> list[Group]:
        options = self._config.eval
        if options.num_prompts == 0:
            return []
        params = SampleParams(
            max_tokens=task.max_tokens,
            temperature=options.temperature,
            stop_token_ids=task.stop_ids(self._tokenizer.eos_ids),
            min_tokens=task.min_tokens,
        )
        groups = []
        prompts = evaluation_prompts(self._config, task, options.num_prompts, self._tokenizer)
        # Below 0, where no group of training is: agent loops park and close episodes by these numbers.
        for n, prompt in zip(itertools.count(-1, -1), prompts):
            prompt_ids = render(prompt, self._tokenizer, task)
            states = [
                RolloutState(
                    task=task.name,
                    group_id=n,
                    sample_index=i,
                    prompt_ids=prompt_ids,
                    sample_params=params,
                    metadata=prompt.metadata,
                    priority=EVALUATION_PRIORITY,
                )
                for i in range(options.samples)
            ]
            groups.append(Group(task=task.name, group_id=n, states=states))
        return groups

    async def evaluate(self, version: int) -> dict[str, float]:
        """Score the pool, which holds `version` and is paused; return metrics by name.

        They are those of `raypost.report.eval_statistics.scores`, and `eval_tokens_mean`.

        Raises StaleWeightsError if a token came from another version, WaitTimeoutError naming the groups that are
        not done after `eval.timeout_s`, RaypostError while another evaluation runs.
        """
        if self._running is not None:
            raise RaypostError(
                f"the evaluation of version {version} was asked for while that of version {self._running} goes on: "
                "wait for it"
            )
        self._running = version
        try:
            with self._spans.span(EVALUATE):
                try:
                    await self._control.resume(version)
                    groups = await self._run_all(version)
                finally:
                    await self._control.pause()
        finally:
            self._running = None
        _check_versions(version, groups)
        return scores(_rewards(groups), self._config.eval) | _lengths(groups)

    async def _run_all(self, version: int) -> list[Group]:
        """Run all groups to their end. Raises the first failure at once."""
        timeout_s = self._config.eval_timeout_s
        # What waits for its turn has not begun: the deadline of a group begins when it can play.
        turns = {
            task.name: asyncio.Semaphore(self._config.evaluated_at_once(task)) for task in self._config.tasks
        }
        runs = {asyncio.create_task(self._run(copy.deepcopy(g), turns[g.task])): g.key for g in self._groups}
        if not runs:
            return []
        try:
            with waiting(f"{len(runs)} groups of an evaluation", timeout_s):
                done, late = await asyncio.wait(runs, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            for run in done:
                run.result()
            if late:
                names = [f"{task}/{group}" for task, group in sorted(runs[run] for run in late)]
                more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
                raise WaitTimeoutError(
                    f"the evaluation of version {version} waited {timeout_s:.0f} s (eval.timeout_s) for "
                    f"{len(late)} of {len(runs)} groups: {', '.join(names[:NAMED])}{more}; raise it, or evaluate fewer "
                    "prompts"
                )
            return [run.result() for run in runs]
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)

    async def _run(self, group: Group, turns: asyncio.Semaphore) -> Group:
        """Run one group; a member that failed is played again as often as in production, its siblings keep theirs."""
        async with turns:
            group = await self._uninterrupted(group)
            for retry in range(self._max_retries[group.task]):
                if all(state.status is not Status.FAILED for state in group.states):
                    break
                log.info("task %r, group %d: what failed is evaluated again (%d)", *group.key, retry + 1)
                group.states = [state for member in group.members for state in played_again(member)]
                group = await self._uninterrupted(group)
        return group

    async def _uninterrupted(self, group: Group) -> Group:
        for _ in range(TRIES):
            group = await self._agent_loop.run(group)
            if group.status is not Status.ABORTED:
                break
        return group

    async def drain_spans(self) -> list[Span]:
        """Return the evaluations since the last call."""
        return self._spans.drain()


def _check_versions(version: int, groups: list[Group]) -> None:
    for group in groups:
        for state in group.states:
            others = {int(v) for v in state.policy_versions} - {version, NO_VERSION}
            if others:
                raise StaleWeightsError(
                    f"the evaluation of version {version} got tokens of version {min(others)} from {state.worker} "
                    f"(task {state.task!r}, group {state.group_id}, sample {state.sample_index}): such a "
                    "score would be of no version; nothing may load weights while an evaluation runs"
                )


def _rewards(groups: list[Group]) -> dict[str, Rewards]:
    rewards: dict[str, list[list[float | None]]] = defaultdict(list)
    for group in groups:
        last = [member[-1] for member in group.members]
        rewards[group.task].append([s.reward if s.status is Status.COMPLETED else None for s in last])
    return dict(rewards)


def _lengths(groups: list[Group]) -> dict[str, float]:
    counts = [sum(state.num_tokens for state in member) for group in groups for member in group.members]
    return {EVAL_TOKENS_MEAN: sum(counts) / len(counts)} if counts else {}
