"""The command line: plans without a heavy import, refuses in one message, and asks Ray for exactly one job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner, Result

from raypost import cli
from raypost.checkpoint import CheckpointDir
from raypost.cli.submission import Submission, dashboard_token, job_environment
from raypost.errors import ClusterError, ConfigError
from raypost.files.owner import owning
from raypost.ledger.ledger import LEDGER_FILE, Ledger
from raypost.plan.cluster import ClusterResources
from raypost.types import GroupCounts
from tests.factories import everything_below, plain_config

ROOT = Path(__file__).resolve().parents[2]
NODES = [
    {"node_id": "a1", "state": "ALIVE", "resources_total": {"CPU": 8.0, "node:10.0.0.1": 1.0}},
    {"node_id": "b2", "state": "DEAD", "resources_total": {"CPU": 64.0}},
]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A configuration file that works, whose runs would go below tmp_path."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(plain_config(name="trial", runs_dir=str(tmp_path / "runs"))))
    return path


class Dashboard(HTTPServer):
    """Answers as Ray's dashboard does when asked for what it has; `asked` keeps path and token of each request."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.rows: dict[str, list[dict[str, Any]]] = {"nodes": NODES, "actors": [], "placement_groups": []}
        self.answer: Any = None
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Dashboard

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["Authorization"]))
        of = self.path.split("?")[0].rpartition("/")[2]
        answer: Any = {"result": True, "data": {"result": {"total": 2, "result": self.server.rows.get(of)}}}
        if self.path == "/nodes?view=summary":
            raylets = [{"raylet": {"nodeId": one["node_id"], "nodeTypeName": "head"}} for one in NODES]
            answer = {"result": True, "data": {"summary": raylets}}
        body = json.dumps(self.server.answer or answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    server = Dashboard()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join(120)
    server.server_close()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


# ---------------------------------------------------------------- plan


def test_plan_shows_placement_bound_arithmetic_and_writes_nothing(recipe: Path, tmp_path: Path) -> None:
    before = everything_below(tmp_path)
    result = run("plan", "--config", recipe, "--node", '{"CPU": 4}', "tasks.0.strategy.max_staleness=2")
    assert result.exit_code == 0, result.output
    for part in (
        "trial",
        "new run",
        "rollout_worker",
        "rollout-0",
        "trainer-0",
        "1 CPU",
        "node 1",
        "shared time",
    ):
        assert part in result.stdout
    for part in (
        "staleness 3",
        "staleness 2: 2 steps old",
        "groups a train step",
        "8 of default x 8",
        "object store",
    ):
        assert part in result.stdout
    assert result.stderr == ""
    assert everything_below(tmp_path) == before


def test_overrides_stand_before_and_after_options(recipe: Path) -> None:
    result = run(
        "plan", "train.num_steps=7", "--config", recipe, "seed=2", "--cluster", "none", "train.batch_size=6"
    )
    assert result.exit_code == 0, result.output
    assert "7 steps" in result.stdout and "6 of default" in result.stdout


HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "pandas", "pyarrow", "datasets", "matplotlib")
"""Packages that take seconds to import, and that a plan has no use for."""
OF_THE_GYM = ("reasoning_gym", "sympy")
"""Packages that only a task of reasoning-gym needs, which imports the other one."""


