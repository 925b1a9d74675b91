"""Chaos: kill roles of a run that goes on, one after the other, let it end, and audit what it left.

    raypost chaos runs/quickstart --seed 0 --kills 20 --every-s 30 --roles engine trainer producer

Each kill is SIGKILL to the role's process on this machine, and `ray.kill` elsewhere, and a line of RUN/chaos.jsonl. The
same seed kills the same roles in the same order. The driver is not killed: its death ends the job, and the command that
started it continues it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from raypost.audit.audit import audit
from raypost.errors import ConfigError, RaypostError
from raypost.files.owner import OWNER, owner
from raypost.report.files import LineWriter

N = TypeVar("N", int, float)
CHAOS = "chaos.jsonl"
"""A line a kill, in the run folder."""
ROLES = {
    "trainer": r"(trainer|critic)-\d+",
    "producer": "producer",
    "buffer": "replay-buffer",
    "controller": "(rollout|evaluation)-controller",
    "broadcaster": "(weight|evaluation)-broadcaster",
    "agent-loop": r"agent-loop-\d+|evaluation-loop",
    "judge": r"judge-\d+",
    "evaluator": "evaluator",
    "telemetry": "telemetry",
    "engine": r"(?!agent-loop-|judge-|trainer-|critic-).+-\d+",
}
"""Role -> names of its actors."""
POLL_S = 0.05
CONNECT = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
"""Variables of a driver's environment that say which cluster it uses, and how."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill that is to come."""

    role: str
    after_s: float
    """Seconds after the one before."""
    choice: float
    """Which actor of the role, as a part of all."""


def schedule(seed: int, kills: int, every_s: float, roles: Sequence[str]) -> Iterator[Kill]:
    """Yield the kills of a seed: every role as often as the others, `every_s` apart on average."""
    drawn, waiting = random.Random(seed), list[str]()
    for _ in range(kills):
        if not waiting:
            waiting = drawn.sample(list(roles), len(roles))
        yield Kill(waiting.pop(), drawn.uniform(0.5, 1.5) * every_s, drawn.random())


def role_of(name: str) -> str | None:
    """Return the role that an actor of that name plays; None if it is none that is killed."""
    return next((role for role, pattern in ROLES.items() if re.fullmatch(pattern, name)), None)


@dataclass(frozen=True, slots=True)
class Victim:
    """A living actor of the run."""

    role: str
    name: str
    actor_id: str
    pid: int
    is_here: bool
    """Whether its process is on this machine."""


class Actors(Protocol):
    """What is killed; see Cluster."""

    def victims(self) -> list[Victim]:
        """Return the living actors, by name."""
        ...

    def kill(self, victim: Victim) -> str:
        """Kill it, so that it may come back; returns how."""
        ...

    def back_s(self, victim: Victim, timeout_s: float) -> float | None:
        """Wait for its actor to have another process; returns the seconds, None if it has none in time."""
        ...


class Cluster:
    """The actors of one run, as Ray's head knows them."""

    def __init__(self, job_id: str) -> None:
        """`job_id`: of the run's driver. This process is connected to its cluster."""
        self._job_id = job_id
        import ray

        self._here = ray.get_runtime_context().get_node_id()

    def victims(self) -> list[Victim]:
        """Return the living actors, by name."""
        from ray._private.state import state  # the public state API needs a dashboard

        rows: Mapping[str, Mapping[str, Any]] = state.actor_table(None)
        found = [
            Victim(role, row["Name"], row["ActorID"], row["Pid"], row["Address"]["NodeID"] == self._here)
            for row in rows.values()
            if row["JobID"] == self._job_id and row["State"] == "ALIVE" and (role := role_of(row["Name"]))
        ]
        return sorted(found, key=lambda one: one.name)

    def kill(self, victim: Victim) -> str:
        """Kill it, so that it may come back; returns how."""
        if victim.is_here:
            os.kill(victim.pid, signal.SIGKILL)
            return "SIGKILL"
        import ray

        for one in ray.util.list_named_actors(all_namespaces=True):
            if one["name"] == victim.name:
                handle = ray.get_actor(one["name"], one["namespace"])
                if handle._actor_id.hex() == victim.actor_id:
                    ray.kill(handle, no_restart=False)
        return "ray.kill"

    def back_s(self, victim: Victim, timeout_s: float) -> float | None:
        """Wait for its actor to have another process; returns the seconds, None if it has none in time."""
        begin = time.monotonic()
        while (waited_s := time.monotonic() - begin) < timeout_s:
            if any(one.name == victim.name and one.pid != victim.pid for one in self.victims()):
                return waited_s
            time.sleep(POLL_S)
        return None


