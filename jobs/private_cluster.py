"""A private Ray head on this machine, for one run or one test session, that leaves nothing behind.

Owns the head process, its temp folder and its token, from start to the last process gone. Does not own
what connects to it: whoever started a driver ends it first, or it is ended here with the rest.

Invariants
- Nothing finds another cluster, and no other cluster is found: of the user's RAY_* variables the settings of Ray's
  processes alone are passed on, and `env()` pins address, token and mode for children.
- Ray picks its own ports, so two clusters may start in the same moment; addresses are read back.
- Only processes that carry this cluster's marker in their environment, or descend from its head, are
  ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self, TypeVar

import psutil

from jobs import keeper
from jobs.keeper import MARKER, processes_with
from jobs.stopping import stop_signals
from raypost.errors import RaypostError

SOCKET_PATH_LIMIT = 103
"""Bytes of a unix socket's path that every platform allows."""
SETTING = re.compile(r"RAY_(?!.*(auth|redis|gcs_storage|external_storage))[a-z]\w*")
"""Settings of Ray's own processes, such as RAY_worker_niceness and RAY_health_check_period_ms, are in lower case.
Addresses, tokens and the state of a session are in capitals; who may call a cluster, and where it keeps its state, are
settings that belong to one cluster."""
_SOCKET_TAIL = len("/r/session_2000-01-01_00-00-00_000000_0000000/sockets/plasma_store.sock")
_PORT_RANGE = (20_000, 30_000)
START_TRIES = 3
PORT_TAKEN = re.compile(
    r"address already in use|port \S+ (is )?(already )?(in use|occupied|taken)", re.IGNORECASE
)
"""In what a head says that did not get a port."""
_TICK_S = 0.05
CHILDREN_GRACE_S = 3.0
KILL_TIMEOUT_S = 5.0
_LOG_TAIL_LINES = 25

T = TypeVar("T")


class ClusterStartError(RaypostError):
    """The private Ray head did not come up; the message ends with the tail of its log."""


