"""Tools and agents end to end: the recipes `tools` and `agent`, with a short warm-up and a few steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.private_cluster import PrivateCluster
from raypost.config import ModelConfig
from raypost.models.resolve import resolve_model
from raypost.report.samples import kept_samples
from tests.jobs.job import ROOT, Job, assert_adds_up, assert_audited
from tests.unit.sandboxes import needs_sandbox

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("recipe", ["tools", "agent"])
def test_calls_of_the_tiny_model_are_made_and_their_results_are_not_trained(
    private_cluster: PrivateCluster, folder: Path, recipe: str
) -> None:
    job = Job(
        private_cluster,
        folder,
        recipe,
        "train.num_steps=4",
        "model.options.steps=300",
        config=f"jobs/recipes/{recipe}.yaml",
    )
    assert job.wait() == 0, job.output()
    report = job.report()
    assert report["status"] == "finished" and report["groups"]["failed"] == 0
    assert_adds_up(report)
    assert_audited(job)
    assert report["logprob_mismatch_max"] < 1e-3
    assert job.spans("judge") and bool(job.spans("tool")) is (recipe == "tools")
    kept = [one for step in range(1, 5) for one in kept_samples(job.run_dir, step).samples]
    called = [one for one in kept if any(not segment["trained"] for segment in one["segments"])]
    assert called, f"no call among {json.dumps([one['response'] for one in kept])}"
    for one in called:
        observed = "".join(segment["text"] for segment in one["segments"] if not segment["trained"])
        assert observed.startswith("<tool>") and observed.endswith("<assistant>")
        assert "<tool_call>" in one["segments"][0]["text"]


def test_a_session_of_two_branches_is_one_sample_of_two_trajectories(
    private_cluster: PrivateCluster, folder: Path
) -> None:
    job = Job(
        private_cluster,
        folder,
        "branches",
        "train.num_steps=3",
        "model.options.steps=200",
        "tasks.0.agent_loop.agent=tests.jobs.playground:asks_anew",
        "tasks.0.strategy.max_staleness=0",
        "train.loss.aggregation=sequence",
        config="jobs/recipes/agent.yaml",
    )
    assert job.wait() == 0, job.output()
    report = job.report()
    assert report["status"] == "finished" and report["groups"]["failed"] == 0
    assert_adds_up(report)
    assert_audited(job)
    assert {record["num_samples"] for record in job.steps()} == {4 * 4}
    kept = kept_samples(job.run_dir, 3).samples
    trajectories = Counter((one["group"], one["sample"]) for one in kept)
    assert {*trajectories.values()} == {2}


SERVER = """
import re
from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator", log_level="CRITICAL")

@server.tool()
def calculate(expression: str) -> str:
    \"\"\"Works out a sum.\"\"\"
    return str(sum(map(int, re.findall(r"-?[0-9]+", expression.replace("- ", "-")))))

server.run()
"""
SANDBOXED = """
from raypost.sandbox import tools

async def calculate(expression: str) -> str:
    \"\"\"Works out a sum.

    Args:
        expression: numbers with + or - between them
    \"\"\"
    return await tools.python(f"print({expression})")
