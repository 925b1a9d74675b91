"""Turning plain classes into actors, and waiting for their resources out loud.

Owns names, lifetimes and the wait for resources. No actor is detached: all end with the driver that spawned them.
What a role needs comes from raypost.plan.plan.bundles, the same numbers that `raypost plan` prints.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypost.errors import ClusterError

log = logging.getLogger(__name__)

LOG_EVERY_S = 15.0
MAX_CONCURRENCY = 100_000
"""Calls that an asynchronous actor has open at once: more than a pool ever makes, so that no call has to queue.

Not concurrency groups: Ray gives each its own event loop, and a role's state belongs to one loop.
"""


def spawn(
    cls: Callable[..., object],
    *args: Any,
    name: str,
    resources: dict[str, float] | None = None,
    max_restarts: int = 0,
    concurrency_groups: dict[str, int] | None = None,
    group: PlacementGroup | None = None,
    bundle: int = -1,
    env: dict[str, str] | None = None,
) -> ActorHandle:
    """Start `cls(*args)` as an actor called `name`. `resources` uses Ray's names, CPU and GPU included.

    `concurrency_groups` (threads a group) are for classes without coroutines; such a class does one call at a
    time in its default group. Classes with coroutines take MAX_CONCURRENCY calls.
    """
    needed = dict(resources or {})
    options: dict[str, Any] = {
        "name": name,
        "num_cpus": needed.pop("CPU", 0),
        "num_gpus": needed.pop("GPU", 0),
        "resources": needed or None,
        "max_restarts": max_restarts,
        "max_task_retries": 0,
    }
    if concurrency_groups is not None:
        options["concurrency_groups"] = concurrency_groups
    elif any(inspect.iscoroutinefunction(member) for _, member in inspect.getmembers(cls)):
        options["max_concurrency"] = MAX_CONCURRENCY
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, bundle)
    if env:
        options["runtime_env"] = {"env_vars": env}
    return ray.remote(**options)(cls).remote(*args)


async def reserve(bundles: list[dict[str, float]], name: str, timeout_s: float) -> PlacementGroup:
    """Reserve a placement group that holds all bundles at once, packed. Raises ClusterError past the deadline.

    While it waits it says what it waits for, and what the cluster has free.
    """
    group = placement_group(bundles, strategy="PACK", name=name)
    start = time.monotonic()
    ready = asyncio.ensure_future(group.ready())
    while True:
        done, _ = await asyncio.wait({ready}, timeout=min(LOG_EVERY_S, timeout_s))
        if done:
            ready.result()
            return group
        waited = time.monotonic() - start
        state = f"{len(bundles)} x {bundles[0]} for {name}; the cluster has free {ray.available_resources()}"
        if waited >= timeout_s:
            ready.cancel()
            remove_placement_group(group)
            raise ClusterError(f"waited {waited:.0f} s for {state}: add nodes, or ask for less")
        log.warning("waiting %.0f s for %s", waited, state)


def cluster_nodes() -> list[dict[str, float]]:
    """Return the resources of every live node, for raypost.plan.plan."""
    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
