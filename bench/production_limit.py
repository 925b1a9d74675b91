"""The limit of bench/production.py: the same token arrays over as many hops, through actors that do nothing else."""

from __future__ import annotations

import argparse
import asyncio
import time

import numpy as np
import ray
from ray.actor import ActorHandle

from actors.placement import spawn
from raypost.types import Group, RolloutState, SampleParams
from raypost.types.packed import PackedGroups, join_groups, pack_groups

DEADLINE_S = 600.0


class Hop:
    """Hands a group on to the next actor and gives back what that returned."""

    def __init__(self, next_hop: ActorHandle | None, answer: PackedGroups | None) -> None:
        self._next = next_hop
        self._answer = answer

    async def hand(self, packed: PackedGroups) -> PackedGroups:
        """Answer with tokens in the last one; pass on what comes back in the others."""
        if self._next is None:
            assert self._answer is not None
            return self._answer
        answer: PackedGroups = await self._next.hand.remote(packed)
        return answer


class Echo:
    """What a judge and a buffer do at least: take a group and answer with little."""

    async def take(self, packed: PackedGroups) -> int:
        return packed.num_samples


class Caller:
    """What a producer does at least: keep `in_flight` calls going, and put what they give into the buffer."""

    def __init__(
        self, loop: ActorHandle, judge: ActorHandle, buffer: ActorHandle, prompt: PackedGroups
    ) -> None:
        self._loop = loop
        self._judge = judge
        self._buffer = buffer
        self._prompt = prompt

    async def run(self, calls: int, in_flight: int) -> None:
        left = iter(range(calls))

        async def one_after_the_other() -> None:
            for _ in left:
                done = await self._loop.hand.remote(self._prompt)
                await self._judge.take.remote(done)
                await self._buffer.take.remote(done)

        await asyncio.gather(*(one_after_the_other() for _ in range(in_flight)))


def packed(args: argparse.Namespace, num_groups: int, tokens: int) -> PackedGroups:
    """Return groups with `tokens` response tokens a member."""
    states = [
        RolloutState(
            task="sums",
            group_id=0,
            sample_index=n,
            prompt_ids=np.arange(8, dtype=np.int32),
            sample_params=SampleParams(max_tokens=args.tokens),
            metadata={"question": "1+1=?", "answer": "2"},
            response_ids=np.ones(tokens, np.int32),
            logprobs=np.zeros(tokens, np.float32),
            policy_versions=np.zeros(tokens, np.int32),
            response_mask=np.ones(tokens, np.bool_),
        )
        for n in range(args.group_size)
    ]
    return join_groups([pack_groups([Group(task="sums", group_id=0, states=states)])] * num_groups)


def limit(args: argparse.Namespace, groups: int, per_call: int) -> float:
    """Return the groups a second that Ray moves over as many hops and does nothing else, `per_call` a call."""
    worker = spawn(Hop, None, packed(args, per_call, args.tokens), name="limit-worker")
    pool = spawn(Hop, worker, None, name="limit-pool")
    loop = spawn(Hop, pool, None, name="limit-loop")
    judge, buffer = spawn(Echo, name="limit-judge"), spawn(Echo, name="limit-buffer")
    source = spawn(Caller, loop, judge, buffer, packed(args, per_call, 0), name="limit-source")
    calls, in_flight = groups // per_call, max(1, args.batch // per_call)
    try:
        ray.get(source.run.remote(4 * in_flight, in_flight), timeout=DEADLINE_S)
        begin = time.perf_counter()
        ray.get(source.run.remote(calls, in_flight), timeout=DEADLINE_S)
        return groups / (time.perf_counter() - begin)
    finally:
        for handle in (source, loop, pool, worker, judge, buffer):
            ray.kill(handle)
