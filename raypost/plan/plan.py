"""What a configuration means before anything starts: its placement, its bounds, and why it cannot work.

Owns the arithmetic and the warnings; what refuses a configuration is in config/ (the configuration by itself),
checks.py (model, data, run folder), schedule.py (production) and cluster.py (resources). Both `raypost plan` and every
job call `check`. Nothing is written and nothing started.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from raypost.config import Config, RolloutConfig, TaskConfig
from raypost.config.engine import EngineConfig
from raypost.config.identity import run_digest
from raypost.config.judges import UNSANDBOXED
from raypost.config.trackers import tracker_problems
from raypost.data.task_source import also_trained, evaluation_prompts
from raypost.errors import ClusterError, ConfigError
from raypost.plan.checks import (
    CONFIG_FILE,
    composition_problems,
    continued_with,
    run_dir_problems,
    source_problems,
)
from raypost.plan.cluster import (
    Bundle,
    ClusterResources,
    bundles,
    engine_pools,
    name_problems,
    occupied,
    place,
    rank_pools,
    shortages,
)
from raypost.plan.memory import memory_lines, memory_warnings, model_sizes
from raypost.plan.models import model_problems, model_warnings
from raypost.plan.node_types import describe
from raypost.plan.nodes import label_problems, node_lines
from raypost.plan.prompts import Surveys, prompt_lines, prompt_warnings
from raypost.plan.schedule import (
    Bound,
    bound,
    horizon,
    schedule_problems,
    shares,
    started_at_once,
    strategy_warnings,
)
from raypost.plan.surprises import surprises
from raypost.plan.user_code import findings

__all__ = ["Bound", "Bundle", "ClusterResources", "Plan", "bundles", "check"]


@dataclass(slots=True, kw_only=True, frozen=True)
class Placement:
    """One line of the placement: actors of one role, what each reserves, and where they would land."""

    role: str
    actors: str
    count: int
    resources: str
    nodes: str


@dataclass(slots=True, kw_only=True, frozen=True)
class Plan:
    """A configuration that can work, and what it amounts to."""

    run_dir: Path
    resumes: bool
    """The run folder holds this very run already: it continues."""
    run_digest: str
    placement: tuple[Placement, ...]
    staleness: tuple[Bound, ...]
    batch: tuple[tuple[str, str], ...]
    """(quantity, value) of the batch arithmetic."""
    nodes: tuple[tuple[str, str], ...]
    """(type of node, how many and what they have), where the cluster tells types."""
    memory: tuple[tuple[str, str], ...]
    """(whose, how much), estimated."""
    transport: str
    warnings: tuple[str, ...]


def check(
    config: Config,
    *,
    cluster: ClusterResources | None = None,
    tried: bool = False,
    offline: bool = False,
) -> Plan:
    """Return the plan of `config`, on `cluster` if given.

    `tried`: the user's own functions were tried, and are not again. `offline`: no service is asked, which is a
    warning.

    Raises ConfigError listing all problems at once; ClusterError if the cluster's resources are the only one.
    """
    surveys: Surveys = {}
    found = [] if tried else findings(config)
    problems = [*name_problems(config), *model_problems(config), *composition_problems(config)]
    problems += [*run_dir_problems(config), *(one.text for one in found if one.refused)]
    if not any(one.refused for one in found):  # both call what was tried
        problems += source_problems(config, tried=tried, offline=offline, surveys=surveys)
        problems += schedule_problems(config)
    problems += tracker_problems(config.trackers)
    lacking = [] if cluster is None else _lacking(config, cluster)
    final = [] if cluster is None else _never_there(config, cluster, lacking)
    problems += final
    if problems:
        error = ClusterError if problems == final else ConfigError
        raise error("\n  ".join([f"{len(problems)} problem(s)", *problems]))
    homes = place(bundles(config), cluster.grown() if cluster.elastic else cluster) if cluster else {}
    sizes = model_sizes(config)
    return Plan(
        run_dir=config.run_dir,
        resumes=(config.run_dir / CONFIG_FILE).exists(),
        run_digest=run_digest(config),
        placement=tuple(_placement(config, homes)),
        staleness=tuple(bound(task, config) for task in config.tasks),
        batch=(*_batch(config).items(), *prompt_lines(config, surveys)),
        nodes=tuple(node_lines(cluster)),
        memory=tuple(memory_lines(config, sizes)),
        transport=_transport(config),
        warnings=(
            *(_unasked(config) if offline else ()),
            *continued_with(config),
            *_warnings(config),
            *prompt_warnings(config, surveys),
            *(one.text for one in found if not one.refused),
            *memory_warnings(config, sizes, cluster),
            *_cluster_warnings(config, cluster, lacking, homes),
        ),
    )


def _lacking(config: Config, cluster: ClusterResources) -> list[str]:
    return [*shortages(config, cluster), *label_problems(config, cluster)]


def _never_there(config: Config, cluster: ClusterResources, lacking: list[str]) -> list[str]:
    """Return what of `lacking` no wait would bring."""
    if not lacking or (cluster.elastic and cluster.addable is None):
        return []
    still = lacking if cluster.addable is None else _lacking(config, cluster.grown())
    if cluster.elastic:
        return [f"with all nodes that the autoscaler may add: {text}" for text in still]
    if not still:
        return [
            *lacking,
            "the cluster's autoscaler may add nodes that have it: set autoscaling: true to wait for them",
        ]
    return lacking


def _unasked(config: Config) -> Iterator[str]:
    for task in config.tasks:
        for where, judge in task.judge.every():
            if judge.url is not None:
                yield f"task {task.name!r}: {where}.url {judge.url} was not asked: plan without --offline asks it"


def _placement(config: Config, homes: dict[str, str]) -> list[Placement]:
    rows: dict[tuple[str, str], list[Bundle]] = {}
    for bundle in bundles(config):
        rows.setdefault((bundle.role, bundle.pool), []).append(bundle)
    return [
        Placement(
            role=role,
            actors=members[0].name if len(members) == 1 else f"{members[0].name} .. {members[-1].name}",
            count=len(members),
            resources=describe(members[0].resources),
            nodes=", ".join(dict.fromkeys(homes[m.name] for m in members if m.name in homes)) or "any",
        )
        for (role, _), members in rows.items()
    ]


def _requests(config: Config) -> int:
    """Return the most trajectories that the tasks' bounds let be in flight at once."""
    groups = shares(config)
    return sum(started_at_once(task, groups[task.name], config) * task.group_size for task in config.tasks)


