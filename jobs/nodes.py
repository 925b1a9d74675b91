"""Nodes: those that are about to go and who is on them, and what the cluster does not give.

Owns what is read of Ray's tables and of its autoscaler beside their public calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

import ray
from ray._private.state import state
from ray.autoscaler.v2.sdk import get_cluster_status

from actors.placement import cluster_nodes
from raypost.errors import ClusterError, WaitTimeoutError
from raypost.plan.cluster import Bundle, describe

T = TypeVar("T")
TOLD_S = 15.0
"""Between two looks at what actors that start wait for."""
ANSWER_S = 5
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


def shortage(
    each: Mapping[str, float], names: Collection[str], labels: Mapping[str, str] | None = None
) -> str:
    """Say what workers without a process ask for, what of it the cluster has, and what its autoscaler does about it."""
    cluster = cluster_nodes()
    own = {name: amount for name, amount in each.items() if amount}
    have = "; ".join(
        f"{name}: {amount * len(names):g} asked, {sum(node.get(name, 0) for node in cluster.free):g} free of "
        f"{sum(node.get(name, 0) for node in cluster.resources):g}"
        for name, amount in own.items()
    )
    which = f" and {dict(labels)}" if labels else ""
    waiting = f"{', '.join(sorted(names))} without a node that has {describe(own)}{which} ({have})"
    return f"{waiting}; {autoscaler_says()}"


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
    return "; ".join(
        shortage(many[0].resources, [one.name for one in many], many[0].labels) for many in kinds.values()
    )


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


def autoscaler_says() -> str:
    """Return what the cluster's autoscaler does just now, in a few words."""
    try:
        found = get_cluster_status(ray.get_runtime_context().gcs_address, timeout=ANSWER_S)
    # A supervision boundary: the autoscaler's table is foreign, and only told of.
    except Exception as error:
        return f"the autoscaler does not answer ({type(error).__name__})"
    if found.failed_launches:
        last = found.failed_launches[-1]
        return f"the autoscaler could not start {last.count} {last.ray_node_type_name}: {last.details}"
    coming = len(found.pending_nodes) + sum(one.count for one in found.pending_launches)
    if coming:
        return f"the autoscaler starts {coming} node(s)"
    if found.stats.autoscaler_iteration_time_s is None:
        return "no autoscaler answers: add nodes"
    return "the autoscaler adds no node: no node type has that, or all are at their maximum"
