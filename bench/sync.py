"""How long a weight sync holds the engines up, and where a step's time goes: real engine, real trainer, the main loop.

    python -m bench.sync --config jobs/recipes/quickstart.yaml train.num_steps=20
    python -m bench.sync --config jobs/recipes/smollm2.yaml train.num_steps=8
    python -m bench.sync --config jobs/recipes/quickstart.yaml --pause-modes abort keep swap -- train.num_steps=60

The roles are those of the main job on a Ray of its own, and the loop is that of jobs/train.py with a clock around each
call, without checkpoints and evaluations. When production resumes, a request for one token is tried every 2 ms, ahead
of all others: the stall is the time from the call of `pause`, or `swap`, until that token is back at the driver.

With several `--pause-modes` the modes take turns, BLOCK steps each, on the same engines. `swap` is what the job does
where nothing but a sync is due: keep, load and resume in one call.

Its last line is one JSON object. For each mode, median, least and greatest: milliseconds of each part of a step
(publish and transport lie within prepare, load within broadcast or swap, read back within load, first token within
stall; the canary comes beside it; still: of a swap, from an engine's word that it paused to its word that it goes on),
and groups a second; how often a group was sent to an agent loop; staleness and mismatch of what was trained, and groups
that grew too old. For the whole run: how long engines and ranks had nothing to do, and how many cores others took of
the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np

from actors.rollout.routing import Router, router_to
from bench.figures import Foreign, spread
from jobs.arguments import config_of, parser
from jobs.driver import connect, run
from jobs.launch import PRODUCTION
from jobs.roles import Roles
from jobs.wiring import spawn
from raypost.config import Config
from raypost.ledger.events import LedgerEvent
from raypost.observe import metrics
from raypost.types import EVALUATION_PRIORITY, GenerateRequest, SampleParams

SyncMode = Literal["abort", "keep", "wait", "swap"]

BLOCK = 6
"""Steps of one mode in a row."""

WARM_UP = 2
"""Steps at the begin of a block that are not counted: the mode before still shows. Nor is the first block."""

PROBE_EVERY_S = 0.002
PROBE_TIMEOUT_S = 60.0


@dataclass
class Step:
    """What was measured of one step: figures by name, milliseconds where they are of a part."""

    mode: SyncMode
    """Of the sync in it, and of the one before it."""
    counted: bool
    block: int
    begin_s: float
    parts: dict[str, float] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    end_s: float = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the block to a part of the step."""
        begin = time.perf_counter()
        yield
        self.parts[name] = self.parts.get(name, 0.0) + 1e3 * (time.perf_counter() - begin)


async def loop(cfg: Config, stop: asyncio.Event, modes: Sequence[SyncMode], steps: list[Step]) -> None:
    """Do what jobs/train.py does, and time it."""
    async with spawn(cfg, stop) as roles:
        router = router_to(PRODUCTION, PROBE_TIMEOUT_S)
        await roles.broadcast(version=0)
        await roles.resume(version=0)
        roles.produce()
        step = 0
        while not roles.finished(step):
            block, place = divmod(step, BLOCK)
            now = Step(modes[block % len(modes)], block > 0 and place >= WARM_UP, block, time.time())
            with now.part("take"):
                status, batch_ref = await roles.take_batch(step + 1)
            if batch_ref is not None:
                step += 1
                with now.part("fit"):
                    trained = await roles.trainer.fit(batch_ref, step)
                with now.part("log"):
                    await roles.acknowledge(step)
                    await roles.log(step, status, trained)
                now.facts = {
                    "groups": status.num_groups,
                    "staleness_mean": float(np.mean(status.staleness)),
                    "mismatch_max": trained.get(metrics.LOGPROB_MISMATCH_MAX, 0.0),
                    "expired": status.metrics.expired_groups,
                }
            if batch_ref is None or cfg.sync_due(step):
                await sync(roles, router, step, now)
            now.end_s = time.time()
            steps.append(now)