@dataclass(kw_only=True, eq=False)
class PrivateCluster:
    """A Ray head on loopback, as a context manager, which raises ClusterStartError when it does not come up."""

    num_cpus: int
    """What Ray may hand out, as `num_gpus` and `resources`: logical amounts."""
    num_gpus: int | None = None
    """None: what Ray finds."""
    resources: Mapping[str, float] = field(default_factory=dict)
    dashboard: bool = False
    temp_dir: Path | None = None
    """Folder in which the cluster makes its own."""
    object_store_memory: int = 512 * 1024**2
    """Bytes."""
    extra_env: Mapping[str, str] = field(default_factory=dict)
    auth: bool = True
    """Every call needs a token made for this cluster alone: GCS and raylet listen on all interfaces whatever their
    flags. Without it any process of this machine's network may connect: only for tests that attach in-process."""
    start_timeout_s: float = 120.0
    stop_timeout_s: float = 6.0
    """Time the head has to drain before everything is killed."""
    save_timeout_s: float = 90.0
    """Time that jobs have to save when this process is killed, so that it can end nothing itself."""
    address: str = field(default="", init=False)
    """`ip:port` of the GCS: what ray.init takes."""
    dashboard_url: str = field(default="", init=False)
    """`http://ip:port` of the dashboard and the job server; empty without `dashboard`."""
    token: str = field(default_factory=lambda: secrets.token_hex(16), init=False, repr=False)
    """What the dashboard asks for, with `auth`."""
    _id: str = field(default_factory=lambda: secrets.token_hex(8), init=False)
    _folder: Path | None = field(default=None, init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    """The head's keeper, which ends as the head does."""
    _pipe: int | None = field(default=None, init=False)
    """Its end in the hand of this process: closed, however this process ends, it ends the cluster."""

    def __enter__(self) -> Self:
        """Start the head; again where another process took a port in the moment between choosing and using it."""
        for last in (*[False] * (START_TRIES - 1), True):
            try:
                self._start()
                break
            except BaseException as error:
                self.stop()
                if last or not (isinstance(error, ClusterStartError) and PORT_TAKEN.search(str(error))):
                    raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the head and all that it started."""
        self.stop()

    @property
    def pids(self) -> list[int]:
        """The ids of all living processes of this cluster, the jobs and actors it hosts included."""
        return sorted(process.pid for process in self._processes())

    @property
    def logs_dir(self) -> Path:
        """Where Ray writes its logs while the cluster is up."""
        assert self._folder is not None, "the cluster was not started"
        return self._folder / "r" / "session_latest" / "logs"

    def alive(self) -> bool:
        """Return whether the head runs."""
        return self._process is not None and self._process.poll() is None

    def env(self) -> dict[str, str]:
        """Return the environment for a child that shall use this cluster and no other."""
        assert self._folder is not None, "the cluster was not started"
        env = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("RAY_") or SETTING.fullmatch(key)
        }
        env |= {
            MARKER: self._id,
            "RAY_AUTH_MODE": "token" if self.auth else "disabled",
            "RAY_AUTH_TOKEN_PATH": str(self._folder / "token"),
            "RAY_USAGE_STATS_ENABLED": "0",
            # setproctitle would otherwise overwrite the environment in which the marker is looked up.
            "SPT_NOENV": "1",
        }
        if self.address:
            env["RAY_ADDRESS"] = self.address
        if self.dashboard_url:
            env["RAY_API_SERVER_ADDRESS"] = self.dashboard_url
        return env | dict(self.extra_env)

    def log_tail(self, lines: int = _LOG_TAIL_LINES) -> str:
        """Return the last lines the head itself wrote."""
        if self._folder is None or not (self._folder / "head.log").exists():
            return ""
        return "\n".join((self._folder / "head.log").read_text(errors="replace").splitlines()[-lines:])

    def save_logs(self, folder: Path) -> None:
        """Copy Ray's logs into `folder`, which `stop` would remove with the rest."""
        shutil.copytree(self.logs_dir, folder, dirs_exist_ok=True, ignore_dangling_symlinks=True)

    def stop(self) -> None:
        """End every process of the cluster and remove its folder. Idempotent; a Ctrl-C waits for it."""
        with _signals_deferred():
            processes = self._processes()
            if self.alive():
                assert self._process is not None
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(self.stop_timeout_s)
            # The head's children die with it; jobs and actors notice a moment later. A head that still
            # lives waits for one of them.
            grace_s = 0.0 if self.alive() else CHILDREN_GRACE_S
            _, left = psutil.wait_procs({*processes, *self._processes()}, timeout=grace_s)
            for process in {*left, *self._processes()}:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=KILL_TIMEOUT_S)
            if self._process is not None:
                self._process.wait(KILL_TIMEOUT_S)
            if self._pipe is not None:
                os.close(self._pipe)
                self._pipe = None
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    def _start(self) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        self._folder = _make_folder(self.temp_dir)
        token_file = self._folder / "token"
        if self.auth:
            token_file.touch(mode=0o600)
            token_file.write_text(self.token)
        env = self.env() | {"DASHBOARD_METRIC_PORT": str(_free_port())}
        end, self._pipe = os.pipe()
        kept = [sys.executable, keeper.__file__, str(end), str(self.save_timeout_s), str(self._folder)]
        try:
            with open(self._folder / "head.log", "wb") as head_log:
                self._process = subprocess.Popen(
                    [*kept, *self._command()],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=head_log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=[end],
                )
        finally:
            os.close(end)
        address_file = self._folder / "r" / "ray_current_cluster"
        # ray start writes this file last, once GCS, raylet and dashboard have answered it.
        self.address = self._wait_for("the head", deadline, lambda: _read(address_file))
        if self.dashboard:
            head_log_file = self._folder / "head.log"
            self.dashboard_url = self._wait_for(
                "the dashboard's address", deadline, lambda: _dashboard_url(head_log_file)
            )

    def _command(self) -> list[str]:
        assert self._folder is not None
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        options = {
            "node-ip-address": _loopback(),
            "port": 0,
            "min-worker-port": 0,
            "max-worker-port": 0,
            "metrics-export-port": 0,
            "dashboard-agent-listen-port": 0,
            # The one port for which Ray refuses 0.
            "ray-client-server-port": _free_port(),
            "include-dashboard": str(self.dashboard).lower(),
            "dashboard-host": "127.0.0.1",
            "dashboard-port": 0,
            # It looks at every log ten times a second, to print it at drivers that ask for that: none of ours does.
            "include-log-monitor": "false",
            "temp-dir": self._folder / "r",
            "num-cpus": self.num_cpus,
            "object-store-memory": self.object_store_memory,
            "log-style": "record",
            "log-color": "false",
        }
        if self.num_gpus is not None:
            options["num-gpus"] = self.num_gpus
        if self.resources:
            options["resources"] = json.dumps(self.resources)
        command += [f"--{name}={value}" for name, value in options.items()]
        # --no-monitor: nothing scales on one machine, and the autoscaler's metrics port is fixed.
        return [*command, "--disable-usage-stats", "--no-monitor"]

    def _wait_for(self, what: str, deadline: float, ready: Callable[[], T]) -> T:
        assert self._process is not None
        while time.monotonic() < deadline:
            if answer := ready():
                return answer
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_TICK_S)
                raise ClusterStartError(f"the Ray head ended with code {code} while starting; {self._why()}")
        raise ClusterStartError(
            f"{what} did not answer within {self.start_timeout_s:g} s; on a busy machine raise "
            f"start_timeout_s; {self._why()}"
        )

    def _why(self) -> str:
        return f"its log ends with:\n{self.log_tail() or '(nothing)'}"

    def _processes(self) -> list[psutil.Process]:
        found = {process.pid: process for process in processes_with(MARKER, self._id)}
        if self.alive():
            assert self._process is not None
            with contextlib.suppress(psutil.NoSuchProcess):
                head = psutil.Process(self._process.pid)
                found |= {process.pid: process for process in (head, *head.children(recursive=True))}
        return list(found.values())


