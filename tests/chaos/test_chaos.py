"""A run that is killed 200 times ends as an undisturbed one: nothing lost or trained twice, the same weights."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from jobs.chaos import ROLES
from jobs.private_cluster import PrivateCluster
from raypost.audit.audit import audit
from tests.chaos.harness import AT_ONCE, DRIVER, PHASES, ChaosRun, config_of, schedule

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SEED = int(os.environ.get("CHAOS_SEED", "0"))
KILLS = int(os.environ.get("CHAOS_KILLS", "200"))
STEPS = int(os.environ.get("CHAOS_STEPS", "190"))
SECONDS = float(os.environ.get("CHAOS_SECONDS", "490"))


PACE_S = 0.3
"""Of a train step while roles are killed: long enough for every phase to be met."""


def test_a_seed_kills_every_role_in_every_phase_before_any_pair_comes_again() -> None:
    pairs = len(ROLES) * len(PHASES)
    for kills in (pairs, 2 * pairs):
        waves = list(schedule(SEED, kills, list(ROLES), driver_kills=3))
        assert waves == list(schedule(SEED, kills, list(ROLES), driver_kills=3))
        assert sum(len(wave.roles) + wave.again for wave in waves) == kills
        assert sum(wave.roles == (DRIVER,) for wave in waves) == 3
        met = Counter((role, wave.phase) for wave in waves for role in wave.roles if role != DRIVER)
        assert (
            max(met.values()) <= -(-kills // pairs) and max(len(wave.roles) for wave in waves) == AT_ONCE[1]
        )


def test_killed_run_ends_as_an_undisturbed_one(cluster: PrivateCluster, folder: Path) -> None:
    config = config_of(folder, steps=STEPS, kind="sync")
    quiet, begin = ChaosRun(cluster, folder, "quiet", config), time.monotonic()
    quiet.finish(200)
    print(f"undisturbed: {time.monotonic() - begin:.0f} s, {quiet.step_s:.2f} s a step")
    assert audit(quiet.run_dir).num_contradictions == 0 and quiet.attempts == 1, quiet.ended_by
    run, begin = ChaosRun(cluster, folder, "killed", config), time.monotonic()
    run.set_pace(PACE_S)
    try:
        roles = os.environ.get("CHAOS_ROLES", " ".join(ROLES)).split()
        run.kill_all(schedule(SEED, KILLS, roles, driver_kills=KILLS // 40), begin + SECONDS)
        run.finish(200)
    finally:
        run.end()
        quiet.end()
        print(json.dumps(run.figures(PACE_S + quiet.step_s), indent=1))
    found = audit(run.run_dir)
    print(json.dumps(found.as_dict(), indent=1))
    assert found.num_contradictions == 0
    assert run.weights == quiet.weights
