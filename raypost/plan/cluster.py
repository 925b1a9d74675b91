"""What the placement asks of a cluster, and whether a cluster has it. Plain data; Ray is not needed.

Owns the resources of every actor (`bundles`: actors are spawned with these very numbers), the description
of a cluster, and the comparison of both. Does not own which node Ray finally picks: `place` is a forecast.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raypost.config import Config, EnginePoolConfig, PoolConfig, RolloutConfig, WorkerPoolConfig
from raypost.config.rollout import RolloutPoolConfig
from raypost.errors import ClusterError
from raypost.plan.node_types import NODE_TYPE, NodeTypes, Resources, describe, fits, matches, types_of_file

LIGHT_ROLES = (
    "rollout-controller",
    "producer",
    "replay-buffer",
    "weight-broadcaster",
    "evaluator",
    "telemetry",
)
"""Roles of which there is one, on whatever time the cores have left."""

EVALUATION_ROLES = ("evaluation-controller", "evaluation-broadcaster", "evaluation-loop")
"""Roles that evaluation has for itself where it has engines of its own."""

_ENGINE_NAMES = {
    "rollout_worker": "rollout",
    "evaluation_worker": "rollout",
    "reference_worker": "reference",
    "reward_worker": "reward",
}
_OWN_FIELDS = {"CPU": "num_cpus", "GPU": "tensor_parallel_size", "memory": "", "object_store_memory": ""}


@dataclass(slots=True, frozen=True)
class Bundle:
    """One actor: its role, its name, and what Ray reserves for it on one node."""

    role: str
    name: str
    resources: dict[str, float]
    shares: int | None = None
    """Number of the device it shares with the others of that number, on one node; None: it has its own."""
    pool: str = ""
    """An engine's: name of its pool; empty: the pool that `rollout` describes."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """That its node must have."""
    fallback_labels: Sequence[Mapping[str, str]] = ()
    """That will do instead."""


@dataclass(slots=True, frozen=True)
class ClusterResources:
    """What each node has, a mapping a node. `elastic`: an autoscaler may add more than is listed."""

    nodes: Sequence[Resources]
    elastic: bool = False
    free: Sequence[Resources] | None = None
    """What of it nobody holds, in the same order; None: unknown, or all of it."""
    labels: Sequence[Mapping[str, str]] | None = None
    """Of each node, in the same order; None: unknown."""
    types: Sequence[str] | None = None
    """Of each node, as its autoscaler names it; None: what its labels say."""
    addable: NodeTypes | None = None
    """Types of nodes that its autoscaler adds; None: unknown."""
    num_new: int = 0
    """The last so many nodes are not there yet."""

    def type_of(self, number: int) -> str:
        """Return the type of a node; empty: it has none, or none is known."""
        labels = self.labels[number] if self.labels is not None else {}
        return (self.types[number] if self.types is not None else "") or labels.get(NODE_TYPE, "")

    def all_types(self) -> list[str]:
        """Return the type of every node."""
        return [self.type_of(number) for number in range(len(self.nodes))]

    def grown(self) -> ClusterResources:
        """Return it with all nodes of each type that its autoscaler may still add; itself where that is not known."""
        if self.addable is None:
            return self
        left = self.addable.left(self.all_types())
        new = [one for one in self.addable.types for _ in range(left[one.name])]
        added = [dict(one.resources) for one in new]
        return replace(
            self,
            nodes=[*self.nodes, *added],
            free=None if self.free is None else [*self.free, *added],
            labels=None if self.labels is None else [*self.labels, *(one.labels for one in new)],
            types=[*self.all_types(), *(one.name for one in new)],
            num_new=len(new) if self.nodes else 0,
        )

    def total(self, resource: str) -> float:
        """Return the sum over all nodes."""
        return sum(node.get(resource, 0) for node in self.nodes)

    def largest(self, resource: str) -> float:
        """Return the most that a single node has."""
        return max((node.get(resource, 0) for node in self.nodes), default=0)

    @classmethod
    def of_this_machine(cls) -> ClusterResources:
        """Return this machine's cores and NVIDIA GPUs as one node."""
        gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
        return cls([{"CPU": len(os.sched_getaffinity(0)), **({"GPU": gpus} if gpus else {})}])

    @classmethod
    def of_cluster_file(cls, path: Path) -> ClusterResources:
        """Return the largest cluster that a file of Ray's launcher, or of KubeRay, allows. Raises ConfigError."""
        return replace(cls([], labels=[], addable=types_of_file(path)).grown(), addable=None)

    @classmethod
    def of_dashboard(cls, address: str, token: str | None = None, timeout_s: float = 2.0) -> ClusterResources:
        """Ask a cluster's dashboard (http://host:8265) what its live nodes have, and hold. Raises ClusterError."""

        def asked(path: str) -> Any:
            request = urllib.request.Request(f"{address.rstrip('/')}/{path}")
            if token:
                request.add_header("Authorization", f"Bearer {token}")
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return json.load(response)["data"]

        def rows(of: str) -> list[dict[str, Any]]:
            return list(asked(f"api/v0/{of}?detail=1&limit=1000")["result"]["result"])

        try:
            alive = [row for row in rows("nodes") if row["state"] == "ALIVE"]
            nodes = {row["node_id"]: row["resources_total"] for row in alive}
            labels = [dict(row.get("labels") or {}) for row in alive]
            raylets = (one["raylet"] for one in asked("nodes?view=summary")["summary"])
            types = {one["nodeId"]: one.get("nodeTypeName", "") for one in raylets}
            free = {node: Counter(total) for node, total in nodes.items()}
            for node, held in _held(rows("actors"), rows("placement_groups")):
                if node in free:
                    free[node].subtract(held)
            own = [dict(total) for total in nodes.values()]
            return cls(
                own,
                False,
                [dict(left) for left in free.values()],
                labels,
                [types.get(node, "") for node in nodes],
            )
        except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError) as error:
            raise ClusterError(
                f"no cluster answers at {address} within {timeout_s:.0f} s ({error}): give the address "
                "of its dashboard, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH if it wants a token"
            ) from error


