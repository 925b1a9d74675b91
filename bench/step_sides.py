"""The sides of bench/step.py: each a process of its own that starts once and then takes turns.

    python -m bench.step_sides SIDE SETUP.json      reads `go SECONDS` lines, answers a line of JSON after each

A turn is as many whole steps as take SECONDS; between turns a side does nothing. raypost's sides are the jobs
themselves (jobs/train.py, jobs/colocate.py) with all their actors: only the moment at which production goes on after
a sync waits for the turn.

For lengths of its own a prompt needs no setting: the agent loops of raypost's side lower `max_tokens` of a group to
what `length_of` says, and end-of-sequence tokens are ignored.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from actors.agent_loop import AgentLoopWorker
from actors.engine.life import OWNER
from raypost.config import Config, load_config
from raypost.config.engine import EngineConfig
from raypost.errors import StoppedError
from raypost.types import FloatArray, Group, IntArray, RolloutState, SampleParams, Status
from raypost.types.packed import PackedGroups, pack_groups, unpack_groups

PROMPT_TOKENS = 16
REWARD = r"(1)[^1]{0,80}$"
"""A response with a 1 near its end is right: about half of those of a model with random weights."""
LENGTHS = (18, 37, 57, 80, 109, 151, 252, 384)
"""Of any eight prompts in a row, one has each: a mean of 136 tokens, a tail up to 384."""


def length_of(number: int) -> int:
    """Return the response length of a prompt with a long-tailed length: each block of eight in another order."""
    block, place = divmod(number, len(LENGTHS))
    return LENGTHS[np.random.default_rng(block).permutation(len(LENGTHS))[place]]


def prompt_of(number: int) -> str:
    """Return a prompt, one of 4096."""
    return " + ".join(str(number // 8**k % 8 + 1) for k in range(4)) + " ="


PROMPTS = [prompt_of(number) for number in range(4096)]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all sides of a run are given."""

    folder: Path
    """Model, prompts and recipes of this run, and what the sides write."""
    tailed: bool
    """Whether lengths have a long tail."""
    groups: int = 8
    """Of a step."""
    group_size: int = 8
    max_tokens: int = 64

    @property
    def model(self) -> str:
        return str(self.folder / "model")

    def recipe(self, name: str) -> Config:
        """Return the configuration of a side."""
        return load_config(self.folder / f"{name}.yaml")

    def length(self, number: int) -> int:
        return length_of(number) if self.tailed else self.max_tokens

    def write(self) -> Path:
        path = self.folder / "setup.json"
        path.write_text(json.dumps(asdict(self) | {"folder": str(self.folder)}))
        return path

    @classmethod
    def read(cls, path: Path) -> Setup:
        fields = json.loads(path.read_text())
        return cls(**fields | {"folder": Path(fields["folder"])})


Response = tuple[IntArray, FloatArray]
"""Token ids and their logprobs."""


class Turns:
    """The turns of this side: `step_begins` is called before every step, and waits where it is another's turn."""

    def __init__(self) -> None:
        """Say "ready" at the first step."""
        self.until = self._begun = 0.0
        self._steps = 0
        self._started = False
        self._facts: dict[str, float] = {}
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what others print does not stand between the answers

    def say(self, **answer: Any) -> None:
        print(json.dumps(answer), file=self._out, flush=True)

    def step_begins(self, **facts: float) -> None:
        """Count a step. `facts` of the turn are sent with its answer. Raises StoppedError after the last turn."""
        now = time.perf_counter()
        if self._started and now < self.until:
            self._steps += 1
            return
        if self._started:
            self.say(steps=self._steps, seconds=now - self._begun, **facts)
        else:
            self.say(ready=True)
        line = sys.stdin.readline().split()
        if not line:
            raise StoppedError("the bench has ended")
        self._started, self._steps = True, 1
        self._begun = time.perf_counter()
        self.until = self._begun + float(line[1])

    def ends(self) -> bool:
        """Return whether the next step is not of this turn."""
        return not self._started or time.perf_counter() >= self.until

    async def step_begins_soon(self) -> None:
        """Do the same in an event loop, which goes on meanwhile."""
        if self.ends():
            await asyncio.to_thread(self.step_begins)
        else:
            self.step_begins()


# ---------------------------------------------------------------- raypost


