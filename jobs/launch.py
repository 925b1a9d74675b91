"""Cast: the actors of one run, as they are spawned: engines, ranks, agent loops, and what they run on.

Owns which actors there are, what each reserves, the placement groups, and their end. Owns no order of starting
(wiring.py does) and no deadline of a call (roles.py does).

    separate   engines   each where its resources are           ranks   one placement group, packed
    colocate   engine n and rank n (of trainer and critic) in bundle n of one placement group: one device
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors import placement
from actors.agent_loop import MANY, AgentLoopPool, AgentLoopWorker
from actors.frozen.reference import ReferenceGroup, ReferenceWorker, reference_engine
from actors.frozen.reward_model import RewardModelPool, RewardModelWorker, reward_engine
from actors.judge import JudgeWorker
from actors.remote import Remote, RemotePool, within
from actors.rollout.controller import RolloutController
from actors.rollout.worker import RolloutWorker
from actors.training.group import TrainerGroup
from actors.training.worker import CONCURRENCY_GROUPS, TrainerWorker
from raypost.config import Config
from raypost.config.engine import EngineConfig
from raypost.plan import plan
from raypost.plan.cluster import Bundle, shared_devices

CALL_TIMEOUT_S = 60.0
"""Deadline of small calls between roles."""


@dataclass
class Cast:
    """What was started so far."""

    cfg: Config
    handles: dict[str, ActorHandle] = field(default_factory=dict)
    gangs: list[PlacementGroup] = field(default_factory=list)
    controllers: dict[str, Remote] = field(default_factory=dict)
    """Of the pools of engines."""
    frozen: dict[str, ActorHandle] = field(default_factory=dict)
    """Workers of reward models and of the reference."""
    started_s: float = field(default_factory=time.time)
    _devices: PlacementGroup | None = None
    """The bundles that engines and ranks share."""

    def add(self, cls: type, *args: Any, name: str, **options: Any) -> ActorHandle:
        """Spawn one actor and remember to end it."""
        self.handles[name] = placement.spawn(cls, *args, name=name, **options)
        return self.handles[name]

    async def reserve(self, bundles: list[dict[str, float]], name: str) -> PlacementGroup:
        """A placement group of this run."""
        gang = await placement.reserve(bundles, name, self.cfg.rollout.start_timeout_s)
        self.gangs.append(gang)
        return gang

    async def share_devices(self) -> None:
        """Reserve what engines and ranks share; nothing where each has its own."""
        if devices := shared_devices(self.cfg):
            self._devices = await self.reserve(devices, "devices")

    def engines(self, role: str, controller: str, model_path: str) -> Remote:
        """The workers of a role and the controller of their pool, not started yet."""
        cfg, workers = self.cfg, {}
        parallel = {pool.name: pool.tensor_parallel_size for pool in cfg.rollout.pools}
        if cfg.eval.pool is not None:
            parallel[cfg.eval.pool.name] = cfg.eval.pool.tensor_parallel_size
        for n, bundle in enumerate(self._bundles(role)):
            ranks = parallel.get(bundle.pool, cfg.rollout.tensor_parallel_size)
            workers[bundle.name] = self.add(
                RolloutWorker,
                bundle.name,
                model_path,
                EngineConfig.of(cfg, tensor_parallel_size=ranks),
                n,
                name=bundle.name,
                resources=bundle.resources,
                max_restarts=-1,
                **self._place(bundle),
            )
        self.add(RolloutController, workers, cfg.rollout, cfg.sync.timeout_s, name=controller)
        self.controllers[controller] = Remote(controller, cfg.sync.timeout_s)
        return self.controllers[controller]

    async def trainer(self, model_path: str, critic_path: str | None) -> TrainerGroup:
        """The ranks of the policy, and with them its critic and its reference's engines; not started yet."""
        critic, reference = None, self._reference(model_path)
        if critic_path is not None:
            config = self.cfg.model_copy(update={"train": self.cfg.train.for_critic})
            critic = TrainerGroup(await self._ranks("critic", config, critic_path), config)
        return TrainerGroup(await self._ranks("trainer", self.cfg, model_path), self.cfg, critic, reference)

    async def _ranks(self, kind: str, config: Config, model_path: str) -> list[ActorHandle]:
        bundles = self._bundles(f"{kind}_worker")
        gang = self._devices or await self.reserve([b.resources for b in bundles], kind)
        return [
            self.add(
                TrainerWorker,
                config,
                model_path,
                rank,
                "critic" if kind == "critic" else "policy",
                name=bundle.name,
                resources=bundle.resources,
                concurrency_groups=CONCURRENCY_GROUPS,
                group=gang,
                bundle=rank,
            )
            for rank, bundle in enumerate(bundles)
        ]

    def _reference(self, model_path: str) -> ReferenceGroup | None:
        cfg = self.cfg
        if cfg.train.loss.kl.pool is None:
            return None
        engine = reference_engine(cfg, cfg.train.loss.kl.pool)
        workers = [
            self._frozen(ReferenceWorker, bundle, model_path, engine, cfg)
            for bundle in self._bundles("reference_worker")
        ]
        return ReferenceGroup(workers, cfg.rollout.start_timeout_s, cfg.train.step_timeout_s)

    def reward_models(self, paths: Mapping[str, str]) -> dict[str, RewardModelPool]:
        """The engines of each reward model as one, not started yet. `paths`: their folders by name."""
        pools, bundles = {}, self._bundles("reward_worker")
        for model in self.cfg.reward_models:
            own, engine = [b for b in bundles if b.pool == model.name], reward_engine(self.cfg, model)
            for bundle in own:
                self._frozen(RewardModelWorker, bundle, paths[model.name], engine)
            # Before the judge's own deadline, which does not know what it waits for.
            timeout_s = self.cfg.rollout.request_timeout_s
            pools[model.name] = RewardModelPool([b.name for b in own], timeout_s)
        return pools

    def _frozen(self, cls: type, bundle: Bundle, *args: Any) -> ActorHandle:
        """A worker whose engine's weights never change."""
        self.frozen[bundle.name] = self.add(
            cls, bundle.name, *args, name=bundle.name, resources=bundle.resources, max_restarts=-1
        )
        return self.frozen[bundle.name]

    def judges(self, reward_models: Mapping[str, RewardModelPool]) -> RemotePool:
        """The judge actors, as one."""
        names = [bundle.name for bundle in self._bundles("judge")]
        for name in names:
            self.add(JudgeWorker, name, self.cfg.tasks, reward_models, name=name, max_restarts=-1)
        return RemotePool(names, self._request_s, many=MANY)

    def agents(self, names: list[str], model_path: str, controller: str, judge: RemotePool) -> AgentLoopPool:
        """Agent loops of those names, which generate at the pool of `controller`, as one."""
        generator = Remote(controller, self._request_s, many=MANY)
        for name in names:
            self.add(
                AgentLoopWorker, name, self.cfg, model_path, generator, judge, name=name, max_restarts=-1
            )
        return AgentLoopPool(RemotePool(names, 2 * self._request_s, many=MANY))

    @property
    def _request_s(self) -> float:
        return self.cfg.rollout.request_timeout_s + CALL_TIMEOUT_S

    def _bundles(self, role: str) -> list[Bundle]:
        return [bundle for bundle in plan.bundles(self.cfg) if bundle.role == role]

    def _place(self, bundle: Bundle) -> dict[str, Any]:
        if self._devices is None or bundle.shares is None:
            return {}
        return {"group": self._devices, "bundle": bundle.shares}

    async def end(self) -> None:
        """Ask the engines to end, then end all actors and give their resources back."""
        ending = [one.shutdown() for one in self.controllers.values()]
        ending += [
            within(handle.shutdown.remote(), CALL_TIMEOUT_S, f"{name} to end")
            for name, handle in self.frozen.items()
        ]
        await asyncio.gather(*ending, return_exceptions=True)
        for handle in self.handles.values():
            ray.kill(handle)
        for gang in self.gangs:
            remove_placement_group(gang)
