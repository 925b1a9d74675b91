"""Kills roles of a scripted run in named phases, as a seeded schedule says, and starts its driver again.

board (what engines and ranks begin with), step-N.tmp -> phase is there -> a wave of kills -> they come back, or not

Roles of a wave die at once, and some again as soon as they are back: a second death meets the recovery from the first.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jobs.chaos import ROLES, Cluster, Victim
from jobs.private_cluster import PrivateCluster
from tests.chaos.scripted import BOARD, PACE, weights_of

ROOT = Path(__file__).resolve().parents[2]
PHASES = (
    "start",
    "produce",
    "take",
    "fit",
    "pause",
    "publish",
    "load",
    "resume",
    "save",
    "commit",
    "evaluate",
)
DRIVER = "driver"
POLL_S = 0.005
ASK_S = 0.05
"""Between two looks at the actors."""
PHASE_S = 6.0
"""How long a phase is waited for."""
BACK_S = 5.0
"""How long the processes of a wave are waited for."""
AT_ONCE = (2, 6)
"""Roles that die at once, at least and at most."""
AGAIN = 0.3
"""Part of the waves in which one of them dies again at once."""
GONE_S = 20.0
ATTEMPTS = 40
"""How often the driver is started at most."""


class Wave(NamedTuple):
    """Kills that are made at once."""

    phase: str
    delay_s: float
    roles: tuple[str, ...]
    choice: float
    """Which actor of a role, as a part of all."""
    again: bool
    """Whether the first of them that is back dies again."""


def schedule(seed: int, kills: int, roles: Sequence[str], driver_kills: int) -> Iterator[Wave]:
    """Yield the kills of a seed: every role in every phase before any pair comes again."""
    drawn = random.Random(seed)
    left: dict[str, list[str]] = {}
    # Not in the last wave, with which the others are all made.
    latest = max(driver_kills + 1, kills - AT_ONCE[1] - 1 - driver_kills)
    drivers, made = sorted(drawn.sample(range(1, latest), driver_kills)), 0
    while made < kills:
        delay_s, choice = drawn.uniform(0, 0.02), drawn.random()
        if drivers and made >= drivers[0]:
            drivers.pop(0)
            made += 1
            yield Wave(drawn.choice(PHASES[1:]), delay_s, (DRIVER,), choice, False)
            continue
        if not any(left.values()):
            left = {phase: drawn.sample(list(roles), len(roles)) for phase in PHASES}
        phase = drawn.choice([one for one in PHASES if left[one]])
        several = min(drawn.randint(*AT_ONCE), len(left[phase]), kills - made)
        again = made + several < kills and drawn.random() < AGAIN
        made += several + again
        yield Wave(phase, delay_s, tuple(left[phase].pop() for _ in range(several)), choice, again)


def config_of(folder: Path, *, steps: int, kind: str, **changed: Any) -> dict[str, Any]:
    """Return a run of `steps` steps, with data of its own."""
    data = folder / "data.jsonl"
    text = "State the final answer to the following arithmetic problem:"
    sums = (f"{text} {n // 100} + {n // 10 % 10} - {n % 10} + 1 =" for n in range(1000))
    data.write_text("".join(json.dumps({"prompt": one, "answer": "4"}) + "\n" for one in sums))
    task = {
        "name": "sums", "source": {"kind": "jsonl", "dataset": str(data), "index_dir": str(folder / "index")},
        "judge": {"kind": "exact"}, "group_size": 2, "max_prompt_tokens": 32, "max_tokens": 12,
        "strategy": {"kind": kind},
    }  # fmt: skip
    return {
        "model": {"name": "tiny", "options": {"steps": 20}, "cache_dir": str(folder / "cache")},
        "tasks": [task],
        "rollout": {
            "num_workers": 2, "max_num_seqs": 16, "kv_cache_gb": 0.1, "start_timeout_s": 60, "pause_timeout_s": 20,
        },
        "train": {
            "num_steps": steps, "batch_size": 4, "num_workers": 2, "step_timeout_s": 60, "micro_batch_tokens": 512,
        },
        "eval": {"num_prompts": 2, "samples": 1, "interval": 3},
        "checkpoint": {"interval": 2, "every_s": None, "hf": False},
        "faults": {"max_failures": 10_000},
        # A scripted engine cannot take part in a broadcast.
        "sync": {"transport": "object_store"},
        **changed,
    }  # fmt: skip


@dataclass
class ChaosRun:
    """One run: its driver's process, and what was killed."""

    cluster: PrivateCluster
    folder: Path
    name: str
    config: dict[str, Any]
    module: str = "tests.chaos.job"
    """What is started."""
    kills: Counter[str] = field(default_factory=Counter)
    """By role and phase."""
    ended_by: list[str] = field(default_factory=list)
    """After which kill the driver ended by itself, with its last words."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """By role: from a kill to the next process."""
    engines: list[tuple[float, str]] = field(default_factory=list)
    """When engines were killed, and which."""
    killing_s: float = 0.0
    """How long roles were killed."""
    killed_s: float = 0.0
    """When the last one was."""
    attempts: int = 0
    starts_s: list[float] = field(default_factory=list)
    """When the driver was started."""
    start_s: float = 120.0
    """How long the first step is waited for."""
    _driver: subprocess.Popen[bytes] | None = None
    _actors: Cluster | None = None

    def __post_init__(self) -> None:
        self.run_dir = self.folder / "runs" / self.name
        self.board = self.folder / BOARD
        self.file = self.folder / f"{self.name}.yaml"
        self.file.write_text(yaml.safe_dump(self.config))
        self.log = self.folder / f"{self.name}.log"
        self.board.touch()
        self.set_pace(0.0)

    def set_pace(self, seconds: float) -> None:
        """Say how long a train step takes."""
        temporary = self.folder / f"{PACE}.tmp"
        temporary.write_text(str(seconds))
        temporary.replace(self.folder / PACE)

    # ---------------------------------------------------------------- driver

    def start(self) -> None:
        """Start the driver, by the same command every time."""
        if not self.attempts:
            self.board.write_text("")
        self.attempts += 1
        self.starts_s.append(time.time())
        assert self.attempts <= ATTEMPTS, f"the driver was started {ATTEMPTS} times:\n{self.words()}"
        command = [sys.executable, "-m", self.module, "--config", str(self.file), "--name", self.name]
        with self.log.open("ab") as log:
            self._driver = subprocess.Popen(
                [*command, "--runs-dir", str(self.folder / "runs")],
                cwd=ROOT, env=self.cluster.env(), stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._actors = None

    def words(self) -> str:
        """Return the end of the driver's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    @property
    def exit_code(self) -> int | None:
        """Of the driver; None while it lives."""
        assert self._driver is not None
        return self._driver.poll()

    def actors(self) -> list[Victim]:
        """Return the living actors of the driver of now."""
        if self._actors is None:
            import ray

            assert self._driver is not None
            jobs = [one["JobID"] for one in ray._private.state.jobs() if one["DriverPid"] == self._driver.pid]
            if not jobs:
                return []
            self._actors = Cluster(jobs[0])
        return self._actors.victims()

    def end(self) -> None:
        """Kill the driver, if it lives."""
        if self._driver is not None and self._driver.poll() is None:
            self._driver.kill()
            self._driver.wait(GONE_S)

    # ---------------------------------------------------------------- kills

    def kill_all(self, waves: Iterator[Wave], until: float) -> None:
        """Make the kills, or as many as there is time for until `until` (monotonic) and the run's end."""
        begin = time.monotonic()
        for wave in waves:
            self.killing_s, self.killed_s = time.monotonic() - begin, time.time()
            if time.monotonic() > until or not self._until_it_trains():
                return
            if not self._until_phase(wave.phase):
                self.kills["no such phase came"] += 1
            time.sleep(wave.delay_s)
            if DRIVER in wave.roles:
                self.end()
                self.kills[f"{DRIVER} {wave.phase}"] += 1
            else:
                self._kill(wave)
        self.killing_s, self.killed_s = time.monotonic() - begin, time.time()

    def _kill(self, wave: Wave) -> None:
        living, again, dead = self.actors(), wave.again, list[Victim]()
        for role in wave.roles:
            victims = [actor for actor in living if actor.role == role]
            if not victims:
                self.kills["no such role lived"] += 1
            elif self.kill(victim := victims[int(wave.choice * len(victims))], f"{role} {wave.phase}"):
                dead.append(victim)
        begin = time.monotonic()
        while dead and time.monotonic() < begin + BACK_S and self.exit_code is None:
            time.sleep(ASK_S)
            alive = {actor.name: actor for actor in self.actors()}
            for victim in [one for one in dead if alive.get(one.name, one).pid != one.pid]:
                dead.remove(victim)
                self.seconds.setdefault(victim.role, []).append(time.monotonic() - begin)
                if again and self.kill(alive[victim.name], f"{victim.role} again"):
                    again = False
                    dead.append(alive[victim.name])
        if self.exit_code not in (None, 0):
            self.ended_by.append(f"{wave.roles} in {wave.phase}: {self.words()[-600:]}")

    def kill(self, victim: Victim, counted: str) -> bool:
        """Kill an actor's process; return whether it lived."""
        try:
            os.kill(victim.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.kills["it had died just now"] += 1
            return False
        self.kills[counted] += 1
        if victim.role == "engine":
            self.engines.append((time.time(), victim.name))
        return True

    def _until_it_trains(self) -> bool:
        """Have a driver, and wait until its ranks have begun a step; return False if the run has ended."""
        if self._driver is not None and self.exit_code == 0:
            return False
        if self._driver is None or self.exit_code is not None:
            self.start()
            size = self.board.stat().st_size
            end = time.monotonic() + self.start_s
            while not self._began("take", size):
                assert time.monotonic() < end, f"no step began in {self.start_s:.0f} s:\n{self.words()}"
                if self.exit_code is not None:
                    self.ended_by.append(f"at its start: {self.words()[-600:]}")
                    self.start()
                time.sleep(0.05)
        return True

    def _until_phase(self, phase: str) -> bool:
        if phase == "produce":
            return True
        if phase == "start":
            engines = [actor for actor in self.actors() if actor.role == "engine"]
            if engines:
                os.kill(engines[0].pid, signal.SIGKILL)
                self.kills["engine so that one starts"] += 1
        size, end = self.board.stat().st_size, time.monotonic() + PHASE_S
        while time.monotonic() < end and self.exit_code is None:
            if phase == "commit":
                if any((self.run_dir / "checkpoints").glob("step-*.tmp/producer.json")):
                    return True
            elif self._began(phase, size):
                return True
            time.sleep(POLL_S)
        return False

    def _began(self, phase: str, since: int) -> bool:
        with self.board.open() as file:
            file.seek(since)
            return any(line.startswith(f"{phase} ") for line in file)

    # ---------------------------------------------------------------- end

    def finish(self, timeout_s: float) -> None:
        """Let the run end, by the same command where its driver died."""
        self.set_pace(0.0)
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self._driver is None:
                self.start()
            elif self.exit_code == 0:
                return
            elif self.exit_code is not None:
                if self.exit_code != -signal.SIGKILL:
                    self.ended_by.append(f"at its end: {self.words()[-600:]}")
                assert len(self.ended_by) < 5, "\n".join(self.ended_by)
                self.start()
            time.sleep(0.1)
        raise AssertionError(f"the run did not end in {timeout_s:.0f} s:\n{self.words()}")

    def figures(self, quiet_step_s: float) -> dict[str, Any]:
        """Return what the kills cost. `quiet_step_s`: what a step takes that nothing disturbs."""
        lines = [line.split() for line in self.board.read_text().splitlines()]
        served: dict[str, list[float]] = {}
        for killed_s, name in self.engines:
            resumed = [float(at) - killed_s for phase, who, at in lines if (phase, who) == ("resume", name)]
            if after := [one for one in resumed if one > 0]:
                # Of a pool whose driver dies meanwhile, all engines are started anew.
                anew = any(0 < one - killed_s < min(after) for one in self.starts_s)
                what = "engine of a driver that died, too" if anew else "engine until it serves"
                served.setdefault(what, []).append(min(after))
        events = [json.loads(line) for line in (self.run_dir / "events.jsonl").read_text().splitlines()]
        for event in events:
            if event["event"] == "role_restarted":
                served.setdefault(f"{event['role']} until it works", []).append(event["seconds"])
        kills = sum(count for name, count in self.kills.items() if not name.startswith(("no such", "it had")))
        fits = [float(at) for phase, who, at in lines if (phase, who) == ("fit", "trainer-0")]
        steps = sum(at < self.killed_s for at in fits)
        lost_s = max(0.0, self.killing_s - steps * quiet_step_s) / max(1, kills)
        return {
            "kills": kills, "kills_a_minute": round(60 * kills / max(1.0, self.killing_s), 1),
            "driver_starts": self.attempts, "killing_s": round(self.killing_s, 1),
            "seconds_lost_a_kill": round(lost_s, 2), "productive_at_one_a_minute": round(60 / (60 + lost_s), 3),
            "batches_trained_again": sum(e.get("count", 1) for e in events if e["event"] == "batches_trained_again"),
            "back_s": {
                role: {"kills": len(all), "median": round(sorted(all)[len(all) // 2], 2), "max": round(max(all), 2)}
                for role, all in sorted((self.seconds | served).items()) if all
            },
            "by_role_and_phase": dict(sorted(self.kills.items())), "ended_by": self.ended_by,
        }  # fmt: skip

    @property
    def step_s(self) -> float:
        """Median time from one step to the next."""
        times = [
            json.loads(line)["time_s"] for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()
        ]
        return float(statistics.median(after - before for before, after in pairwise(times)))

    @property
    def weights(self) -> bytes:
        """What the last checkpoint holds."""
        steps = [
            int(one.name.removeprefix("step-")) for one in (self.run_dir / "checkpoints").glob("step-[0-9]*")
        ]
        return weights_of(self.run_dir / "checkpoints" / f"step-{max(steps)}")


LIGHT = [role for role in ROLES if role not in ("trainer", "producer", "controller")]
"""Roles that any run survives."""
