"""How long a rollout worker takes to come and to go while a run goes on, on nodes that an autoscaler adds and removes.

    python -m bench.elastic --rounds 3

The quickstart with real engines on Ray's own autoscaler, each rollout worker on a node of its own (raylets of this
machine, so a node costs no machine's boot). Every round types `raypost scale RUN --workers 2`, then starts a bare
engine on the same busy machine (vLLM alone, in a process of its own, to its first token), then types `--workers 1`.
Seconds, medians of the rounds; the last line is one JSON object.

    node_s           from `--workers 2` until the node is there
    joined_s         until the worker serves: its engine is started, it holds the current version, verified
    first_token_s    until it generates for a group
    left_s           from `--workers 1` until it is out of the pool, and what it ran goes on elsewhere
    gone_s           until its node is gone; idle_s of that the autoscaler leaves a node that is idle
    bare_s           a bare engine from its process's start to its first token
    join_ratio       first_token_s over node_s + bare_s
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from raypost.config import load_config
from raypost.config.engine import EngineConfig
from raypost.report.pool import pool_record
from tests.jobs.autoscaling import AutoscalingCluster, autoscaling_cluster, rollout_nodes
from tests.jobs.job import Job

PATIENCE_S = 400.0
BARE = """
import json, sys
from vllm import LLM, SamplingParams
options = json.loads(sys.argv[1])
llm = LLM(skip_tokenizer_init=True, load_format="dummy", disable_log_stats=True, **options)
llm.generate({"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
"""


def until(job: Job, what: str, there: Callable[[], bool]) -> float:
    """Wait until it is there; return when that was."""
    end = time.monotonic() + PATIENCE_S
    while not there():
        assert job.process.poll() is None, f"the run ended before {what}:\n{job.output()}"
        assert time.monotonic() < end, f"no {what}: {pool_record(job.run_dir)}"
        time.sleep(0.05)
    return time.time()


def scale(job: Job, workers: int) -> float:
    """Type the command; return when."""
    begin = time.time()
    command = [sys.executable, "-m", "raypost", "scale", str(job.run_dir), "--workers", str(workers)]
    subprocess.run(command, check=True, timeout=PATIENCE_S, stdout=subprocess.DEVNULL)
    return begin


def bare(job: Job, model: Path) -> float:
    """Return the seconds that a bare engine of the run's settings takes to its first token."""
    config = load_config(job.run_dir / "config.yaml")
    engine = EngineConfig.of(config)
    options = {
        "model": str(model), "dtype": engine.dtype, "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.rollout.max_num_seqs, "enforce_eager": engine.rollout.enforce_eager,
        "kv_cache_memory_bytes": int(engine.rollout.kv_cache_gb * 2**30),
    }  # fmt: skip
    begin = time.perf_counter()
    command = [sys.executable, "-c", BARE, json.dumps(options)]
    subprocess.run(
        command, check=True, timeout=PATIENCE_S, capture_output=True, env=os.environ | engine.environment()
    )
    return time.perf_counter() - begin


def one_round(job: Job, model: Path) -> dict[str, float]:
    """Have a worker come and go; return the seconds."""
    joined, left = len(job.events("worker_joined")), len(job.events("worker_left"))
    asked = scale(job, 2)
    node = until(job, "node", lambda: rollout_nodes() == 2)
    until(job, "worker", lambda: len(job.events("worker_joined")) > joined)
    event = job.events("worker_joined")[-1]

    def served() -> list[float]:
        return [one["start_s"] for one in job.spans("rollout") if one["actor"] == event["actor"]]

    until(job, "first token", lambda: bool(served()))
    bare_s = bare(job, model)
    dropped = scale(job, 1)
    until(job, "departure", lambda: len(job.events("worker_left")) > left)
    gone = until(job, "removal of the node", lambda: rollout_nodes() == 1)
    return {
        "node_s": node - asked,
        "joined_s": event["time_s"] - asked,
        "first_token_s": min(served()) - asked,
        "left_s": job.events("worker_left")[-1]["time_s"] - dropped,
        "gone_s": gone - dropped,
        "bare_s": bare_s,
        "join_ratio": (min(served()) - asked) / (node - asked + bare_s),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="rp-") as name, autoscaling_cluster(Path(name)) as cluster:
        job = Job(
            cluster, Path(name), "elastic", "train.num_steps=1000000", "eval.num_prompts=0", "autoscaling=true",
            "rollout.num_workers=1", "rollout.resources={rollout: 1}", "train.resources={trainer: 1}",
        )  # fmt: skip
        try:
            job.until_step(2)
            model = next(Path(name, "cache").rglob("config.json")).parent
            found = []
            for _ in range(rounds):
                found.append(one_round(job, model))
                print(found[-1], flush=True)
        finally:
            job.process.terminate()
            job.wait()
    figures: dict[str, float] = {
        key: round(statistics.median(one[key] for one in found), 2) for key in found[0]
    }
    idle_s = 60 * AutoscalingCluster.idle_minutes
    print(json.dumps(figures | {"idle_s": idle_s, "rounds": rounds, "load_average": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
