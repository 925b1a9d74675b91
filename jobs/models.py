"""The models of a run as local folders. They are prepared in a task of its own, so that the driver stays small."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import ray

from actors.remote import within
from raypost.checkpoint import CHECKPOINTS, CheckpointDir
from raypost.config import Config, ModelConfig
from raypost.data.prompt import render
from raypost.data.task_source import check_source
from raypost.data.tokenizer import Tokenizer
from raypost.judges.reward_model import check_language_model, check_reward_model
from raypost.models.resolve import resolve_model
from raypost.plan.prompts import dropped_prompts
from raypost.types import IntArray


@dataclass(frozen=True, slots=True)
class Models:
    """Folders of a run's models, and the canary prompt."""

    policy: str
    critic: str | None
    rewards: dict[str, str]
    """Of the reward models, by name."""
    canary_ids: IntArray
    dropped: tuple[str, ...] = ()
    """What the tasks drop of their prompts, for the report."""


async def prepare_models(cfg: Config) -> Models:
    """Return all models as local folders; one that is not there yet is fetched or made."""
    ref = ray.remote(num_cpus=0)(_prepare).options(name="prepare-models").remote(cfg)
    models: Models = await within(ref, cfg.train.step_timeout_s, f"model {cfg.model.name} to be prepared")
    return models


def _prepare(cfg: Config) -> Models:
    def folder(model: ModelConfig) -> str:
        return str(resolve_model(model, cfg.seed, cfg.model.cache_dir.expanduser()))

    policy = folder(cfg.model)
    start, own = cfg.checkpoint.start_from, CheckpointDir(cfg.run_dir / CHECKPOINTS, 1, {})
    if start is not None and not own.steps():
        from raypost.trainer.start import check_start

        check_start(cfg, start, policy)
    critic = cfg.train.critic
    rewards = {one.name: folder(ModelConfig(name=one.model)) for one in cfg.reward_models}
    for one in cfg.reward_models:
        (check_language_model if one.generates else check_reward_model)(one, Path(rewards[one.name]))
    task = cfg.tasks[0]
    # A prompt as in training: on token ids put together at random a model's rounding errors are magnified.
    tokenizer = Tokenizer.load(policy)
    prompt = check_source(task, cfg.seed, tokenizer)[0]
    return Models(
        policy=policy,
        critic=(folder(ModelConfig(name=critic.name)) if critic.name else policy) if critic else None,
        rewards=rewards,
        canary_ids=render(prompt, tokenizer, task),
        dropped=tuple(dropped_prompts(cfg, tokenizer)),
    )
