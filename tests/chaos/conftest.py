"""Clusters of their own for runs that are disturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from jobs.private_cluster import PrivateCluster
from tests.conftest import EQUAL_TERMS

Private = Callable[..., PrivateCluster]


@contextmanager
def private(env: dict[str, str], **options: Any) -> Iterator[PrivateCluster]:
    """A cluster that this process is connected to; `env`: of its processes and drivers, not of this one."""
    import ray

    resources = {"rollout": 8, "trainer": 8} | options.pop("resources", {})
    options = {"num_cpus": 8, "object_store_memory": 128 * 1024**2} | options
    with PrivateCluster(auth=False, extra_env=EQUAL_TERMS | env, resources=resources, **options) as made:
        ray.init(made.address, namespace="chaos", log_to_driver=False)
        try:
            yield made
        finally:
            ray.shutdown()


@pytest.fixture
def start() -> Iterator[Private]:
    """Start a cluster that ends with the test."""
    with ExitStack() as stack:
        yield lambda env={}, **options: stack.enter_context(private(env, **options))


@pytest.fixture
def cluster(start: Private) -> PrivateCluster:
    return start()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chaos")
