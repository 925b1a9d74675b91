"""A run waits for what others hold before it starts anything, and says what."""

from __future__ import annotations

import pytest

from jobs.driver import wait_for_room
from raypost.errors import ClusterError
from raypost.plan.cluster import ClusterResources, occupied
from tests.factories import make_config

TOTAL = [{"CPU": 8.0}, {"CPU": 4.0}]
CONFIG = make_config(rollout={"num_workers": 2, "num_cpus": 3}, train__num_cpus=1)


def cluster(*free: float, elastic: bool = False) -> ClusterResources:
    return ClusterResources(TOTAL, elastic, [{"CPU": amount} for amount in free])


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


def test_what_others_hold_is_said_in_sum_or_on_a_node() -> None:
    assert occupied(CONFIG, ClusterResources(TOTAL)) == []
    assert occupied(CONFIG, cluster(8, 4)) == []
    assert occupied(CONFIG, cluster(3, 4)) == []
    assert occupied(CONFIG, cluster(1, 4)) == [
        "the placement needs 7 CPU, and of the cluster's 12 only 5 are free: others hold the rest"
    ]
    assert occupied(CONFIG, cluster(5, 2)) == [
        "rollout-1 needs 3 CPU on one node, and others hold it: the most that is free on any node: 5 CPU"
    ]


def test_a_run_starts_when_others_have_given_back_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    wait_for_room(CONFIG, lambda: cluster(8 if clock.now >= 20 else 1, 4), clock.sleep, clock)
    assert clock.now == 20
    assert capsys.readouterr().out == (
        "waiting for at most 300 s: the placement needs 7 CPU, and of the cluster's 12 only 5 are free: others hold "
        "the rest\n"
    )


def test_a_run_is_refused_by_name_when_its_patience_ends_and_a_growing_cluster_is_not_waited_for() -> None:
    clock = Clock()
    with pytest.raises(ClusterError, match=r"waited rollout\.start_timeout_s 300 s .*\n.* only 5 are free"):
        wait_for_room(CONFIG, lambda: cluster(1, 4), clock.sleep, clock)
    assert clock.now == 300
    wait_for_room(CONFIG, lambda: cluster(1, 4, elastic=True), clock.sleep, clock)
    assert clock.now == 300