def main(argv: list[str] | None = None) -> int:
    """Run the command. Exit code: 0 the run ended well and its audit finds nothing, 1 it did not, 2 refused."""
    args = parser().parse_args(argv)
    try:
        driver = _driver(args.run_dir)
        cluster = _connect(driver, args.address)
        killed = kill_all(args, cluster)
    except (RaypostError, ConnectionError) as error:
        print(f"refused: {error}", file=sys.stderr, flush=True)
        return 2
    print(f"{killed} of {args.kills} kills made; the run goes on to its end", flush=True)
    end = time.monotonic() + args.wait_s
    while owner(args.run_dir) is not None and time.monotonic() < end:
        time.sleep(1.0)
    found = audit(args.run_dir)
    print(json.dumps(found.as_dict(), indent=2))
    status = _status(args.run_dir)
    print(f"the run {status}; {found.num_contradictions} contradictions in what it left", flush=True)
    ended_well = status in ("finished", "stopped") and killed == args.kills
    return 0 if ended_well and not found.num_contradictions else 1


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(prog="raypost chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="folder of a run that goes on")
    parser.add_argument("--seed", type=int, default=0, help="which roles, in which order (default: 0)")
    parser.add_argument("--kills", type=_above_0(int), default=10, help="how many (default: 10)")
    parser.add_argument(
        "--every-s", type=_above_0(float), default=30.0, help="seconds between two, on average (default: 30)"
    )
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=[*ROLES], help="default: all")
    parser.add_argument("--address", help="of the run's Ray cluster, where its driver is on another machine")
    parser.add_argument(
        "--wait-s",
        type=_above_0(float),
        default=3600.0,
        help="how long the run may go on after the last (default: 3600)",
    )
    return parser


def _above_0(kind: Callable[[str], N]) -> Callable[[str], N]:
    def parsed(text: str) -> N:
        number = kind(text)
        if number <= 0:
            raise argparse.ArgumentTypeError(f"it is {text}, and must be above 0")
        return number

    return parsed


def _driver(run_dir: Path) -> dict[str, Any]:
    """Return what the owner of the run says of itself. Raises ConfigError if no run goes on there."""
    if owner(run_dir) is None:
        raise ConfigError(f"no run goes on in {run_dir}: start it, and then kill roles of it")
    driver: dict[str, Any] = json.loads((run_dir / OWNER).read_text())
    return driver


def _connect(driver: Mapping[str, Any], address: str | None) -> Cluster:
    """Join the cluster of the run's driver. Raises ConfigError where it cannot be known."""
    environment = Path(f"/proc/{driver['pid']}/environ")
    if address is not None:
        os.environ["RAY_ADDRESS"] = address
    elif driver["host"] == os.uname().nodename and environment.exists():
        pairs = dict(one.partition("=")[::2] for one in environment.read_text().split("\0"))
        os.environ |= {name: pairs[name] for name in CONNECT if name in pairs}
    if "RAY_ADDRESS" not in os.environ:
        raise ConfigError(
            f"the driver, process {driver['pid']} on {driver['host']}, does not say which Ray cluster it uses: give "
            "--address, and the token of the cluster in RAY_AUTH_TOKEN_PATH if it asks for one"
        )
    # Ray reads the variables above when it is imported.
    import logging

    import ray

    ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level=logging.WARNING)
    jobs = [
        one for one in ray._private.state.jobs() if one["DriverPid"] == driver["pid"] and not one["IsDead"]
    ]
    if len(jobs) != 1:
        raise ConfigError(
            f"the cluster at {os.environ['RAY_ADDRESS']} has {len(jobs)} jobs of a driver with process id "
            f"{driver['pid']}: give the --address of the run's cluster"
        )
    return Cluster(jobs[0]["JobID"])


def kill_all(args: argparse.Namespace, cluster: Actors) -> int:
    """Make the kills; returns how many were made. Raises ConfigError for a role that the run does not have."""
    there = {one.role for one in cluster.victims()}
    if missing := sorted({*args.roles} - there):
        if args.roles != [*ROLES]:
            raise ConfigError(f"the run has no {', '.join(missing)}: it has {', '.join(sorted(there))}")
        args.roles = sorted(there)
    lines, killed = LineWriter(args.run_dir / CHAOS), 0
    for kill in schedule(args.seed, args.kills, args.every_s, args.roles):
        end = time.monotonic() + kill.after_s
        while time.monotonic() < end:
            time.sleep(min(POLL_S, kill.after_s))
        victims = [one for one in cluster.victims() if one.role == kill.role]
        if owner(args.run_dir) is None:
            break
        if not victims:
            print(f"no {kill.role} lives just now: it is not killed again", flush=True)
            continue
        victim, at_s = victims[int(kill.choice * len(victims))], time.time()
        how = cluster.kill(victim)
        back_s = cluster.back_s(victim, args.every_s)
        said = {"at_s": at_s, "role": kill.role, "actor": victim.name, "pid": victim.pid, "how": how}
        lines.write({**said, "back_s": back_s})
        killed += 1
        back = "is not back yet" if back_s is None else f"has a new process after {back_s:.1f} s"
        print(f"{how} {victim.name} (process {victim.pid}), which {back}", flush=True)
    return killed


def _status(run_dir: Path) -> str:
    try:
        return str(json.loads((run_dir / "report.json").read_text())["status"])
    except (OSError, ValueError, KeyError):
        return "has no report"


if __name__ == "__main__":
    sys.exit(main())
