"""Cast: the actors of one run, as they are spawned: engines, ranks, agent loops, and what they run on.

Owns which actors there are, what each reserves, the placement groups, and their end. Owns no order of starting
(wiring.py does) and no deadline of a call (roles.py does).

    separate   engines   each where its resources are           ranks   one placement group, packed
    colocate   engine n and rank n (of trainer and critic) in bundle n of one placement group: one device
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors import placement
from actors.agent_loop import MANY, AgentLoopPool, AgentLoopWorker
from actors.judge import JudgeWorker
from actors.remote import Remote, RemotePool
from actors.rollout_controller import RolloutController
from actors.rollout_worker import EngineConfig, RolloutWorker
from actors.trainer import TrainerGroup
from actors.trainer_worker import CONCURRENCY_GROUPS, TrainerWorker
from raypost import plan
from raypost.config import Config
from raypost.resources import Bundle, shared_devices

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
        engine = EngineConfig.of(cfg)
        for n, bundle in enumerate(self._bundles(role)):
            ranks = parallel.get(bundle.pool, engine.tensor_parallel_size)
            workers[bundle.name] = self.add(
                RolloutWorker,
                bundle.name,
                model_path,
                replace(engine, tensor_parallel_size=ranks),
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
        """The ranks of the policy, and with them those of its critic if there is one; not started yet."""
        critic = None
        if critic_path is not None:
            config = self.cfg.model_copy(update={"train": self.cfg.train.for_critic})
            critic = TrainerGroup(await self._ranks("critic", config, critic_path), config)
        return TrainerGroup(await self._ranks("trainer", self.cfg, model_path), self.cfg, critic)

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

    def judges(self) -> RemotePool:
        """The judge actors, as one."""
        names = [bundle.name for bundle in self._bundles("judge")]
        for name in names:
            self.add(JudgeWorker, name, self.cfg.tasks, name=name, max_restarts=-1)
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
        await asyncio.gather(*(one.shutdown() for one in self.controllers.values()), return_exceptions=True)
        for handle in self.handles.values():
            ray.kill(handle)
        for gang in self.gangs:
            remove_placement_group(gang)
