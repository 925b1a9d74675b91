"""Clusters for tests. Each is private, reached by its own address, and leaves no process behind."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

from jobs.keeper import MARKER, processes_with
from jobs.private_cluster import PrivateCluster

# Read by Ray once a process. Tests attach in-process to clusters that only they know of; without this Ray
# would use, or make, a token in the home of whoever runs the tests.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_AUTH_TOKEN_PATH"] = os.devnull
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["SPT_NOENV"] = "1"
for pinned in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
    os.environ.pop(pinned, None)

# A machine that is busy with other things must not fail a test.
settings.register_profile("raypost", deadline=None)
settings.load_profile("raypost")

EQUAL_TERMS = {"RAY_worker_niceness": "0"}
"""By itself Ray makes its workers give way to everything else: on a busy machine they get next to no time."""
os.environ |= EQUAL_TERMS

OURS = "RAYPOST_TESTS"
"""Environment variable of everything that this process starts: others may test on the same machine."""
os.environ[OURS] = str(os.getpid())

LOCAL_CPUS = 8
"""Logical: what tests may reserve, not what the machine has."""
GONE_TIMEOUT_S = 60.0

LONGEST = (
    "test_producer_invariants.py",
    "test_user_code.py",
    "test_invariants.py",
    "test_types.py",
    "test_train.py",
    "test_trainer.py",
    "test_compositions.py",
    "test_rollout_worker.py",
)
"""Files that begin first, so that the processes of a parallel run end together."""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Let each process of a parallel run begin with other files: what one has compiled, the others load."""
    report = yield
    name = os.environ.get("PYTEST_XDIST_WORKER", "")
    if name and report.passed and isinstance(collector, pytest.Dir | pytest.Package):
        part, parts = int(name.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        begin = len(report.result) * part // parts
        report.result = report.result[begin:] + report.result[:begin]
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, the others in the order of their paths: the same in each process."""
    items.sort(key=lambda item: ((*LONGEST, item.path.name).index(item.path.name), item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: a test in five mostly waits, for processes and for what must time out."""
    return len(os.sched_getaffinity(0)) + 1


# Millions of objects of imports and parameters, which stay: each full collection would visit all of them.
gc.disable()


def pytest_collection_finish() -> None:
    """From here on the garbage collector looks at what tests make alone."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Of torch in this process, not in what it starts: threads that share tensors this small mostly wait."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def private_cluster() -> Iterator[PrivateCluster]:
    """A head without dashboard, for drivers that are processes of their own with `private_cluster.env()`."""
    cluster = PrivateCluster(
        num_cpus=LOCAL_CPUS,
        resources={"rollout": LOCAL_CPUS, "trainer": LOCAL_CPUS},
        object_store_memory=256 * 1024**2,
        auth=False,
        extra_env=EQUAL_TERMS,
    )
    with cluster:
        yield cluster
    assert cluster.pids == []


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[None]:
    """This process as the driver of a Ray of its own."""
    import ray

    folder = Path(tempfile.mkdtemp(prefix="rp-", dir="/tmp"))
    mark = folder.name
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(MARKER, mark)
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=LOCAL_CPUS,
                resources={"rollout": LOCAL_CPUS, "trainer": LOCAL_CPUS},
                object_store_memory=256 * 1024**2,
                _temp_dir=str(folder),
                log_to_driver=False,
            )
        yield
    finally:
        ray.shutdown()
        left = survivors(mark)
        for process in left:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    assert left == [], f"processes outlived ray.shutdown by {GONE_TIMEOUT_S} s: {left}"


@pytest.fixture(scope="module")
def local_ray(shared_ray: None) -> Iterator[None]:
    """The same Ray for every module: to start one takes seconds. Actors that a module leaves end with it."""
    import ray

    yield
    for name in ray.util.list_named_actors():
        with suppress(ValueError):  # It ends just now.
            ray.kill(ray.get_actor(name))


def survivors(mark: str) -> list[psutil.Process]:
    """Processes started under `mark` that do not end by themselves within the timeout."""
    left: list[psutil.Process] = psutil.wait_procs(processes_with(MARKER, mark), timeout=GONE_TIMEOUT_S)[1]
    return left
