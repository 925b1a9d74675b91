"""Types of nodes that an autoscaler adds: what each has, how many there may be, and why none comes for a request.

Read from a cluster file of Ray's launcher or a manifest of KubeRay. Owns the resources and labels of a node as plain
data, and what fits where; Ray is not needed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from raypost.errors import ConfigError

Resources = Mapping[str, float]
"""Amounts under Ray's names: CPU, GPU and custom ones."""
Labels = Mapping[str, str]

NODE_TYPE = "ray.io/node-group"
"""Label with the type of a node, on Kubernetes."""
UNBOUNDED = 1000
"""Nodes of a type of which there may be as many as one likes."""


@dataclass(slots=True, frozen=True)
class NodeType:
    """One type: what each node has, and how many of them there may be."""

    name: str
    resources: Resources
    most: int
    labels: Labels = field(default_factory=dict)

    def has(self, wanted: Resources, ways: Sequence[Labels]) -> bool:
        """Return whether an empty node of it takes these resources, with the labels of one of `ways`."""
        return fits(wanted, self.resources) and any(matches(way, self.labels) for way in ways)


@dataclass(slots=True, frozen=True)
class NodeTypes:
    """All types of a cluster."""

    types: Sequence[NodeType]
    head: str = ""
    """Name of the head's type."""
    most: int = UNBOUNDED
    """Nodes of all types together, the head left out."""

    def left(self, there: Sequence[str]) -> dict[str, int]:
        """Return how many of each type may be added to nodes of these types, each as if no other were."""
        counts = Counter(there)
        if there:
            # A cluster has a head, and not each says its type.
            counts[self.head] = max(1, counts[self.head])
        in_all = max(0, self.most - sum(counts[one.name] for one in self.types if one.name != self.head))
        own = {one.name: max(0, one.most - counts[one.name]) for one in self.types}
        return {name: more if name == self.head else min(in_all, more) for name, more in own.items()}

    def why_none(self, wanted: Resources, ways: Sequence[Labels], there: Sequence[str]) -> str:
        """Say why no node is added for a request, beside nodes of these types."""
        fitting = [one for one in self.types if one.has(wanted, ways)]
        if not fitting:
            known = "; ".join(f"{one.name}: {describe(one.resources)}" for one in self.types if one.most)
            return f"no node type has that ({known}): lower what is asked for, or add a type"
        counts, left = Counter(there), self.left(there)
        if may := [f"{left[one.name]} of {one.name}" for one in fitting if left[one.name]]:
            return f"the autoscaler may add {', '.join(may)}, and has not begun to"
        of_types = ", ".join(f"{one.name} {counts[one.name]} of {one.most}" for one in fitting)
        if all(counts[one.name] >= one.most for one in fitting):
            return f"all node types that have that are at their maximum ({of_types}): raise it"
        return f"the cluster is at its maximum of {self.most} nodes ({of_types}): raise its max_workers"


def types_of_file(path: Path) -> NodeTypes:
    """Return the node types of a cluster file of Ray's launcher, or of KubeRay's. Raises ConfigError."""
    try:
        content = yaml.safe_load(path.read_text())
        return types_of_manifest(content) if "spec" in content else types_of_launcher(content)
    except OSError as error:
        raise ConfigError(f"cannot read cluster file {path}: {error.strerror}") from error
    except (yaml.YAMLError, KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{path} is no Ray cluster file with head_node_type and available_node_types, and no RayCluster or RayJob: "
            f"{error!r}"
        ) from error


def types_of_launcher(content: Mapping[str, Any]) -> NodeTypes:
    """Return the node types of a cluster file of Ray's launcher. Raises KeyError and the like."""
    head, most = str(content["head_node_type"]), content.get("max_workers", 0)
    found = []
    for name, one in content["available_node_types"].items():
        # Ray's own default: the head's type has no workers, any other as many as the cluster may have.
        workers = int(one.get("max_workers", 0 if name == head else most))
        found.append(
            NodeType(str(name), dict(one["resources"]), workers + (name == head), one.get("labels") or {})
        )
    return NodeTypes(found, head, int(most))


def types_of_manifest(content: Mapping[str, Any]) -> NodeTypes:
    """Return the node types of a RayCluster or RayJob of KubeRay. Raises KeyError and the like."""
    spec = content["spec"]
    spec = spec.get("rayClusterSpec", spec)
    groups = [
        NodeType(
            name := str(group["groupName"]),
            _of_pod(group),
            int(group["maxReplicas"]),
            _group_labels(name, group),
        )
        for group in spec["workerGroupSpecs"]
    ]
    return NodeTypes(
        [
            NodeType(
                "headgroup",
                _of_pod(spec["headGroupSpec"]),
                1,
                _group_labels("headgroup", spec["headGroupSpec"]),
            ),
            *groups,
        ],
        "headgroup",
    )


def _group_labels(name: str, group: Mapping[str, Any]) -> Labels:
    return {NODE_TYPE: name, **(group.get("labels") or {})}


def _of_pod(group: Mapping[str, Any]) -> Resources:
    """Return what Ray offers on a pod of KubeRay: its start parameters, else the container's limits and requests."""
    params = group.get("rayStartParams") or {}
    asked = group["template"]["spec"]["containers"][0].get("resources") or {}
    of_container = {**(asked.get("requests") or {}), **(asked.get("limits") or {})}
    cpus, gpus = str(of_container.get("cpu", 0)), of_container.get("nvidia.com/gpu", 0)
    # A quantity of Kubernetes in thousandths; Ray counts whole cores, rounded up.
    cores = -(-int(cpus[:-1]) // 1000) if cpus.endswith("m") else float(cpus)
    offered = {"CPU": float(params.get("num-cpus", cores)), "GPU": float(params.get("num-gpus", gpus))}
    # KubeRay passes it through a shell: JSON within a JSON string.
    custom = json.loads(json.loads(params["resources"])) if "resources" in params else {}
    return {name: amount for name, amount in offered.items() if amount or name == "CPU"} | custom


def asked_for(node: Resources) -> dict[str, float]:
    """Return what of a node's resources a configuration can ask for."""
    return {name: amount for name, amount in node.items() if _is_asked_for(name)}


def matches(selectors: Mapping[str, str], labels: Labels) -> bool:
    """Return whether a node with these labels is selected, as Ray does."""
    return all(is_selected(selector, labels.get(name)) for name, selector in selectors.items())


def is_selected(selector: str, value: str | None) -> bool:
    """Return whether a selector takes a label's value; None: the node has no such label."""
    wanted = selector.removeprefix("!")
    values = wanted[3:-1].split(",") if wanted.startswith("in(") else [wanted]
    return (value in values) != selector.startswith("!")


def fits(wanted: Resources, node: Resources) -> bool:
    """Return whether a node has all of it."""
    return all(node.get(name, 0) >= amount for name, amount in wanted.items())


def describe(resources: Resources) -> str:
    """Return such as `1 CPU, 2 GPU`; `shared time` where nothing is reserved."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "shared time"


def _is_asked_for(resource: str) -> bool:
    return not resource.startswith(("node:", "accelerator_type:")) and not resource.endswith("memory")
