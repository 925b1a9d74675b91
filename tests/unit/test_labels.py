"""Labels of nodes: what selects which, and what is said of one that no node has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypost.config import Config
from raypost.errors import ClusterError
from raypost.plan.cluster import ClusterResources, bundles, place
from raypost.plan.node_types import matches
from raypost.plan.nodes import label_problems, node_lines
from raypost.plan.plan import check
from tests.factories import make_config

SPOT, HELD = {"market": "spot", "zone": "a"}, {"market": "held", "zone": "b"}


@pytest.mark.parametrize(
    ("selectors", "spot", "held"),
    [
        ({}, True, True),
        ({"market": "spot"}, True, False),
        ({"market": "!spot"}, False, True),
        ({"zone": "in(a,b)"}, True, True),
        ({"zone": "!in(a,c)"}, False, True),
        ({"market": "spot", "zone": "b"}, False, False),
        ({"gpu": "!h100"}, True, True),
    ],
)
def test_a_selector_selects_as_ray_does(selectors: dict[str, str], spot: bool, held: bool) -> None:
    assert (matches(selectors, SPOT), matches(selectors, HELD)) == (spot, held)


def cluster(*labels: dict[str, str], cpus: float = 8) -> ClusterResources:
    return ClusterResources([{"CPU": cpus}] * len(labels), labels=labels)


def config(**rollout: Any) -> Config:
    return make_config(rollout={"num_workers": 1, **rollout}, eval__num_prompts=0)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"labels": {"markt": "spot"}}, "no node has a label 'markt' (there are: market, zone): did you mean market?"),
        ({"labels": {"rack": "7"}}, "no node has a label 'rack' (there are: market, zone): start nodes with --labels"),
        ({"labels": {"market": "spto"}}, "the values of 'market' are held, spot: choose one of them"),
        ({"labels": {"market": "spot", "zone": "b"}}, "no node has all of it at once"),
        ({"labels": {"market": "spto"}, "fallback_labels": [{"zone": "c"}]}, "needs a node with market: spto"),
        ({"pools": [{"name": "far", "labels": {"zone": "c"}}]}, "rollout-far-0 needs a node with zone: c"),
    ],
)  # fmt: skip
def test_a_label_that_no_node_has_is_named_with_what_is_there(rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError) as refused:
        check(config(**rollout), cluster=cluster(SPOT, HELD))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "rollout",
    [
        {"labels": {"market": "spot"}},
        {"labels": {"market": "spto"}, "fallback_labels": [{"market": "held"}]},
        {"labels": {"market": "!spto"}},
    ],
)
def test_labels_that_some_node_has_are_fine(rollout: dict[str, Any]) -> None:
    assert list(label_problems(config(**rollout), cluster(SPOT, HELD))) == []
    unknown = ClusterResources([{"CPU": 8}])
    assert list(label_problems(config(labels={"market": "spto"}), unknown)) == [], (
        "labels are not known there"
    )


def test_a_worker_needs_its_resources_on_a_node_with_its_labels() -> None:
    nodes = ClusterResources([{"CPU": 2}, {"CPU": 16}], labels=[SPOT, HELD])
    (problem,) = label_problems(config(labels=SPOT, num_cpus=4), nodes)
    assert "rollout-0 needs 4 CPU on a node with market: spot, zone: a, and none of the nodes" in problem
    assert list(label_problems(config(labels=HELD, num_cpus=4), nodes)) == []


def test_the_forecast_puts_workers_on_nodes_with_their_labels_and_names_the_type_and_what_is_free() -> None:
    spot, held = {**SPOT, "ray.io/node-group": "cheap"}, HELD
    free = [{"CPU": 5.0}, {"CPU": 8.0}]
    nodes = ClusterResources([{"CPU": 8, "memory": 1e9}, {"CPU": 8}], free=free, labels=[held, spot])
    homes = place(bundles(config(labels={"market": "spot"})), nodes)
    assert homes == {"rollout-0": "node 2 (cheap)", "trainer-0": "node 1"}
    lines = {
        "of no type": "1 node(s), 8 CPU each; free: 5 CPU",
        "cheap": "1 node(s), 8 CPU each; free: 8 CPU",
    }
    assert dict(node_lines(nodes)) == lines
    assert list(node_lines(None)) == list(node_lines(ClusterResources([{"CPU": 1}]))) == []


def test_what_a_cluster_may_get_yet_is_a_warning() -> None:
    elastic = ClusterResources([{"CPU": 8}], elastic=True, labels=[SPOT])
    warnings = check(config(labels={"market": "held"}), cluster=elastic).warnings
    assert any(
        "the cluster must grow first: rollout-0 needs a node with market: held" in one for one in warnings
    )


def test_labels_of_node_types_come_from_the_cluster_file_and_those_of_workers_from_their_pools(
    tmp_path: Path,
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "head_node_type: head\nmax_workers: 2\navailable_node_types:\n  head: {resources: {CPU: 0}}\n"
        "  spot: {resources: {CPU: 4}, labels: {market: spot}, max_workers: 2}\n"
    )
    found = ClusterResources.of_cluster_file(file)
    assert found.labels == [{}, {"market": "spot"}, {"market": "spot"}]
    assert dict(node_lines(found)) == {"head": "1 node(s), 0 CPU each", "spot": "2 node(s), 4 CPU each"}
    assert dict(check(config(), cluster=found).nodes) == dict(node_lines(found))
    cfg = config(
        labels={"a": "1"}, pools=[{"name": "far", "labels": {"b": "2"}, "fallback_labels": [{"c": "3"}]}]
    )
    chosen = {one.name: (one.labels, tuple(one.fallback_labels)) for one in bundles(cfg) if one.resources}
    assert chosen == {
        "rollout-0": ({"a": "1"}, ()),
        "rollout-far-0": ({"b": "2"}, ({"c": "3"},)),
        "trainer-0": ({}, ()),
    }


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"labels": {"mar ket": "spot"}}, "selects no node"),
        ({"labels": {"market": "in(spot"}}, "selects no node"),
        ({"labels": {"market": "spot|held"}}, "selects no node"),
        ({"fallback_labels": [{"market": "held"}]}, "fallback_labels need labels"),
        ({"reserve": "pack", "num_workers": 2, "autoscale": {"min": 1, "max": 3}}, "reserve holds the places of 2"),
        ({"reserve": "stack"}, "'pack' or 'spread'"),
        ({"reserve": "pack", "labels": SPOT, "fallback_labels": [HELD]}, "leave out these or reserve"),
    ],
)  # fmt: skip
def test_labels_and_reservations_that_ray_could_not_keep_are_refused(
    rollout: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as refused:
        config(**rollout)
    assert message in str(refused.value)