def _held(
    actors: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Resources]]:
    """Yield (node, resources) of each actor of its own, and of each bundle of a placement group."""
    for actor in actors:
        if actor["state"] == "ALIVE" and not actor["placement_group_id"]:
            yield actor["node_id"], actor["required_resources"]
    for group in groups:
        if group["state"] == "CREATED":
            yield from ((bundle["node_id"], bundle["unit_resources"]) for bundle in group["bundles"])


def bundles(config: Config) -> list[Bundle]:
    """Return every actor of a run with what it reserves; the driver's own process is not among them."""
    critic, pool, reference = config.train.critic, config.eval.pool, config.train.loss.kl.pool
    shared = config.placement == "colocate"
    # Ray counts a device that several actors share in parts.
    gpus = {} if config.device == "cpu" else {"GPU": (round(1 / (3 if critic else 2), 3) if shared else 1)}
    agent, judge = (
        {"CPU": cpus} if cpus else {} for cpus in (config.rollout.agent_cpus, config.rollout.judge_cpus)
    )
    ranks: list[tuple[str, WorkerPoolConfig]] = [("trainer", config.train)]
    if critic:
        ranks.append(("critic", critic))
    return [
        *_engines("rollout_worker", config.rollout, config, part=gpus.get("GPU") if shared else None),
        *(one for pool in config.rollout.pools for one in _engines("rollout_worker", pool, config)),
        *_standing_by(config.rollout, config),
        *(one for pool in config.rollout.pools for one in _standing_by(pool, config)),
        *(_engines("evaluation_worker", pool, config) if pool else ()),
        *(_engines("reference_worker", reference, config) if reference else ()),
        *(one for model in config.reward_models for one in _engines("reward_worker", model, config)),
        *(
            Bundle(
                f"{kind}_worker",
                f"{kind}-{n}",
                {"CPU": of.num_cpus, **gpus, **of.resources},
                shares=n if shared else None,
                labels=of.labels,
            )
            for kind, of in ranks
            for n in range(of.num_workers)
        ),
        *(Bundle("agent_loop", f"agent-loop-{n}", agent) for n in range(config.rollout.agent_workers)),
        *(Bundle("judge", f"judge-{n}", judge) for n in range(config.rollout.judge_workers)),
        *(
            Bundle(name.replace("-", "_"), name, agent if name == "evaluation-loop" else {})
            for name in (*LIGHT_ROLES, *(EVALUATION_ROLES if pool else ()))
        ),
    ]


