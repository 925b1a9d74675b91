"""A private cluster whose head is empty of rollout nodes, and whose real autoscaler adds and removes them.

Nodes are raylets on this machine: Ray's own provider for tests, under its autoscaler v2.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray
import yaml
from ray._private.state import state

from jobs.private_cluster import PrivateCluster, _free_port, _loopback

HEAD = "f" * 50 + "00000"
HEAD_TYPE = "ray.head.default"
"""What the provider calls the head, whatever else it is given."""
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"


class AutoscalingCluster(PrivateCluster):
    """Adds nodes of one type, with a CPU and a unit of `rollout` each."""

    most_nodes = 3
    idle_minutes = 0.1

    def _command(self) -> list[str]:
        assert self._folder is not None
        port, file = _free_port(), self._folder / "autoscaling.yaml"
        file.write_text(yaml.safe_dump(self._autoscaling(f"{_loopback()}:{port}")))
        command = [
            one for one in super()._command() if one != "--no-monitor" and not one.startswith("--port=")
        ]
        return [*command, f"--port={port}", f"--autoscaling-config={file}"]

    def _autoscaling(self, gcs_address: str) -> dict[str, object]:
        head = {"CPU": self.num_cpus, **self.resources}
        return {
            "cluster_name": "tests",
            "max_workers": self.most_nodes,
            "idle_timeout_minutes": self.idle_minutes,
            "provider": {
                "type": "external", "module": PROVIDER, "use_node_id_as_ip": True, "disable_node_updaters": True,
                "disable_launch_config_check": True, "launch_multiple": True, "head_node_id": HEAD,
                "gcs_address": gcs_address,
            },
            "head_node_type": HEAD_TYPE,
            "available_node_types": {
                HEAD_TYPE: {"resources": head, "node_config": {}, "max_workers": 0},
                "rollout": {
                    "resources": {"CPU": 1, "rollout": 1}, "node_config": {}, "min_workers": 0,
                    "max_workers": self.most_nodes,
                },
            },
            "head_setup_commands": [], "worker_setup_commands": [], "setup_commands": [],
            "initialization_commands": [], "head_start_ray_commands": [], "worker_start_ray_commands": [],
            "file_mounts": {}, "cluster_synced_files": [], "auth": {},
        }  # fmt: skip


ENVIRONMENT = {
    "RAY_FAKE_CLUSTER": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": HEAD,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
    # A node that is gone is noticed within two seconds.
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "1000",
}


@contextmanager
def autoscaling_cluster(folder: Path, dashboard: bool = False) -> Iterator[AutoscalingCluster]:
    """Start one, and connect this process to it."""
    cluster = AutoscalingCluster(
        dashboard=dashboard,
        num_cpus=8,
        resources={"trainer": 8},
        object_store_memory=128 * 1024**2,
        auth=False,
        extra_env={"RAY_worker_niceness": "0", **ENVIRONMENT},
    )
    with cluster:
        os.environ["RAY_ADDRESS"] = cluster.address
        ray.init(cluster.address, log_to_driver=False)
        try:
            yield cluster
        finally:
            ray.shutdown()
            del os.environ["RAY_ADDRESS"]
    assert cluster.pids == []


def rollout_nodes() -> int:
    """How many nodes there are beside the head."""
    return sum(node["Alive"] and "rollout" in node["Resources"] for node in ray.nodes())


def node_of(actor: str) -> str:
    """The node on which a living actor is."""
    return nodes_of_living(actor).pop()


def nodes_of_living(actor: str) -> set[str]:
    """The nodes on which actors of a name live: one at most in each run, and none while Ray starts it again."""
    rows = state.actor_table(None).values()
    return {str(row["Address"]["NodeID"]) for row in rows if row["Name"] == actor and row["State"] == "ALIVE"}


def drain(node: str, seconds: int) -> str:
    """Tell a node to go, as a spot notice does; return it."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--node-id", node]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot notice"]
    subprocess.run([*command, "--deadline-remaining-seconds", str(seconds)], check=True, timeout=240)
    return node


def kill_raylet(node: str) -> None:
    """End a node without notice."""
    port = next(one["NodeManagerPort"] for one in ray.nodes() if one["NodeID"] == node)
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "raylet" and any(
            one.laddr.port == port and one.status == psutil.CONN_LISTEN for one in process.net_connections()
        ):
            process.kill()
            return
    raise AssertionError(f"no raylet listens on port {port}")