"""


@needs_sandbox
def test_an_mcp_server_a_sandbox_processes_and_a_frozen_user_play_in_one_run(
    private_cluster: PrivateCluster, folder: Path
) -> None:
    (folder / "server.py").write_text(SERVER)
    (folder / "sandboxed.py").write_text(SANDBOXED)
    recipe = yaml.safe_load((ROOT / "jobs/recipes/tools.yaml").read_text())
    recipe["model"]["options"]["steps"] = 300
    frozen = resolve_model(ModelConfig(name="tiny", options=recipe["model"]["options"]), 0, folder / "cache")
    [sums] = recipe["tasks"]
    sums["chat_template"] = str(ROOT / "jobs/recipes/tools.jinja")
    game: dict[str, Any] = {"kind": "environment", "isolation": "process", "max_turn_tokens": 8}
    game |= {"environment": "tests.jobs.playground:AskTwice", "params": {"reward": 0.5}}
    talk: dict[str, Any] = {
        "kind": "environment",
        "environment": "raypost.agent_loop.user_simulator:UserSimulator",
    }
    talk |= {"reward_model": "customer", "params": {"max_turns": 2, "max_tokens": 4, "messages": False}}
    loops = {
        "mcp": sums["agent_loop"] | {"tools": [{"mcp": [sys.executable, "server.py"]}]},
        "sandbox": sums["agent_loop"] | {"tools": ["sandboxed.py:calculate"]},
        "game": game,
        "talk": talk,
    }
    recipe["tasks"] = [sums | {"name": name, "agent_loop": loop} for name, loop in loops.items()]
    recipe["reward_models"] = [
        {
            "name": "customer",
            "model": str(frozen),
            "generates": True,
            "max_model_len": 256,
        }
    ]
    path = folder / "worlds.yaml"
    path.write_text(yaml.safe_dump(recipe))
    options = ["train.num_steps=3", "train.batch_size=8", "eval.num_prompts=4", "model.options.steps=300"]
    options += [
        "rollout.agent_cpus=0.5",
        "rollout.judge_cpus=0.25",
        "tasks.0.group_size=8",
        "keep_samples=100",
    ]
    job = Job(private_cluster, folder, "worlds", *options, config=str(path))
    assert job.wait() == 0, job.output()
    report = job.report()
    assert report["status"] == "finished" and report["groups"]["failed"] == 0, report["problems"]
    assert_adds_up(report)
    assert_audited(job)
    for kind in ("tool", "sandbox", "environment"):
        assert {span["actor"] for span in job.spans(kind)} == {"agent-loop-0"}, kind
    kept = [one for step in range(1, 4) for one in kept_samples(job.run_dir, step).samples]
    answered = Counter(
        one["task"] for one in kept if any(not segment["trained"] for segment in one["segments"])
    )
    assert set(answered) == set(loops), f"{answered}: {json.dumps([one['response'] for one in kept])}"


def test_a_taskset_of_verifiers_trains_by_its_own_rewards(
    private_cluster: PrivateCluster, folder: Path
) -> None:
    # It wants other versions of openai and mcp than raypost has: an environment of its own.
    environment, example = folder / "verifiers", ROOT / "examples" / "verifiers"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=240)
    pip = [str(environment / "bin" / "pip"), "install", "--quiet", "verifiers==0.4.0", "uv"]
    subprocess.run(pip, check=True, timeout=600)
    # uv, with which its harness makes an environment too, trusts what pip trusts.
    trusted = [f"SSL_CERT_FILE={os.environ['PIP_CERT']}"] if "PIP_CERT" in os.environ else []
    command = ["env", f"HOME={folder}", *trusted]
    command += [str(environment / "bin" / "python"), str(example / "play.py"), "sums"]
    job = Job(
        private_cluster,
        folder,
        "verifiers",
        "train.num_steps=3",
        "train.batch_size=2",
        "tasks.0.group_size=2",
        f"tasks.0.source.dataset={example / 'data.jsonl'}",
        f"tasks.0.agent_loop.command={json.dumps(command)}",
        config=str(example / "config.yaml"),
    )
    assert job.wait() == 0, job.output()
    report = job.report()
    assert (report["status"], report["steps"], report["groups"]["failed"]) == ("finished", 3, 0)
    assert_adds_up(report)
    assert_audited(job)
    kept = [one for step in range(1, 4) for one in kept_samples(job.run_dir, step).samples]
    assert len(kept) == 3 * 4 and {one["reward"] for one in kept} <= {0.0, 1.0}
    # verifiers' own judgement of what the policy said, not the task's judge.
    assert report["judges"].get("sums", {}).get("calls", 0) == 0
