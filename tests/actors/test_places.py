"""Places of a rollout pool that are reserved together, and nodes by their labels, on a Ray of this machine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.actor import ActorHandle

from actors.placement import cluster_nodes, spawn
from jobs.places import Places
from raypost.errors import ClusterError
from raypost.plan.cluster import bundles
from tests.factories import make_config


class Worker:
    def where(self) -> tuple[Any, str]:
        context = ray.get_runtime_context()
        return ray.util.get_current_placement_group(), str(context.get_node_id())


async def test_reserved_places_are_held_handed_on_and_given_back_and_labels_choose_the_node(
    local_ray: None, tmp_path: Path
) -> None:
    (labels,) = cluster_nodes().labels
    here = {"ray.io/node-id": labels["ray.io/node-id"]}
    far = {"name": "far", "num_cpus": 0.01, "labels": {"zone": "c"}, "fallback_labels": [here]}
    cfg = make_config(
        rollout={"num_workers": 2, "num_cpus": 0.01, "reserve": "spread", "labels": here, "pools": [far]},
        runs_dir=str(tmp_path), rollout__start_timeout_s=60,
    )  # fmt: skip
    asked = {one.name: one for one in bundles(cfg)}
    places, actors = Places(cfg), list[ActorHandle]()

    async def put(name: str) -> tuple[dict[str, Any], tuple[Any, str]]:
        like = asked.get(name, asked["rollout-0"])
        place = places.of_engine(replace(like, name=name))
        actors.append(spawn(Worker, name=name, resources=like.resources, **place))
        return place, await asyncio.wait_for(actors[-1].where.remote(), 240)

    try:
        await places.reserve()
        first, (group, _) = await put("rollout-0")
        second, (other, _) = await put("rollout-1")
        assert group == other == first["group"] and {first["bundle"], second["bundle"]} == {0, 1}
        third, (none, _) = await put("rollout-2")
        assert none is None and third == {"labels": here, "fallback_labels": ()}, "all places are taken"
        ray.kill(actors[0])
        places.leave("rollout-0")
        places.leave("rollout-2")
        again, (same, _) = await put("rollout-3")
        assert same == group and again["bundle"] == first["bundle"]
        _, (none, node) = await put("rollout-far-0")
        assert none is None and {"ray.io/node-id": node} == here, "no node is in zone c, and this one will do"
        with pytest.raises(ClusterError, match=r"rollout is not reserved .*already exists"):
            await Places(cfg).reserve()
        none = {"name": "none", "reserve": "pack", "labels": {"zone": "c"}}
        late = make_config(rollout={"pools": [none], "start_timeout_s": 1})
        with pytest.raises(ClusterError, match=r"waited 1 s for 1 x .* for pool none on nodes with .*zone"):
            await Places(late).reserve()
    finally:
        for actor in actors:
            ray.kill(actor)
        places.release()
    end = time.monotonic() + 60
    while any("group" in name for name in ray.available_resources()):
        assert time.monotonic() < end, "its places are given back"
        await asyncio.sleep(0.1)
