"""Many sessions, of which the world fails some: nothing is lost, and nothing piles up.

    python -m bench.soak [--sessions 20000] [--failing 0.02] [--aborted 0.05]

The agent loop, its endpoint and the parking are those of a run; the policy is a script that answers at once. A session
asks twice, every tenth over HTTP, and some rewrite what was said. What fails is played again, what a pause interrupts
comes back, and some groups are dropped while they are parked. Prints one JSON object: sessions by how they ended, and
threads, processes, open files, memory and parked episodes after a tenth of the sessions, and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil

from bench.session import ASKED, TEMPLATE
from raypost.agent_loop.session import Session
from raypost.agent_loop.session_loop import SessionAgentLoop
from raypost.chat.renderer import TemplateRenderer
from raypost.config import TaskConfig
from raypost.data.tokenizer import Tokenizer
from raypost.models.tiny import TinyRecipe, write_tokenizer
from raypost.production.verdict import played_again
from raypost.types import GenerateRequest, GenerateResult, Group, RolloutState, SampleParams, Status
from raypost.types.packed import pack_groups, unpack_groups

GROUP_SIZE, AT_ONCE, MAX_RUNS = 8, 16, 50
DROPPED = 0.05
"""Chance that a group which a pause interrupted is dropped."""
TASK = {
    "source": {"kind": "jsonl", "dataset": "x"},
    "judge": {"kind": "exact"},
    "max_prompt_tokens": 200,
    "agent_loop": {"kind": "session", "agent": "a:b", "session_timeout_s": 60, "step_timeout_s": 30},
}


class Policy:
    """Says " 7" at once; some requests are aborted before their last token, some fail."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random, aborted: float, failing: float) -> None:
        """Both are chances of a request."""
        self._said = [*tokenizer.encode(" 7", add_special_tokens=False), tokenizer.eos_ids[0]]
        self._rng, self._aborted, self._failing = rng, aborted, failing

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Answer a request."""
        await asyncio.sleep(0)
        chance = self._rng.random()
        if chance < self._failing:
            return GenerateResult.nothing("error", error="scripted")
        ids = self._said[:1] if chance < self._failing + self._aborted else self._said
        return GenerateResult(
            response_ids=np.asarray(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            policy_versions=np.zeros(len(ids), np.int32),
            finish_reason="stop" if len(ids) > 1 else "abort",
            worker="w",
        )


class Judge:
    """Gives everybody 1."""

    async def judge(self, states: list[RolloutState]) -> list[float]:
        """Return the rewards."""
        return [1.0] * len(states)


class Agents:
    """Agents that ask twice; some of them fail."""

    def __init__(self, rng: random.Random, failing: float, http: aiohttp.ClientSession) -> None:
        """`failing`: chance that one raises."""
        self._rng, self._failing, self._http = rng, failing, http

    async def __call__(self, session: Session) -> None:
        """Play."""
        messages = list(session.messages)
        over_http = self._rng.random() < 0.1
        for _ in range(2):
            if over_http:
                message = await self._ask(session, messages)
            else:
                message = (await session.complete(messages))["choices"][0]["message"]
            if self._rng.random() < self._failing / 2:
                raise OSError("scripted")
            if self._rng.random() < 0.1:
                message = {**message, "content": "something else"}
            messages += [message, {"role": "user", "content": ASKED}]

    async def _ask(self, session: Session, messages: list[dict[str, Any]]) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {session.api_key}"}
        url = f"{session.base_url}/chat/completions"
        async with self._http.post(url, json={"messages": messages}, headers=headers) as response:
            response.raise_for_status()
            message: dict[str, Any] = (await response.json())["choices"][0]["message"]
            return message


async def soak(sessions: int, failing: float, aborted: float, seed: int) -> dict[str, Any]:
    """Return what is printed."""
    rng, ended = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(TinyRecipe(corpus="calls"), Path(folder))
        tokenizer = Tokenizer.load(folder)
    async with aiohttp.ClientSession() as http:
        task = TaskConfig.model_validate(TASK)
        loop = SessionAgentLoop(
            Policy(tokenizer, rng, aborted, failing / 4), Judge(), tokenizer,
            TemplateRenderer(tokenizer, template=TEMPLATE.read_text()), task, Agents(rng, failing, http), worker="w",
        )  # fmt: skip
        left, marks, start_s = iter(range(sessions // GROUP_SIZE)), list[dict[str, int]](), time.monotonic()

        async def work() -> None:
            for number in left:
                await _play(loop, tokenizer, number, rng, ended)
                if number == sessions // GROUP_SIZE // 10:
                    marks.append(_standing(loop))

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        spent_s = time.monotonic() - start_s
        marks.append(_standing(loop))
        await loop.close()
    first, last = marks
    return {
        "sessions": sum(ended[one] for one in ("completed", "dropped", "lost")),
        **ended,
        "seconds": round(spent_s, 1),
        "after_a_tenth": first,
        "at_the_end": last,
    }


async def _play(
    loop: SessionAgentLoop, tokenizer: Tokenizer, number: int, rng: random.Random, ended: Counter[str]
) -> None:
    """Bring a group to its end, or drop it."""
    group = _group(tokenizer, number)
    for _ in range(MAX_RUNS):
        (group,) = unpack_groups(pack_groups([await loop.run(group)]))
        if group.status is Status.COMPLETED:
            ended["completed"] += len(group.members)
            ended["branches"] += len(group.states) - len(group.members)
            return
        ended["failures"] += sum(member[0].status is Status.FAILED for member in group.members)
        ended["interruptions"] += sum(member[0].status is Status.ABORTED for member in group.members)
        if rng.random() < DROPPED:
            await loop.forget([group.key])
            ended["dropped"] += len(group.members)
            return
        # Played again at once: what failed is scripted, and needs no time.
        states = [state for member in group.members for state in played_again(member)]
        group.states = [replace(state, num_retries=0) for state in states]
    ended["lost"] += len(group.members)


def _group(tokenizer: Tokenizer, number: int) -> Group:
    params = SampleParams(max_tokens=200, stop_token_ids=tokenizer.eos_ids)
    states = [
        RolloutState(
            task="default",
            group_id=number,
            sample_index=index,
            prompt_ids=np.asarray([1], np.int32),
            sample_params=params,
            metadata={"question": ASKED, "answer": "3"},
        )
        for index in range(GROUP_SIZE)
    ]
    return Group(task="default", group_id=number, states=states)


def _standing(loop: SessionAgentLoop) -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    return {
        "threads": process.num_threads(),
        "processes": len(process.children(recursive=True)),
        "files": process.num_fds(),
        "memory_mb": process.memory_info().rss >> 20,
        "parked": loop.num_parked,
        "tasks": len(asyncio.all_tasks()),
    }


def main() -> None:
    """Print what stood at the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=20_000)
    parser.add_argument("--failing", type=float, default=0.02)
    parser.add_argument("--aborted", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(soak(args.sessions, args.failing, args.aborted, args.seed))))


if __name__ == "__main__":
    main()
