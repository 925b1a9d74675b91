"""Types of nodes that an autoscaler may add: read from its file, counted in the plan, and why none comes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.core.generated.autoscaler_pb2 import AutoscalingState

from jobs.nodes import said_of
from raypost.config import load_config
from raypost.errors import ClusterError, ConfigError
from raypost.plan.cluster import ClusterResources, bundles, place, shortages
from raypost.plan.node_types import NODE_TYPE, Labels, NodeType, NodeTypes, Resources, types_of_file
from raypost.plan.nodes import node_lines
from raypost.plan.plan import check
from tests.factories import make_config

ROOT = Path(__file__).resolve().parents[2]
SMALL, LARGE = NodeType("small", {"CPU": 1, "rollout": 1}, 3), NodeType("large", {"CPU": 8}, 2, {"zone": "b"})
TYPES = NodeTypes([NodeType("head", {"CPU": 4}, 1), SMALL, LARGE], "head", 4)


def live(*types: NodeType, known: bool = True) -> ClusterResources:
    """Return a head and nodes of these types. `known`: what may be added is."""
    nodes = [TYPES.types[0], *types]
    resources, labels = [one.resources for one in nodes], [one.labels for one in nodes]
    names = [one.name for one in nodes]
    return ClusterResources(resources, True, resources, labels, names, TYPES if known else None)


def config(**rollout: Any) -> Any:
    return make_config(autoscaling=True, rollout={"num_workers": 1, **rollout}, eval__num_prompts=0)


def test_the_plan_counts_what_is_there_and_what_may_be_added_by_type() -> None:
    lines = dict(node_lines(live(SMALL)))
    assert (
        lines["small"] == "1 node(s), 1 CPU, 1 rollout each; free: 1 CPU, 1 rollout; the autoscaler may add 2"
    )
    assert lines["large"] == "no node, 8 CPU each; the autoscaler may add 2"
    assert lines["head"].endswith("the autoscaler may add 0")
    in_kubernetes = replace(live(), types=None, labels=[{NODE_TYPE: "head"}])
    assert list(dict(node_lines(in_kubernetes))) == ["head", "small", "large"], "there a label says it"
    assert "may add" not in str(dict(node_lines(live(SMALL, known=False))))


def test_the_number_of_all_nodes_bounds_what_may_be_added_of_each_type() -> None:
    assert TYPES.left(["head"]) == TYPES.left([""]) == {"head": 0, "small": 3, "large": 2}
    assert TYPES.left([])["head"] == 1
    assert TYPES.left(["head", *["small"] * 3]) == {"head": 0, "small": 0, "large": 1}


def test_a_run_that_fits_the_grown_cluster_waits_and_is_placed_on_nodes_that_come() -> None:
    cfg = config(num_workers=3, resources={"rollout": 1})
    found = check(cfg, cluster=live(SMALL))
    assert any("the cluster must grow first: the placement needs 3 rollout" in one for one in found.warnings)
    (row,) = (one for one in found.placement if one.role == "rollout_worker")
    assert row.nodes == "node 2 (small), a new small"


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (
            {"num_workers": 4, "resources": {"rollout": 1}},
            "the placement needs 4 rollout .* the cluster has 3",
        ),
        ({"num_cpus": 9}, "each rollout_worker needs 9 CPU on one node, but no node has that"),
        ({"labels": {"zone": "c"}}, "the values of 'zone' are b: choose one of them"),
        ({"resources": {"rolout": 1}}, "the placement needs 1 rolout .* the cluster has 0"),
    ],
)
def test_what_no_node_type_can_give_is_refused_although_the_cluster_grows(
    rollout: dict[str, Any], message: str
) -> None:
    with pytest.raises(ClusterError, match=f"with all nodes that the autoscaler may add: .*{message}"):
        check(config(**rollout), cluster=live(SMALL))
    assert check(config(**rollout), cluster=live(SMALL, known=False)).warnings, (
        "who knows what may come waits"
    )


def test_a_run_that_does_not_wait_is_told_that_it_could() -> None:
    cfg, cluster = config(num_workers=3, resources={"rollout": 1}), replace(live(SMALL), elastic=False)
    with pytest.raises(ClusterError, match="set autoscaling: true to wait for them"):
        check(cfg, cluster=cluster)
    with pytest.raises(ClusterError) as refused:
        check(config(num_workers=4, resources={"rollout": 1}), cluster=cluster)
    assert "set autoscaling" not in str(refused.value)


def test_a_pool_that_may_become_larger_than_the_cluster_is_warned_of() -> None:
    cfg = config(resources={"rollout": 1}, autoscale={"min": 1, "max": 5})
    warnings = check(cfg, cluster=live(SMALL)).warnings
    (told,) = (one for one in warnings if "autoscale.max" in one)
    assert told.startswith("rollout.autoscale.max 5 cannot be reached") and "the cluster has 3" in told
    assert not any("cannot be reached" in one for one in check(cfg, cluster=live(known=False)).warnings)


@pytest.mark.parametrize("name", ["raycluster", "rayjob"])
def test_a_manifest_of_kuberay_is_a_cluster_file(name: str, tmp_path: Path) -> None:
    path = ROOT / "deploy" / "kuberay" / f"{name}.yaml"
    cluster, cfg = (
        ClusterResources.of_cluster_file(path),
        load_config(ROOT / "jobs/recipes/gpu-multinode.yaml"),
    )
    assert shortages(cfg, cluster) == []
    homes = place(bundles(cfg), cluster)
    assert homes["rollout-0"].endswith("(rollout)") and homes["trainer-0"].endswith("(trainer)")
    assert types_of_file(path).left([]) == {"headgroup": 1, "rollout": 4, "trainer": 2}
    assert cluster.nodes[0]["CPU"] == 0, "num-cpus of the head's start parameters"
    content = yaml.safe_load(path.read_text())
    spec = content["spec"].get("rayClusterSpec", content["spec"])
    spec["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resources"] = {
        "requests": {"cpu": "1500m"}
    }
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(content))
    assert types_of_file(tmp_path / "x.yaml").types[1].resources == {"CPU": 2, "rollout": 4}
    del spec["workerGroupSpecs"][0]["maxReplicas"]
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match="maxReplicas"):
        types_of_file(tmp_path / "x.yaml")


def state(*infeasible: dict[str, float], version: int = 1) -> AutoscalingState:
    found = AutoscalingState(autoscaler_state_version=version)
    for one in infeasible:
        found.infeasible_resource_requests.add().resources_bundle.update(one)
    return found


FULL = live(SMALL, SMALL, SMALL)


@pytest.mark.parametrize(
    ("wanted", "ways", "cluster", "said"),
    [
        ({"rollout": 2}, [{}], live(), "no node type has that (head: 4 CPU; small: 1 CPU, 1 rollout; large: 8 CPU)"),
        ({"CPU": 8}, [{"zone": "a"}], live(), "no node type has that"),
        ({"CPU": 8}, [{"zone": "a"}, {"zone": "b"}], live(), "the autoscaler may add 2 of large, and has not begun to"),
        ({"rollout": 1}, [{}], FULL, "all node types that have that are at their maximum (small 3 of 3): raise it"),
        ({"CPU": 8}, [{}], live(SMALL, SMALL, SMALL, LARGE),
         "the cluster is at its maximum of 4 nodes (large 1 of 2): raise its max_workers"),
    ],
)  # fmt: skip
def test_it_is_said_why_no_node_comes(
    wanted: dict[str, float], ways: list[Labels], cluster: ClusterResources, said: str
) -> None:
    assert said in said_of(state(wanted), wanted, ways, cluster)


@pytest.mark.parametrize(
    ("wanted", "found", "said"),
    [
        ({"rollout": 1}, state({"CPU": 1, "rollout": 1}), "the node types that have that are at their maximum, or the "
         "cluster is (small has 3 node(s))"),
        ({"rollout": 2}, state({"CPU": 1, "rollout": 2}), "no node type that is there has that (head, small)"),
        ({"rollout": 2}, state({"CPU": 1}), "the autoscaler has not looked at it yet"),
        ({"rollout": 2}, state(version=0), "no autoscaler answers: add nodes"),
    ],
)  # fmt: skip
def test_without_the_types_the_autoscalers_refusal_and_the_nodes_that_live_say_it(
    wanted: Resources, found: AutoscalingState, said: str
) -> None:
    assert said in said_of(found, wanted, [{}], replace(FULL, addable=None))
