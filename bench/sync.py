"""How long a weight sync holds the engines up, and where a step's time goes: real engine, real trainer, the main loop.

    python -m bench.sync --config jobs/recipes/quickstart.yaml train.num_steps=20
    python -m bench.sync --config jobs/recipes/smollm2.yaml train.num_steps=8

The roles are those of the main job on a Ray of its own, and the loop is that of jobs/train.py with a clock around each
call, without checkpoints and evaluations. When production resumes, a request for one token is tried every 2 ms, ahead
of all others: the stall is the time from the call of `pause` until that token is back at the driver.

Its last line is one JSON object: median, least and greatest milliseconds of each part of a step (publish lies within
prepare, load and canary within broadcast, first token within stall); how long engines and ranks had nothing to do;
how often a group was sent to an agent loop; groups that grew too old; staleness and mismatch of what was trained; how
many cores other processes of the machine took.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import psutil

from actors.rollout.routing import router_to
from jobs.arguments import config_of, parser
from jobs.driver import connect, run
from jobs.launch import PRODUCTION
from jobs.roles import Roles
from jobs.wiring import spawn
from raypost import metrics
from raypost.config import Config
from raypost.types import EVALUATION_PRIORITY, GenerateRequest, SampleParams

WARM_UP = 4
"""Steps that are not counted: the first ones meet cold memory and code."""

PROBE_EVERY_S = 0.002
PROBE_TIMEOUT_S = 60.0

Parts = dict[str, float]
"""Milliseconds."""


class Clock:
    """The parts of the step under way, and of those before it."""

    def __init__(self) -> None:
        self.steps: list[Parts] = []
        self.trained: list[Mapping[str, float]] = []
        self.busy: list[tuple[float, float, float]] = []
        """At each step's begin: the time, CPU seconds of the machine, and those of this process and its descendants."""

    def next_step(self) -> None:
        """Begin a step."""
        self.steps.append({})
        times, own = psutil.cpu_times(), 0.0
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                own += sum(process.cpu_times()[:2])
        self.busy.append((time.perf_counter(), sum(times) - times.idle - times.iowait, own))

    def foreign_cores(self) -> tuple[float, float]:
        """Return the seconds of the counted steps, and the cores that others took meanwhile."""
        seconds, all_s, own_s = (b - a for a, b in zip(self.busy[WARM_UP], self.busy[-1], strict=True))
        return seconds, max(0.0, (all_s - own_s) / seconds)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the block to a part of the step."""
        begin = time.perf_counter()
        yield
        self.steps[-1][name] = self.steps[-1].get(name, 0.0) + 1e3 * (time.perf_counter() - begin)


async def loop(cfg: Config, stop: asyncio.Event, clock: Clock) -> None:
    """Do what jobs/train.py does, and time it."""
    async with spawn(cfg, stop) as roles:
        await roles.broadcast(version=0)
        await roles.producer.resume(version=0)
        roles.produce()
        step = 0
        while not roles.finished(step):
            clock.next_step()
            with clock.part("take"):
                status, batch_ref = await roles.take_batch(step + 1)
            if batch_ref is not None:
                step += 1
                with clock.part("fit"):
                    trained = await roles.trainer.fit(batch_ref, step)
                with clock.part("log"):
                    await roles.producer.acknowledge(step)
                    await roles.log(step, status, trained)
                facts = {
                    "staleness": float(np.mean(status.staleness)),
                    "groups": status.num_groups,
                    "expired": status.metrics.expired_groups,
                }
                clock.trained.append({**trained, **facts})
            if batch_ref is None or cfg.sync_due(step):
                await sync(roles, step, clock)
        clock.next_step()


async def sync(roles: Roles, version: int, clock: Clock) -> None:
    """One sync, and the first token after it."""
    with clock.part("prepare"):
        await roles.prepare(version)
    begin = time.perf_counter()
    with clock.part("pause"):
        await roles.pause(version)
    with clock.part("broadcast"):
        await roles.broadcast(version)
    probe = asyncio.create_task(first_token(roles, version))
    with clock.part("resume"):
        await roles.producer.resume(version)
    resumed = time.perf_counter()
    token = await probe
    report, parts = await roles.broadcaster.broadcast(version), clock.steps[-1]
    parts |= {"first token": 1e3 * (token - resumed), "stall": 1e3 * (token - begin)}
    within = {"publish": report.publish_s, "load": report.load_s, "canary": report.canary_s}
    parts |= {name: 1e3 * seconds for name, seconds in within.items()}


async def first_token(roles: Roles, version: int) -> float:
    """Return when the pool gave a token again."""
    request = GenerateRequest(
        request_id=f"first-token-{version}",
        token_ids=np.ones(2, np.int32),
        sample_params=SampleParams(max_tokens=1),
        priority=EVALUATION_PRIORITY - 1,
    )
    router = router_to(PRODUCTION, PROBE_TIMEOUT_S)
    while not len((await router.generate(request)).response_ids):
        await asyncio.sleep(PROBE_EVERY_S)
    return time.perf_counter()


def summary(cfg: Config, clock: Clock) -> dict[str, Any]:
    """Return what was measured."""
    steps, trained = clock.steps[WARM_UP:], clock.trained[WARM_UP:]
    seconds, foreign = clock.foreign_cores()
    parts = {
        name: [round(of(values), 1) for of in (statistics.median, min, max)]
        for name in dict.fromkeys(part for step in steps for part in step)
        if (values := [step[name] for step in steps if name in step])
    }
    report = json.loads((cfg.run_dir / "report.json").read_text())
    with (cfg.run_dir / "ledger.jsonl").open() as lines:
        events = Counter(json.loads(line)["event"] for line in lines)
    mismatch = [step[name] for step in trained if (name := metrics.LOGPROB_MISMATCH_MAX) in step]
    return {
        "pause_mode": cfg.sync.pause_mode,
        "ms": parts,
        "groups_per_s": round(sum(step["groups"] for step in trained) / seconds, 2),
        "rollout_idle": report["rollout_idle_fraction"],
        "trainer_idle": report["trainer_idle_fraction"],
        "dispatches_a_group": 1 + events["continued"] / max(1, events["trained"]),
        "staleness_mean": statistics.mean(step["staleness"] for step in trained),
        "mismatch_max": max(mismatch, default=None),
        "expired": sum(step["expired"] for step in trained),
        "steps": len(trained),
        "foreign_cores": round(foreign, 2),
    }


def main() -> int:
    """Measure one recipe and print it."""
    made = parser(__doc__)
    args = made.parse_args()
    clock, stop = Clock(), asyncio.Event()
    with tempfile.TemporaryDirectory(prefix="rp-") as folder:
        args.runs_dir = args.runs_dir or folder
        args.overrides = ["checkpoint.interval=0", "eval.num_prompts=0", *args.overrides]
        cfg = config_of(args)
        connect(cfg)
        code = run(loop(cfg, stop, clock), stop, "the figures are those of the steps so far")
        if code == 0:
            print(json.dumps(summary(cfg, clock)), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
