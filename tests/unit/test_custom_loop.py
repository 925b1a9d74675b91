"""Agent loops and environments of the user's: from the configuration, tried by the plan, played."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from raypost.agent_loop.custom import CustomAgentLoop, LoopContext
from raypost.config import Config, load_config
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError
from raypost.plan import loops
from raypost.plan.loops import loop_problems
from raypost.types import Status
from tests.unit.production import virtual
from tests.unit.scripted_generator import Scorer, ScriptedGenerator, init, result
from tests.unit.tokenizers import write_tokenizer

YAML = """
model: {{name: tiny}}
tasks: [{{source: {{kind: reasoning_gym, dataset: chain_sum}}, agent_loop: {agent_loop}}}]
train: {{num_steps: 4, batch_size: 8}}
"""
LOOP = """
from raypost import SingleTurnAgentLoop

class Loop(SingleTurnAgentLoop):
    def __init__(self, context, bonus=0.0):
        super().__init__(context.generator, context.judge, context.tokenizer.decode, rollout=context.rollout)
        self.bonus = bonus

    async def run(self, group):
        done = await super().run(group)
        for state in done.states:
            state.metadata["seen"].append(state.sample_index)
            if state.reward is not None:
                state.reward += self.bonus
        return done
"""
GAME = """
class Game:
    def __init__(self, size=3):
        self.size = size
    def reset(self, metadata):
        from raypost import Observation
        return Observation(text="go")
    def step(self, action):
        from raypost import Observation
        return Observation(reward=1.0, done=True)
"""


def configured(folder: Path, source: str, agent_loop: str = "{kind: custom, loop: 'mine.py:Loop'}") -> Config:
    (folder / "mine.py").write_text(textwrap.dedent(source))
    (folder / "config.yaml").write_text(YAML.format(agent_loop=agent_loop))
    return load_config(folder / "config.yaml")


def problems(
    folder: Path, source: str, agent_loop: str = "{kind: custom, loop: 'mine.py:Loop'}"
) -> list[str]:
    config = configured(folder, source, agent_loop)
    tokenizer = Tokenizer.load(write_tokenizer(folder / "model"))
    return list(loop_problems(config.tasks[0], config, tokenizer))


def test_a_loop_of_ones_own_plays_groups_whose_members_share_nothing(tmp_path: Path) -> None:
    options = "{kind: custom, loop: 'mine.py:Loop', params: {bonus: 0.5}}"
    config = configured(tmp_path, LOOP, options)
    (tmp_path / "mine.py").unlink()  # the configuration holds its text
    generator = ScriptedGenerator(lambda _: result([5], "stop"))
    context = LoopContext(
        task=config.tasks[0],
        rollout=config.rollout,
        generator=generator,
        judge=Scorer(),
        tokenizer=Tokenizer.load(write_tokenizer(tmp_path / "model")),
    )
    group = init(2)
    shared: dict[str, Any] = {"seen": []}
    for state in group.states:
        state.metadata = shared
    done = virtual(CustomAgentLoop(context).run(group))
    assert [(state.status, state.reward) for state in done.states] == [(Status.COMPLETED, 1.5)] * 2
    assert [state.metadata["seen"] for state in done.states] == [[0], [1]]


def test_what_can_begin_is_accepted(tmp_path: Path) -> None:
    source = LOOP.replace('state.metadata["seen"].append(state.sample_index)', "pass")
    assert problems(tmp_path, source) == []
    assert (
        problems(tmp_path, GAME, "{kind: environment, environment: 'mine.py:Game', params: {size: 2}}") == []
    )


BARE = """
class Loop:
    def __init__(self, context): ...
    async def interrupt(self): ...
    async def run(self, group):
        {body}
"""


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("Lopp = 1", "mine.py has no 'Loop'"),
        ("Loop = 1", "is a int and no function"),
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def Loop(): ...", "cannot be made with a LoopContext and params {}: TypeError"),
        (
            "class Loop:\n  def __init__(self, c): ...\n  async def run(self, g): ...",
            "without `async def interrupt`",
        ),
        ("class Loop:\n  def __init__(self, c): ...\n  def run(self, g): ...", "without `async def run`"),
        (BARE.format(body="1 / 0"), "ZeroDivisionError: division by zero"),
        (BARE.format(body="return None"), "returned a NoneType and no Group"),
        (BARE.format(body="group.states.pop(); return group"), "must return the same"),
        (BARE.format(body="group.states[0].logprobs = None; return group"), "token fields that do not fit"),
        (BARE.format(body="import asyncio; await asyncio.sleep(60)"), "longer than 0.5 s"),
        ("import time; time.sleep(3)", "longer than 0.5 s to import"),
    ],
)
def test_a_loop_that_cannot_work_is_refused(
    source: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "TRIAL_S", 0.5 if "sleep" in source else 15.0)
    (problem,) = problems(tmp_path, source)
    assert text in problem and problem.startswith("task 'default': agent_loop.loop"), problem


@pytest.mark.parametrize(
    ("agent_loop", "text"),
    [
        ("{kind: custom}", "kind 'custom' needs `loop`"),
        ("{loop: 'mine.py:Loop'}", "loop 'mine.py:Loop' is not used by kind 'single_turn': use 'custom'"),
        ("{kind: custom, loop: 'gone.py:Loop'}", "gone.py cannot be read"),
        (
            "{kind: environment, environment: 'a:b', loop: 'c:d'}",
            "loop 'c:d' is not used by kind 'environment'",
        ),
    ],
)
def test_a_loop_that_is_not_named_is_refused(agent_loop: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="problem") as refused:
        configured(tmp_path, LOOP, agent_loop)
    assert text in str(refused.value)