def _batch(config: Config) -> dict[str, str]:
    train, rollout, groups = config.train, config.rollout, shares(config)
    samples = sum(groups[task.name] * task.group_size for task in config.tasks)
    tokens = sum(groups[task.name] * task.group_size * task.max_tokens for task in config.tasks)
    steps_ahead = max(horizon(task, config) for task in config.tasks)
    groups_a_minibatch = train.batch_size // train.num_minibatches
    split = ", ".join(f"{groups[task.name]} of {task.name} x {task.group_size}" for task in config.tasks)
    return {
        "groups a train step": f"{train.batch_size} ({split})",
        "trajectories a train step": f"{samples}, at most {tokens} response tokens",
        "groups a rank": f"{train.batch_size // train.num_workers} on {train.num_workers} rank(s)",
        "optimizer steps a train step": f"{train.num_updates} of {groups_a_minibatch} groups",
        "trajectories in the whole run": f"{samples * train.num_steps} in {train.num_steps} steps",
        "requests in flight": f"the staleness bound allows {_requests(config)}, for {rollout.num_slots} slots "
        f"({_slots(rollout)})",
        "prompts of a group": _shared_prompts(config),
        "groups produced ahead": f"at most {steps_ahead * train.batch_size} ({steps_ahead} batch(es))",
        "evaluation": "; ".join(_evaluation(task, config) for task in config.tasks),
    }


def _shared_prompts(config: Config) -> str:
    """Say what siblings share of their prompt."""
    size = EngineConfig.of(config).block_size
    whose = "the engine's own" if size is None else str(size)
    own = f"{whose}{' (vLLM: 128)' if size is None and config.device == 'cpu' else ''}"
    return f"shared by whole blocks of the key-value cache, block_size {own}"


def _slots(rollout: RolloutConfig) -> str:
    pools = rollout.by_pool().values()
    return ", ".join(f"{one.num_workers} worker(s) x max_num_seqs {one.max_num_seqs}" for one in pools)


def _evaluation(task: TaskConfig, config: Config) -> str:
    """Say on how many prompts a task is evaluated, and which."""
    wanted, own = config.eval.num_prompts, config.evaluated(task)
    if not wanted:
        return f"{task.name}: none"
    source = (own or task).source
    # Making problems may take long; there are as many as one asks for.
    made = source.kind == "reasoning_gym"
    count = f"up to {wanted}" if made else str(len(evaluation_prompts(config, task, wanted)))
    where = source.dataset if own is not None else f"held out of {source.dataset}"
    return f"{task.name}: {count} prompts x {config.eval.samples}, {where}"


def _transport(config: Config) -> str:
    lora = config.train.lora
    what = "adapters, the base once" if lora is not None and lora.sync == "adapter" else "all weights"
    ways = {"auto": "object store, or gloo between nodes", "object_store": "object store"}
    way = ways.get(config.sync.transport, f"{config.sync.transport}, object store to fall back on")
    return (
        f"{way}: {what}, in buckets of {config.train.bucket_mb} MiB, published once a version, read by "
        f"{config.rollout.num_engines} worker(s), version and digest verified at every sync, "
        f"read back from the model: {config.sync.verify}"
    )


