"""AgentLoopWorker: runs groups through generation and judging. Groups travel in columnar form.

AgentLoopPool is the producer's view of all of them: an AgentLoop that sends each group to the least loaded
worker. A worker that dies is restarted by Ray and its groups are dispatched again.
"""

from __future__ import annotations

import functools

from actors.remote import ACTOR_ERRORS, CallBatches, RemotePool
from raypost.agent_loop.custom import CustomAgentLoop, LoopContext
from raypost.agent_loop.environment import EnvironmentAgentLoop
from raypost.agent_loop.single_turn import SingleTurnAgentLoop
from raypost.config import Config, RolloutConfig, TaskConfig
from raypost.config.imports import load_function
from raypost.data.tokenizer import Tokenizer
from raypost.packed import PackedGroups, pack_groups, unpack_groups
from raypost.protocols import AgentLoop, Generator, Judge
from raypost.types import Group

MANY = {"run": 8, "judge": 8}
"""Calls of a pool and of judges that travel together at most: those of eight groups, half a megabyte."""
MARGIN_S = 30.0
"""On top of the pool's own deadline for a request, so that the pool, which knows the worker, reports first."""


class AgentLoopWorker(CallBatches):
    """Hosts one agent loop for each task."""

    def __init__(
        self, name: str, config: Config, model_path: str, generator: Generator, judge: Judge
    ) -> None:
        """`model_path`: a folder with the tokenizer. `generator`: the way to the rollout pool."""
        super().__init__()
        self._name = name
        tokenizer = Tokenizer.load(model_path)
        self._loops = {
            task.name: _build(task, config.rollout, tokenizer, generator, judge) for task in config.tasks
        }

    def __repr__(self) -> str:
        """Return the actor's name."""
        return self._name

    async def run(self, packed: PackedGroups) -> PackedGroups:
        """Run ONE group, packed alone."""
        (group,) = unpack_groups(packed)
        return pack_groups([await self._loops[group.task].run(group)])

    async def interrupt(self) -> None:
        """Stop judging within its grace period; what was generated comes back ABORTED."""
        for loop in self._loops.values():
            await loop.interrupt()


def _build(
    task: TaskConfig, rollout: RolloutConfig, tokenizer: Tokenizer, generator: Generator, judge: Judge
) -> AgentLoop:
    rollout = rollout.model_copy(update={"request_timeout_s": rollout.request_timeout_s + MARGIN_S})
    options, strategy = task.agent_loop, task.strategy
    if options.kind == "custom":
        return CustomAgentLoop(
            LoopContext(task=task, rollout=rollout, generator=generator, judge=judge, tokenizer=tokenizer)
        )
    if options.environment is None:
        return SingleTurnAgentLoop(generator, judge, tokenizer.decode, rollout=rollout, strategy=strategy)
    make = load_function(
        options.environment, f"task {task.name!r}: agent_loop.environment", options.file_source
    )
    return EnvironmentAgentLoop(
        generator,
        functools.partial(make, **options.params),
        functools.partial(tokenizer.encode, add_special_tokens=False),
        tokenizer.decode,
        options,
        rollout=rollout,
        strategy=strategy,
        retryable=ACTOR_ERRORS,
    )


class AgentLoopPool:
    """An AgentLoop over a pool of workers, for use inside another actor."""

    def __init__(self, pool: RemotePool) -> None:
        """`pool` has AgentLoopWorker actors."""
        self._pool = pool

    async def run(self, group: Group) -> Group:
        """Run a group on the least loaded worker."""
        (done,) = unpack_groups(await self._pool.run(pack_groups([group])))
        return done

    async def interrupt(self) -> None:
        """End judging on every worker within its grace period."""
        await self._pool.on_every("interrupt")
