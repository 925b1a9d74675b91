"""Roles that hang in all the ways that a run has met: each is real but for who calls it."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path
from typing import Any

from actors.judge import JudgeWorker
from actors.many_calls import CallBatches
from actors.remote import remote
from raypost.agent_loop.environment import Observation
from raypost.agent_loop.episode import Episode
from raypost.config.judges import JudgeConfig
from raypost.files.jsonl import LineFile
from raypost.observe.waits import working_for
from raypost.types import RolloutState
from tests.unit.reward_functions import state_of, task_of

FOR_EVER_S = 600.0


class Maze:
    """An environment whose step never returns."""

    def reset(self, metadata: dict[str, Any]) -> Observation:
        return Observation()

    def step(self, action: str) -> Observation:
        time.sleep(FOR_EVER_S)
        return Observation(done=True)


class Hanging(CallBatches):
    """Passes `work` on to the next role, or hangs by itself."""

    def __init__(self, following: str | None = None, how: str = "", folder: str = "") -> None:
        super().__init__()
        self.following, self.how, self.folder = following, how, Path(folder)

    async def work(self) -> None:
        """Wait for ever."""
        working_for.set("sums/40")
        if self.following is not None:
            await remote(self.following, Hanging, timeout_s=FOR_EVER_S).work()
        elif self.how == "judge":
            with socket.create_server(("127.0.0.1", 0)) as server:
                url = f"http://127.0.0.1:{server.getsockname()[1]}/score"
                config = JudgeConfig(kind="http", url=url, timeout_s=FOR_EVER_S)
                await JudgeWorker("judge-0", (task_of(config),)).judge([self.state()])
        elif self.how == "environment":
            episode = Episode("maze", FOR_EVER_S)
            episode.environment = Maze()
            await episode.ask("step", "left")
        elif self.how == "file system":
            os.mkfifo(self.folder / "ledger.jsonl")
            writer = LineFile(self.folder / "ledger.jsonl")
            writer._opened = True
            writer.append(["{}"])
        else:
            self.spin()

    def state(self) -> RolloutState:
        state = state_of("4")
        state.group_id = 40
        return state

    def spin(self) -> None:
        """Keep the event loop from turning."""
        time.sleep(FOR_EVER_S)


class HangingRank:
    """A rank that comes to the collectives that it is told to."""

    def fit(self, rank: int, ranks: int, store: str, collectives: list[str]) -> None:
        """Join the other ranks, then each collective by its name; `sleep` is none."""
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        for one in collectives:
            if one == "sleep":
                self.loss()
            elif one == "barrier":
                dist.barrier()
            else:
                dist.all_reduce(torch.ones(1))

    def loss(self) -> None:
        """Take for ever."""
        time.sleep(FOR_EVER_S)


async def idle() -> None:
    """Do nothing."""
    await asyncio.sleep(0)
