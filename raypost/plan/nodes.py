"""The nodes of a cluster by type and by label: how many of each there are, and whether those that are selected exist.

Owns what is said of them. What bundles select, and which labels a selector takes, is in cluster.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from raypost.config import Config
from raypost.plan.cluster import NODE_TYPE, ClusterResources, bundles, describe, is_selected, matches


def node_lines(cluster: ClusterResources | None) -> Iterator[tuple[str, str]]:
    """Yield (type of node, how many there are and what they have), with what is free where that is known."""
    if cluster is None or cluster.labels is None:
        return
    groups: dict[str, list[int]] = {}
    for number, labels in enumerate(cluster.labels):
        groups.setdefault(labels.get(NODE_TYPE) or "of no type", []).append(number)
    for name, members in groups.items():
        each = {one: amount for one, amount in cluster.nodes[members[0]].items() if _is_asked_for(one)}
        text = f"{len(members)} node(s), {describe(each)} each"
        if cluster.free is not None:
            free = {one: sum(cluster.free[n].get(one, 0) for n in members) for one in each}
            text += f"; free: {describe(free)}"
        yield name, text


def _is_asked_for(resource: str) -> bool:
    return not resource.startswith(("node:", "accelerator_type:")) and not resource.endswith("memory")


def label_problems(config: Config, cluster: ClusterResources) -> Iterator[str]:
    """Yield which labels no node has, once for each selection; nothing where the nodes' labels are not known."""
    if cluster.labels is None:
        return
    told = []
    for bundle in bundles(config):
        ways = [bundle.labels, *bundle.fallback_labels]
        if not bundle.labels or (bundle.role, ways) in told:
            continue
        told.append((bundle.role, ways))
        fitting = [labels for labels in cluster.labels if any(matches(way, labels) for way in ways)]
        if not fitting:
            yield f"{bundle.name} needs a node with {_text(bundle.labels)}, and {_why(bundle.labels, cluster)}"
        elif not any(_has(bundle.resources, node) for node in _nodes(cluster, ways)):
            yield (
                f"{bundle.name} needs {describe(bundle.resources)} on a node with {_text(bundle.labels)}, and none of "
                "the nodes with that has so much: change labels, or lower what it asks for"
            )


def _nodes(cluster: ClusterResources, ways: list[Mapping[str, str]]) -> Iterator[Mapping[str, float]]:
    for node, labels in zip(cluster.nodes, cluster.labels or (), strict=True):
        if any(matches(way, labels) for way in ways):
            yield node


def _has(needed: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(node.get(name, 0) >= amount for name, amount in needed.items())


def _why(selectors: Mapping[str, str], cluster: ClusterResources) -> str:
    known: dict[str, set[str]] = {}
    for labels in cluster.labels or ():
        for name, value in labels.items():
            known.setdefault(name, set()).add(value)
    for name, selector in selectors.items():
        if name not in known and not selector.startswith("!"):
            names = sorted(one for one in known if not one.startswith("ray.io/"))
            close = difflib.get_close_matches(name, known, 1)
            fix = f"did you mean {close[0]}?" if close else "start nodes with --labels, or remove it"
            return f"no node has a label {name!r} (there are: {', '.join(names) or 'none'}): {fix}"
        if not any(is_selected(selector, value) for value in (*known.get(name, ()), None)):
            return f"the values of {name!r} are {', '.join(sorted(known.get(name, ())))}: choose one of them"
    return "no node has all of it at once: change labels, or add such nodes"


def _text(selectors: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in selectors.items())
