"""The order of prompts, and its position."""

from __future__ import annotations

import pytest

from raypost.errors import CheckpointError, ConfigError
from raypost.sampler import Sampler
from raypost.types import Status
from tests.unit.production import STOP, Numbers, encode, task_config


def make(size: int = 7, seed: int = 0, name: str = "default", **task: object) -> Sampler:
    config = task_config(name).model_copy(update=task)
    return Sampler(config, Numbers(size), encode, (STOP,), seed)


def answers(sampler: Sampler, count: int) -> list[str]:
    return [sampler.sample().states[0].metadata["answer"] for _ in range(count)]


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


def test_group_ids_grow_across_epochs() -> None:
    sampler = make(size=3)
    assert [sampler.sample().group_id for _ in range(8)] == list(range(8))


def test_order_depends_on_the_seed_alone() -> None:
    assert answers(make(30), 60) == answers(make(30), 60)
    assert answers(make(30), 30) != answers(make(30, seed=1), 30)


@pytest.mark.parametrize("position", [0, 1, 6, 7, 20])
def test_restored_sampler_continues_with_the_exact_suffix(position: int) -> None:
    sampler, other = make(), make()
    answers(sampler, position)
    other.load_state_dict(sampler.state_dict())
    assert other.position == position
    assert answers(other, 9) == answers(sampler, 9)


def test_missing_state_is_an_error_not_a_restart() -> None:
    with pytest.raises(CheckpointError, match="silently restart"):
        make().load_state_dict({})


@pytest.mark.parametrize("other", [make(size=8), make(seed=3), make(name="other")])
def test_foreign_state_is_refused(other: Sampler) -> None:
    with pytest.raises(CheckpointError, match="other prompts"):
        make().load_state_dict(other.state_dict())


def test_prompt_that_is_too_long_is_named_and_not_cut() -> None:
    sampler = make(size=2000, max_prompt_tokens=3)
    with pytest.raises(ConfigError, match=r"prompt '1\d\d\d' has 4 tokens, allowed are 1 to 3"):
        answers(sampler, 2000)


def test_empty_source_is_refused() -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        make(size=0)
