"""cluster.yaml is what Ray's cluster launcher accepts, and what Ray does not look at agrees too."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from raypost.config import load_config
from raypost.plan.cluster import ClusterResources, shortages

PATH = Path(__file__).resolve().parents[2] / "cluster.yaml"
LABEL_KEY = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


@pytest.fixture
def config() -> dict[str, Any]:
    return dict(yaml.safe_load(PATH.read_text()))


def validate(config: dict[str, Any]) -> None:
    """Ray's own defaults and schema, as `ray up` applies them."""
    validate_config(prepare_config(copy.deepcopy(config)))


def lint(config: dict[str, Any]) -> list[str]:
    """What Ray's validation lets pass although it cannot work."""
    problems = []
    for name, node_type in config["available_node_types"].items():
        least, most = node_type.get("min_workers", 0), node_type.get("max_workers", 0)
        if most > config["max_workers"]:
            problems.append(f"{name}: max_workers {most} is above the global {config['max_workers']}")
        if least > most:
            problems.append(f"{name}: min_workers {least} is above max_workers {most}")
        problems += [f"{name}: bad label {key!r}" for key in node_type.get("labels", {}) if not label(key)]
    return problems


def label(key: str) -> bool:
    return LABEL_KEY.fullmatch(key) is not None


def test_ray_accepts_the_file(config: dict[str, Any]) -> None:
    validate(config)
    assert lint(config) == []


def test_head_hosts_no_engine_and_no_rank(config: dict[str, Any]) -> None:
    head = config["available_node_types"][config["head_node_type"]]
    assert head["resources"] == {"CPU": 0}
    assert head.get("max_workers", 0) == 0


@pytest.mark.parametrize("role", ["rollout", "trainer"])
def test_each_gpu_offers_one_unit_of_its_role(config: dict[str, Any], role: str) -> None:
    resources = config["available_node_types"][role]["resources"]
    assert resources[role] == resources["GPU"] > 0
    assert set(resources) == {"CPU", "GPU", role}


def test_both_worker_types_fit_below_the_global_maximum(config: dict[str, Any]) -> None:
    workers = sum(node_type.get("max_workers", 0) for node_type in config["available_node_types"].values())
    assert workers <= config["max_workers"]


def test_the_recipe_that_it_names_waits_for_its_nodes_and_fits_them() -> None:
    """An empty head has nothing: without `autoscaling` the job would be refused on it."""
    [recipe] = re.findall(r"--config (\S+) --runs-dir", PATH.read_text())
    root = PATH.parent
    assert f"--config {recipe} --runs-dir" in (root / "README.md").read_text()
    cfg = load_config(root / recipe)
    assert cfg.autoscaling
    assert shortages(cfg, ClusterResources.of_cluster_file(PATH)) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["no_such_key"], 1),
        (["head_node_type"], "no-such-type"),
        (["available_node_types", "rollout", "max_workers"], "many"),
        (["available_node_types", "rollout", "resources", "rollout"], 0.5),
        (["available_node_types", "trainer", "node_config"], None),
    ],
)
def test_mistake_is_refused_by_ray(config: dict[str, Any], path: list[str], value: object) -> None:
    place(config, path, value)
    with pytest.raises((jsonschema.ValidationError, ValueError)):
        validate(config)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["available_node_types", "rollout", "max_workers"], 1000),
        (["available_node_types", "trainer", "min_workers"], 3),
        (["available_node_types", "rollout", "labels"], {"no spaces": "x"}),
    ],
)
def test_mistake_that_ray_misses_is_linted(config: dict[str, Any], path: list[str], value: object) -> None:
    place(config, path, value)
    validate(config)
    assert len(lint(config)) == 1


def place(config: dict[str, Any], path: list[str], value: object) -> None:
    for key in path[:-1]:
        config = config[key]
    config[path[-1]] = value
