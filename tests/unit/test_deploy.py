"""What lies in deploy/ is what Kubernetes, KubeRay and Docker take, and fits the recipe that it names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import ray
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raypost.config import load_config
from raypost.plan.cluster import ClusterResources, shortages

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = ["raycluster", "rayjob"]
KUBERNETES = "1.33"
Params = dict[str, str]
Count = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    """KubeRay's fields (ray.io/v1) as far as the manifests may use them; any other is a typo."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Auth(Strict):
    mode: Literal["disabled", "token"] = "token"
    secretName: str | None = None


class Autoscaler(Strict):
    version: Literal["v1", "v2"]
    idleTimeoutSeconds: Count = 60
    upscalingMode: Literal["Default", "Aggressive", "Conservative"] = "Default"
    resources: dict[str, Params] | None = None


class Head(Strict):
    rayStartParams: Params
    template: dict[str, Any]
    serviceType: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"


class WorkerGroup(Strict):
    groupName: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]
    replicas: Count = 0
    minReplicas: Count
    maxReplicas: Count
    idleTimeoutSeconds: Count = 60
    rayStartParams: Params
    template: dict[str, Any]


class ClusterSpec(Strict):
    rayVersion: str
    authOptions: Auth
    enableInTreeAutoscaling: bool
    autoscalerOptions: Autoscaler
    headGroupSpec: Head
    workerGroupSpecs: list[WorkerGroup]


class SubmitterConfig(Strict):
    backoffLimit: Count


class JobSpec(Strict):
    entrypoint: str
    metadata: Params
    submissionMode: Literal["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]
    submitterConfig: SubmitterConfig
    backoffLimit: Count
    shutdownAfterJobFinishes: bool
    ttlSecondsAfterFinished: Count
    runtimeEnvYAML: str
    rayClusterSpec: ClusterSpec


class Manifest(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayCluster", "RayJob"]
    metadata: Params
    spec: dict[str, Any]


def manifest(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "kuberay" / f"{name}.yaml").read_text()))


def validated(content: dict[str, Any]) -> ClusterSpec:
    """Return the cluster of a manifest. Raises ValidationError of pydantic, or of Kubernetes' schemas."""
    found = Manifest.model_validate(content)
    if found.kind == "RayJob":
        cluster = JobSpec.model_validate(found.spec).rayClusterSpec
    else:
        cluster = ClusterSpec.model_validate(found.spec)
    groups: list[Head | WorkerGroup] = [cluster.headGroupSpec, *cluster.workerGroupSpecs]
    for group in groups:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group.template}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    return cluster


def offered(group: WorkerGroup) -> dict[str, float]:
    """Return what Ray offers on a node of this group."""
    custom = json.loads(json.loads(group.rayStartParams["resources"]))
    [container] = group.template["spec"]["containers"]
    asked = container["resources"]["requests"]
    return {"CPU": float(asked["cpu"]), "GPU": float(asked["nvidia.com/gpu"]), **custom}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_is_what_kubernetes_and_kuberay_take(name: str) -> None:
    cluster = validated(manifest(name))
    assert cluster.rayVersion == ray.__version__
    for group in cluster.workerGroupSpecs:
        node = offered(group)
        assert node[group.groupName] == node["GPU"], "one unit a GPU"


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_recipe_that_a_manifest_names_fits_the_largest_size_of_its_cluster(name: str) -> None:
    [recipe] = re.findall(r"jobs/recipes/\S+\.yaml", (DEPLOY / "kuberay" / f"{name}.yaml").read_text())
    cfg = load_config(ROOT / recipe)
    assert cfg.autoscaling
    nodes = [
        node
        for group in validated(manifest(name)).workerGroupSpecs
        for node in [offered(group)] * group.maxReplicas
    ]
    assert shortages(cfg, ClusterResources(nodes)) == []


def test_a_run_of_a_rayjob_is_continued_by_its_retries() -> None:
    content = manifest("rayjob")
    spec = JobSpec.model_validate(content["spec"])
    assert f"--name {content['metadata']['name']} " in spec.entrypoint
    assert spec.backoffLimit > 0 == spec.submitterConfig.backoffLimit


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["spec", "autoScalerOptions"], {}),
        (["spec", "headGroupSpec", "rayStartParams", "num-cpus"], 0),
        (["spec", "workerGroupSpecs", 0, "minReplicas"], -1),
        (["spec", "workerGroupSpecs", 0, "idleTimeout"], 60),
        (["spec", "workerGroupSpecs", 0, "template", "spec", "containers", 0, "imagePullPolice"], "Always"),
        (["spec", "workerGroupSpecs", 0, "template", "spec", "volumes", 1, "emptyDir"], "Memory"),
        (["spec", "headGroupSpec", "template", "spec", "containers", 0, "ports", 0, "containerPort"], "6379"),
    ],
)
def test_typo_in_a_manifest_is_caught(path: list[Any], value: object) -> None:
    content = manifest("raycluster")
    place: Any = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises((ValidationError, kubernetes_validate.ValidationError)):
        validated(content)


def test_dockerfile_is_what_hadolint_takes_and_copies_what_is_there() -> None:
    file = DEPLOY / "Dockerfile"
    linter = Path(sys.executable).with_name("hadolint")
    found = subprocess.run(
        [linter, "--no-color", file], capture_output=True, text=True, check=False, timeout=240
    )
    assert (found.returncode, found.stdout) == (0, "")
    copied = [
        name
        for line in re.findall(r"^COPY (.*) \S+$", file.read_text(), re.MULTILINE)
        for name in line.split()
    ]
    assert copied and all((ROOT / name).exists() for name in copied)