class TailedAgentLoopWorker(AgentLoopWorker):
    """Responses of a group as long as `length_of` says."""

    async def run(self, packed: PackedGroups) -> PackedGroups:
        (group,) = unpack_groups(packed)
        for state in group.states:
            state.sample_params = replace(state.sample_params, max_tokens=length_of(group.group_id))
        return await super().run(pack_groups([group]))


class InTurns:
    """The producer of a job, which goes on when it is this side's turn."""

    def __init__(self, producer: Any, turns: Turns, placement: str) -> None:
        self._producer = producer
        self._turns = turns
        self._placement = placement
        self._served = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    async def resume(self, version: int) -> None:
        await self._turns.step_begins_soon()
        await self._producer.resume(version)
        self._served = version

    async def swap(self, version: int, *waits: float) -> None:
        ends = self._turns.ends() and self._placement == "separate"
        if ends:  # requests freeze until it is this side's turn again
            await self._producer.pause("keep")
        await self._turns.step_begins_soon()
        if ends:
            await self._producer.resume(self._served)
        await self._producer.swap(version, *waits)
        self._served = version


def raypost(setup: Setup, turns: Turns, name: str, placement: str) -> None:
    """Run the job of a placement on a Ray of its own."""
    import jobs.colocate
    import jobs.driver
    import jobs.launch
    import jobs.train
    from jobs.wiring import spawn

    launch: Any = jobs.launch
    if setup.tailed:
        launch.AgentLoopWorker = TailedAgentLoopWorker

    @asynccontextmanager
    async def in_turns(cfg: Config, stop: asyncio.Event) -> AsyncIterator[Any]:
        async with spawn(cfg, stop) as roles:
            in_turn: Any = InTurns(roles.producer, turns, placement)
            roles.producer = in_turn
            yield roles

    module: Any = jobs.colocate if placement == "colocate" else jobs.train
    module.spawn = in_turns
    job = jobs.colocate.colocate if placement == "colocate" else jobs.train.train
    argv = [
        "--config",
        str(setup.folder / f"{name}.yaml"),
        "--name",
        name,
        "--runs-dir",
        str(setup.folder / "runs"),
    ]
    jobs.driver.main(job, argv, placement=placement)


# ---------------------------------------------------------------- engine and trainer alone


def engine_alone(setup: Setup, config: Config) -> Any:
    """Start the engine that raypost would start, without anything around it."""
    engine = EngineConfig.of(config)
    os.environ |= engine.environment() | {OWNER: str(os.getpid())}
    from actors.rollout.vllm_engine import RolloutEngine

    return RolloutEngine(setup.model, engine)


def rank_alone(setup: Setup, config: Config) -> Any:
    """Return one rank of the trainer, in this process."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_SIZE": "1",
                   "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
                   "OMP_NUM_THREADS": str(config.train.threads)}  # fmt: skip
    from raypost.trainer.policy_rank import PolicyRank

    return PolicyRank(config, setup.model, 0)


def prompt_ids(setup: Setup) -> list[IntArray]:
    from raypost.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(setup.model)
    return [np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32) for text in PROMPTS]


async def generated(setup: Setup, engine: Any, ids: IntArray, group: int, member: int) -> Response:
    """Return what vLLM gives for a request like raypost's: ids and their logprobs."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=setup.length(group), ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    outputs = engine.llm.generate(tokens_input(ids.tolist()), params, f"{group}/{member}")
    (final,) = [one async for one in outputs]
    (output,) = final.outputs
    logprobs = np.asarray(output.logprobs.logprobs[: len(output.token_ids)], np.float32)
    return np.asarray(output.token_ids, np.int32), logprobs


def batch_of(groups: list[tuple[int, IntArray, list[Response]]]) -> PackedGroups:
    """Return groups (number, prompt, (ids, logprobs) of each member) with random rewards, as the trainer takes them."""
    rng = np.random.default_rng(groups[0][0])
    made = []
    for number, prompt, members in groups:
        states = []
        for index, (ids, logprobs) in enumerate(members):
            state = RolloutState(
                task="bench", group_id=number, sample_index=index, prompt_ids=prompt,
                sample_params=SampleParams(max_tokens=len(ids)), status=Status.COMPLETED, reward=float(rng.normal()),
            )  # fmt: skip
            state.append_segment(ids, logprobs, np.zeros(len(ids), np.int32))
            states.append(state)
        made.append(Group(task="bench", group_id=number, states=states))
    return pack_groups(made)


