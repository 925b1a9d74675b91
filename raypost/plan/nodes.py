"""The nodes of a cluster by type and by label: how many of each there are, and whether those that are selected exist.

Owns what is said of them. What bundles select, and which labels a selector takes, is in cluster.py.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from raypost.config import Config
from raypost.plan.cluster import ClusterResources, bundles
from raypost.plan.node_types import (
    Labels,
    NodeType,
    Resources,
    asked_for,
    describe,
    fits,
    is_selected,
    matches,
)


def node_lines(cluster: ClusterResources | None) -> Iterator[tuple[str, str]]:
    """Yield (type of node, how many there are and what they have), what is free, and how many more there may be."""
    if cluster is None or (cluster.labels is None and cluster.types is None):
        return
    there = cluster.all_types()
    types = {} if cluster.addable is None else {one.name: one for one in cluster.addable.types}
    left = {} if cluster.addable is None else cluster.addable.left(there)
    for name in dict.fromkeys(there):
        members = [number for number, one in enumerate(there) if one == name]
        each = asked_for(cluster.nodes[members[0]])
        text = f"{len(members)} node(s), {describe(each)} each"
        if cluster.free is not None:
            free = {one: sum(cluster.free[n].get(one, 0) for n in members) for one in each}
            text += f"; free: {describe(free)}"
        yield name or "of no type", text + _more(types.pop(name, None), left)
    for name, one in types.items():
        if left[name]:
            yield name, f"no node, {describe(one.resources)} each{_more(one, left)}"


def _more(one: NodeType | None, left: Mapping[str, int]) -> str:
    return "" if one is None else f"; the autoscaler may add {left[one.name]}"


def why_none(wanted: Resources, ways: Sequence[Labels], cluster: ClusterResources) -> str:
    """Say why an autoscaler, which has looked at a request, adds no node for it.

    `ways`: labels that its node must have, and those that will do instead.
    """
    if cluster.addable is not None:
        return cluster.addable.why_none(wanted, ways, cluster.all_types())
    counts = Counter(filter(None, cluster.all_types()))
    nodes = zip(cluster.all_types(), cluster.nodes, cluster.labels or [{}] * len(cluster.nodes), strict=True)
    fitting = {
        kind
        for kind, node, labels in nodes
        if kind and fits(wanted, node) and any(matches(way, labels) for way in ways)
    }
    if fitting:
        there = ", ".join(f"{name} has {counts[name]}" for name in sorted(fitting))
        return f"the node types that have that are at their maximum, or the cluster is ({there} node(s))"
    known = (
        f"no node type that is there has that ({', '.join(counts)})"
        if counts
        else "no node of any type is there"
    )
    return f"{known}, and the autoscaler finds no other to add"


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
        elif not any(fits(bundle.resources, node) for node in _nodes(cluster, ways)):
            yield (
                f"{bundle.name} needs {describe(bundle.resources)} on a node with {_text(bundle.labels)}, and none of "
                "the nodes with that has so much: change labels, or lower what it asks for"
            )


def _nodes(cluster: ClusterResources, ways: list[Labels]) -> Iterator[Resources]:
    for node, labels in zip(cluster.nodes, cluster.labels or (), strict=True):
        if any(matches(way, labels) for way in ways):
            yield node


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
