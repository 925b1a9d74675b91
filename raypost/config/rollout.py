"""The rollout pool: its engines, and how many of them there may be."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from raypost.config.resources import ConfigModel, EnginePoolConfig, PoolConfig

Reserve = Literal["pack", "spread"]
"""How places that are reserved together lie."""


class AutoscaleConfig(ConfigModel):
    """Bounds of a rollout pool that grows while training waits for batches, and shrinks while engines wait for work."""

    min: Annotated[int, Field(ge=1)] = 1
    """Fewest workers."""
    max: Annotated[int, Field(ge=1)]
    """Most workers."""
    window_s: Annotated[float, Field(gt=0)] = 60
    """Time of production that is measured before a decision, seconds; pauses do not count."""
    cooldown_s: Annotated[float, Field(ge=0)] = 120
    """Least time between two changes, seconds; never less than a worker took to start. After growing, the pool shrinks
    only when five times as much has passed."""
    max_step: Annotated[int, Field(ge=1)] = 4
    """Most workers that come or go at once."""

    @model_validator(mode="after")
    def _min_is_no_more_than_max(self) -> AutoscaleConfig:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, above max {self.max}: swap them, or raise max")
        return self


class RolloutPoolConfig(PoolConfig):
    """Further engines of production, of another kind or in another place; null: as in `rollout`."""

    autoscale: AutoscaleConfig | None = None
    """Let the run choose how many workers this pool has; null: `num_workers`, until `raypost scale --pool` says
    otherwise."""
    reserve: Reserve | None = None
    """Reserve the places of this pool's first `num_workers` all at once, close to one another or spread."""
    standby: Annotated[int, Field(ge=0)] = 0
    """Number of further workers of this pool whose engines are started and serve nothing until one is needed."""
    max_num_seqs: Annotated[int, Field(ge=1)] | None = None
    """Most requests that an engine of this pool decodes at once."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of a GPU's memory that an engine of this pool takes."""
    kv_cache_gb: Annotated[float, Field(gt=0)] | None = None
    """Size of the key-value cache of an engine of this pool where `device` is cpu, GiB."""
    enforce_eager: bool | None = None
    """Whether engines of this pool skip CUDA graphs and compilation."""

    @model_validator(mode="after")
    def _begins_within_its_bounds(self) -> RolloutPoolConfig:
        _check_pool(self)
        return self


CPU_BLOCK = 32
"""Tokens of the smallest block of keys and values that vLLM's kernels for CPU take."""


