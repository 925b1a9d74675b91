"""Launcher: starts the actors of one run and ends them. A new role gets its method here.

Owns which actors there are, what each reserves and is given, the placement groups, and their end. Owns no order of
starting (wiring.py does) and nothing of what the driver does with a role (roles.py does).

    separate   engines   each where its resources are           ranks   one placement group, packed
    colocate   engine n and rank n (of trainer and critic) in bundle n of one placement group: one device
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, TypeVar

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors import placement
from actors.agent_loop import MANY, AgentLoopPool, AgentLoopWorker
from actors.evaluator import Evaluator
from actors.frozen.language_model import LanguageModelPool, LanguageModelWorker
from actors.frozen.reference import ReferenceGroup, ReferenceWorker
from actors.frozen.reward_model import RewardModelPool, RewardModelWorker, reward_engine
from actors.judge import JudgeWorker
from actors.producer import ProducerActor
from actors.remote import RemotePool, remote, within
from actors.replay_buffer import ReplayBufferActor, remote_buffer
from actors.rollout.controller import RolloutController
from actors.rollout.routing import router_to
from actors.rollout.worker import RolloutWorker
from actors.telemetry.recorder import Telemetry
from actors.training.broadcaster import WeightBroadcaster
from actors.training.folder_weights import FolderWeights
from actors.training.group import TrainerGroup
from actors.training.worker import CONCURRENCY_GROUPS, TrainerWorker
from jobs.models import Models
from raypost.config import Config
from raypost.config.engine import EngineConfig
from raypost.config.judges import POLICY
from raypost.judges.generative import LanguageModel, PolicyModel
from raypost.packed import PackedGroups
from raypost.plan import plan
from raypost.plan.cluster import Bundle, shared_devices
from raypost.production.build import buffer_bounds, task_limits
from raypost.protocols import (
    BroadcasterRole,
    Buffer,
    EvaluatorRole,
    Judge,
    ProducerRole,
    RolloutPool,
    TelemetryRole,
    WeightSource,
)
from raypost.types import Ref

P = ParamSpec("P")
R = TypeVar("R")
log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0
"""Deadline of small calls between roles."""
RESTART_TRIES = 8
"""How often a call to an actor that may be restarting is made: some 14 s in all."""
PRODUCTION = "rollout-controller"
EVALUATION = "evaluation-controller"
WATCHED = (
    PRODUCTION,
    "producer",
    "weight-broadcaster",
    "evaluator",
    "evaluation-broadcaster",
    "judge-",
    "trainer-",
    "critic-",
    "reference-",
)
"""Names of the actors that telemetry asks for spans, statistics and counts."""


@dataclass
class Launcher:
    """The actors started so far. As a context it ends them all."""

    cfg: Config
    models: Models
    started_s: float = field(default_factory=time.time)
    _handles: dict[str, ActorHandle] = field(default_factory=dict)
    _placement_groups: list[PlacementGroup] = field(default_factory=list)
    _devices: PlacementGroup | None = None
    """The bundles that engines and ranks share."""
    _pools: dict[str, RolloutPool] = field(default_factory=dict)
    _reward_workers: list[ActorHandle] = field(default_factory=list)
    _judges: list[ActorHandle] = field(default_factory=list)
    _trainer: TrainerGroup | None = None

    async def __aenter__(self) -> Self:
        """Return itself; actors are started by the methods."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let engines and ranks end in their own way, within deadlines; kill what is left; free the resources."""
        ending = [pool.shutdown() for pool in self._pools.values()]
        ending += [
            within(worker.shutdown.remote(), CALL_TIMEOUT_S, f"{worker} to end")
            for worker in (*self._reward_workers, *self._judges)
        ]
        if self._trainer is not None:
            ending.append(self._trainer.shutdown())
        for outcome in await asyncio.gather(*ending, return_exceptions=True):
            if isinstance(outcome, BaseException):
                log.warning("what did not end by itself is killed: %s", outcome)
        for handle in self._handles.values():
            ray.kill(handle)
        for group in self._placement_groups:
            remove_placement_group(group)

    # ---------------------------------------------------------------- engines

    async def share_devices(self) -> None:
        """Reserve the devices that engines and ranks share, where they do."""
        if devices := shared_devices(self.cfg):
            self._devices = await self._reserve(devices, "devices")

    def rollout_pool(self, *, evaluation: bool = False) -> RolloutPool:
        """Return the pool of the rollout workers, or of those that are evaluation's own; not started yet."""
        cfg = self.cfg
        name = EVALUATION if evaluation else PRODUCTION
        pools = {pool.name: pool for pool in (*cfg.rollout.pools, cfg.eval.pool) if pool is not None}
        workers = {
            bundle.name: self._add(
                RolloutWorker,
                bundle.name,
                self.models.policy,
                EngineConfig.of(cfg, pools.get(bundle.pool)),
                n,
                name=bundle.name,
                resources=bundle.resources,
                max_restarts=-1,
                **self._place(bundle),
            )
            for n, bundle in enumerate(self._bundles("evaluation_worker" if evaluation else "rollout_worker"))
        }
        # Not started again: which version its workers hold would be forgotten.
        self._add(RolloutController, workers, cfg.rollout, cfg.sync.timeout_s, name=name)
        self._pools[name] = remote(name, RolloutPool, timeout_s=cfg.sync.timeout_s)
        return self._pools[name]

    async def start_engines(self) -> list[object]:
        """Start the engines of all pools and reward models; returns what each says about itself."""
        pools = asyncio.gather(*(pool.start() for pool in self._pools.values()))
        rewards = asyncio.gather(*(worker.start.remote() for worker in self._reward_workers))
        of_pools, of_rewards = await asyncio.gather(pools, rewards)
        return [*itertools.chain(*of_pools), *of_rewards]

    def _place(self, bundle: Bundle) -> dict[str, Any]:
        if self._devices is None or bundle.shares is None:
            return {}
        return {"group": self._devices, "bundle": bundle.shares}

    def _frozen(self, cls: type, bundle: Bundle, *args: Any) -> ActorHandle:
        """Add a worker whose engine's weights never change."""
        return self._add(
            cls, bundle.name, *args, name=bundle.name, resources=bundle.resources, max_restarts=-1
        )

    # ---------------------------------------------------------------- training

    async def trainer(self) -> TrainerGroup:
        """Return the ranks of the policy, with its critic and its reference's engines; not started yet."""
        critic = None
        if self.models.critic is not None:
            config = self.cfg.model_copy(update={"train": self.cfg.train.for_critic})
            critic = TrainerGroup(await self._ranks("critic", config, self.models.critic), config)
        ranks = await self._ranks("trainer", self.cfg, self.models.policy)
        self._trainer = TrainerGroup(ranks, self.cfg, critic, self._reference())
        return self._trainer

    async def _ranks(
        self, kind: Literal["trainer", "critic"], config: Config, model_path: str
    ) -> list[ActorHandle]:
        bundles = self._bundles(f"{kind}_worker")
        group = self._devices or await self._reserve([b.resources for b in bundles], kind)
        return [
            self._add(
                TrainerWorker,
                config,
                model_path,
                rank,
                "critic" if kind == "critic" else "policy",
                name=bundle.name,
                resources=bundle.resources,
                concurrency_groups=CONCURRENCY_GROUPS,
                group=group,
                bundle=rank,
            )
            for rank, bundle in enumerate(bundles)
        ]

    def _reference(self) -> ReferenceGroup | None:
        cfg = self.cfg
        if cfg.train.loss.kl.pool is None:
            return None
        engine = EngineConfig.of(cfg, cfg.train.loss.kl.pool)
        workers = [
            self._frozen(ReferenceWorker, bundle, self.models.policy, engine, cfg)
            for bundle in self._bundles("reference_worker")
        ]
        return ReferenceGroup(workers, cfg.rollout.start_timeout_s, cfg.train.step_timeout_s)

    def folder_weights(self) -> WeightSource:
        """Return the weights of the policy's folder, in place of a trainer."""
        self._add(FolderWeights, self.cfg, self.models.policy, name="folder-weights")
        return remote("folder-weights", WeightSource, timeout_s=self.cfg.train.step_timeout_s)

    def broadcaster(
        self, weights: WeightSource, pool: RolloutPool, *, evaluation: bool = False
    ) -> BroadcasterRole:
        """Return the broadcaster of `weights` into `pool`."""
        cfg = self.cfg
        return self._role(
            BroadcasterRole,
            cfg.sync.timeout_s + cfg.train.step_timeout_s,
            "evaluation-broadcaster" if evaluation else "weight-broadcaster",
            WeightBroadcaster,
            weights,
            pool,
            cfg.sync,
            self.models.canary_ids,
            cfg.placement == "colocate",
        )

    # ---------------------------------------------------------------- production and evaluation

    def judges(self) -> Judge:
        """Return the judges as one, with the reward models that they ask; those are not started yet."""
        reward_models, own = self._reward_models()
        language_models: dict[str, LanguageModel] = {**own}
        if self.cfg.policy_judges:
            timeout_s = self.cfg.rollout.request_timeout_s
            generator = router_to(PRODUCTION, timeout_s)
            policy = PolicyModel(generator, self.models.policy, self.cfg.engine_model_len, timeout_s)
            language_models[POLICY] = policy
        names = [bundle.name for bundle in self._bundles("judge")]
        for name in names:
            judge = self._add(
                JudgeWorker, name, self.cfg.tasks, reward_models, language_models, name=name, max_restarts=-1
            )
            self._judges.append(judge)
        return remote(names, Judge, timeout_s=self._request_s, many=MANY)

    def _reward_models(self) -> tuple[dict[str, RewardModelPool], dict[str, LanguageModelPool]]:
        pools, speakers = {}, {}
        for model in self.cfg.reward_models:
            bundles = [b for b in self._bundles("reward_worker") if b.pool == model.name]
            engine = reward_engine(self.cfg, model)
            for bundle in bundles:
                path = self.models.rewards[model.name]
                kind = LanguageModelWorker if model.generates else RewardModelWorker
                self._reward_workers.append(self._frozen(kind, bundle, path, engine))
            # Before the judge's own deadline, which does not know what it waits for.
            timeout_s = self.cfg.rollout.request_timeout_s
            names = [b.name for b in bundles]
            if model.generates:
                speakers[model.name] = LanguageModelPool(names, timeout_s)
            else:
                pools[model.name] = RewardModelPool(names, timeout_s)
        return pools, speakers

    def agents(self, judge: Judge, *, evaluation: bool = False) -> AgentLoopPool:
        """Return the agent loops as one, on the pool of the rollout workers or on evaluation's own."""
        controller = EVALUATION if evaluation else PRODUCTION
        generator = router_to(controller, self.cfg.rollout.request_timeout_s)
        names = ["evaluation-loop"] if evaluation else [b.name for b in self._bundles("agent_loop")]
        for name in names:
            self._add(
                AgentLoopWorker,
                name,
                self.cfg,
                self.models.policy,
                generator,
                judge,
                name=name,
                max_restarts=-1,
            )
        return AgentLoopPool(RemotePool(names, 2 * self._request_s, many=MANY))

    def buffer(self) -> Buffer[Ref[PackedGroups]]:
        """Return the replay buffer; it survives its process where it keeps a journal."""
        cfg = self.cfg
        self._add(
            ReplayBufferActor,
            task_limits(cfg),
            buffer_bounds(cfg),
            str((cfg.run_dir / "buffer").resolve()) if cfg.buffer.journal else None,
            uuid.uuid4().hex,
            name="replay-buffer",
            max_restarts=-1 if cfg.buffer.journal else 0,
        )
        return remote_buffer("replay-buffer", timeout_s=CALL_TIMEOUT_S, tries=RESTART_TRIES)

    def producer(
        self, agents: AgentLoopPool, buffer: Buffer[Ref[PackedGroups]], pool: RolloutPool
    ) -> ProducerRole:
        """Return the producer."""
        cfg = self.cfg
        self._add(ProducerActor, cfg, self.models.policy, agents, buffer, pool, name="producer")
        take_s = cfg.take_timeout_s + cfg.rollout.pause_timeout_s
        return remote(
            "producer",
            ProducerRole,
            timeout_s=2 * cfg.rollout.pause_timeout_s + 2 * CALL_TIMEOUT_S,
            timeouts_s={"run": None, "take_batch": take_s, "produce_batch": take_s},
        )

    def evaluator(self, agents: AgentLoopPool, pool: RolloutPool) -> EvaluatorRole:
        """Return the evaluator."""
        cfg = self.cfg
        timeout_s = cfg.eval.timeout_s + CALL_TIMEOUT_S
        return self._role(
            EvaluatorRole, timeout_s, "evaluator", Evaluator, cfg, self.models.policy, agents, pool
        )

    def telemetry(self) -> TelemetryRole:
        """Return the telemetry of the actors started so far."""
        watched = {name: handle for name, handle in self._handles.items() if name.startswith(WATCHED)}
        if self.cfg.eval.pool is not None:
            # Its time is not the run's: production goes on meanwhile.
            del watched["evaluator"]
        return self._role(
            TelemetryRole,
            CALL_TIMEOUT_S,
            "telemetry",
            Telemetry,
            self.cfg,
            watched,
            self.started_s,
            self.models.policy,
            self.models.dropped,
        )

    # ---------------------------------------------------------------- what all of them use

    def _role(
        self,
        role: type[R],
        timeout_s: float,
        name: str,
        cls: Callable[P, R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Start an actor that needs no device and can begin anew, and return it as its role.

        If it dies it is started again, and the call that met its death is made again: its calls are idempotent.
        """
        self._add(cls, *args, name=name, max_restarts=-1, **kwargs)
        return remote([name], role, timeout_s=timeout_s, tries=RESTART_TRIES)

    def _add(self, cls: Callable[..., object], *args: Any, name: str, **options: Any) -> ActorHandle:
        self._handles[name] = placement.spawn(cls, *args, name=name, **options)
        return self._handles[name]

    async def _reserve(self, bundles: list[dict[str, float]], name: str) -> PlacementGroup:
        group = await placement.reserve(bundles, name, self.cfg.rollout.start_timeout_s)
        self._placement_groups.append(group)
        return group

    def _bundles(self, role: str) -> list[Bundle]:
        return [bundle for bundle in plan.bundles(self.cfg) if bundle.role == role]

    @property
    def _request_s(self) -> float:
        return self.cfg.rollout.request_timeout_s + CALL_TIMEOUT_S
