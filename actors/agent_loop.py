"""AgentLoopWorker: runs groups through generation and judging. Groups travel in columnar form.

AgentLoopPool is the producer's view of all of them: an AgentLoop that sends each group to the least loaded
worker. A worker that dies is restarted by Ray and its groups are dispatched again.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from actors.many_calls import CallBatches
from actors.remote import ACTOR_ERRORS, RemotePool
from raypost.agent_loop.custom import CustomAgentLoop, LoopContext
from raypost.agent_loop.environment import EnvironmentAgentLoop, Messages
from raypost.agent_loop.group_loop import GroupLoop
from raypost.agent_loop.isolated import environment_maker
from raypost.agent_loop.parking import worker_of
from raypost.agent_loop.session_loop import SessionAgentLoop
from raypost.agent_loop.single_turn import SingleTurnAgentLoop
from raypost.agent_loop.tools import ToolAgentLoop
from raypost.chat.renderer import Renderer, task_renderer
from raypost.config import Config, RolloutConfig, TaskConfig
from raypost.config.imports import load_function
from raypost.data.functions import function_tools
from raypost.data.prompt import conversation, prompt_text
from raypost.data.tokenizer import Tokenizer
from raypost.observe.spans import Span, SpanLog
from raypost.observe.waits import working_for
from raypost.types import AgentLoop, Generator, Group, GroupKey, IntArray, Judge
from raypost.types.packed import PackedGroups, pack_groups, unpack_groups

MANY = {"run": 8, "judge": 8}
"""Calls of a pool and of judges that travel together at most: those of eight groups, half a megabyte."""
MARGIN_S = 30.0
"""On top of the pool's own deadline for a request, so that the pool, which knows the worker, reports first."""


class AgentLoopWorker(CallBatches):
    """Hosts one agent loop for each task."""

    def __init__(
        self,
        name: str,
        config: Config,
        model_path: str,
        generator: Generator,
        judge: Judge,
        speakers: Mapping[str, object] | None = None,
    ) -> None:
        """`model_path`: a folder with the tokenizer. `generator`: the way to the rollout pool.

        `speakers`: frozen models that generate, which environments may be given.
        """
        super().__init__()
        self._name = name
        self._spans = SpanLog(name)
        tokenizer = Tokenizer.load(model_path)
        self._loops = {
            task.name: _build(task, config, tokenizer, generator, judge, name, dict(speakers or {}))
            for task in config.tasks
        }

        shared: dict[str, asyncio.Semaphore | None] = {}
        for task in config.tasks:
            loop, together = self._loops[task.name], task.agent_loop.max_concurrent_of
            if isinstance(loop, GroupLoop):
                loop.spans = self._spans
                loop.turns = loop.turns if together is None else shared.setdefault(together, loop.turns)

    def __repr__(self) -> str:
        """Return the actor's name."""
        return self._name

    async def drain_spans(self) -> list[Span]:
        """Return the spans of tools and environments since the last call."""
        return self._spans.drain()

    async def run(self, packed: PackedGroups) -> PackedGroups:
        """Run ONE group, packed alone."""
        (group,) = unpack_groups(packed)
        working_for.set(f"{group.task}/{group.group_id}")
        return pack_groups([await self._loops[group.task].run(group)])

    async def interrupt(self) -> None:
        """Stop judging within its grace period; what was generated comes back ABORTED."""
        for loop in self._loops.values():
            await loop.interrupt()

    async def forget(self, keys: Sequence[GroupKey]) -> None:
        """Close what is parked of these groups."""
        for loop in self._loops.values():
            await loop.forget(keys)


def _build(
    task: TaskConfig,
    config: Config,
    tokenizer: Tokenizer,
    generator: Generator,
    judge: Judge,
    worker: str,
    speakers: dict[str, object],
) -> AgentLoop:
    rollout = config.rollout
    rollout = rollout.model_copy(update={"request_timeout_s": rollout.request_timeout_s + MARGIN_S})
    options, strategy = task.agent_loop, task.strategy
    if options.max_concurrent is not None:
        share = max(1, options.max_concurrent // config.num_agent_loops)
        options = options.model_copy(update={"max_concurrent": share})
        task = task.model_copy(update={"agent_loop": options})
    if options.kind == "custom":
        return CustomAgentLoop(
            LoopContext(task=task, rollout=rollout, generator=generator, judge=judge, tokenizer=tokenizer)
        )
    if options.kind == "tools":
        return ToolAgentLoop(
            generator,
            judge,
            tokenizer,
            task_renderer(task, tokenizer),
            function_tools(task),
            options,
            rollout=rollout,
            strategy=strategy,
            worker=worker,
        )
    if options.kind == "session":
        what = f"task {task.name!r}: agent_loop.agent"
        agent = load_function(options.agent, what, options.file_source) if options.agent else None
        chat = task_renderer(task, tokenizer)
        return SessionAgentLoop(
            generator,
            judge,
            tokenizer,
            chat,
            task,
            agent,
            rollout=rollout,
            worker=worker,
            address_file=config.run_dir / "sessions" / f"{worker}.{task.name}.json",
        )
    if options.environment is None:
        return SingleTurnAgentLoop(generator, judge, tokenizer.decode, rollout=rollout, strategy=strategy)
    return _environments(task, config.seed, rollout, tokenizer, generator, worker, speakers)


def _environments(
    task: TaskConfig,
    seed: int,
    rollout: RolloutConfig,
    tokenizer: Tokenizer,
    generator: Generator,
    worker: str,
    speakers: dict[str, object],
) -> EnvironmentAgentLoop:
    renderer = task_renderer(task, tokenizer) if task.chat else None
    return EnvironmentAgentLoop(
        generator,
        environment_maker(task, speakers),
        functools.partial(tokenizer.encode, add_special_tokens=False),
        tokenizer.decode,
        task.agent_loop,
        rollout=rollout,
        strategy=task.strategy,
        retryable=ACTOR_ERRORS,
        worker=worker,
        seed=seed,
        renderer=renderer,
        opening=functools.partial(_opening, task, renderer) if renderer else None,
    )


def _opening(
    task: TaskConfig, renderer: Renderer, metadata: Mapping[str, Any], messages: Messages
) -> IntArray:
    """Return the ids of a prompt with what an environment says at the beginning."""
    return renderer.render([*conversation(task, prompt_text(task, metadata), metadata), *messages])


class AgentLoopPool:
    """An AgentLoop over a pool of workers, for use inside another actor."""

    def __init__(self, pool: RemotePool) -> None:
        """`pool` has AgentLoopWorker actors."""
        self._pool = pool

    async def run(self, group: Group) -> Group:
        """Run a group on the worker that parked an episode of it, else on the least loaded one."""
        working_for.set(f"{group.task}/{group.group_id}")
        packed = pack_groups([group])
        done = await self._pool.on(worker_of(group.states), "run", packed)
        (group,) = unpack_groups(done)
        return group

    async def interrupt(self) -> None:
        """End judging on every worker within its grace period."""
        await self._pool.on_every("interrupt")

    async def forget(self, keys: Sequence[GroupKey]) -> None:
        """Close what the workers keep for these groups."""
        await self._pool.on_every("forget", keys)