def _make_folder(parent: Path | None) -> Path:
    """Make a folder that only this user can enter: Ray opens its own temp folder to everybody."""
    if parent is None:
        default = Path(tempfile.gettempdir())
        parent = default if _room_for_sockets(default) >= 0 else Path("/tmp")
    if (room := _room_for_sockets(parent)) < 0:
        raise ClusterStartError(
            f"temp_dir {parent} is {-room} bytes too long: Ray's sockets below it may have at most "
            f"{SOCKET_PATH_LIMIT}; use a shorter one"
        )
    return Path(tempfile.mkdtemp(prefix="rp-", dir=parent))


def _room_for_sockets(parent: Path) -> int:
    return SOCKET_PATH_LIMIT - len(os.fsencode(parent / "rp-12345678")) - _SOCKET_TAIL


def _loopback() -> str:
    """Return an address only this machine reaches. Ray replaces 127.0.0.1 by an outer one, but not its neighbour."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.2", 0))
        except OSError:
            return "127.0.0.1"
    return "127.0.0.2"


def _free_port() -> int:
    """Return a port nobody listens on, outside the range from which the system serves other sockets."""
    for port in random.SystemRandom().sample(range(*_PORT_RANGE), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise ClusterStartError(f"none of 100 ports tried in {_PORT_RANGE} is free")


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _dashboard_url(log_file: Path) -> str:
    match = re.search(r"RAY_API_SERVER_ADDRESS='(http://[^']+)'", log_file.read_text(errors="replace"))
    return match.group(1) if match else ""


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Hold back the signals that stop a run while the block runs, and deliver the last of them after it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, note) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if caught:
            signal.raise_signal(caught[-1])
