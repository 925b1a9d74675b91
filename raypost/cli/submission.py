"""A job for a cluster: what is checked before it is submitted, and the command that submits it."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from raypost.cli.runtime import HOME, INSTALLED, job_module
from raypost.config import Config, load_config
from raypost.config.judges import function_file
from raypost.errors import ConfigError
from raypost.plan.cluster import ClusterResources

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SECRET = re.compile(r"token|secret|passw|credential|api_?key|access_?key|private_?key", re.IGNORECASE)
"""Names of environment variables that look like secrets."""
STOP_WAIT_S = 120
"""Time a job has, after `ray job stop`, to save and to report before Ray kills it."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A configuration that may travel to a cluster from the current folder, and the cluster that is there."""

    file: Path
    """The configuration, relative to the current folder."""
    address: str
    overrides: list[str]
    config: Config
    cluster: ClusterResources
    id: str | None

    @classmethod
    def of(
        cls, file: Path, address: str, overrides: list[str], submission_id: str | None = None
    ) -> Submission:
        """Read and check. Raises ConfigError for what cannot travel, ClusterError if no cluster answers."""
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"--address {address!r} must be the cluster's dashboard, such as http://host:8265"
            )
        if submission_id is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", submission_id):
            raise ConfigError(
                f"--submission-id {submission_id!r} must be 1 to 64 letters, digits, '_' or '-'"
            )
        root = Path.cwd()
        if not INSTALLED and not (root / "jobs" / "train.py").is_file():
            raise ConfigError(
                f"{root} has no jobs/train.py, and this raypost is a checkout, {HOME}, which the job would lack: "
                "submit from its root, or install raypost's wheel here and on the nodes"
            )
        if not file.resolve().is_relative_to(root):
            raise ConfigError(
                f"--config {file} lies outside {root}, which is what travels to the job: move it there"
            )
        config = load_config(file, overrides)
        _check_functions(config, file, root)
        cluster = ClusterResources.of_dashboard(address, dashboard_token())
        return cls(file.resolve().relative_to(root), address, overrides, config, cluster, submission_id)

    @property
    def is_local(self) -> bool:
        """Whether the cluster is on this machine."""
        return urlsplit(self.address).hostname in LOOPBACK

    def command(self, env: list[str], no_wait: bool) -> list[str]:
        """Return `ray job submit ...`. Raises ConfigError for a variable that may not be set."""
        variables = {**job_environment(env), "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}
        ray = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", self.address]
        options = ["--working-dir", ".", "--runtime-env-json", json.dumps({"env_vars": variables})]
        options += ["--submission-id", self.id] if self.id else []
        options += ["--metadata-json", json.dumps(job_metadata(self.config, str(self.file)))]
        options += ["--no-wait"] if no_wait else []
        # The job's own folder is removed with it: a relative run folder would be lost.
        runs_dir = str(self.config.runs_dir.expanduser().absolute())
        job = ["python", "-m", job_module(self.config.job), "--config", str(self.file)]
        return [*ray, *options, "--", *job, "--runs-dir", runs_dir, *self.overrides]


def job_metadata(config: Config, file: str) -> dict[str, str]:
    """Return what Ray's dashboard shows of a job beside its entrypoint; `job_name` is its column Name there."""
    return {"job_name": config.name, "config": file, "model": config.model.name, "device": config.device}


def _check_functions(config: Config, path: Path, root: Path) -> None:
    for task in config.tasks:
        named = [(f"{place}.function", judge.function) for place, judge in task.judge.every()]
        for place, function in [*named, ("agent_loop", task.agent_loop.named)]:
            file = function_file(function)
            if file is not None and not (path.parent / file).resolve().is_relative_to(root):
                raise ConfigError(
                    f"task {task.name!r}: {place} {function!r} lies outside {root}, which is what travels to the "
                    "job: move its file there"
                )


def job_environment(pairs: list[str]) -> dict[str, str]:
    """Return NAME=VALUE pairs as a mapping. Raises ConfigError for one that looks like a secret."""
    variables = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"--env {name!r} must read NAME=VALUE")
        if SECRET.search(name):
            raise ConfigError(
                f"--env {name} looks like a secret, and Ray shows a job's environment in its dashboard and "
                "logs: put it into a file or the environment of the nodes instead"
            )
        variables[name] = value
    return variables


def dashboard_token() -> str | None:
    """Return the token that Ray's own tools send: of its two variables, else of the user's file in token mode."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if not path and os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        path = "~/.ray/auth_token"
    file = Path(path).expanduser() if path else None
    return file.read_text().strip() if file is not None and file.is_file() else None
