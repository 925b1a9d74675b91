"""`collect`: a Collector from a generator, prompts and an environment.

Owns how the parts of one task are put together, and the schedule of a collector that nobody trains beside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from pydantic import ValidationError

from raypost.agent_loop.environment import Environment, EnvironmentAgentLoop
from raypost.collector.collector import Collector
from raypost.collector.gated_generator import GatedGenerator
from raypost.collector.options import DEFAULTS, CollectorOptions
from raypost.config import AgentLoopConfig, RolloutConfig, StrategyConfig, TaskConfig
from raypost.data.prompt import Prompt, render
from raypost.data.sampler import Sampler
from raypost.data.sources import Source, Stream
from raypost.data.task_source import build_source
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError
from raypost.production.producer import TaskRuntime
from raypost.production.strategy import AsyncProduceStrategy, build_strategy
from raypost.types import AgentLoop, Generator
from raypost.types.pause import PauseMode

CLOCKLESS = {"enable_partial_rollout", "drop_uniform_rewards", "is_valid"}
"""Fields of a strategy that mean the same without train steps."""
Prompts = Source | Stream | Sequence[Prompt | str]
_TURNS = AgentLoopConfig()


def collect(
    generator: Generator,
    tokenizer: Tokenizer,
    prompts: Prompts | None = None,
    *,
    environment: Callable[[], Environment] | None = None,
    agent_loop: Callable[[Generator], AgentLoop] | None = None,
    task: Mapping[str, object] | None = None,
    batch_size: int | None = None,
    num_groups: int = 16,
    max_turns: int = _TURNS.max_turns,
    max_turn_tokens: int | None = _TURNS.max_turn_tokens,
    step_timeout_s: float = _TURNS.step_timeout_s,
    seed: int = 0,
    **options: Unpack[CollectorOptions],
) -> Collector:
    """Collect what a policy does, without training it.

    `generator` may be a rollout pool, which is then paused for new weights; any other is gated. `prompts` None:
    those of the task's `source`. Either `environment`, called for each trajectory, or `agent_loop`, which is given
    the generator, plays. `task` are fields of TaskConfig, for instance group_size (here 1 unless given),
    max_tokens, temperature. `max_turns`, `max_turn_tokens` and `step_timeout_s` are the environment's.

    `num_groups` are at work or wait for the caller at most, and none is ever too old. With `batch_size` the rules
    of training hold instead: so many groups are a step, `update_policy` follows each batch, and what is older than
    the max_staleness of the task's strategy is not delivered. Raises ConfigError.
    """
    if (environment is None) == (agent_loop is None):
        raise ConfigError("collect needs either an environment or an agent_loop, not both and not none")
    config = _task(task or {}, prompts is None)
    options = DEFAULTS | options
    pool = _pool(generator, options["pause_mode"])
    if agent_loop is not None:
        loop = agent_loop(pool)
    else:
        assert environment is not None
        loop = EnvironmentAgentLoop(
            pool,
            environment,
            functools.partial(tokenizer.encode, add_special_tokens=False),
            tokenizer.decode,
            AgentLoopConfig(
                max_turns=max_turns, max_turn_tokens=max_turn_tokens, step_timeout_s=step_timeout_s
            ),
            rollout=RolloutConfig(pause_timeout_s=options["pause_timeout_s"]),
            strategy=config.strategy,
            retryable=options["retryable"],
        )
    strategy = (
        OnDemandStrategy(config.strategy, num_groups)
        if batch_size is None
        else build_strategy(config.strategy, sync_weights_interval=1)
    )
    sampler = Sampler(
        config,
        _source(config, prompts, seed),
        functools.partial(render, tokenizer=tokenizer, task=config),
        tokenizer.eos_ids,
        seed,
    )
    return Collector(
        [TaskRuntime(config, sampler, loop, strategy)],
        pool,
        batch_size=1 if batch_size is None else batch_size,
        **options,
    )


class OnDemandStrategy(AsyncProduceStrategy):
    """So many groups at work or waiting for the consumer, of whatever version: its clock is nobody's training."""

    def __init__(self, config: StrategyConfig, num_groups: int) -> None:
        """Raise ConfigError for a setting that means something only where train steps are counted."""
        without_meaning = config.model_fields_set - CLOCKLESS
        if without_meaning:
            raise ConfigError(
                f"strategy sets {sorted(without_meaning)}, which are about train steps: give batch_size, the groups "
                "of a step, as well, or leave them out"
            )
        if num_groups < 1:
            raise ConfigError(f"num_groups must be >= 1, got {num_groups}")
        super().__init__(config, sync_weights_interval=1, ages=False)
        self._num_groups = num_groups

    def waits_for_consumer(self, future_step: int, next_consumer_step: int) -> bool:
        """Each step is one group."""
        return future_step >= next_consumer_step + self._num_groups


def _task(given: Mapping[str, object], own_source: bool) -> TaskConfig:
    prompts = {"source": {"kind": "jsonl", "dataset": "prompts"}, "judge": {"kind": "exact"}}
    fields = {"name": "collect", "group_size": 1, **({} if own_source else prompts), **given}
    try:
        return TaskConfig.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"task of collect: {error}") from None


def _pool(generator: Any, pause_mode: PauseMode) -> Any:
    """Return the generator, gated unless it can be paused."""
    if hasattr(generator, "pause") and hasattr(generator, "resume"):
        return generator
    if pause_mode == "keep":
        raise ConfigError(
            f"pause_mode is keep, but {type(generator).__name__} has no pause that could keep its requests: use "
            "abort or wait"
        )
    return GatedGenerator(generator)


class _Listed:
    """Prompts given as they are."""

    def __init__(self, prompts: Sequence[Prompt | str]) -> None:
        self._prompts = [Prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    def __len__(self) -> int:
        return len(self._prompts)

    def sample(self, index: int) -> Prompt:
        return self._prompts[index]


def _source(config: TaskConfig, prompts: Prompts | None, seed: int) -> Source | Stream:
    if prompts is None:
        return build_source(config, seed)
    if isinstance(prompts, Sequence):
        return _Listed(prompts)
    return prompts
