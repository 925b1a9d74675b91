"""The main job with scripted engines and ranks: `python -m tests.chaos.job --config ...`."""

from __future__ import annotations

import sys

from jobs.driver import main
from jobs.launch import Launcher
from jobs.train import train
from tests.chaos.scripted import ScriptedRolloutWorker, ScriptedTrainerWorker


def use_scripted() -> None:
    """Let the launcher of this process start them."""
    Launcher.rollout_worker = ScriptedRolloutWorker
    Launcher.trainer_worker = ScriptedTrainerWorker


if __name__ == "__main__":
    use_scripted()
    sys.exit(main(train))
