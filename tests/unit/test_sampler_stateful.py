"""Whatever happens to samplers between, what they hand out is what one sampler without interruption does."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raypost.config import JudgeConfig, SourceConfig, TaskConfig
from raypost.data.prompt import Prompt
from raypost.data.sampler import Sampler
from raypost.data.task_source import build_source
from raypost.types import Group, IntArray
from tests.thorough import examples
from tests.unit.prompts import STOP, Numbers, NumberStream, task_config


class Interruption(Exception):
    """What a source raises now and then."""


class Unreliable:
    """Raises once when `armed`."""

    armed = False

    def trip(self) -> None:
        if self.armed:
            self.armed = False
            raise Interruption


class UnreliableNumbers(Numbers, Unreliable):
    def sample(self, index: int) -> Prompt:
        self.trip()
        return super().sample(index)


class UnreliableStream(NumberStream, Unreliable):
    def prompts(self) -> Iterator[Prompt]:
        for prompt in super().prompts():
            self.trip()
            yield prompt


def encode(prompt: Prompt) -> IntArray:
    return np.asarray([ord(letter) for letter in prompt.text[-40:]], np.int32)


def python_task(kind: str, size: int) -> TaskConfig:
    source = SourceConfig(kind="python", dataset=f"tests.unit.prompts:{kind}", params={"count": size + 20})
    return TaskConfig(source=source, judge=JudgeConfig(kind="exact"))


def gym_task(size: int) -> TaskConfig:
    return TaskConfig(source=SourceConfig(kind="reasoning_gym", dataset="chain_sum", size=size + 20))


class Interrupted(RuleBasedStateMachine):
    """Samplers of one source, of which one hands out; states are saved and restored at any point."""

    @initialize(
        kind=st.sampled_from(["numbers", "stream", "sequence rows", "stream rows", "reasoning_gym"]),
        size=st.integers(1, 9),
        seed=st.integers(0, 3),
    )
    def begin(self, kind: str, size: int, seed: int) -> None:
        match kind:
            case "numbers":
                self.task: TaskConfig = task_config()
                self.source: Any = UnreliableNumbers(size)
            case "stream":
                self.task, self.source = task_config(), UnreliableStream(size)
            case "reasoning_gym":
                self.task = gym_task(size)
                self.source = build_source(self.task, seed)
            case _:
                self.task = python_task(kind.removesuffix(" rows"), size)
                self.source = build_source(self.task, seed)
        self.seed = seed
        self.whole = self.new()
        self.expected: list[Group] = []
        self.sampler = self.new()
        self.position = 0
        self.saved = [(0, pickle.dumps(self.sampler.state_dict()))]

    def new(self) -> Sampler:
        return Sampler(self.task, self.source, encode, (STOP,), self.seed)

    def check(self, group: Any) -> None:
        while len(self.expected) <= self.position:
            self.expected.append(self.whole.sample())
        expected = self.expected[self.position]
        assert group.group_id == expected.group_id == self.position
        first, same = group.states[0], expected.states[0]
        assert first.prompt_ids.tolist() == same.prompt_ids.tolist()
        assert first.metadata == same.metadata
        self.position += 1

    @rule(count=st.integers(1, 12))
    def sample(self, count: int) -> None:
        for _ in range(count):
            self.check(self.sampler.sample())

    @rule()
    def start(self) -> None:
        self.sampler.start()

    @rule()
    def close(self) -> None:
        self.sampler.close()

    @precondition(lambda self: isinstance(self.source, Unreliable))
    @rule(when=st.sampled_from(["start", "sample"]))
    def interrupt(self, when: str) -> None:
        self.source.armed = True
        try:
            group = getattr(self.sampler, when)()
        except Interruption:
            return
        finally:
            self.source.armed = False
        if group is not None:
            self.check(group)

    @rule()
    def save(self) -> None:
        self.saved.append((self.position, pickle.dumps(self.sampler.state_dict())))

    @rule(data=st.data(), in_place=st.booleans())
    def restore(self, data: st.DataObject, in_place: bool) -> None:
        self.position, state = data.draw(st.sampled_from(self.saved))
        if not in_place:
            self.sampler = self.new()
        self.sampler.load_state_dict(pickle.loads(state))

    @invariant()
    def the_state_counts_what_was_handed_out(self) -> None:
        assert self.sampler.position == self.position
        assert self.sampler.state_dict()["position"] == self.position


Interrupted.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=30, deadline=None)
test_save_and_resume_at_any_point_continue_the_same_sequence = Interrupted.TestCase
