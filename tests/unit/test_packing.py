"""Every trainable token is computed once, on one rank, in micro-batches of bounded size and equal number."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypost.packing import micro_batches, plan_batch, plan_micro_batches
from raypost.types import Group, RolloutState, SampleParams, Status


def make_state(group_id=0, index=0, prompt=3, response=4, reward=1.0, status=Status.COMPLETED, **params):
    rng = np.random.default_rng([group_id, index])
    state = RolloutState(
        task="task",
        group_id=group_id,
        sample_index=index,
        prompt_ids=np.arange(1, prompt + 1, dtype=np.int32) + 10 * group_id,
        sample_params=SampleParams(max_tokens=64, **params),
        status=status,
        reward=reward,
    )
    logprobs = -rng.random(response).astype(np.float32)
    ids = rng.integers(100, 200, response).astype(np.int32)
    state.append_segment(ids, logprobs, np.full(response, 7, np.int32))
    return state


def make_groups(num_groups=6, size=4, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Group(
            task="task",
            group_id=g,
            states=[
                make_state(g, i, int(rng.integers(1, 9)), int(rng.integers(1, 12)), float(rng.normal()))
                for i in range(size)
            ],
        )
        for g in range(num_groups)
    ]


@given(
    lengths=st.lists(st.integers(1, 40), max_size=60),
    world_size=st.integers(1, 5),
    max_tokens=st.integers(40, 200),
)
def test_plan_is_complete_bounded_balanced_and_equal_in_number(lengths, world_size, max_tokens):
    plan = plan_micro_batches(lengths, world_size, max_tokens)
    assert sorted(i for rank in plan for part in rank for i in part) == list(range(len(lengths)))
    assert len(plan) == world_size and len({len(rank) for rank in plan}) == 1 and len(plan[0]) >= 1
    for rank in plan:
        for part in rank:
            assert len(part) * max((lengths[i] for i in part), default=0) <= max_tokens
        order = [lengths[i] for part in rank for i in part]
        assert order == sorted(order, reverse=True)
    loads = [sum(lengths[i] for part in rank for i in part) for rank in plan]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_a_sample_that_fits_nowhere_is_named():
    with pytest.raises(ValueError, match="sample 1 has 41 tokens, more than micro_batch_tokens 40"):
        plan_micro_batches([3, 41], 2, 40)


def test_every_trained_token_is_predicted_from_the_position_before_it():
    groups = make_groups()
    groups[0].states[0].response_mask[1] = False
    batch = plan_batch(groups, "grpo", 1)
    seen = []
    for micro in micro_batches(batch.samples, 0, 1, 40):
        width = micro.input_ids_BL.shape[1]
        assert micro.input_ids_BL.size <= 40
        start = 0
        for row, sample in enumerate(micro.samples):
            state, count = sample.state, sample.num_trained
            ids, trained = np.concatenate([state.prompt_ids, state.response_ids]), state.response_mask
            part = slice(start, start + count)
            positions = micro.index_T[part] - row * width
            assert np.array_equal(ids[positions + 1], micro.targets_T[part])
            assert np.array_equal(micro.targets_T[part], state.response_ids[trained])
            assert np.array_equal(micro.rollout_logprobs_T[part], state.logprobs[trained])
            assert np.array_equal(micro.input_ids_BL[row, : len(ids) - 1], ids[:-1])
            assert not micro.input_ids_BL[row, len(ids) - 1 :].any()
            assert set(micro.advantages_T[part].tolist()) == {np.float32(sample.advantage)}
            start += count
            seen.append((state.group_id, state.sample_index))
        assert start == micro.num_trained
    assert sorted(seen) == [(g, i) for g in range(6) for i in range(4)]


def test_ranks_share_the_samples_and_agree_on_the_number_of_micro_batches():
    samples = plan_batch(make_groups(3), "grpo", 1).samples
    plans = [micro_batches(samples, rank, 5, 24) for rank in range(5)]
    assert len({len(plan) for plan in plans}) == 1
    keys = [(s.state.group_id, s.state.sample_index) for plan in plans for m in plan for s in m.samples]
    assert len(keys) == len(set(keys)) == len(samples)


def test_a_filler_has_an_input_and_no_trained_token():
    plans = [micro_batches(plan_batch(make_groups(1, 2), "grpo", 1).samples, r, 3, 64) for r in range(3)]
    (filler,) = (m for plan in plans for m in plan if not m.samples)
    assert filler.input_ids_BL.shape == (1, 1) and filler.num_trained == 0
    assert (filler.index_T.dtype, filler.advantages_T.dtype) == (np.int64, np.float32)
    assert len(micro_batches([], 0, 1, 64)) == 1


def test_minibatches_are_the_groups_in_order():
    batch = plan_batch(make_groups(6), "grpo", 3)
    ids = [[sample.state.group_id for sample in part[::4]] for part in batch.minibatches]
    assert ids == [[0, 1], [2, 3], [4, 5]]


def test_untrainable_trajectories_are_left_out_by_name_and_the_group_keeps_its_true_size():
    states = [make_state(1, i, reward=float(i)) for i in range(8)]
    states[1].status, states[1].error = Status.FAILED, "judge died"
    states[2].reward = float("nan")
    states[3].response_mask[:] = False
    states[4].logprobs[2] = np.nan
    states[5].prompt_ids = states[5].prompt_ids[:0]
    batch = plan_batch([Group(task="task", group_id=1, states=states)], "dr_grpo", 1)
    assert [s.state.sample_index for s in batch.samples] == [0, 6, 7]
    assert [s.advantage for s in batch.samples] == pytest.approx([-13 / 3, 5 / 3, 8 / 3])
    text = "; ".join(batch.left_out)
    for part in ("sample 1: status is failed (judge died)", "sample 2: reward is nan", "sample 3: no token",
                 "sample 4: a trained token's logprob", "sample 5: the prompt is empty"):  # fmt: skip
        assert f"group ('task', 1) {part}" in text


def test_a_masked_tokens_logprob_may_be_anything():
    states = [make_state(0, i, reward=float(i)) for i in range(2)]
    states[0].response_mask[1], states[0].logprobs[1] = False, np.nan
    batch = plan_batch([Group(task="task", group_id=0, states=states)], "grpo", 1)
    assert len(batch.samples) == 2 and batch.samples[0].num_trained == 3


def test_a_group_with_one_trainable_member_is_left_out():
    states = [make_state(0, 0), make_state(0, 1, status=Status.FAILED, reward=None)]
    batch = plan_batch([Group(task="task", group_id=0, states=states)], "grpo", 1)
    assert batch.samples == [] and "1 trainable of 2, 2 are needed" in batch.left_out[-1]


def test_samples_without_advantage_are_not_computed_but_count():
    groups = [
        Group(task="task", group_id=0, states=[make_state(0, i, reward=1.0) for i in range(3)]),
        Group(task="task", group_id=1, states=[make_state(1, i, reward=float(i)) for i in range(3)]),
    ]
    samples = plan_batch(groups, "grpo", 1).samples
    assert sum(sample.num_trained for sample in samples) == 24
    computed = [s.state for m in micro_batches(samples, 0, 1, 64) for s in m.samples]
    # The middle of three equally spaced rewards has advantage 0 as well.
    assert sorted((s.group_id, s.sample_index) for s in computed) == [(1, 0), (1, 2)]


def test_each_token_has_its_own_temperature():
    states = [make_state(0, i, reward=float(i), temperature=t) for i, t in enumerate((0.5, 2.0))]
    samples = plan_batch([Group(task="task", group_id=0, states=states)], "grpo", 1).samples
    (micro,) = micro_batches(samples, 0, 1, 64)
    assert micro.temperatures_T.tolist() == [0.5] * 4 + [2.0] * 4


def test_planning_is_deterministic():
    groups = make_groups(8)
    first = micro_batches(plan_batch(groups, "grpo", 1).samples, 1, 2, 30)
    again = micro_batches(plan_batch(groups, "grpo", 1).samples, 1, 2, 30)
    assert all(np.array_equal(a.index_T, b.index_T) for a, b in zip(first, again, strict=True))