def _warnings(config: Config) -> Iterator[str]:
    rollout, train = config.rollout, config.train
    for task in config.tasks:
        yield from (f"task {task.name!r}: {text}" for text in strategy_warnings(task, config))
        yield from (f"task {task.name!r}: {place} {UNSANDBOXED}" for place in task.unsandboxed)
    yield from model_warnings(config)
    yield from surprises(config)
    slots, requests = rollout.num_slots, _requests(config)
    if requests < slots:
        yield (
            f"{slots - requests} of the engines' {slots} slots stay empty: the staleness bound allows {requests} "
            "requests; raise max_staleness or train.batch_size, or lower rollout.max_num_seqs"
        )
    for task in config.tasks:
        if config.eval.num_prompts and config.evaluated(task) and task.source.kind != "reasoning_gym":
            found = evaluation_prompts(config, task, config.eval.num_prompts)
            if shared := also_trained(task, config.seed, found):
                yield (
                    f"task {task.name!r}: {shared} of the {len(found)} prompts of eval.source are trained on too, so "
                    "its score says less: remove them from one of the two"
                )
    checkpoint, evaluation = config.checkpoint, config.eval
    if checkpoint.keep_best and checkpoint.interval and evaluation.num_prompts and not evaluation.interval:
        yield (
            "checkpoint.keep_best needs scores, but eval.interval is 0, so only the last checkpoint has one: set it to "
            f"checkpoint.interval {checkpoint.interval}"
        )
    correction = train.correction
    uncorrected = correction.weight is None and correction.reject is None and correction.proximal != "rollout"
    if uncorrected and config.staleness_bound > 0:
        yield (
            "train.correction has neither weight nor reject although trained data may be stale: its mismatch "
            "stays uncorrected"
        )
    if train.loss.kl.pool is not None and config.model.dtype == "bfloat16":
        yield (
            "train.loss.kl.pool with model.dtype bfloat16: engines and ranks round differently, so the divergence from "
            "the reference does not begin at 0"
        )
    if config.device == "cuda" and config.model.dtype == "float32":
        yield "model.dtype is float32 on GPUs: bfloat16 takes half the memory and is several times faster"


def _when_all_are_large(config: Config, cluster: ClusterResources) -> Iterator[str]:
    """Yield what the cluster lacks for pools that grew as far as they may."""
    rollout = config.rollout
    bounds = {name or "rollout": one.autoscale for name, one in rollout.by_pool().items()}
    large = {name: found.max for name, found in bounds.items() if found is not None}
    if not large:
        return
    pools = [
        pool.model_copy(update={"num_workers": large.get(pool.name, pool.num_workers)})
        for pool in rollout.pools
    ]
    wide = {"num_workers": large.get("rollout", rollout.num_workers), "pools": tuple(pools)}
    largest = config.model_copy(update={"rollout": rollout.model_copy(update=wide)})
    named = ", ".join(f"{name}.autoscale.max {most}" for name, most in large.items())
    if never := [] if cluster.addable is None else shortages(largest, cluster.grown()):
        yield from (
            f"{named} cannot be reached: with all nodes that the autoscaler may add, {text}" for text in never
        )
    else:
        yield from (f"for {named} the cluster must grow: {text}" for text in shortages(largest, cluster))


def _cluster_warnings(
    config: Config, cluster: ClusterResources | None, lacking: list[str], homes: dict[str, str]
) -> Iterator[str]:
    if cluster is None:
        yield "no cluster was looked at: whether its resources suffice is checked when the job starts"
        return
    yield from (f"the cluster must grow first: {text}" for text in lacking)
    waits = "it may grow" if cluster.elastic else "then is refused"
    patience = f"the job waits rollout.start_timeout_s {config.rollout.start_timeout_s:g} s for it, {waits}"
    yield from (
        f"{text}; {patience}" for text in occupied(config, cluster.grown() if cluster.elastic else cluster)
    )
    yield from () if lacking else _when_all_are_large(config, cluster)
    homeless = [bundle.name for bundle in bundles(config) if bundle.resources and bundle.name not in homes]
    if homeless and not lacking:
        yield f"resources suffice in sum, but {', '.join(homeless)} may find no node with enough left"
    of_engines = sum(pool.num_workers * pool.threads for pool in engine_pools(config).values())
    of_ranks = sum(ranks.num_workers * ranks.threads for ranks in rank_pools(config).values())
    taking_turns = config.placement == "colocate"
    threads = max(of_engines, of_ranks) if taking_turns else of_engines + of_ranks
    if config.device == "cpu" and threads > cluster.total("CPU"):
        yield (
            f"engines and ranks use {threads} threads on {cluster.total('CPU'):g} cores: both crawl; lower "
            "rollout.threads or train.threads"
        )
