"""The judge that a task's configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from raypost.config import JudgeConfig, TaskConfig
from raypost.data.gym import gym_dataset
from raypost.errors import ConfigError
from raypost.judges.code import CodeJudge
from raypost.judges.composed import ComposedJudge
from raypost.judges.function import FunctionJudge
from raypost.judges.generative import GenerativeJudge, LanguageModel
from raypost.judges.reward_model import RewardModel, RewardModelJudge
from raypost.judges.rules import RuleJudge, exact
from raypost.judges.service import HttpJudge
from raypost.types import Judge


class Closed(Protocol):
    """A judge with processes or connections of its own."""

    async def close(self) -> None:
        """End them."""
        ...


def build_judge(
    task: TaskConfig,
    reward_models: Mapping[str, RewardModel] | None = None,
    language_models: Mapping[str, LanguageModel] | None = None,
    on_retry: Callable[[], None] | None = None,
    to_close: list[Closed] | None = None,
) -> Judge:
    """Return the judge of `task`. Raises ConfigError for an unknown reasoning-gym dataset or reward model.

    `on_retry` is told of each call that is made once more. The judges that have something to close are appended to
    `to_close`.
    """
    made = to_close if to_close is not None else []

    def functions(config: JudgeConfig) -> FunctionJudge:
        made.append(judge := FunctionJudge(task, config, on_retry))
        return judge

    def build(config: JudgeConfig, place: str) -> Judge:
        if config.kind == "composed":
            parts = {n: (part.weight, build(part, f"{place}.parts.{n}")) for n, part in config.parts.items()}
            combine = functions(config) if config.combine == "function" else None
            return ComposedJudge(parts, config.combine, function=combine, route_by=config.route_by)
        if config.kind in ("function", "math"):
            return functions(config)
        if config.kind == "http":
            made.append(service := HttpJudge(task, config, on_retry))
            return service
        if config.kind == "generative":
            speaker = (language_models or {}).get(config.reward_model or "")
            if speaker is None:
                raise _unknown(task, place, config, language_models)
            return GenerativeJudge(speaker, task, config, on_retry)
        if config.kind == "code":
            return CodeJudge(config)
        if config.kind == "reward_model":
            model = (reward_models or {}).get(config.reward_model or "")
            if model is None:
                raise _unknown(task, place, config, reward_models)
            return RewardModelJudge(model, task, config.reward_model or "")
        if config.kind == "exact":
            return RuleJudge(exact, config.answer_pattern)
        dataset = gym_dataset(task.source, seed=0, part=0)
        return RuleJudge(
            lambda answer, metadata: dataset.score_answer(answer, metadata["entry"]), config.answer_pattern
        )

    return build(task.judge, "judge")


def _unknown(
    task: TaskConfig, place: str, config: JudgeConfig, models: Mapping[str, object] | None
) -> ConfigError:
    return ConfigError(
        f"task {task.name!r}: {place}.reward_model is {config.reward_model!r}, but there are {sorted(models or {})}: "
        "name one of reward_models"
    )
