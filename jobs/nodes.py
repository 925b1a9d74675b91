"""Nodes: those that are about to go and who is on them, what the cluster does not give, what its autoscaler may add.

Owns what is read of Ray's tables and of its autoscaler beside their public calls. Ray tells how many nodes of a type
there may be only where a provider reports it; else the autoscaler's own file does, to whoever is on the head.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
import ray
import yaml
from ray._private import worker as ray_worker
from ray._private.state import state
from ray.core.generated.autoscaler_pb2 import AutoscalingState, GetClusterStatusReply

from actors.placement import cluster_nodes
from raypost.errors import ClusterError, WaitTimeoutError
from raypost.plan.cluster import Bundle, ClusterResources
from raypost.plan.node_types import (
    UNBOUNDED,
    Labels,
    NodeType,
    NodeTypes,
    Resources,
    describe,
    types_of_launcher,
)
from raypost.plan.nodes import why_none

log = logging.getLogger(__name__)

T = TypeVar("T")
TOLD_S = 15.0
"""Between two looks at what actors that start wait for."""
ANSWER_S = 30
"""How long the head may take to say what its autoscaler does."""


def draining_nodes() -> frozenset[str]:
    """Return the ids of nodes that were told to go: by a spot notice, by hand, or as they were idle."""
    return frozenset(state.get_draining_nodes())


def nodes_of(nodes: Collection[str]) -> set[str]:
    """Return the names of this job's actors that are on these nodes."""
    if not nodes:
        return set()
    job = ray.get_runtime_context().get_job_id()
    rows = state.actor_table(None).values()
    return {
        row["Name"]
        for row in rows
        if row["JobID"] == job and row["Address"]["NodeID"] in nodes and row["State"] == "ALIVE"
    }


def live_cluster(elastic: bool) -> ClusterResources:
    """Return what every live node has, what of it is free, its labels and type, and what may be added."""
    nodes = cluster_nodes()
    names = {
        one.node_id.hex(): one.ray_node_type_name for one in _status().cluster_resource_state.node_states
    }
    types = [names.get(node, "") for node in nodes.ids]
    return ClusterResources(nodes.resources, elastic, nodes.free, nodes.labels, types, node_types())


def node_types() -> NodeTypes | None:
    """Return the types of nodes that the cluster's autoscaler adds; None where neither Ray nor this node knows."""
    reported = state.get_cluster_config()
    if reported is not None and reported.node_group_configs:
        groups = reported.node_group_configs
        return NodeTypes(
            [
                NodeType(one.name, dict(one.resources), one.max_count if one.max_count >= 0 else UNBOUNDED)
                for one in groups
            ]
        )
    file = _autoscaler_file(ray.get_runtime_context().gcs_address)
    try:
        return types_of_launcher(yaml.safe_load(file.read_text())) if file is not None else None
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        log.warning("the autoscaler's file %s does not say its node types: %r", file, error)
        return None


def _autoscaler_file(gcs_address: str) -> Path | None:
    """Return the file that the autoscaler of a cluster was started with, if it runs on this node."""
    for process in psutil.process_iter(["cmdline"]):
        options = dict(
            one.split("=", 1) for one in process.info["cmdline"] or () if one.startswith("--") and "=" in one
        )
        if options.get("--gcs-address") == gcs_address and (file := options.get("--autoscaling-config")):
            return Path(file)
    return None


def shortage(of: Bundle, names: Collection[str]) -> str:
    """Say what workers without a process ask for, what of it the cluster has, and what its autoscaler does about it."""
    cluster = live_cluster(elastic=True)
    own = {name: amount for name, amount in of.resources.items() if amount}
    have = "; ".join(
        f"{name}: {amount * len(names):g} asked, {sum(node.get(name, 0) for node in cluster.free or ()):g} free of "
        f"{cluster.total(name):g}"
        for name, amount in own.items()
    )
    which = f" and {dict(of.labels)}" if of.labels else ""
    waiting = f"{', '.join(sorted(names))} without a node that has {describe(own)}{which} ({have})"
    return f"{waiting}; {autoscaler_says(own, [of.labels, *of.fallback_labels], cluster)}"


def homeless(asked: Sequence[Bundle]) -> str:
    """Say which of a run's actors have no process for want of a node, and what the cluster has; empty: all have one."""
    job = ray.get_runtime_context().get_job_id()
    rows = state.actor_table(None).values()
    pending = {
        row["Name"] for row in rows if row["JobID"] == job and not row["Pid"] and row["State"] != "DEAD"
    }
    kinds: dict[str, list[Bundle]] = {}
    for one in asked:
        if one.name in pending and one.resources:
            kinds.setdefault(f"{one.resources} {one.labels}", []).append(one)
    return "; ".join(shortage(many[0], [one.name for one in many]) for many in kinds.values())


async def said_meanwhile(
    work: Awaitable[T], look: Callable[[], str], say: Callable[[str], None], every_s: float = TOLD_S
) -> T:
    """Return what `work` comes to, and say meanwhile what it waits for, as `look` finds it.

    Raises ClusterError with what lacked last where the deadline of `work` passes, else what `work` raises.
    """
    found, task = "", asyncio.ensure_future(work)
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=every_s)
            if done:
                return task.result()
            before, found = found, await asyncio.to_thread(look)
            if found and found != before:
                say(f"waiting: {found}")
    except WaitTimeoutError as error:
        if found:
            raise ClusterError(f"{error}: {found}") from error
        raise
    finally:
        task.cancel()


def autoscaler_says(
    wanted: Resources, ways: Sequence[Labels] = ({},), cluster: ClusterResources | None = None
) -> str:
    """Return what the cluster's autoscaler does just now about a request that no node has room for, in a few words.

    `ways`: labels that its node must have, and those that will do instead.
    """
    try:
        return said_of(_status().autoscaling_state, wanted, ways, cluster or live_cluster(elastic=True))
    # A supervision boundary: the autoscaler's table is foreign, and only told of.
    except Exception as error:
        return f"the autoscaler does not answer ({type(error).__name__})"


def said_of(
    found: AutoscalingState, wanted: Resources, ways: Sequence[Labels], cluster: ClusterResources
) -> str:
    """Return what an autoscaler's state says of a request."""
    if found.failed_instance_requests:
        last = found.failed_instance_requests[-1]
        return f"the autoscaler could not start {last.count} {last.ray_node_type_name}: {last.reason}"
    coming = len(found.pending_instances) + sum(one.count for one in found.pending_instance_requests)
    if coming:
        return f"the autoscaler starts {coming} node(s)"
    if not found.autoscaler_state_version:
        return "no autoscaler answers: add nodes"
    refused = [*found.infeasible_resource_requests]
    refused += [one for gang in found.infeasible_gang_resource_requests for one in gang.requests]
    if not any(wanted.items() <= dict(one.resources_bundle).items() for one in refused):
        return "the autoscaler has not looked at it yet"
    return why_none(wanted, ways, cluster)


def _status() -> GetClusterStatusReply:
    """Return what the head knows of nodes and of its autoscaler."""
    reply = GetClusterStatusReply()
    reply.ParseFromString(ray_worker.global_worker.gcs_client.get_cluster_status(timeout_s=ANSWER_S))
    return reply
