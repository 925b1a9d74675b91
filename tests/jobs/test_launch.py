"""How the actors of a run begin and end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from actors.training.group import TrainerGroup
from jobs.launch import Launcher
from jobs.models import Models
from raypost.errors import WaitTimeoutError
from tests.factories import make_config
from tests.jobs.job import ROOT


class Ranks:
    """Stands for a trainer group; it only counts how often it was asked to leave."""

    def __init__(self, error: Exception | None = None) -> None:
        self.left = 0
        self.error = error

    async def shutdown(self) -> None:
        """Leave the process group."""
        self.left += 1
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [None, WaitTimeoutError("waited 10 s for close of trainer-1")])
async def test_the_end_of_a_job_asks_the_ranks_to_leave_their_process_group(error: Exception | None) -> None:
    ranks = Ranks(error)
    models = Models(policy="", critic=None, rewards={}, canary_ids=np.zeros(0, np.int32))
    with pytest.raises(RuntimeError, match="the loop failed"):
        async with Launcher(make_config(), models, _trainer=cast(TrainerGroup, ranks)):
            raise RuntimeError("the loop failed")
    assert ranks.left == 1


ROLES = """
import gc, sys
from pathlib import Path
from actors.placement import Home, _present
for searches in (True, False):
    _present(type("Role", (), {}), "role", Home(Path(sys.argv[1]), 9.0), searches)()
    print(gc.get_threshold()[0], gc.get_freeze_count() > 0)
"""


def test_roles_search_for_cycles_rarely_and_ranks_as_often_as_python_does(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ROLES, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["700", "False", "20000", "True"], done.stderr