def _engines(role: str, of: EnginePoolConfig, config: Config, part: float | None = None) -> list[Bundle]:
    """Return the workers of one pool. `part`: the fraction of a GPU of each, if they share theirs."""
    gpus = {} if config.device == "cpu" else {"GPU": part or of.tensor_parallel_size}
    pool = of.name if isinstance(of, PoolConfig) else ""
    shared = config.placement == "colocate" and isinstance(of, RolloutConfig)
    return [
        Bundle(
            role,
            f"{_ENGINE_NAMES[role]}{f'-{pool}' if pool else ''}-{n}",
            {"CPU": of.num_cpus, **gpus, **of.resources},
            shares=n if shared else None,
            pool=pool,
            labels=of.labels,
            fallback_labels=of.fallback_labels,
        )
        for n in range(of.num_workers)
    ]


def _standing_by(of: RolloutConfig | RolloutPoolConfig, config: Config) -> list[Bundle]:
    """Return those that stand by for a pool: their names are the next."""
    all_ = _engines(
        "rollout_worker", of.model_copy(update={"num_workers": of.num_workers + of.standby}), config
    )
    return [replace(one, role="standby_worker") for one in all_[of.num_workers :]]


def shared_devices(config: Config) -> list[dict[str, float]]:
    """Return what is reserved for each shared device: the sum over the actors that share it."""
    devices: dict[int, Counter[str]] = {}
    for bundle in bundles(config):
        if bundle.shares is not None:
            devices.setdefault(bundle.shares, Counter()).update(bundle.resources)
    return [
        {name: 1.0 if name == "GPU" else amount for name, amount in devices[n].items()}
        for n in sorted(devices)
    ]