class RolloutConfig(EnginePoolConfig):
    """The rollout pool and its engines."""

    pools: tuple[RolloutPoolConfig, ...] = ()
    """Further engines that production uses, each pool placed by its own needs, for instance on other nodes, and with
    arguments of its own."""
    autoscale: AutoscaleConfig | None = None
    """Let the run choose how many workers the pool has, beginning with `num_workers`; null: as many as these, until
    `raypost scale` says otherwise. Those of `pools` are counted there."""
    reserve: Reserve | None = None
    """Reserve the places of the first `num_workers` all at once or not at all, close to one another (pack) or on
    different nodes where possible (spread), so that two runs do not hold half of what each needs. null: each for
    itself."""
    standby: Annotated[int, Field(ge=0)] = 0
    """Number of further workers whose engines are started and serve nothing. One takes the place of a worker that dies,
    or is the next that joins, within seconds; each takes the memory and the device of a worker."""
    drain: Literal["abort", "wait"] = "abort"
    """What a worker that leaves does with its requests. abort: they go on at once on other workers, with their tokens.
    wait: they run to their end for `drain_timeout_s`, or until the next sync."""
    drain_timeout_s: Annotated[float, Field(gt=0)] = 60
    """Longest time that a worker which leaves waits for its requests, seconds."""
    max_num_seqs: Annotated[int, Field(ge=1)] = 64
    """Most requests that an engine decodes at once."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Fraction of a GPU's memory that an engine takes."""
    kv_cache_gb: Annotated[float, Field(gt=0)] = 1
    """Size of an engine's key-value cache where `device` is cpu, GiB."""
    block_size: Annotated[int, Field(ge=1)] | None = None
    """Tokens of a block of the engines' key-value cache, as vLLM's. Siblings share their prompt, and turns what came
    before them, by whole blocks; the rest is computed once each. null: the engine's own, but on CPU, whose 128 a prompt
    seldom fills, 32 where a task has `max_prompt_tokens` above that, or turns."""
    max_num_batched_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens that an engine computes in one step, as vLLM's; a longer prompt takes several. A sync waits for the
    step under way: less makes syncs shorter, for a large model on few cores. null: the engine's own, in thousands."""
    enforce_eager: bool = True
    """Skip CUDA graphs and compilation: engines start faster and generate slower."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 300
    """Longest time that an engine may take to start or to restart, seconds."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 600
    """Longest time that one generation may take, seconds."""
    liveness_timeout_s: Annotated[float, Field(gt=0)] = 60
    """Longest time that an engine may take to answer, between two of its steps, before it is taken for hung and is
    started anew, seconds."""
    slow_worker: Literal["report", "restart"] = "report"
    """What is done about an engine that makes less than a quarter of the tokens a second and request that the others
    make, three times in a row. report: it is named, and gets fewer requests. restart: it is started anew too, twice at
    most."""
    pause_timeout_s: Annotated[float, Field(gt=0)] = 60
    """Longest time that a pause may wait for engines and pending groups, seconds."""
    agent_workers: Annotated[int, Field(ge=1)] = 1
    """Number of agent-loop actors, which turn prompts into trajectories."""
    agent_cpus: Annotated[float, Field(ge=0)] = 0
    """CPUs that each of them reserves, for tools, environments and agents that compute; 0: it shares its node's
    time."""
    judge_workers: Annotated[int, Field(ge=1)] = 1
    """Number of judge actors, which score responses."""
    judge_cpus: Annotated[float, Field(ge=0)] = 0
    """CPUs that each of them reserves, for judges that compute, or run programs; 0: it shares its node's time."""

    @model_validator(mode="after")
    def _begins_within_its_bounds(self) -> RolloutConfig:
        _check_pool(self)
        return self

    @model_validator(mode="after")
    def _a_step_has_a_token_of_each_request(self) -> RolloutConfig:
        most = max(one.max_num_seqs for one in self.by_pool().values())
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < most:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, and max_num_seqs {most} requests need a "
                "token each: raise it to that, or lower max_num_seqs"
            )
        return self

    @property
    def num_engines(self) -> int:
        """Engines of production, over all pools."""
        return self.num_workers + sum(pool.num_workers for pool in self.pools)

    @property
    def num_slots(self) -> int:
        """Sequences that all engines of production run at once."""
        return sum(one.num_workers * one.max_num_seqs for one in self.by_pool().values())

    def by_pool(self) -> dict[str, RolloutConfig]:
        """Return the settings of each pool by its name, what is not set there as here; this one's name is empty."""
        return {"": self} | {pool.name: self.of_pool(pool) for pool in self.pools}

    def of_pool(self, pool: EnginePoolConfig) -> RolloutConfig:
        """Return these settings with those that a pool has of its own."""
        own = {
            name: value for name, value in pool if name in RolloutConfig.model_fields and value is not None
        }
        alone = {"pools": (), "autoscale": None, "reserve": None, "standby": 0}
        return self.model_copy(update=alone | own)


def _check_pool(pool: RolloutConfig | RolloutPoolConfig) -> None:
    """Raise ValueError for a pool that does not begin within its bounds, or could not keep what it reserves."""
    bounds, count = pool.autoscale, pool.num_workers
    if bounds is not None and not bounds.min <= count <= bounds.max:
        raise ValueError(
            f"num_workers is {count}, outside of autoscale.min {bounds.min} and autoscale.max {bounds.max}: "
            "begin with a number between them"
        )
    if pool.reserve and bounds is not None and bounds.min < count:
        raise ValueError(
            f"reserve holds the places of {count} workers, but autoscale.min is {bounds.min}, and an empty place would "
            f"keep its node: raise it to {count}, lower num_workers, or leave out reserve"
        )
    if pool.reserve and pool.fallback_labels:
        raise ValueError(
            "fallback_labels are for workers that are placed one by one: leave out these or reserve"
        )
