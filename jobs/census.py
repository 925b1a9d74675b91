"""Census: which process each actor of a run had, so that one that ended can be named, with its last words.

    look()          names, processes and nodes of the actors that live, from Ray's table of actors
    autopsy(name)   node, process, what Ray says of the end of that process, and the last lines of its log

Owns what is read from Ray beside its public calls, which say of an actor that died neither which it was nor why.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import ray
from ray._private import worker as ray_worker
from ray._private.state import state
from ray.core.generated import gcs_pb2
from ray.exceptions import RayActorError

from actors.remote import raised
from raypost.errors import RankLostError, RoleLostError
from raypost.faults import Failure

log = logging.getLogger(__name__)

LAST_LINES = 6
"""Of an actor's log, in a failure."""
_MOST_BYTES = 1 << 16
_RAYS_OWN = (":job_id:", ":actor_name:", ":task_name:")
"""How lines begin that Ray writes into logs for itself."""


@dataclass(frozen=True, slots=True)
class Process:
    """Where an actor was."""

    pid: int
    node: str


class Census:
    """The processes of the actors of this job, as they were when it looked last."""

    def __init__(self) -> None:
        """Know nobody yet."""
        self._processes: dict[str, Process] = {}
        self._names: dict[str, str] = {}

    def look(self) -> None:
        """Take down the actors that live; of those that are gone it keeps what it knew."""
        job = ray.get_runtime_context().get_job_id()
        for actor_id, facts in state.actor_table(None).items():
            if facts["JobID"] == job and facts["Name"] and facts["Pid"]:
                self._processes[facts["Name"]] = Process(facts["Pid"], facts["Address"]["IPAddress"])
                self._names[actor_id] = facts["Name"]

    def restarts(self, actor: str) -> int:
        """Return how often Ray has begun to start an actor of this job again."""
        job = ray.get_runtime_context().get_job_id()
        rows = state.actor_table(None).values()
        return max(
            (row["NumRestarts"] for row in rows if (row["JobID"], row["Name"]) == (job, actor)), default=0
        )

    def failure(self, role: str, actor: str, cause: str, at_s: float) -> Failure:
        """Return the failure of an actor with all that can be found out about its process."""
        process = self._processes.get(actor)
        if process is None:
            return Failure(role=role, actor=actor, cause=cause, at_s=at_s)
        return Failure(
            role=role, actor=actor, cause=cause, at_s=at_s, node=process.node, pid=process.pid,
            exit_cause=_exit_cause(process), last_words=_last_words(process),
        )  # fmt: skip

    def explained(self, error: BaseException) -> BaseException:
        """Return an error that says which actor died, why, and what can be done, for one that tells of a death.

        Any other is returned as it is.
        """
        cause = raised(error)
        if isinstance(cause, RankLostError):
            name: str | None = str(cause).partition(" ")[0]
        elif isinstance(cause, RayActorError):
            if cause.actor_id not in self._names:
                self.look()
            name = self._names.get(str(cause.actor_id))
        else:
            return error
        if name not in self._processes:
            return error
        failure = self.failure(name.rstrip("-0123456789"), name, f"it died ({type(cause).__name__})", 0.0)
        return RoleLostError(f"{failure.story}\nThe same command continues the run from its last checkpoint")


def _exit_cause(process: Process) -> str | None:
    """Return what Ray recorded of the end of a process, None while it lives."""
    for raw in state._connect_and_get_accessor().get_worker_table():
        found = gcs_pb2.WorkerTableData.FromString(raw)
        address = found.worker_address.ip_address
        if found.is_alive or (found.pid, address) != (process.pid, process.node):
            continue
        detail: str = found.exit_detail.partition(" Some common causes")[0].strip()
        if "connection error" in detail:
            detail = "it was killed, ran out of memory, or crashed (the system's log says which)"
        return detail
    return None


def _last_words(process: Process) -> tuple[str, ...]:
    """Return the last lines of what a process of this node wrote to standard error, or else to standard output."""
    node = ray_worker._global_node
    if node is None or process.node not in (ray.util.get_node_ip_address(), node.node_ip_address):
        return (
            f"(its log is on node {process.node}: worker-*-{process.pid}.err in the logs of Ray's session)",
        )
    for ending in ("err", "out"):
        for path in Path(node.get_session_dir_path(), "logs").glob(f"worker-*-{process.pid}.{ending}"):
            with open(path, "rb") as file:
                file.seek(max(0, path.stat().st_size - _MOST_BYTES))
                text = file.read().decode(errors="replace")
            lines = [one for one in text.splitlines() if one.strip() and not one.startswith(_RAYS_OWN)]
            if lines:
                return tuple(lines[-LAST_LINES:])
    return ()
