"""Advantages of a whole batch, from its records and what the models say, against a loop over its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raypost.config import AdvantageConfig, KlConfig
from raypost.trainer.algorithm.token_advantages import TokenValues, token_advantages
from raypost.trainer.batch.train_batch import TrainBatch, plan_batch
from raypost.types import Group, Status
from raypost.types.packed import pack_groups
from raypost.types.turns import Turn, record_turns
from tests.present import present
from tests.unit.train_groups import make_groups, make_state

NONE = KlConfig()


def make_batch(cut: Any = ()) -> TrainBatch:
    """Four groups with masked tokens and a failed member; `cut`: (group, member) that a limit ended."""
    groups = make_groups(4, 3, longest=9)
    for group in groups:
        for i, state in enumerate(group.states):
            state.finish_reason = "length" if (group.group_id, i) in cut else "stop"
            if state.num_tokens > 3:
                # A tool's tokens; with three left over, the last of all is one of them.
                state.response_mask[[1, -1]] = False
    groups[2].states[1].status = Status.FAILED
    return plan_batch(pack_groups(groups), AdvantageConfig(kind="gae"), 1)


def naive_gae(rewards: Any, values: Any, after: Any, discount: float, lam: float) -> list[float]:
    advantages, following, later = [], after, 0.0
    for reward, value in zip(rewards[::-1], values[::-1], strict=True):
        later = reward + discount * following - value + discount * lam * later
        following = value
        advantages.append(later)
    return advantages[::-1]


def test_a_response_that_was_cut_off_is_worth_what_the_critic_expects_after_it_and_others_nothing() -> None:
    batch = make_batch(cut={(0, 0), (1, 2), (2, 1), (3, 1)})
    rng = np.random.default_rng(0)
    values = TokenValues(*rng.normal(size=(2, batch.num_tokens)).astype(np.float32))
    cut = [sample for sample in batch.samples if sample.cut_off]
    assert len(cut) == 3 and any(not sample.state.response_mask[-1] for sample in cut)
    ended = [sample for sample in batch.samples if not sample.cut_off]
    for sample in ended:
        values.after[sample.last] = 0.0
    config = AdvantageConfig(kind="gae", whiten=False, discount=0.9, gae_lambda=0.8)
    got = token_advantages(batch, config, NONE, values=values)
    for sample in batch.samples:
        own = values.values[sample.places].astype(float).tolist()
        rewards = [0.0] * (len(own) - 1) + [sample.state.reward]
        after = float(values.after[sample.last]) if sample.cut_off else 0.0
        expected = naive_gae(rewards, own, after, 0.9, 0.8)
        assert got.advantages[sample.places] == pytest.approx(expected, abs=1e-5)
        assert present(got.returns)[sample.places] == pytest.approx(np.add(expected, own), abs=1e-5)
    trained = np.concatenate([sample.places for sample in batch.samples])
    assert not np.delete(got.advantages, trained).any() and not np.delete(present(got.returns), trained).any()


def test_the_state_after_the_last_token_is_what_one_more_token_would_be_chosen_in() -> None:
    sample = make_batch(cut={(1, 2)}).samples[5]
    assert sample.cut_off and sample.state.num_tokens > 3
    longer = sample.with_one_more(100)
    assert (
        longer.num_inputs == sample.num_inputs + 1 == len(sample.state.prompt_ids) + sample.state.num_tokens
    )
    assert longer.places[:-1].tolist() == (sample.trained + 100).tolist()
    assert longer.places[-1] == longer.last == 100 + sample.state.num_tokens
    assert sample.state.num_tokens == longer.state.num_tokens - 1, "the sample itself is as it was"


@pytest.mark.parametrize("kind", ["grpo", "reinforce_pp"])
def test_penalties_are_part_of_what_is_compared(kind: str) -> None:
    batch = make_batch()
    rng = np.random.default_rng(1)
    old, ref = -rng.random((2, batch.num_tokens)).astype(np.float32)
    kl = KlConfig(coefficient=0.3, kind="k1", place="reward")
    config = AdvantageConfig(kind=kind, whiten=False, overlong_buffer=62, overlong_penalty=2.0)
    got = token_advantages(batch, config, kl, old_logprobs=old, ref_logprobs=ref).advantages
    for group in batch.groups:
        rewards = []
        for sample in group:
            per_token = -0.3 * (old[sample.places].astype(float) - ref[sample.places])
            per_token[-1] += (
                present(sample.state.reward) - 2.0 * max(0, sample.state.num_tokens - (64 - 62)) / 62
            )
            rewards.append(per_token)
        totals = np.asarray([one.sum() for one in rewards])
        for sample, own, total in zip(group, rewards, totals, strict=True):
            expected = own[::-1].cumsum()[::-1]
            if kind == "grpo":
                expected = np.full(len(own), (total - totals.mean()) / (totals.std(ddof=1) + 1e-6))
            assert got[sample.places] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="needs the policy's and the reference's logprobs"):
        token_advantages(batch, config, kl, old_logprobs=old)


def test_a_batch_without_anything_trainable_has_empty_columns() -> None:
    groups = make_groups(2, 2)
    for group in groups:
        for state in group.states:
            state.status = Status.FAILED
    batch = plan_batch(pack_groups(groups), AdvantageConfig(kind="gae"), 1)
    config = AdvantageConfig(kind="gae")
    none = np.zeros(batch.num_tokens, np.float32)
    got = token_advantages(batch, config, NONE, values=TokenValues(none, none))
    assert not got.advantages.any() and got.returns is not None and not got.returns.any()


def test_turns_are_where_the_record_of_a_trajectory_says() -> None:
    """Two members of two turns: 2 tokens, 1 observed, 2 more. The first is ahead after turn one, both end alike."""
    states = [make_state(0, index, response=5, reward=1.0) for index in range(2)]
    for state, first in zip(states, (1.0, 0.0), strict=True):
        state.response_mask[2] = False
        record_turns(state, [Turn(0, 2, 3, first, False), Turn(3, 5, 5, 1.0 - first, True)])
    batch = plan_batch(pack_groups([Group(task="task", group_id=0, states=states)]), AdvantageConfig(), 1)

    def advantages(**options: Any) -> list[float]:
        config = AdvantageConfig(kind="dr_grpo", **options)
        return [float(one) for one in token_advantages(batch, config, KlConfig()).advantages]

    assert advantages() == [0.0] * 10
    assert advantages(credit="turn") == [0, 0, 0, -0.5, -0.5, 0, 0, 0, 0.5, 0.5]
    assert advantages(credit="turn", turn_discount=0.5) == [
        0.25,
        0.25,
        0,
        -0.5,
        -0.5,
        -0.25,
        -0.25,
        0,
        0.5,
        0.5,
    ]
