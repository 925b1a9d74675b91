"""The order of prompts, and its position."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from raypost.data.sampler import Sampler
from raypost.errors import CheckpointError, ConfigError
from raypost.types import Status
from tests.unit.prompts import STOP, Broken, Numbers, NumberStream, answers, encode, of, task_config


def make(size: int = 7, seed: int = 0, name: str = "default", **task: Any) -> Sampler:
    return Sampler(task_config(name, **task), Numbers(size), encode, (STOP,), seed)


def test_a_group_is_made_of_init_siblings_of_one_prompt() -> None:
    one = make(group_size=3, max_tokens=9, temperature=0.5).sample()
    assert [member.sample_index for member in one.states] == [0, 1, 2]
    assert {member.status for member in one.states} == {Status.INIT}
    assert {member.metadata["answer"] for member in one.states} == {one.states[0].metadata["answer"]}
    params = one.states[0].sample_params
    assert (params.max_tokens, params.temperature, params.stop_token_ids) == (9, 0.5, (STOP,))


def test_every_epoch_has_every_prompt_once_in_another_order() -> None:
    sampler = make(size=20)
    first, second = answers(sampler, 20), answers(sampler, 20)
    assert sorted(first) == sorted(second) == sorted(map(str, range(20)))
    assert first != second


def test_a_stream_keeps_its_order_and_starts_again_at_its_end() -> None:
    assert answers(of(NumberStream(3)), 7) == ["0", "1", "2", "0", "1", "2", "0"]


@pytest.mark.parametrize("source", [Numbers(3), NumberStream(3)])
def test_group_ids_grow_across_epochs(source: Any) -> None:
    sampler = of(source)
    assert [sampler.sample().group_id for _ in range(8)] == list(range(8))


def test_order_depends_on_the_seed_alone() -> None:
    assert answers(make(30), 60) == answers(make(30), 60)
    assert answers(make(30), 30) != answers(make(30, seed=1), 30)


@pytest.mark.parametrize("source", [Numbers(7), NumberStream(7)])
@pytest.mark.parametrize("position", [0, 1, 6, 7, 14, 20])
def test_restored_sampler_continues_with_the_exact_suffix(source: Any, position: int) -> None:
    sampler, other = of(source), of(source)
    answers(sampler, position)
    answers(other, 3)
    other.load_state_dict(sampler.state_dict())
    assert other.position == position
    assert answers(other, 9) == answers(sampler, 9)


def test_nothing_is_read_before_the_first_sample() -> None:
    sampler = of(Broken(1, 0))
    sampler.load_state_dict(sampler.state_dict())
    with pytest.raises(ZeroDivisionError):
        sampler.sample()


# ---------------------------------------------------------------- states that do not fit


@pytest.mark.parametrize("missing", [None, "position", "epoch", "offset", "last"])
def test_missing_state_is_an_error_not_a_restart(missing: str | None) -> None:
    state = make().state_dict() if missing else {}
    state.pop(missing or "", None)
    with pytest.raises(CheckpointError, match=f"lacks.* {missing or 'position'}.*silently restart"):
        make().load_state_dict(state)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (make(size=8), "size=8, this run has 7"),
        (make(seed=3), "seed=3, this run has 0"),
        (make(name="other"), "task='other', this run has 'default'"),
        (make(group_size=3), "group_size=3, this run has 8"),
        (of(NumberStream(7)), "size=None, this run has 7"),
    ],
)
def test_foreign_state_is_refused(other: Sampler, named: str) -> None:
    with pytest.raises(CheckpointError, match=f"{named}.*other prompts.*start a new run"):
        make().load_state_dict(other.state_dict())


def test_state_of_another_source_of_the_same_size_is_refused() -> None:
    mine, other = Numbers(7), Numbers(7)
    mine.identity, other.identity = "mine", "other"  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="source='other', this run has 'mine'"):
        of(mine).load_state_dict(of(other).state_dict())


def test_state_of_an_order_that_this_numpy_does_not_draw_is_refused() -> None:
    state = make().state_dict()
    with pytest.raises(CheckpointError, match="order='0123', this run has"):
        make().load_state_dict({**state, "order": "0123"})


@pytest.mark.parametrize("size", [4, 3])
def test_stream_that_became_another_one_is_refused_when_it_is_read(size: int) -> None:
    class Other(NumberStream):
        def prompts(self) -> Iterator[Any]:
            return iter(list(super().prompts())[-size:])

    sampler, other = of(NumberStream(7)), of(Other(7))
    answers(sampler, 4)
    other.load_state_dict(sampler.state_dict())
    with pytest.raises(CheckpointError, match="not the one that was sampled" if size == 4 else "now gives 3"):
        other.sample()


def test_refused_state_changes_nothing() -> None:
    sampler, same = make(), make()
    answers(sampler, 3)
    with pytest.raises(CheckpointError):
        sampler.load_state_dict(make(seed=1).state_dict())
    assert answers(sampler, 4) == answers(same, 7)[3:]


# ---------------------------------------------------------------- prompts that do not work


def test_prompt_that_is_too_long_is_named_and_not_cut() -> None:
    sampler = make(size=2000, max_prompt_tokens=3)
    with pytest.raises(ConfigError, match=r"prompt '1\d\d\d' has 4 tokens, allowed are 1 to 3"):
        answers(sampler, 2000)
    position = sampler.position
    with pytest.raises(ConfigError, match=r"prompt '1\d\d\d' has 4 tokens"):
        sampler.sample()
    assert sampler.position == position


def test_empty_source_is_refused() -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        make(size=0)


def test_empty_stream_is_an_error_and_no_endless_loop() -> None:
    with pytest.raises(ConfigError, match="gave no prompt to train in epoch 0"):
        of(NumberStream(0)).sample()


def test_stream_that_can_be_read_only_once_is_an_error_in_the_second_epoch() -> None:
    once = NumberStream(3).prompts()

    class OneShot(NumberStream):
        def prompts(self) -> Iterator[Any]:
            return once

    sampler = of(OneShot(3))
    answers(sampler, 3)
    with pytest.raises(ConfigError, match="no prompt to train in epoch 1"):
        sampler.sample()


def test_stream_that_raised_is_read_again_from_where_it_was_not_taken_for_ended() -> None:
    class Flaky(NumberStream):
        failed = False

        def prompts(self) -> Iterator[Any]:
            for prompt in super().prompts():
                if prompt.text == "2" and not self.failed:
                    self.failed = True
                    raise OSError("the network is gone")
                yield prompt

    sampler = of(Flaky(4))
    answers(sampler, 2)
    with pytest.raises(OSError, match="network is gone"):
        sampler.sample()
    assert answers(sampler, 3) == ["2", "3", "0"]


def test_without_workers_torch_is_not_imported() -> None:
    code = "import sys, raypost.data.sampler, raypost.data.task_source; print('torch' in sys.modules)"
    assert os.popen(f'{sys.executable} -c "{code}"').read().strip() == "False"
