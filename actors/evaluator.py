"""Evaluator: scores the policy on held-out problems, on the rollout pool's own engines.

Owns the held-out problems and the mean over them. It runs while production is paused: it opens the pool
for itself, and closes it again whatever happens. A response that failed is counted, never scored.
"""

from __future__ import annotations

import asyncio

from raypost.config import Config
from raypost.datasets import held_out, render
from raypost.metrics import SpanLog
from raypost.protocols import AgentLoop, RolloutControl
from raypost.task_config import TaskConfig
from raypost.tokenizer import Tokenizer
from raypost.types import EVALUATION_PRIORITY, Group, RolloutState, SampleParams, Span, Status

TRIES = 5
"""How often a group is run again after the pool was interrupted under it."""


class Evaluator:
    """Mean score over `eval.num_prompts` held-out problems a task, `eval.samples` responses each."""

    def __init__(
        self, config: Config, model_path: str, agent_loop: AgentLoop, control: RolloutControl
    ) -> None:
        self._config, self._agent_loop, self._control = config, agent_loop, control
        self._tokenizer = Tokenizer.load(model_path)
        self._spans = SpanLog("evaluator")
        self._groups = {task.name: self._held_out_groups(task) for task in config.tasks}

    def __repr__(self) -> str:
        return "evaluator"

    def _held_out_groups(self, task: TaskConfig) -> list[Group]:
        prompts = held_out(task, self._config.seed, self._config.eval.num_prompts)
        params = SampleParams(
            max_tokens=task.max_tokens,
            temperature=self._config.eval.temperature,
            stop_token_ids=self._tokenizer.eos_ids,
        )
        groups: list[Group] = []
        for n, prompt in enumerate(prompts):
            states = [
                RolloutState(
                    task=task.name,
                    group_id=n,
                    sample_index=i,
                    prompt_ids=render(prompt, self._tokenizer, task),
                    sample_params=params,
                    metadata=prompt.metadata,
                    priority=EVALUATION_PRIORITY,
                )
                for i in range(self._config.eval.samples)
            ]
            groups.append(Group(task=task.name, group_id=n, states=states))
        return groups

    async def evaluate(self, version: int) -> dict[str, float]:
        """Score the pool at `version`: `held_out` over all tasks, `held_out/<task>`, `eval_tokens_mean`,
        `eval_failed` (responses without a score). Production must be paused."""
        with self._spans.span("evaluate"):
            await self._control.resume(version)
            try:
                done = {
                    name: await asyncio.gather(*(self._run(group) for group in groups))
                    for name, groups in self._groups.items()
                }
            finally:
                await self._control.pause()
        return _scores(done)

    async def _run(self, group: Group) -> Group:
        for _ in range(TRIES):
            group = await self._agent_loop.run(group)
            if group.status is not Status.ABORTED:
                break
        return group

    async def drain_spans(self) -> list[Span]:
        """Evaluations since the last call."""
        return self._spans.drain()


def _scores(done: dict[str, list[Group]]) -> dict[str, float]:
    scores: dict[str, float] = {}
    rewards_of_all: list[float] = []
    tokens, failed = 0, 0
    for name, groups in done.items():
        states = [state for group in groups for state in group.states]
        rewards = [s.reward for s in states if s.status is Status.COMPLETED and s.reward is not None]
        failed += len(states) - len(rewards)
        tokens += sum(state.num_tokens for state in states)
        rewards_of_all += rewards
        if rewards:
            scores[f"held_out/{name}"] = sum(rewards) / len(rewards)
    if rewards_of_all:
        scores["held_out"] = sum(rewards_of_all) / len(rewards_of_all)
        scores["eval_tokens_mean"] = tokens / (len(rewards_of_all) + failed)
    scores["eval_failed"] = float(failed)
    return scores