def run_alone(*arguments: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """The command line in a process of its own, and the packages that this process has imported."""
    program = (
        "import atexit, sys; from raypost.cli import app; "
        "atexit.register(lambda: print('imported', *{name.partition('.')[0] for name in sys.modules})); app()"
    )
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    done.stdout, _, imported = done.stdout.rpartition("imported")
    return done, set(imported.split())


@pytest.fixture
def light_recipe(tmp_path: Path) -> Path:
    """As `recipe`, of a file's prompts and of a model that is no program's."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' * 9)
    task = {"source": {"kind": "jsonl", "dataset": str(data)}, "judge": {"kind": "exact"}}
    path = tmp_path / "light.yaml"
    path.write_text(
        yaml.safe_dump(
            plain_config(model__name="some/model", tasks=[task], eval__num_prompts=0, runs_dir=str(tmp_path))
        )
    )
    return path


def test_plan_imports_nothing_heavy_and_the_gym_only_where_a_task_uses_it(
    light_recipe: Path, tmp_path: Path
) -> None:
    done, imported = run_alone("plan", "--config", str(light_recipe), "--cluster", "none")
    assert done.returncode == 0, done.stderr
    assert not imported & {*HEAVY, *OF_THE_GYM}
    done, imported = run_alone("status", str(tmp_path))
    assert done.returncode == 2 and not imported & {*HEAVY, *OF_THE_GYM}


def test_plan_in_a_process_of_its_own_writes_nothing_and_refuses_in_one_message(
    recipe: Path, light_recipe: Path, tmp_path: Path
) -> None:
    before = everything_below(tmp_path)
    small = ("rollout.num_cpus=0.5", "train.num_cpus=0.5")  # fits a machine of one core
    good, imported = run_alone("plan", "--config", str(recipe), *small)
    bad, _ = run_alone("plan", "--config", str(light_recipe), "rollout.num_cpus=999")
    assert (good.returncode, bad.returncode) == (0, 2), good.stderr + bad.stderr
    assert not imported & set(HEAVY) and imported >= set(OF_THE_GYM)
    assert bad.stdout == ""
    assert bad.stderr.startswith("refused: 1 problem(s)")
    assert "needs 1000 CPU" in bad.stderr
    assert "Traceback" not in bad.stderr
    assert everything_below(tmp_path) == before


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("train.num_stepz=3", "did you mean num_steps?"),
        ("train.num_workers=3", "not divisible by train.num_workers 3"),
        ("tasks.0.source.dataset=chain_sums", "did you mean chain_sum"),
        ("model.name=./absent", "absent"),
        ("rollout.num_workers=64", "needs 65 CPU"),
        ("runs_dir=/dev/null", "lies in /dev, which keeps no files"),
        ("oops", "must read key=value"),
    ],
)
def test_plan_refuses_on_stderr_with_exit_code_two(recipe: Path, override: str, part: str) -> None:
    result = run("plan", "--config", recipe, "--node", '{"CPU": 8}', override)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("refused: ")
    assert part in result.stderr


@pytest.mark.parametrize("node", ["8", "{", '{"CPU": "many"}', "[1]"])
def test_node_that_is_no_mapping_of_amounts_is_refused(recipe: Path, node: str) -> None:
    result = run("plan", "--config", recipe, "--node", node)
    assert result.exit_code == 2
    assert "must be JSON such as" in result.stderr


def test_plan_without_cluster_says_so(recipe: Path) -> None:
    result = run("plan", "--config", recipe, "--cluster", "none", "rollout.num_workers=1000")
    assert result.exit_code == 0
    assert "no cluster was looked at" in result.stdout


def test_plan_for_a_cluster_file_uses_its_largest_size(recipe: Path, tmp_path: Path) -> None:
    types: dict[str, dict[str, Any]] = {
        "head": {"resources": {"CPU": 2}},
        "rollout": {"resources": {"CPU": 8}, "max_workers": 4},
    }
    file = tmp_path / "cluster.yaml"
    file.write_text(
        yaml.safe_dump({"head_node_type": "head", "max_workers": 4, "available_node_types": types})
    )
    types["head"]["max_workers"] = 0
    file.write_text(
        yaml.safe_dump({"head_node_type": "head", "max_workers": 4, "available_node_types": types})
    )
    assert run("plan", "--config", recipe, "--cluster", file, "rollout.num_workers=33").exit_code == 0
    result = run("plan", "--config", recipe, "--cluster", file, "rollout.num_workers=34")
    assert (result.exit_code, "the cluster has 34" in result.stderr) == (2, True)


def test_plan_for_a_running_cluster_counts_its_living_nodes(
    recipe: Path, dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "sesame")
    result = run("plan", "--config", recipe, "--cluster", dashboard.url, "rollout.num_workers=8")
    assert "the cluster has 8" in result.stderr
    asked = [f"/api/v0/{of}?detail=1" for of in ("nodes", "actors", "placement_groups")]
    assert sorted(path.split("&")[0] for path, _ in dashboard.asked) == sorted(
        ["/nodes?view=summary", *asked]
    )
    assert {token for _, token in dashboard.asked} == {"Bearer sesame"}
    assert "10.0.0.1" in run("plan", "--config", recipe, "--cluster", dashboard.url).stdout


def test_plan_for_a_running_cluster_and_a_file_counts_the_nodes_that_may_come(
    recipe: Path, dashboard: Dashboard, tmp_path: Path
) -> None:
    types = {"head": {"resources": {"CPU": 8}}, "more": {"resources": {"CPU": 4}, "max_workers": 2}}
    file = tmp_path / "cluster.yaml"
    file.write_text(
        yaml.safe_dump({"head_node_type": "head", "max_workers": 2, "available_node_types": types})
    )

    def planned(*words: object) -> Result:
        return run("plan", "--config", recipe, "--cluster", dashboard.url, *words, "autoscaling=true")

    shown = planned("--cluster", file).stdout
    assert "the autoscaler may add 2" in shown and "of no type" not in shown
    assert planned("--cluster", file, "rollout.num_workers=15").exit_code == 0
    refused = planned("--cluster", file, "rollout.num_workers=16")
    assert refused.exit_code == 2 and "with all nodes that the autoscaler may add" in refused.stderr
    assert planned("rollout.num_workers=16").exit_code == 0, "which nodes may come is not known"
    for words in (
        ["--cluster", dashboard.url],
        ["--cluster", file, "--cluster", "none"],
        ["--cluster", "local"],
    ):
        twice = planned(*words)
        assert twice.exit_code == 2 and "give one, or the dashboard of a running cluster" in twice.stderr


def test_plan_says_what_others_hold_of_a_running_cluster(recipe: Path, dashboard: Dashboard) -> None:
    first = NODES[0]["node_id"]
    dashboard.rows["actors"] = [
        {"state": "ALIVE", "node_id": first, "required_resources": {"CPU": 3}, "placement_group_id": None},
        {"state": "DEAD", "node_id": first, "required_resources": {"CPU": 3}, "placement_group_id": None},
        {"state": "ALIVE", "node_id": first, "required_resources": {"CPU": 2}, "placement_group_id": "p"},
    ]
    bundle = {"node_id": first, "unit_resources": {"CPU": 4}}
    dashboard.rows["placement_groups"] = [{"state": "CREATED", "bundles": [bundle]}]
    result = run("plan", "--config", recipe, "--cluster", dashboard.url)
    assert "needs 2 CPU, and of the cluster's 8 only 1 are free" in " ".join(result.stdout.split())
    dashboard.rows["actors"] = []
    assert "are free" not in run("plan", "--config", recipe, "--cluster", dashboard.url).stdout


def test_the_users_token_file_is_sent_where_rays_own_tools_would_send_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("of-the-user\n")
    (tmp_path / "other").write_text("of-a-file")
    assert dashboard_token() is None
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert dashboard_token() == "of-the-user"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "other"))
    assert dashboard_token() == "of-a-file"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-the-environment")
    assert dashboard_token() == "of-the-environment"


def test_cluster_that_does_not_answer_as_one_is_refused(dashboard: Dashboard) -> None:
    dashboard.answer = {"hello": "world"}
    with pytest.raises(ClusterError, match="no cluster answers at"):
        ClusterResources.of_dashboard(dashboard.url)
    with pytest.raises(ClusterError, match="no cluster answers at"):
        ClusterResources.of_dashboard("http://127.0.0.1:1")


# ---------------------------------------------------------------- submit


def submit_command(config: Path, address: str, *overrides: str, **options: Any) -> list[str]:
    submission = Submission.of(config, address, list(overrides), options.pop("submission_id", None))
    return submission.command(**{"env": [], "no_wait": False, **options})


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the repository, as the current one."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_submit_runs_the_main_job_with_this_folder_and_an_absolute_run_folder(
    repository: Path, dashboard: Dashboard
) -> None:
    Path("recipe.yaml").write_text(yaml.safe_dump(plain_config(name="trial")))
    command = submit_command(
        Path("recipe.yaml"), dashboard.url, "seed=3", submission_id="a-1", env=["LEVEL=info"], no_wait=True
    )
    split = command.index("--")
    assert command[3:7] == ["job", "submit", "--address", dashboard.url]
    assert command[command.index("--working-dir") + 1] == "."
    assert command[command.index("--submission-id") + 1] == "a-1"
    assert "--no-wait" in command[:split]
    environment = json.loads(command[command.index("--runtime-env-json") + 1])
    assert environment == {"env_vars": {"LEVEL": "info", "RAY_JOB_STOP_WAIT_TIME_S": "120"}}
    metadata = json.loads(command[command.index("--metadata-json") + 1])
    assert (metadata["job_name"], metadata["config"]) == ("trial", "recipe.yaml")
    runs = str(repository / "runs")
    job = ["python", "-m", "jobs.train", "--config", "recipe.yaml", "--runs-dir", runs, "seed=3"]
    assert command[split + 1 :] == job


def test_submit_runs_the_job_that_composes_the_placement(repository: Path, dashboard: Dashboard) -> None:
    Path("recipe.yaml").write_text(yaml.safe_dump(plain_config(name="trial", placement="colocate")))
    command = submit_command(Path("recipe.yaml"), dashboard.url)
    assert command[command.index("--") + 1 :][:3] == ["python", "-m", "jobs.colocate"]


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password", "OPENAI_API_KEY", "apikey"]
)
def test_environment_that_looks_like_a_secret_is_refused_without_its_value(name: str) -> None:
    with pytest.raises(ConfigError, match="looks like a secret") as caught:
        job_environment(["LEVEL=info", f"{name}=hunter2"])
    assert name in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("pair", ["LEVEL", "=3", "A B=3", "1A=2"])
def test_environment_that_is_no_pair_is_refused(pair: str) -> None:
    with pytest.raises(ConfigError, match="must read NAME=VALUE"):
        job_environment([pair])


@pytest.mark.parametrize("identity", ["../../x", "", "a b", "-a", "x" * 65])
def test_unfit_submission_id_is_refused(recipe: Path, repository: Path, identity: str) -> None:
    with pytest.raises(ConfigError, match="must be 1 to 64 letters"):
        submit_command(recipe, "http://127.0.0.1:1", submission_id=identity)


@pytest.mark.parametrize("address", ["auto", "ray://host:10001", "127.0.0.1:8265", "http://"])
def test_address_that_is_no_dashboard_is_refused(recipe: Path, repository: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="must be the cluster's dashboard"):
        submit_command(recipe, address)


def test_what_cannot_travel_to_the_job_is_refused(
    recipe: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="lies outside"):
        submit_command(Path("/etc/hostname"), "http://127.0.0.1:1")
    judge = "tasks.0.judge={kind: function, function: /etc/reward.py:score, function_source: x}"
    with pytest.raises(
        ConfigError, match=r"judge\.function '/etc/reward\.py:score' lies outside .*move its file"
    ):
        submit_command(recipe, "http://127.0.0.1:1", judge)
    monkeypatch.chdir(repository / "jobs")
    with pytest.raises(ConfigError, match=r"has no jobs/train\.py.*submit from its root"):
        submit_command(recipe, "http://127.0.0.1:1")


def test_configuration_that_cannot_work_is_not_submitted(
    recipe: Path, repository: Path, dashboard: Dashboard
) -> None:
    result = run(
        "submit", "--config", recipe, "--address", dashboard.url, "tasks.0.source.dataset=chain_sums"
    )
    assert result.exit_code == 2
    assert "did you mean chain_sum" in result.stderr


# ---------------------------------------------------------------- status, report


def test_status_and_report_refuse_a_folder_without_a_run(tmp_path: Path) -> None:
    for command in ("status", "report"):
        result = run(command, tmp_path)
        assert result.exit_code == 2
        assert f"refused: {tmp_path} holds no run" in result.stderr


def test_checkpoints_are_listed_with_what_each_is_worth_and_damage_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    there = CheckpointDir(tmp_path / "checkpoints", 9, {}, keep_best=True)
    for step, held_out in ((3, 0.75), (5, 0.5), (7, None)):
        folder = there.begin(step)
        np.save(folder / "producer.npy", np.zeros(250_000))
        facts = {"weights": {"w": [500, 1000]}, "dtype": "bfloat16", "zero_stage": 2, "num_workers": 2}
        (folder / "trainer.json").write_text(json.dumps(facts))
        there.commit(step)
        there.record_score(step, held_out)
    result = run("checkpoints", tmp_path)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if "step-" in line]
    assert [("best" in line, "latest" in line, "whole" in line, "2 MB" in line) for line in lines] == [
        (True, False, True, True), (False, False, True, True), (False, True, True, True)]  # fmt: skip
    assert "0.75" in lines[0]
    assert "0.5 M weights" in result.output and "ZeRO 2 on 2 ranks" in result.output
    (tmp_path / "checkpoints" / "step-5" / "producer.npy").write_bytes(b"")
    damaged = run("checkpoints", tmp_path)
    assert damaged.exit_code == 1 and "checkpoint.fallback=true" in " ".join(damaged.output.split())
    assert run("checkpoints", tmp_path / "nothing").exit_code == 2


def test_status_follows_a_run_to_its_report(recipe: Path, tmp_path: Path) -> None:
    from raypost.config import load_config
    from raypost.report import plots
    from raypost.report.writer import RunWriter

    config = load_config(recipe)
    writer = RunWriter(config.run_dir, config)
    writer.write_step(1, {"reward_mean": 0.125, "loss": 0.5})
    writer.write_step(2, {"reward_mean": 0.25, "loss": 0.25, "staleness": [0, 1]})
    result = run("status", config.run_dir)
    assert result.exit_code == 0, result.output
    for part in ("2 of 4", "0.25", "DEAD: its driver is gone and closed no record; last sign of life"):
        assert part in result.stdout
    with owning(config.run_dir):
        result = run("status", config.run_dir)
        assert f"RUNNING: process {os.getpid()} on " in result.stdout and "DEAD" not in result.stdout
    ledger = Ledger(config.run_dir / LEDGER_FILE)
    ledger.sampled(("sums", 0))
    ledger.flush()
    with pytest.MonkeyPatch.context() as patch:
        # `raypost report` draws them, below.
        patch.setattr(plots, "draw", lambda *_: plots.Drawn({}, b"", b""))
        writer.finish("finished", None, GroupCounts(sampled=3, trained=3))
    result = run("status", config.run_dir)
    for part in ("ENDED: finished", "groups trained", "groups lost", "report.html", "no group grew too old"):
        assert part in result.stdout
    with owning(config.run_dir):
        again = run("status", config.run_dir).stdout
        assert "RUNNING" in again and "finished" not in again, (
            "the report of the session before says nothing of it"
        )
    (config.run_dir / "report.html").unlink()
    result = run("report", config.run_dir)
    assert result.exit_code == 0, result.output
    assert "<svg" in (config.run_dir / "report.html").read_text()


DAMAGE = {
    "metrics.jsonl": [b"{broken", b"[]", b"{}", b'{"step": "one", "time_s": 1}', b'{"step": 1}', b"\xff"],
    "events.jsonl": [b"{broken", b"3", b"{}", b'{"event": "start"}', b'{"event": "eval", "time_s": 1}',
                     b'{"event": "usage", "time_s": 1, "judges": 3}', b'{"event": "counts", "time_s": null}'],
    "spans.jsonl": [b"{broken", b'{"actor": "a"}'],
    "report.json": [b"{broken", b"[]", b'{"groups": 3}'],
    "config.yaml": [b"{broken", b"[]", b"name: [", b"\xff"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in DAMAGE.items() for line in lines])
def test_status_and_report_of_a_damaged_run_are_a_sentence(
    recipe: Path, tmp_path: Path, name: str, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raypost.config import load_config
    from raypost.report import writer

    monkeypatch.setattr(writer, "_draw", lambda *_: None)
    config = load_config(recipe)
    recorder = writer.RunWriter(config.run_dir, config)
    recorder.write_step(1, {"reward_mean": 0.125})
    recorder.finish("finished", None, GroupCounts(sampled=3, trained=3))
    path = config.run_dir / name
    whole = path.read_bytes() if path.exists() else b""
    path.write_bytes(whole + line + b"\n" if name.endswith("jsonl") else line)
    for command in ("report", "status"):
        result = run(command, config.run_dir)
        assert result.exit_code in (0, 2), (command, result.exception)
        assert "Traceback" not in result.output
        if result.exit_code == 2:
            assert name in result.stderr
