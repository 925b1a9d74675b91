"""Turning plain classes into actors, and waiting for their resources out loud.

Owns names, lifetimes and the wait for resources. No actor is detached: all end with the driver that spawned them.
What a role needs comes from raypost.plan.plan.bundles, the same numbers that `raypost plan` prints.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray._private.state import available_resources_per_node
from ray.actor import ActorHandle
from ray.exceptions import RaySystemError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypost.doctor.presence import announce
from raypost.doctor.watch import present
from raypost.errors import ClusterError
from raypost.observe.waits import waiting

log = logging.getLogger(__name__)

LOG_EVERY_S = 15.0
NO_LABELS: Mapping[str, str] = {}
MAX_CONCURRENCY = 100_000
"""Calls that an asynchronous actor has open at once: more than a pool ever makes, so that no call has to queue.

Not concurrency groups: Ray gives each its own event loop, and a role's state belongs to one loop.
"""
GC_ALLOCATIONS = 20_000
"""New objects after which Python searches for unreachable cycles, of which roles make few: with its own 700 the search
is a tenth of what production costs. Ranks keep that number: a cycle there may hold a device's memory.
"""


class Home(NamedTuple):
    """The run that an actor is of."""

    run_dir: Path
    stall_s: float


def spawn(
    cls: Callable[..., object],
    *args: Any,
    name: str,
    resources: dict[str, float] | None = None,
    max_restarts: int = 0,
    concurrency_groups: dict[str, int] | None = None,
    group: PlacementGroup | None = None,
    bundle: int = -1,
    labels: Mapping[str, str] = NO_LABELS,
    fallback_labels: Sequence[Mapping[str, str]] = (),
    env: dict[str, str] | None = None,
    home: Home | None = None,
) -> ActorHandle:
    """Start `cls(*args)` as an actor called `name`. `resources` uses Ray's names, CPU and GPU included.

    `concurrency_groups` (threads a group) are for classes without coroutines; such a class does one call at a
    time in its default group. Classes with coroutines take MAX_CONCURRENCY calls. `labels`: of its node, where it is in
    no group, and `fallback_labels` those that will do. `home`: where its process says that
    it is there, and what it waits for (raypost.doctor).
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
    elif labels:
        options["label_selector"] = dict(labels)
        if fallback_labels:
            options["fallback_strategy"] = [{"label_selector": dict(one)} for one in fallback_labels]
    if env:
        options["runtime_env"] = {"env_vars": env}
    if home is not None:
        announce(home.run_dir, name, resources or {})
        cls = _present(cls, name, home, searches=concurrency_groups is not None)
    return ray.remote(**options)(cls).remote(*args)


def _present(cls: Any, name: str, home: Home, searches: bool = False) -> Callable[..., object]:
    """Return the class with a presence that begins before its constructor.

    `searches`: its process searches for unreachable cycles as often as Python does by itself.
    """

    def init(self: object, *args: Any, **kwargs: Any) -> None:
        present(name, *home).start()
        if not searches:
            gc.set_threshold(GC_ALLOCATIONS)
        cls.__init__(self, *args, **kwargs)
        if not searches:
            gc.freeze()  # modules, tokenizers and sources stay

    if inspect.isfunction(cls.__init__):  # Ray checks arguments by its signature
        init = functools.wraps(cls.__init__)(init)
    members = {"__init__": init, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), members)


async def reserve(
    bundles: list[dict[str, float]],
    name: str,
    timeout_s: float,
    *,
    spread: bool = False,
    labels: Mapping[str, str] = NO_LABELS,
) -> PlacementGroup:
    """Reserve a placement group that holds all bundles at once, packed, or `spread` over nodes, on nodes with `labels`.

    While it waits it says what it waits for, and what the cluster has free. Raises ClusterError past the deadline, and
    for a name that is reserved already.
    """
    selectors = [dict(labels)] * len(bundles) if labels else None
    strategy = "SPREAD" if spread else "PACK"
    try:
        group = placement_group(bundles, strategy=strategy, name=name, bundle_label_selector=selectors)
    except RaySystemError as error:
        told = f"{name} is not reserved ({error}): a run in the same namespace may hold it, which has to end first"
        raise ClusterError(told) from error
    start = time.monotonic()
    ready = asyncio.ensure_future(group.ready())
    wanted = f"{len(bundles)} x {bundles[0]} for {name}" + (
        f" on nodes with {dict(labels)}" if labels else ""
    )
    while True:
        with waiting(wanted, timeout_s, outside="node"):
            done, _ = await asyncio.wait({ready}, timeout=min(LOG_EVERY_S, timeout_s))
        if done:
            ready.result()
            return group
        waited = time.monotonic() - start
        state = f"{wanted}; the cluster has free {ray.available_resources()}"
        if waited >= timeout_s:
            ready.cancel()
            remove_placement_group(group)
            raise ClusterError(f"waited {waited:.0f} s for {state}: add nodes, or ask for less")
        log.warning("waiting %.0f s for %s", waited, state)


class Nodes(NamedTuple):
    """Every live node, in one order, for raypost.plan.plan."""

    ids: list[str]
    resources: list[dict[str, float]]
    free: list[dict[str, float]]
    labels: list[dict[str, str]]


def cluster_nodes() -> Nodes:
    """Return what every live node has, what of it is free, and its labels."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    free = available_resources_per_node()
    return Nodes(
        [str(node["NodeID"]) for node in nodes],
        [dict(node["Resources"]) for node in nodes],
        [dict(free.get(node["NodeID"], {})) for node in nodes],
        [dict(node["Labels"]) for node in nodes],
    )
