"""Launcher: starts the actors of one run and ends them. A new role gets its method here.

Owns which actors there are, what each is given, and their end. Owns no order of starting (wiring.py does), no places
(places.py does) and nothing of what the driver does with a role (roles.py does).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, ClassVar, Literal, ParamSpec, Self, TypeVar

import ray
from ray.actor import ActorHandle

from actors import placement
from actors.agent_loop import MANY, AgentLoopPool, AgentLoopWorker
from actors.evaluator import Evaluator
from actors.judge import JudgeWorker
from actors.producer import ProducerActor
from actors.remote import ROLE_TRIES, RemotePool, remote, within
from actors.replay_buffer import RemoteBuffer, ReplayBufferActor
from actors.rollout.controller import RolloutController
from actors.rollout.routing import router_to
from actors.rollout.worker import RolloutWorker
from actors.telemetry.recorder import Telemetry
from actors.training.broadcaster import WeightBroadcaster
from actors.training.folder_weights import FolderWeights
from actors.training.group import TrainerGroup
from actors.training.worker import CONCURRENCY_GROUPS, TrainerWorker
from jobs.frozen import reference_group, reward_pools, speakers
from jobs.models import Models
from jobs.places import Places
from raypost.config import Config
from raypost.config.engine import EngineConfig
from raypost.config.judges import POLICY
from raypost.doctor.presence import withdraw
from raypost.doctor.watch import tell
from raypost.errors import WaitTimeoutError
from raypost.judges.generative import LanguageModel, PolicyModel
from raypost.plan import plan
from raypost.plan.cluster import Bundle
from raypost.production.build import buffer_bounds, task_limits
from raypost.types import (
    BroadcasterRole,
    Buffer,
    EvaluatorRole,
    Judge,
    ProducerRole,
    Ref,
    RolloutPool,
    TelemetryRole,
    WeightSource,
)
from raypost.types.packed import PackedGroups

P = ParamSpec("P")
R = TypeVar("R")
log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0
"""Deadline of small calls between roles."""
BATCHES = "batches"
"""In a run folder: the batches that were trained since the last checkpoint."""
PRODUCTION = "rollout-controller"
EVALUATION = "evaluation-controller"
WATCHED = (
    PRODUCTION, "producer", "weight-broadcaster", "evaluator", "evaluation-broadcaster", "agent-loop-", "judge-",
    "trainer-", "critic-", "reference-",
)  # fmt: skip
"""Names of the actors that telemetry asks for spans, statistics and counts."""


@dataclass
class Launcher:
    """The actors started so far. As a context it ends them all."""

    rollout_worker: ClassVar[type] = RolloutWorker
    """Hosts an engine, `trainer_worker` a rank: what tests of everything around them replace."""
    trainer_worker: ClassVar[type] = TrainerWorker

    cfg: Config
    models: Models
    started_s: float = field(default_factory=time.time)
    is_run: bool = True
    """Whether the run folder is this job's, where its processes say that they are there (raypost.doctor)."""
    _handles: dict[str, ActorHandle] = field(default_factory=dict)
    _pools: dict[str, RolloutPool] = field(default_factory=dict)
    _reward_workers: list[ActorHandle] = field(default_factory=list)
    _judges: list[ActorHandle] = field(default_factory=list)
    _trainer: TrainerGroup | None = None
    _places: Places = field(init=False)
    _attempt: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Names this start of the run in what outlives a process of it."""

    def __post_init__(self) -> None:
        """Reserve nothing yet."""
        self._places = Places(self.cfg)

    async def __aenter__(self) -> Self:
        """Return itself; actors are started by the methods."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let engines and ranks end in their own way, within deadlines; kill what is left; free the resources.

        Where a wait passed its deadline, it is written first what was waited for.
        """
        if self.is_run and isinstance(error, WaitTimeoutError):
            await asyncio.to_thread(tell, self.cfg.run_dir, "at the deadline", str(error))
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
        self._places.release()

    # ---------------------------------------------------------------- engines

    async def reserve(self) -> None:
        """Reserve what actors need together, where some do."""
        await self._places.reserve()

    def rollout_pool(self, *, evaluation: bool = False) -> RolloutPool:
        """Return the pool of the rollout workers, or of those that are evaluation's own; not started yet."""
        cfg = self.cfg
        name = EVALUATION if evaluation else PRODUCTION
        bundles = self._bundles("evaluation_worker" if evaluation else "rollout_worker")
        for n, bundle in enumerate(bundles):
            self._add_engine(bundle, n)
        self._add(
            RolloutController,
            {bundle.name: bundle.name for bundle in bundles},
            cfg.rollout,
            cfg.sync.timeout_s,
            cfg.sync.canary_tolerance,
            name=name,
            max_restarts=-1,
        )
        self._pools[name] = remote(
            [name],
            RolloutPool,
            timeout_s=cfg.sync.timeout_s,
            timeouts_s={"swap": self._swap_s},
            tries=ROLE_TRIES,
        )
        return self._pools[name]

    def _add_engine(self, bundle: Bundle, number: int) -> None:
        pools = {
            pool.name: pool for pool in (*self.cfg.rollout.pools, self.cfg.eval.pool) if pool is not None
        }
        engine = EngineConfig.of(self.cfg, pools.get(bundle.pool))
        self._place(self.rollout_worker, bundle, self.models.policy, engine, number)

    def add_worker(self, number: int, pool: str) -> str:
        """Start the actor of one more worker of a pool, whose resources may have to be waited for; return its name."""
        like = next(one for one in self._bundles("rollout_worker") if one.pool == pool)
        bundle = replace(like, name=f"{like.name.rstrip('0123456789')}{number}")
        self._add_engine(bundle, number)
        return bundle.name

    async def start_worker(self, name: str, timeout_s: float) -> None:
        """Start the engine of a worker that is in no pool yet. Raises WaitTimeoutError, also without its resources."""
        await within(self._handles[name].start.remote(), timeout_s, f"the engine of {name} to stand by")

    def end_worker(self, name: str) -> None:
        """End the actor of a rollout worker for good; what is there no more is ended."""
        if handle := self._handles.pop(name, None):
            ray.kill(handle)
        self._places.leave(name)
        if self.is_run:
            withdraw(self.cfg.run_dir.resolve(), name)

    async def start_engines(self) -> list[object]:
        """Start the engines of all pools and reward models; returns what each says about itself."""
        pools = asyncio.gather(*(pool.start() for pool in self._pools.values()))
        rewards = asyncio.gather(*(worker.start.remote() for worker in self._reward_workers))
        of_pools, of_rewards = await asyncio.gather(pools, rewards)
        return [*itertools.chain(*of_pools), *of_rewards]

    # ---------------------------------------------------------------- training

    async def trainer(self) -> TrainerGroup:
        """Return the ranks of the policy, with its critic and its reference's engines; not started yet."""
        critic = None
        if self.models.critic is not None:
            config = self.cfg.model_copy(update={"train": self.cfg.train.for_critic})
            ranks = await self._ranks("critic", config, self.models.critic)
            critic = TrainerGroup(ranks, config, name="critic")
        ranks = await self._ranks("trainer", self.cfg, self.models.policy)
        reference = reference_group(self.cfg, self.models, self._bundles("reference_worker"), self._place)
        self._trainer = TrainerGroup(ranks, self.cfg, critic, reference)
        return self._trainer

    async def _ranks(self, kind: Literal["trainer", "critic"], config: Config, model_path: str) -> list[str]:
        """Start the ranks' actors; Ray starts each again, in its bundle, as often as it ends. Returns their names."""
        bundles = self._bundles(f"{kind}_worker")
        group = await self._places.of_ranks(kind, bundles)
        for rank, bundle in enumerate(bundles):
            self._add(
                self.trainer_worker,
                config,
                model_path,
                rank,
                "critic" if kind == "critic" else "policy",
                name=bundle.name,
                resources=bundle.resources,
                max_restarts=-1,
                concurrency_groups=CONCURRENCY_GROUPS,
                group=group,
                bundle=rank,
            )
        return [bundle.name for bundle in bundles]

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
            cfg.publish_timeout_s,
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
        bundles = self._bundles("reward_worker")
        reward_models, self._reward_workers = reward_pools(self.cfg, self.models, bundles, self._place)
        language_models: dict[str, LanguageModel] = {**speakers(self.cfg, bundles)}
        if self.cfg.policy_judges:
            timeout_s = self.cfg.rollout.request_timeout_s
            generator = router_to(PRODUCTION, timeout_s)
            policy = PolicyModel(generator, self.models.policy, self.cfg.engine_model_len, timeout_s)
            language_models[POLICY] = policy
        bundles = self._bundles("judge")
        asked = self.cfg.tasks, reward_models, language_models
        self._judges += [self._place(JudgeWorker, bundle, *asked) for bundle in bundles]
        return remote([bundle.name for bundle in bundles], Judge, timeout_s=self._request_s, many=MANY)

    def agents(self, judge: Judge, *, evaluation: bool = False) -> AgentLoopPool:
        """Return the agent loops as one, on the pool of the rollout workers or on evaluation's own."""
        controller = EVALUATION if evaluation else PRODUCTION
        generator = router_to(controller, self.cfg.rollout.request_timeout_s)
        bundles = self._bundles("evaluation_loop" if evaluation else "agent_loop")
        talk = speakers(self.cfg, self._bundles("reward_worker"))
        for bundle in bundles:
            self._place(AgentLoopWorker, bundle, self.cfg, self.models.policy, generator, judge, talk)
        return AgentLoopPool(RemotePool([bundle.name for bundle in bundles], 2 * self._request_s, many=MANY))

    def buffer(self) -> RemoteBuffer:
        """Return the replay buffer; it survives its process where it keeps a journal."""
        cfg = self.cfg
        self._add(
            ReplayBufferActor,
            task_limits(cfg),
            buffer_bounds(cfg),
            str((cfg.run_dir / "buffer").resolve()) if cfg.buffer.journal else None,
            self._attempt,
            str((cfg.run_dir / BATCHES).resolve()),
            cfg.checkpoint.retry_s,
            cfg.checkpoint.fsync,
            name="replay-buffer",
            max_restarts=-1 if cfg.buffer.journal else 0,
        )
        return RemoteBuffer(["replay-buffer"], CALL_TIMEOUT_S + cfg.checkpoint.retry_s, ROLE_TRIES)

    def producer(
        self, agents: AgentLoopPool, buffer: Buffer[Ref[PackedGroups]], pool: RolloutPool
    ) -> ProducerRole:
        """Return the producer."""
        cfg = self.cfg
        take_s = cfg.take_timeout_s + cfg.rollout.pause_timeout_s
        pause_s = 2 * cfg.rollout.pause_timeout_s + 2 * CALL_TIMEOUT_S
        self._add(
            ProducerActor,
            cfg,
            self.models.policy,
            agents,
            buffer,
            pool,
            self._attempt,
            name="producer",
            max_restarts=-1,
        )
        return remote(
            ["producer"],
            ProducerRole,
            timeout_s=pause_s,
            timeouts_s={
                "run": None,
                "take_batch": take_s,
                "produce_batch": take_s,
                "swap": pause_s + self._swap_s,
            },
            tries=ROLE_TRIES,
        )

    def evaluator(self, agents: AgentLoopPool, pool: RolloutPool) -> EvaluatorRole:
        """Return the evaluator."""
        cfg = self.cfg
        timeout_s = cfg.eval_timeout_s + CALL_TIMEOUT_S
        return self._role(
            EvaluatorRole, timeout_s, "evaluator", Evaluator, cfg, self.models.policy, agents, pool
        )

    def telemetry(self) -> TelemetryRole:
        """Return the telemetry of the actors started so far."""
        watched = [name for name in self._handles if name.startswith(WATCHED)]
        if self.cfg.eval.pool is not None:
            # Its time is not the run's: production goes on meanwhile.
            watched.remove("evaluator")
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
        return remote([name], role, timeout_s=timeout_s, tries=ROLE_TRIES)

    def _add(self, cls: Callable[..., object], *args: Any, name: str, **options: Any) -> ActorHandle:
        home = placement.Home(self.cfg.run_dir.resolve(), self.cfg.stall_s) if self.is_run else None
        self._handles[name] = placement.spawn(cls, *args, name=name, home=home, **options)
        return self._handles[name]

    def _place(self, cls: Callable[..., object], bundle: Bundle, *args: Any) -> ActorHandle:
        """Start an actor, which is told its name first, where its bundle says; it is restarted when it dies."""
        options = {"resources": bundle.resources, "max_restarts": -1, **self._places.of_engine(bundle)}
        return self._add(cls, bundle.name, *args, name=bundle.name, **options)

    def _bundles(self, role: str) -> list[Bundle]:
        return [bundle for bundle in plan.bundles(self.cfg) if bundle.role == role]

    @property
    def _swap_s(self) -> float:
        """Longest time of a swap that waits for its version."""
        return self.cfg.publish_timeout_s + self.cfg.sync.timeout_s

    @property
    def _request_s(self) -> float:
        return self.cfg.rollout.request_timeout_s + CALL_TIMEOUT_S
