"""What tests of whole runs share: a folder with the model, and the promise that nothing is left running."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.job import engines


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs and the model cache: the model is made once."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(autouse=True)
def no_engine_is_left() -> Iterator[None]:
    """Whatever a job started, it is gone when the job is."""
    before = engines()
    yield
    end = time.monotonic() + 60
    while (left := engines() - before) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left, f"processes outlived their job: {left}"