def name_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with the names of custom resources and pools."""
    for section, of in {**engine_pools(config), **rank_pools(config)}.items():
        for name in of.resources:
            if name in _OWN_FIELDS:
                own = _OWN_FIELDS[name]
                fix = f"set {section}.{own}" if own in type(of).model_fields else "remove it"
                yield f"{section}.resources names {name}, which is no custom resource: {fix}"
    names = [pool.name for pool in (*config.rollout.pools, *([config.eval.pool] if config.eval.pool else []))]
    if len(set(names)) != len(names):
        yield f"rollout.pools and eval.pool need different names, got {names}: rename one"


def engine_pools(config: Config) -> dict[str, EnginePoolConfig]:
    """Return what the configuration says of engines, by its place."""
    pools: dict[str, EnginePoolConfig | None] = {
        "rollout": config.rollout,
        **{f"rollout.pools.{n}": pool for n, pool in enumerate(config.rollout.pools)},
        **{f"reward_models.{n}": model for n, model in enumerate(config.reward_models)},
        "eval.pool": config.eval.pool,
        "train.loss.kl.pool": config.train.loss.kl.pool,
    }
    return {place: pool for place, pool in pools.items() if pool is not None}


def rank_pools(config: Config) -> dict[str, WorkerPoolConfig]:
    """Return what the configuration says of trainer ranks, by its place."""
    critic = config.train.critic
    return {"train": config.train} | ({} if critic is None else {"train.critic": critic})


def shortages(config: Config, cluster: ClusterResources) -> list[str]:
    """Return what the cluster lacks, in sum or on a single node, with both numbers and the fix."""
    asked = bundles(config)
    on_one_node: list[tuple[str, Resources]] = [
        (b.role, b.resources) for b in asked if b.resources and b.shares is None
    ]
    on_one_node += [("shared device", device) for device in shared_devices(config)]
    problems, lacking = [], set()
    for resource in sorted({name for bundle in asked for name in bundle.resources}):
        need = sum(resources.get(resource, 0) for _, resources in on_one_node)
        have = cluster.total(resource)
        if need > have:
            lacking.add(resource)
            counts = Counter((b.role, b.resources[resource]) for b in asked if b.resources.get(resource))
            parts = ", ".join(f"{count} {role} x {amount:g}" for (role, amount), count in counts.items())
            problems.append(
                f"the placement needs {need:g} {resource} ({parts}), the cluster has {have:g}: "
                + _fix(resource)
            )
    for n, (who, resources) in enumerate(on_one_node):
        told = (who, resources) in on_one_node[:n]
        if told or lacking & set(resources) or any(fits(resources, node) for node in cluster.nodes):
            continue
        large = ", ".join(f"{cluster.largest(name):g} {name}" for name in resources)
        problems.append(
            f"each {who} needs {describe(resources)} on one node, but no node has that; the most "
            f"that any node has: {large}: use larger nodes, or lower what one {who} asks for"
        )
    return problems


def occupied(config: Config, cluster: ClusterResources) -> list[str]:
    """Return what the cluster has and others hold now, with the three numbers."""
    if cluster.free is None:
        return []
    free = ClusterResources(cluster.free, labels=cluster.labels)
    heavy = [bundle for bundle in bundles(config) if bundle.resources]
    problems = [
        f"the placement needs {need:g} {resource}, and of the cluster's {cluster.total(resource):g} only "
        f"{free.total(resource):g} are free: others hold the rest"
        for resource in sorted({name for bundle in heavy for name in bundle.resources})
        if free.total(resource)
        < (need := sum(bundle.resources.get(resource, 0) for bundle in heavy))
        <= cluster.total(resource)
    ]
    homes = place(heavy, free)
    homeless = [
        bundle for bundle in heavy if bundle.name not in homes and bundle.name in place(heavy, cluster)
    ]
    if homeless and not problems:
        one = homeless[0]
        most = ", ".join(f"{free.largest(name):g} {name}" for name in one.resources)
        problems.append(
            f"{one.name} needs {describe(one.resources)} on one node, and others hold it: the most that is free on any "
            f"node: {most}"
        )
    return problems


def place(asked: Sequence[Bundle], cluster: ClusterResources) -> dict[str, str]:
    """Return actor name -> node: largest actors first, each on the first node with room, if any has.

    Ray decides anew when the job runs; this shows that, and how, it can fit.
    """
    free = [dict(node) for node in cluster.nodes]
    labels = cluster.labels
    homes = {}
    heavy = (bundle for bundle in asked if bundle.resources)
    for bundle in sorted(
        heavy, key=lambda b: (b.resources.get("GPU", 0), b.resources.get("CPU", 0)), reverse=True
    ):
        ways = [bundle.labels, *bundle.fallback_labels]
        for number, node in enumerate(free):
            is_chosen = labels is None or any(matches(way, labels[number]) for way in ways)
            if is_chosen and fits(bundle.resources, node):
                for name, amount in bundle.resources.items():
                    node[name] -= amount
                homes[bundle.name] = _node_name(number, cluster)
                break
    return homes


def _node_name(number: int, cluster: ClusterResources) -> str:
    """Return the node's address, which Ray lists among its resources, else its place in the list, and its type."""
    node = cluster.nodes[number]
    kind = cluster.type_of(number)
    if number >= len(cluster.nodes) - cluster.num_new:
        return f"a new {kind}"
    address = next(
        (name for name in node if name.startswith("node:") and not name.startswith("node:__")), None
    )
    name = address.removeprefix("node:") if address else f"node {number + 1}"
    return f"{name} ({kind})" if kind else name


def _fix(resource: str) -> str:
    if resource == "CPU":
        return (
            "add nodes, or lower rollout.num_workers, rollout.num_cpus, rollout.agent_cpus, train.num_workers or "
            "train.num_cpus"
        )
    if resource == "GPU":
        return "add nodes, or lower rollout.num_workers, rollout.tensor_parallel_size or train.num_workers"
    return f"start nodes with --resources '{json.dumps({resource: 1})}', or remove it from the configuration"
