"""Every trainable token is computed once, on one rank, in micro-batches of bounded size and equal number."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypost.config import AdvantageConfig
from raypost.trainer.algorithm.token_advantages import with_advantage
from raypost.trainer.batch.packing import PackingRule, Unit, make_units, micro_batches, spread
from raypost.trainer.batch.train_batch import Limits, plan_batch
from raypost.types import Group, RolloutState, SampleParams, Status
from raypost.types.packed import pack_groups
from tests.present import present
from tests.unit.train_groups import make_groups, make_state, planned

RULES = {
    "padded": PackingRule(40, packed=False),
    "packed": PackingRule(40, share_prompts=False),
    "shared": PackingRule(40),
}


@given(
    prompts=st.lists(st.integers(1, 20), max_size=12),
    size=st.integers(2, 5),
    world_size=st.integers(1, 5),
    max_tokens=st.integers(40, 200),
    kind=st.sampled_from(sorted(RULES)),
    seed=st.integers(0, 5),
)
def test_plan_is_complete_bounded_and_equal_in_number(
    prompts: Any, size: int, world_size: int, max_tokens: int, kind: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    groups = [
        Group(
            task="task",
            group_id=g,
            states=[make_state(g, i, prompt, int(rng.integers(1, 21))) for i in range(size)],
        )
        for g, prompt in enumerate(prompts)
    ]
    rule = PackingRule(max_tokens, RULES[kind].packed, RULES[kind].share_prompts, pair_cost=0.01)
    samples = planned(groups).samples
    plans = [micro_batches(samples, rank, world_size, rule) for rank in range(world_size)]
    assert len({len(plan) for plan in plans}) == 1 and len(plans[0]) >= 1
    computed = Counter(id(sample) for plan in plans for micro in plan for sample in micro.samples)
    assert computed == Counter(map(id, samples))
    for micro in (micro for plan in plans for micro in plan):
        assert micro.num_inputs <= max_tokens
        if micro.segments is not None:
            ends = [s.start + s.length for s in micro.segments]
            assert [s.start for s in micro.segments] == [0, *ends[:-1]] and ends[-1] == micro.num_inputs


def test_ranks_are_balanced_by_cost_and_a_prompt_is_shared_by_fewer_where_that_balances() -> None:
    rng = np.random.default_rng(1)
    states = [make_state(0, i, 10, int(rng.integers(20, 60))) for i in range(16)]
    samples = planned([Group(task="task", group_id=0, states=states)]).samples
    rule = PackingRule(10_000, pair_cost=0.001)
    assert len(make_units(samples, rule)) == 1
    costs = [sum(unit.cost(rule) for unit in units) for units in spread(make_units(samples, rule), 4, rule)]
    assert max(costs) < 1.15 * np.mean(costs)


def test_long_samples_count_their_attention() -> None:
    lengths = [400, *[100] * 4]
    states = [make_state(0, i, 1, length) for i, length in enumerate(lengths)]
    samples = planned([Group(task="task", group_id=0, states=states)]).samples
    linear = PackingRule(1000, share_prompts=False)
    dear = PackingRule(1000, share_prompts=False, pair_cost=0.01)
    tokens = [
        [sum(u.tokens for u in r) for r in spread(make_units(samples, rule), 2, rule)]
        for rule in (linear, dear)
    ]
    assert sorted(tokens[0]) == [400, 400] and sorted(tokens[1]) == [400, 400]
    assert Unit((samples[0],)).cost(dear) > 4 * Unit((samples[1],)).cost(dear)


def test_a_prompt_is_shared_where_it_saves_time() -> None:
    states = [make_state(0, i, 8, 5) for i in range(4)]
    samples = planned([Group(task="task", group_id=0, states=states)]).samples
    (unit,) = make_units(samples, PackingRule(100, pair_cost=0.001))
    assert unit.tokens == 8 + 4 * 4
    assert len(make_units(samples, PackingRule(100, share_prompts=False))) == 4
    assert len(make_units(samples, PackingRule(100, packed=False))) == 4
    assert [unit.tokens for unit in make_units(samples, PackingRule(16, pair_cost=0.001))] == [16, 16]


def test_members_with_other_prompts_share_nothing_with_them() -> None:
    states = [make_state(0, i, 6 + i % 2, 5) for i in range(4)]
    units = make_units(planned([Group(task="task", group_id=0, states=states)]).samples, PackingRule(100))
    assert sorted(len(unit.samples) for unit in units) == [2, 2]


def test_a_sample_that_fits_nowhere_is_named() -> None:
    states = [make_state(3, i, 3, 4 if i else 39) for i in range(2)]
    samples = planned([Group(task="task", group_id=3, states=states)]).samples
    with pytest.raises(
        ValueError, match=r"group \('task', 3\) sample 0 has 41 tokens, more than .*tokens 40"
    ):
        micro_batches(samples, 0, 2, RULES["shared"])


@pytest.mark.parametrize("kind", RULES)
def test_every_trained_token_is_predicted_from_the_position_before_it(kind: str) -> None:
    groups = make_groups()
    groups[0].states[0].response_mask[1] = False
    packed = pack_groups(groups)
    batch = plan_batch(packed, AdvantageConfig(), 1)
    seen = []
    for micro in micro_batches(batch.samples, 0, 1, RULES[kind]):
        row_L = micro.input_ids_BL.ravel()
        for number, sample in enumerate(micro.samples):
            state, part = sample.state, micro.sample_T == number
            ids, trained = np.concatenate([state.prompt_ids, state.response_ids]), state.response_mask
            before = len(state.prompt_ids) - 1 + np.flatnonzero(trained)
            assert np.array_equal(row_L[micro.index_T[part]], ids[before])
            assert np.array_equal(micro.targets_T[part], state.response_ids[trained])
            assert np.array_equal(micro.rollout_logprobs_T[part], state.logprobs[trained])
            assert np.array_equal(packed.columns[1][micro.places_T[part]], state.response_ids[trained])
            assert np.array_equal(packed.columns[2][micro.places_T[part]], state.logprobs[trained])
            seen.append((state.group_id, state.sample_index))
    assert sorted(seen) == [(g, i) for g in range(6) for i in range(4)]


def test_a_response_sees_its_own_prompt_and_nothing_else() -> None:
    groups = make_groups(3)
    for micro in micro_batches(planned(groups).samples, 0, 1, PackingRule(200, pair_cost=0.0001)):
        row_L, segments = micro.input_ids_BL[0], list(present(micro.segments))
        whole = []
        for s in segments:
            prefix = row_L[s.prefix_start : s.prefix_start + s.prefix_length]
            whole.append(np.concatenate([prefix, row_L[s.start : s.start + s.length]]).tolist())
        for sample in micro.samples:
            ids = np.concatenate([sample.state.prompt_ids, sample.state.response_ids])[:-1].tolist()
            assert ids in whole


def test_ranks_share_the_samples_and_agree_on_the_number_of_micro_batches() -> None:
    samples = planned(make_groups(3)).samples
    plans = [micro_batches(samples, rank, 5, PackingRule(24)) for rank in range(5)]
    assert len({len(plan) for plan in plans}) == 1
    keys = [(s.state.group_id, s.state.sample_index) for plan in plans for m in plan for s in m.samples]
    assert len(keys) == len(set(keys)) == len(samples)


@pytest.mark.parametrize("kind", RULES)
def test_a_filler_has_an_input_and_no_trained_token(kind: str) -> None:
    rule = RULES[kind]
    plans = [micro_batches(planned(make_groups(1, 2)).samples, r, 3, rule) for r in range(3)]
    fillers = [m for plan in plans for m in plan if not m.samples]
    assert fillers
    for filler in fillers:
        assert filler.input_ids_BL.shape == (1, 1) and filler.num_trained == 0
        assert (filler.index_T.dtype, filler.temperatures_T.dtype) == (
            np.dtype(np.int64),
            np.dtype(np.float32),
        )
    assert len(micro_batches([], 0, 1, rule)) == 1


def test_a_lognormal_mix_of_lengths_is_packed_without_padding() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5, 1, 256), 8, 2000).astype(int)
    states = [make_state(0, i, 1, int(length)) for i, length in enumerate(lengths)]
    samples = planned([Group(task="task", group_id=0, states=states)]).samples
    useful = sum(sample.num_inputs for sample in samples)
    used = {}
    for name, rule in {
        "packed": PackingRule(4096, share_prompts=False),
        "padded": PackingRule(4096, False),
    }.items():
        plans = [micro_batches(samples, rank, 2, rule) for rank in range(2)]
        used[name] = sum(micro.num_inputs for plan in plans for micro in plan)
    assert useful / used["packed"] > 0.999 > useful / used["padded"]


def test_minibatches_are_the_groups_in_order() -> None:
    batch = planned(make_groups(6), 3)
    ids = [[group[0].state.group_id for group in part] for part in batch.minibatches]
    assert ids == [[0, 1], [2, 3], [4, 5]]


def test_untrainable_trajectories_are_left_out_by_name_and_the_group_keeps_its_true_size() -> None:
    states = [make_state(1, i, reward=float(i)) for i in range(8)]
    states[1].status, states[1].error = Status.FAILED, "judge died"
    states[2].reward = float("nan")
    states[3].response_mask[:] = False
    states[4].logprobs[2] = np.nan
    states[5].prompt_ids = states[5].prompt_ids[:0]
    batch = planned([Group(task="task", group_id=1, states=states)])
    assert [s.state.sample_index for s in batch.samples] == [0, 6, 7]
    text = "; ".join(batch.left_out)
    for part in ("sample 1: status is failed (judge died)", "sample 2: reward is nan", "sample 3: no token",
                 "sample 4: a trained token's logprob", "sample 5: the prompt is empty"):  # fmt: skip
        assert f"group ('task', 1) {part}" in text


def test_what_a_model_cannot_read_or_was_not_sampled_is_left_out_by_name() -> None:
    def bad_logprob(state: RolloutState) -> None:
        state.logprobs[1] = 0.5

    def minus_infinity(state: RolloutState) -> None:
        state.logprobs[1] = -np.inf

    def nobody(state: RolloutState) -> None:
        state.policy_versions[2] = -1

    def foreign(state: RolloutState) -> None:
        state.response_ids[0] = 200

    def negative(state: RolloutState) -> None:
        state.prompt_ids = np.asarray([-1, 2], np.int32)

    def greedy(state: RolloutState) -> None:
        state.sample_params = SampleParams(max_tokens=64, temperature=0.0)

    def infinite(state: RolloutState) -> None:
        state.reward = float("-inf")

    cases = {
        bad_logprob: "a trained token's logprob is 0.5, above 0", minus_infinity: "logprob is not finite",
        nobody: "a trained token has no policy version",
        foreign: "token id 200 is outside the model's vocabulary of 200",
        negative: "token id -1 is outside", greedy: "temperature is 0.0: greedy tokens", infinite: "reward is -inf",
    }  # fmt: skip
    states = [make_state(1, i, reward=float(i)) for i in range(len(cases) + 3)]
    for state, spoil in zip(states, cases, strict=False):
        spoil(state)
    long = states[len(cases)]
    long.append_segment(*(np.zeros(8, np.int32), np.zeros(8, np.float32), np.zeros(8, np.int32)))
    batch = plan_batch(
        pack_groups([Group(task="task", group_id=1, states=states)]), AdvantageConfig(), 1, Limits(200, 14)
    )
    assert [sample.state.sample_index for sample in batch.samples] == [len(cases) + 1, len(cases) + 2]
    for i, text in enumerate(
        [*cases.values(), "it has 15 tokens, more than 14, the longest max_prompt_tokens"]
    ):
        assert batch.left_out[i].startswith(f"group ('task', 1) sample {i}: ") and text in batch.left_out[i]
    # Rounding of a logarithm, and what is at the limits, is fine; so is anything without limits.
    states[-1].logprobs[0], states[-1].response_ids[0] = 1e-6, 199
    states[-1].append_segment(*(np.zeros(7, np.int32), np.zeros(7, np.float32), np.zeros(7, np.int32)))
    group = Group(task="task", group_id=1, states=states[-2:])
    whole = plan_batch(pack_groups([group]), AdvantageConfig(), 1, Limits(200, 14))
    assert (whole.left_out, whole.groups_left_out) == ([], {})
    assert len(planned([Group(task="task", group_id=1, states=[long, states[-1]])]).samples) == 2


def test_a_masked_tokens_logprob_may_be_anything() -> None:
    states = [make_state(0, i, reward=float(i)) for i in range(2)]
    states[0].response_mask[1], states[0].logprobs[1] = False, np.nan
    batch = planned([Group(task="task", group_id=0, states=states)])
    assert len(batch.samples) == 2 and batch.samples[0].num_trained == 3


def test_a_group_with_too_few_trainable_members_is_left_out() -> None:
    states = [make_state(0, 0), make_state(0, 1, status=Status.FAILED, reward=None)]
    batch = planned([Group(task="task", group_id=0, states=states)])
    assert batch.samples == [] and "1 trainable of 2, 2 are needed" in batch.left_out[-1]
    (why,) = batch.groups_left_out.values()
    assert "1 trainable of 2, 2 are needed" in why and len(batch.left_out) > 1


@pytest.mark.parametrize(
    "rewards, chosen", [((0.0, 0.0, 0.0, 1.0), [0, 3]), ((1.0, 0.0, 1.0, 0.0), [0, 1]), ((1.0,) * 4, [])]
)
def test_members_of_an_over_sampled_group_are_chosen_as_the_configuration_says(
    rewards: tuple[float, ...], chosen: list[int]
) -> None:
    config = AdvantageConfig.model_validate({"select": {"size": 2, "bounds": [0.1, 0.9]}})
    states = [make_state(0, i, reward=reward) for i, reward in enumerate(rewards)]
    batch = plan_batch(pack_groups([Group(task="task", group_id=0, states=states)]), config, 1)
    assert [sample.state.sample_index for sample in batch.samples] == chosen
    if not chosen:
        assert "no choice of 2 of 4 members lies within train.advantage.select.bounds" in batch.left_out[0]


def test_a_choice_of_fewer_members_than_the_advantage_compares_is_refused() -> None:
    with pytest.raises(ValueError, match=r"select\.size is 1, but 'grpo' compares 2 members or more"):
        AdvantageConfig.model_validate({"select": {"size": 1, "bounds": [0, 1]}})
    with pytest.raises(ValueError, match="the first must be below the second"):
        AdvantageConfig.model_validate({"select": {"size": 2, "bounds": [1, 0]}})


def test_a_sample_knows_its_place_in_the_batchs_columns() -> None:
    groups = make_groups(3)
    groups[1].states[2].status = Status.FAILED
    packed = pack_groups(groups)
    batch = plan_batch(packed, AdvantageConfig(), 1)
    assert batch.num_tokens == len(packed.columns[1]) and len(batch.samples) == 11
    for sample in batch.samples:
        assert np.array_equal(packed.columns[1][sample.places], sample.state.response_ids)
    advantages = np.zeros(batch.num_tokens, np.float32)
    advantages[batch.samples[4].places[-1]] = -1.0
    assert [s for s in batch.samples if with_advantage(advantages)(s)] == [batch.samples[4]]


def test_each_token_has_the_sampling_parameters_of_its_trajectory() -> None:
    states = [make_state(0, i, reward=float(i), temperature=t) for i, t in enumerate((0.5, 2.0))]
    samples = planned([Group(task="task", group_id=0, states=states)]).samples
    (micro,) = micro_batches(samples, 0, 1, PackingRule(64))
    assert micro.temperatures_T.tolist() == [0.5] * 4 + [2.0] * 4 and micro.top_p_T is None
    states = [make_state(0, i, reward=float(i), top_p=p) for i, p in enumerate((0.5, 1.0))]
    samples = planned([Group(task="task", group_id=0, states=states)]).samples
    (micro,) = micro_batches(samples, 0, 1, PackingRule(64))
    assert (
        present(micro.top_p_T).tolist() == [0.5] * 4 + [1.0] * 4
        and present(micro.top_k_T).tolist() == [0] * 8
    )


def test_planning_is_deterministic() -> None:
    first = micro_batches(planned(make_groups(8)).samples, 1, 2, PackingRule(30))
    again = micro_batches(planned(make_groups(8)).samples, 1, 2, PackingRule(30))
    assert all(np.array_equal(a.index_T, b.index_T) for a, b in zip(first, again, strict=True))


def test_trajectories_of_one_session_are_one_member_of_their_group() -> None:
    """Two segments of one session have one reward between them, with which nothing can be compared."""
    alone, two = (
        Group(task="task", group_id=g, states=[make_state(g, 0), make_state(g, 1)]) for g in range(2)
    )
    for state in alone.states:
        state.metadata = {"session_id": "s"}
    batch = planned([alone, two])
    assert {sample.key for sample in batch.samples} == {("task", 1)}
    assert batch.left_out == ["group ('task', 0): 1 trainable of 2, 2 are needed"]


def test_stop_tokens_are_barred_up_to_min_tokens_wherever_a_response_stands() -> None:
    stops = [((2, 3), 2), ((2, 3), 0), ((4,), 9)]
    states = [
        make_state(0, i, reward=float(i), stop_token_ids=ids, min_tokens=least)
        for i, (ids, least) in enumerate(stops)
    ]
    states[0].response_mask[0] = False
    for rule in RULES.values():
        (micro,) = micro_batches(planned([Group(task="task", group_id=0, states=states)]).samples, 0, 1, rule)
        rows = {sample.state.sample_index: [] for sample in micro.samples}  # type: ignore[var-annotated]
        for row, sample in zip(present(micro.barred_TS).tolist(), micro.sample_T, strict=True):
            rows[micro.samples[sample].state.sample_index].append(row)
        assert rows == {0: [[2, 3], [-1, -1], [-1, -1]], 1: [[-1, -1]] * 4, 2: [[4, -1]] * 4}
    plain = [make_state(0, i, reward=float(i), stop_token_ids=(2,)) for i in range(2)]
    (micro,) = micro_batches(
        planned([Group(task="task", group_id=0, states=plain)]).samples, 0, 1, PackingRule(400)
    )
    assert micro.barred_TS is None
