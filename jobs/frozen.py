"""The engines of a run whose weights never change: of reward models, and of a reference.

Owns which workers they are, and how they are asked. Actors are added by the launcher's `add`, which ends them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ray.actor import ActorHandle

from actors.frozen.language_model import LanguageModelPool, LanguageModelWorker
from actors.frozen.reference import ReferenceGroup, ReferenceWorker
from actors.frozen.reward_model import RewardModelPool, RewardModelWorker, reward_engine
from jobs.models import Models
from raypost.config import Config
from raypost.config.engine import EngineConfig
from raypost.plan.cluster import Bundle

Add = Callable[..., ActorHandle]
"""Starts an actor where its bundle says: (class, bundle, arguments behind its name)."""


def reference_group(
    cfg: Config, models: Models, bundles: Sequence[Bundle], add: Add
) -> ReferenceGroup | None:
    """Return the engines of the reference, where it has some; not started yet."""
    if cfg.train.loss.kl.pool is None:
        return None
    engine = EngineConfig.of(cfg, cfg.train.loss.kl.pool)
    workers = [add(ReferenceWorker, bundle, models.policy, engine, cfg) for bundle in bundles]
    return ReferenceGroup(workers, cfg.rollout.start_timeout_s, cfg.train.step_timeout_s)


def reward_pools(
    cfg: Config, models: Models, bundles: Sequence[Bundle], add: Add
) -> tuple[dict[str, RewardModelPool], list[ActorHandle]]:
    """Return the reward models that score, and the workers of all, not started yet; see `speakers` for the others."""
    pools: dict[str, RewardModelPool] = {}
    workers: list[ActorHandle] = []
    for model in cfg.reward_models:
        own = [bundle for bundle in bundles if bundle.pool == model.name]
        path, engine = models.rewards[model.name], reward_engine(cfg, model)
        kind = LanguageModelWorker if model.generates else RewardModelWorker
        workers += [add(kind, bundle, path, engine) for bundle in own]
        if not model.generates:
            # Before the judge's own deadline, which does not know what it waits for.
            timeout_s = cfg.rollout.request_timeout_s
            pools[model.name] = RewardModelPool([bundle.name for bundle in own], timeout_s)
    return pools, workers


def speakers(cfg: Config, bundles: Sequence[Bundle]) -> dict[str, LanguageModelPool]:
    """Return the way to each frozen model that generates."""
    timeout_s = cfg.rollout.request_timeout_s
    return {
        model.name: LanguageModelPool([b.name for b in bundles if b.pool == model.name], timeout_s)
        for model in cfg.reward_models
        if model.generates
    }
