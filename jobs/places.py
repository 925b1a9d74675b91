"""Places: where the actors of a run are put, and what is reserved for them together.

Owns the placement groups of one run: the devices that engines and ranks share, the ranks, and rollout pools with
`reserve`. What an actor needs comes from raypost.plan.cluster.bundles.

    separate   engines   each by itself, by resources and labels, or a pool in one group     ranks   one group, packed
    colocate   engine n and rank n (of trainer and critic) in bundle n of one group: one device

A place that a worker left is given to the next that comes; a group is held until the run ends, so a reserved pool never
becomes smaller than what it reserved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors.placement import reserve
from jobs.nodes import autoscaler_says
from raypost.config import Config
from raypost.errors import ClusterError
from raypost.plan.cluster import Bundle, bundles, shared_devices


class Places:
    """The placement groups of a run."""

    def __init__(self, cfg: Config) -> None:
        """Reserve nothing yet."""
        self._cfg = cfg
        self._groups: list[PlacementGroup] = []
        self._devices: PlacementGroup | None = None
        """The bundles that engines and ranks share."""
        self._reserved: dict[str, PlacementGroup] = {}
        """Of rollout pools that have one, by the pool's name."""
        self._in: dict[str, list[str | None]] = {}
        """Who is in which of its bundles."""

    async def reserve(self) -> None:
        """Reserve what engines and ranks share, and the rollout pools that ask for it."""
        if devices := shared_devices(self._cfg):
            self._devices = await self._group(devices, "devices", labels=self._cfg.train.labels)
        for name, own in self._cfg.rollout.by_pool().items():
            if own.reserve:
                asked = [
                    one for one in bundles(self._cfg) if (one.role, one.pool) == ("rollout_worker", name)
                ]
                resources, spread = [one.resources for one in asked], own.reserve == "spread"
                what = f"pool {name}" if name else "rollout"
                self._reserved[name] = await self._group(resources, what, spread=spread, labels=own.labels)
                self._in[name] = [None] * len(asked)

    async def of_ranks(self, kind: str, ranks: Sequence[Bundle]) -> PlacementGroup:
        """Return the group of ranks, bundle n for rank n."""
        resources = [one.resources for one in ranks]
        return self._devices or await self._group(resources, kind, labels=ranks[0].labels)

    def of_engine(self, bundle: Bundle) -> dict[str, Any]:
        """Return the place of an engine's actor, as arguments of `spawn`."""
        if self._devices is not None and bundle.shares is not None:
            return {"group": self._devices, "bundle": bundle.shares}
        places = self._in.get(bundle.pool, []) if bundle.role == "rollout_worker" else []
        if None in places:
            number = places.index(None)
            places[number] = bundle.name
            return {"group": self._reserved[bundle.pool], "bundle": number}
        return {"labels": bundle.labels, "fallback_labels": bundle.fallback_labels}

    def leave(self, name: str) -> None:
        """Give the place that an engine's actor had to the next."""
        for places in self._in.values():
            if name in places:
                places[places.index(name)] = None

    def release(self) -> None:
        """Give all back."""
        for group in self._groups:
            remove_placement_group(group)

    async def _group(self, resources: list[dict[str, float]], name: str, **how: Any) -> PlacementGroup:
        try:
            group = await reserve(resources, name, self._cfg.rollout.start_timeout_s, **how)
        except ClusterError as error:
            largest = max(resources, key=lambda one: sum(one.values()))
            said = await asyncio.to_thread(autoscaler_says, largest, [how.get("labels") or {}])
            raise ClusterError(f"{error}; {said}") from error
        self._groups.append(group)
        return group
