"""The worker of agent loops makes the loop that a task names; the pool finds the worker that parked an episode."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.agent_loop import AgentLoopPool, AgentLoopWorker
from raypost.agent_loop.parking import PARKED
from raypost.config import load_config
from raypost.data.prompt import Prompt, render
from raypost.data.tokenizer import Tokenizer
from raypost.types import GenerateRequest, GenerateResult, Group, RolloutState, SampleParams, Status
from raypost.types.packed import pack_groups, unpack_groups
from tests.unit.chat_templates import TEMPLATES
from tests.unit.scripted_environments import AnswersInTurn
from tests.unit.scripted_generator import Scorer, result
from tests.unit.tokenizers import write_tokenizer

YAML = """
model: {{name: tiny}}
tasks:
  - name: t
    source: {{kind: reasoning_gym, dataset: chain_sum}}
    max_prompt_tokens: 500
    chat_template: template.jinja
    agent_loop: {agent_loop}
train: {{num_steps: 4, batch_size: 8}}
"""
MINE = '''
from raypost import Observation

def add(a: int, b: int) -> int:
    """Adds."""
    return a + b

async def agent(session):
    reply = await session.complete()
    say = [*session.messages, reply["choices"][0]["message"], {"role": "user", "content": "Sure?"}]
    await session.complete(say)

class Game:
    def reset(self, metadata, *, seed):
        return Observation(messages=[{"role": "user", "content": "Guess."}])
    def step(self, action):
        return Observation(messages=[{"role": "user", "content": "No."}], reward=0.5, done="four" in action)
'''


@pytest.mark.parametrize(
    "agent_loop",
    [
        "{kind: tools, tools: ['mine.py:add']}",
        "{kind: session, agent: 'mine.py:agent'}",
        "{kind: environment, environment: 'mine.py:Game'}",
        "{kind: environment, environment: 'mine.py:Game', isolation: process}",
    ],
)
def test_a_task_of_several_turns_is_played_as_its_configuration_says(agent_loop: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "template.jinja").write_text(TEMPLATES["chatml with tools"])
    (tmp_path / "config.yaml").write_text(YAML.format(agent_loop=agent_loop))
    config = load_config(tmp_path / "config.yaml")
    folder = write_tokenizer(tmp_path / "model")
    tokenizer = Tokenizer.load(folder)
    texts = ['<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>', "It is four."]
    ids = [tokenizer.encode(text, add_special_tokens=False).tolist() for text in texts]
    first, last = ([*one, tokenizer.eos_ids[0]] for one in ids)
    engine = AnswersInTurn(result(first), result([], "abort"), result(last))
    prompt = Prompt("3 + 4 =", {"question": "3 + 4 =", "answer": "7"})
    state = RolloutState(
        task="t",
        group_id=0,
        sample_index=0,
        prompt_ids=render(prompt, tokenizer, config.tasks[0]),
        sample_params=SampleParams(max_tokens=300, stop_token_ids=tokenizer.eos_ids),
        metadata=prompt.metadata,
    )

    async def main() -> RolloutState:
        worker = AgentLoopWorker("loop-3", config, str(folder), engine, Scorer())
        packed = await worker.run(pack_groups([Group(task="t", group_id=0, states=[state])]))
        (paused,) = unpack_groups(packed)
        assert (paused.status, paused.states[0].metadata[PARKED][0]) == (Status.ABORTED, "loop-3")
        (done,) = unpack_groups(await worker.run(pack_groups([paused])))
        kind = config.tasks[0].agent_loop.kind
        spans = {span.kind for span in await worker.drain_spans()}
        assert spans == {"tools": {"tool"}, "environment": {"environment"}, "session": set()}[kind]
        await worker.forget([done.key])
        return done.states[0]

    one = asyncio.run(main())
    assert (one.status, one.num_restarts, one.num_aborts) == (Status.COMPLETED, 0, 1), one.error
    sent = engine.requests[-1].token_ids.tolist()
    assert sent == [*one.prompt_ids, *one.response_ids][: len(sent)]
    assert int(one.response_mask.sum()) == len(first) + len(last)


ONCE = """
async def agent(session):
    await session.complete()
    return 1.0
"""


class Crowded:
    """Answers when nobody else asks any more, and knows how many asked at once."""

    def __init__(self, ids: list[int]) -> None:
        """`ids`: what it answers."""
        self._ids, self._now, self.most = ids, 0, 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Answer after all that is ready to ask has asked."""
        self._now += 1
        self.most = max(self.most, self._now)
        for _ in range(50):
            await asyncio.sleep(0)
        self._now -= 1
        return result(self._ids)


@pytest.mark.parametrize(("shares", "most"), [(True, 2), (False, 4)])
def test_tasks_of_one_environment_have_its_turns_together(shares: bool, most: int, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ONCE)
    (tmp_path / "template.jinja").write_text(TEMPLATES["chatml with tools"])
    of = ", max_concurrent_of: shop" if shares else ""
    task = YAML.format(agent_loop=f"{{kind: session, agent: 'mine.py:agent', max_concurrent: 2{of}}}")
    head, train = task.split("  - ")[0], "train:" + task.split("train:")[1]
    one = task.removeprefix(head).removesuffix(train)
    (tmp_path / "config.yaml").write_text(head + one + one.replace("name: t", "name: u") + train)
    config = load_config(tmp_path / "config.yaml")
    folder = write_tokenizer(tmp_path / "model")
    tokenizer = Tokenizer.load(folder)
    engine = Crowded([*tokenizer.encode("Seven.", add_special_tokens=False).tolist(), tokenizer.eos_ids[0]])
    prompt = Prompt("3 + 4 =", {"question": "3 + 4 =", "answer": "7"})

    def group(task: int, number: int) -> Group:
        name = config.tasks[task].name
        states = [
            RolloutState(
                task=name,
                group_id=number,
                sample_index=place,
                prompt_ids=render(prompt, tokenizer, config.tasks[task]),
                sample_params=SampleParams(max_tokens=300, stop_token_ids=tokenizer.eos_ids),
                metadata=prompt.metadata,
            )
            for place in range(4)
        ]
        return Group(task=name, group_id=number, states=states)

    async def main() -> None:
        worker = AgentLoopWorker("loop-0", config, str(folder), engine, Scorer())
        groups = [group(task, number) for task in (0, 1) for number in (0, 1)]
        for packed in await asyncio.gather(*(worker.run(pack_groups([one])) for one in groups)):
            (done,) = unpack_groups(packed)
            assert [state.status for state in done.states] == [Status.COMPLETED] * 4, done.states[0].error

    asyncio.run(main())
    assert engine.most == most


def test_a_group_goes_to_the_worker_that_parked_it_and_all_are_told_of_its_end() -> None:
    asked: list[Any] = []

    class Pool:
        async def on(self, name: str | None, method: str, packed: Any) -> Any:
            asked.append((name, method))
            return packed

        async def on_every(self, method: str, *args: Any) -> None:
            asked.append((method, *args))

    state = RolloutState(
        task="t",
        group_id=0,
        sample_index=0,
        prompt_ids=np.zeros(1, np.int32),
        sample_params=SampleParams(max_tokens=3),
    )
    group = Group(task="t", group_id=0, states=[state])
    pool: Any = Pool()
    asyncio.run(AgentLoopPool(pool).run(group))
    state.metadata = {PARKED: ["loop-3", "x"]}
    asyncio.run(AgentLoopPool(pool).run(group))
    asyncio.run(AgentLoopPool(pool).forget([group.key]))
    assert asked == [(None, "run"), ("loop-3", "run"), ("forget", [("t", 0)])]
