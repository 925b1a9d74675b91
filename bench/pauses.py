"""Games under many pauses: TextArena's Blackjack, every request aborted with a probability.

    python -m bench.pauses --groups 20 --members 8

The agent loop, the parking and the processes of the games are those of a run; the policy is a script. Prints one JSON
object: for each probability the trajectories that failed or began again, and the moves that a game was asked twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from typing import Any

import numpy as np

from raypost.agent_loop.environment import EnvironmentAgentLoop
from raypost.agent_loop.fork_server import EnvironmentSpec
from raypost.agent_loop.isolated import EnvironmentProcesses, IsolatedEnvironment
from raypost.types import GenerateRequest, GenerateResult, Group, IntArray, RolloutState, SampleParams, Status
from raypost.types.packed import pack_groups, unpack_groups

STOP, SEEN = 2, 60
MAX_PAUSES = 10_000
PATH = "raypost.agent_loop.textarena_environment:TextArenaEnvironment"


class Player:
    """Hits or stands, each time with a number that it never says again; is aborted with a probability."""

    def __init__(self, probability: float, seed: int) -> None:
        """`probability`: of an abort, for each request."""
        self._probability, self._rng = probability, random.Random(seed)
        self.num_requests = self.num_aborts = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Answer a request."""
        self.num_requests += 1
        ids, reason = [1000 + self.num_requests, STOP], "stop"
        if self._rng.random() < self._probability:
            self.num_aborts += 1
            ids, reason = ids[: self._rng.randrange(2)], "abort"
        return GenerateResult(
            response_ids=np.asarray(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            policy_versions=np.zeros(len(ids), np.int32),
            finish_reason=reason,
            worker="player",
        )


class Watched(EnvironmentProcesses):
    """Counts the moves that games are asked to make."""

    def __init__(self, spec: EnvironmentSpec, timeout_s: float) -> None:
        """See EnvironmentProcesses."""
        super().__init__(spec, timeout_s)
        self.moves: Counter[str] = Counter()
        self.beginnings: dict[int, set[str]] = {}

    def __call__(self) -> IsolatedEnvironment:
        """Return one that is watched."""
        made, step, reset = super().__call__(), IsolatedEnvironment.step, IsolatedEnvironment.reset

        async def watched_step(action: str) -> Any:
            self.moves[action] += 1
            return await step(made, action)

        async def watched_reset(metadata: dict[str, Any], *, seed: int = 0) -> Any:
            seen = await reset(made, metadata, seed=seed)
            self.beginnings.setdefault(seed, set()).add(seen.text)
            return seen

        made.step, made.reset = watched_step, watched_reset  # type: ignore[method-assign]
        return made


def decode(ids: IntArray) -> str:
    """Return moves as TextArena reads them."""
    return " ".join(f"[{'Hit' if int(i) % 3 == 0 else 'Stand'}] {i}" for i in ids if i != STOP)


def new_group(number: int, members: int) -> Group:
    """Return a group that has not begun."""
    states = [
        RolloutState(
            task="blackjack",
            group_id=number,
            sample_index=index,
            prompt_ids=np.asarray([5, 6], np.int32),
            sample_params=SampleParams(max_tokens=400, stop_token_ids=(STOP,)),
        )
        for index in range(members)
    ]
    return Group(task="blackjack", group_id=number, states=states)


async def play(groups: int, members: int, probability: float, seed: int = 0) -> dict[str, Any]:
    """Play all groups at once, each as often as it comes back aborted; return what became of them."""
    began = time.monotonic()
    spec = EnvironmentSpec(path=PATH, what="environment", params={"id": "Blackjack-v0"})
    games, player = Watched(spec, 60.0), Player(probability, seed)
    loop = EnvironmentAgentLoop(player, games, lambda _: np.asarray([SEEN], np.int32), decode, worker="here")

    async def to_the_end(group: Group) -> Group:
        for _ in range(MAX_PAUSES):
            if (group := await loop.run(group)).status is not Status.ABORTED:
                break
            (group,) = unpack_groups(pack_groups([group]))
        return group

    try:
        done = await asyncio.gather(*(to_the_end(new_group(n, members)) for n in range(groups)))
    finally:
        await loop.close()
    states = [state for group in done for state in group.states]
    return {
        "probability": probability,
        "trajectories": len(states),
        "requests": player.num_requests,
        "aborts": player.num_aborts,
        "failed": sum(state.status is Status.FAILED for state in states),
        "completed": sum(state.status is Status.COMPLETED for state in states),
        "restarted": sum(state.num_restarts > 0 for state in states),
        "moves": sum(games.moves.values()),
        "moves_twice": sum(count > 1 for count in games.moves.values()),
        "groups_whose_siblings_began_differently": sum(len(one) > 1 for one in games.beginnings.values()),
        "mean_reward": sum(state.reward or 0.0 for state in states) / len(states),
        "errors": sorted({str(state.error) for state in states if state.error}),
        "seconds": round(time.monotonic() - began, 2),
    }


def main() -> None:
    """Print what became of the games."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--probability", type=float, nargs="+", default=[0.05, 0.2])
    given = parser.parse_args()
    found = [asyncio.run(play(given.groups, given.members, one)) for one in given.probability]
    print(json.dumps({"blackjack": found}))


if __name__ == "__main__":
    main()