def alone(setup: Setup, turns: Turns) -> None:
    """Generate and fit, one after the other, with nothing between them: neither roles nor a sync."""
    config = setup.recipe("alone")
    engine, rank = engine_alone(setup, config), rank_alone(setup, config)
    prompts = prompt_ids(setup)

    async def run() -> None:
        for step in range(10**6):
            await turns.step_begins_soon()
            numbers = range(step * setup.groups, (step + 1) * setup.groups)
            calls = [
                generated(setup, engine, prompts[number % len(prompts)], number, member)
                for number in numbers
                for member in range(setup.group_size)
            ]
            answers = iter(await asyncio.gather(*calls))
            groups = [
                (number, prompts[number % len(prompts)], [next(answers) for _ in range(setup.group_size)])
                for number in numbers
            ]
            rank.train(batch_of(groups), step + 1)

    asyncio.run(run())


def engine_only(setup: Setup, turns: Turns) -> None:
    """Keep the engine full for ever; groups of a turn are what its tokens make. Between turns it is frozen."""
    config = setup.recipe("raypost")
    engine, prompts = engine_alone(setup, config), prompt_ids(setup)
    full = config.rollout.max_num_seqs

    async def run() -> None:
        tokens, number = 0, iter(range(10**9))

        async def one_after_the_other() -> None:
            nonlocal tokens
            while True:
                group, member = divmod(next(number), setup.group_size)
                ids, _ = await generated(setup, engine, prompts[group % len(prompts)], group, member)
                tokens += len(ids)

        streams = [asyncio.create_task(one_after_the_other()) for _ in range(full)]
        mean = setup.group_size * float(np.mean(LENGTHS if setup.tailed else [setup.max_tokens]))
        before = 0
        while True:
            await engine.pause("keep", clear_cache=False)
            await asyncio.to_thread(turns.step_begins, groups=(tokens - before) / mean)
            before = tokens
            await engine.resume()
            _, gone = await asyncio.wait(streams, timeout=max(0.0, turns.until - time.perf_counter()))
            assert len(gone) == full, "a request ended with an error"

    asyncio.run(run())


def trainer_only(setup: Setup, turns: Turns) -> None:
    """Train batches that are there already."""
    config = setup.recipe("raypost")
    rank, prompts, rng = rank_alone(setup, config), prompt_ids(setup), np.random.default_rng(0)
    batches = []
    for block in range(8):
        groups = []
        for number in range(block * setup.groups, (block + 1) * setup.groups):
            ids = rng.integers(3, 20, (setup.group_size, setup.length(number))).astype(np.int32)
            members = [(one, np.full(len(one), -3.0, np.float32)) for one in ids]
            groups.append((number, prompts[number % len(prompts)], members))
        batches.append(batch_of(groups))
    for step in range(10**6):
        turns.step_begins()
        rank.train(batches[step % len(batches)], step + 1)


# ---------------------------------------------------------------- all of them


def trl(setup: Setup, turns: Turns, name: str) -> None:
    """Run one of TRL's trainers."""
    # Not installed for users, only for developers.
    from bench import step_trl

    step_trl.synchronous(setup, turns, colocated_vllm=name == "trl_vllm")


SIDES: dict[str, Callable[[Setup, Turns], None]] = {
    "raypost": functools.partial(raypost, name="raypost", placement="separate"),
    "raypost_recompute": functools.partial(raypost, name="raypost_recompute", placement="separate"),
    "raypost_two": functools.partial(raypost, name="raypost_two", placement="separate"),
    "raypost_colocate": functools.partial(raypost, name="raypost_colocate", placement="colocate"),
    "alone": alone,
    "engine_only": engine_only,
    "trainer_only": trainer_only,
    **{name: functools.partial(trl, name=name) for name in ("trl", "trl_vllm")},
}


def main() -> None:
    """Be one side until the input ends."""
    name, path = sys.argv[1:]
    turns = Turns()
    threading.current_thread().name = name
    try:
        SIDES[name](Setup.read(Path(path)), turns)
    except StoppedError:
        pass
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    # At once: threads of a side may still wait for what nobody does any more.
    os._exit(0)


if __name__ == "__main__":
    main()