async def sync(roles: Roles, router: Router, version: int, step: Step) -> None:
    """One sync, and the first token after it, by a router that knows the pool as those of agent loops do."""
    with step.part("prepare"):
        await roles.prepare(version)
    begin = time.perf_counter()
    if step.mode == "swap":
        with step.part("swap"):
            await roles.producer.swap(version)
        probe = asyncio.create_task(first_token(router, version))
    else:
        with step.part("pause"):
            await roles.producer.pause(step.mode)
        with step.part("broadcast"):
            await roles.broadcast(version)
        probe = asyncio.create_task(first_token(router, version))
        with step.part("resume"):
            await roles.resume(version)
    resumed = time.perf_counter()
    token = await probe
    report = await roles.broadcaster.broadcast(version)
    within = {
        "publish": report.publish_s,
        "transport": report.transport_s,
        "load": report.load_s,
        "read back": report.verify_s,
        "canary": report.canary_s,
    }
    if step.mode == "swap":
        within["still"] = report.load_s + report.resume_s
    step.parts |= {name: 1e3 * seconds for name, seconds in within.items()}
    step.parts |= {"first token": 1e3 * (token - resumed), "stall": 1e3 * (token - begin)}


async def first_token(router: Router, version: int) -> float:
    """Return when the pool gave a token again."""
    request = GenerateRequest(
        request_id=f"first-token-{version}",
        token_ids=np.ones(2, np.int32),
        sample_params=SampleParams(max_tokens=1),
        priority=EVALUATION_PRIORITY - 1,
    )
    while not len((await router.generate(request)).response_ids):
        await asyncio.sleep(PROBE_EVERY_S)
    return time.perf_counter()


def of_mode(mode: SyncMode, steps: Sequence[Step], continued_s: Sequence[float]) -> dict[str, Any]:
    """Return the figures of one mode; `continued_s`: when groups were sent to an agent loop once more."""
    own = [step for step in steps if step.mode == mode and step.counted and step.facts]
    groups = sum(step.facts["groups"] for step in own)
    blocks = [[step for step in own if step.block == block] for block in sorted({step.block for step in own})]
    again = sum(step.begin_s <= at < step.end_s for step in own for at in continued_s)
    return {
        "ms": {
            name: spread([step.parts[name] for step in own if name in step.parts]) for name in own[0].parts
        },
        "groups_per_s": spread(
            [sum(s.facts["groups"] for s in b) / sum(s.end_s - s.begin_s for s in b) for b in blocks]
        ),
        "dispatches_a_group": round(1 + again / groups, 2),
        "staleness_mean": spread([step.facts["staleness_mean"] for step in own]),
        "mismatch_max": max(step.facts["mismatch_max"] for step in own),
        "expired": sum(step.facts["expired"] for step in own),
        "steps": len(own),
    }


def summary(cfg: Config, modes: Sequence[SyncMode], steps: Sequence[Step], foreign: float) -> dict[str, Any]:
    """Return what was measured."""
    report = json.loads((cfg.run_dir / "report.json").read_text())
    with (cfg.run_dir / "ledger.jsonl").open() as lines:
        events = [json.loads(line) for line in lines]
    continued_s = [event["time"] for event in events if event["event"] == LedgerEvent.CONTINUED]
    return {
        **{mode: of_mode(mode, steps, continued_s) for mode in dict.fromkeys(modes)},
        "rollout_idle": report["rollout_idle_fraction"],
        "trainer_idle": report["trainer_idle_fraction"],
        "foreign_cores": round(foreign, 2),
        "load_average": os.getloadavg()[0],
    }


async def measure(cfg: Config, stop: asyncio.Event, modes: Sequence[SyncMode], found: dict[str, Any]) -> None:
    """Run the loop and fill `found`."""
    steps: list[Step] = []
    foreign = Foreign()
    samples: list[float] = []

    async def watch() -> None:
        # Processes take their times with them when they end, so the last sample of a run that ended would be too low.
        while True:
            await asyncio.sleep(5)
            samples.append(foreign.cores())

    watching = asyncio.create_task(watch())
    await loop(cfg, stop, modes, steps)
    watching.cancel()
    found |= summary(cfg, modes, steps, samples[-2] if len(samples) > 1 else 0.0)


def main() -> int:
    """Measure one recipe and print it."""
    made = parser(__doc__)
    made.add_argument("--pause-modes", nargs="+", choices=get_args(SyncMode))
    args = made.parse_args()
    stop, found = asyncio.Event(), dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="rp-") as folder:
        args.runs_dir = args.runs_dir or folder
        args.overrides = [
            "checkpoint.interval=0",
            "checkpoint.every_s=null",
            "eval.num_prompts=0",
            *args.overrides,
        ]
        cfg = config_of(args)
        connect(cfg)
        modes = args.pause_modes or ["swap" if cfg.sync.pause_mode == "keep" else cfg.sync.pause_mode]
        code = run(
            measure(cfg, stop, modes, found),
            stop,
            "the figures are those of the steps so far",
            cfg.run_dir / "traceback.txt",
        )
    if code == 0:
        print(json.dumps(found), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
