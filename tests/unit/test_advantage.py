"""Advantages against loops that spell the formulas out, over random groups, masks and lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from raypost.config import AdvantageConfig
from raypost.errors import ConfigError
from raypost.trainer.algorithm.advantage import ADVANTAGES, Scored, compute_advantages, gae, whitened
from raypost.trainer.algorithm.estimators import STD_EPS, dr_grpo, grpo, mc, opo, pass_at_k, rloo

REWARD = st.floats(-5, 5, allow_nan=False).map(lambda r: round(r, 3))
GROUP = st.lists(st.one_of(REWARD, st.sampled_from([0.0, 1.0])), min_size=2, max_size=9)


def mean(values: Any) -> float:
    return math.fsum(values) / len(values)


def std(values: Any, ddof: int = 1) -> float:
    return math.sqrt(math.fsum((v - mean(values)) ** 2 for v in values) / (len(values) - ddof))


def close(got: Any, expected: Any) -> None:
    assert np.allclose(got, expected, rtol=1e-6, atol=1e-6), (got, expected)


# ---------------------------------------------------------------- members compared


def naive_pass_at_k(rewards: Any, k: int, eps: float) -> list[float]:
    sets = list(combinations(range(len(rewards)), k))
    worth = {one: max(rewards[i] for i in one) for one in sets}
    centre, spread = mean(list(worth.values())), std(list(worth.values()), ddof=0)
    return [
        (mean([worth[one] for one in sets if i in one]) - centre) / (spread + eps)
        for i in range(len(rewards))
    ]


@settings(max_examples=80, deadline=None)
@given(rewards=GROUP, data=st.data())
def test_estimators_are_their_formulas(rewards: Any, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=len(rewards), max_size=len(rewards)))
    n, total = len(rewards), math.fsum(rewards)
    eps = 1e-4
    close(grpo(rewards, eps), [(r - mean(rewards)) / (std(rewards) + eps) for r in rewards])
    close(mc(rewards, eps), [(r - mean(rewards)) / max(std(rewards), eps) for r in rewards])
    close(dr_grpo(rewards), [r - mean(rewards) for r in rewards])
    close(rloo(rewards), [r - (total - r) / (n - 1) for r in rewards])
    weighted = math.fsum(length * r for length, r in zip(lengths, rewards, strict=True))
    close(opo(rewards, lengths), [r - weighted / sum(lengths) for r in rewards])
    k = data.draw(st.integers(1, n - 1))
    close(pass_at_k(rewards, k, eps), naive_pass_at_k(rewards, k, eps))


def test_pass_at_k_of_right_and_wrong_is_the_papers_closed_form() -> None:
    size, wrong, k = 8, 5, 3
    mean_worth = 1 - math.comb(wrong, k) / math.comb(size, k)
    spread = math.sqrt(mean_worth * (1 - mean_worth))
    right = (1 - mean_worth) / spread
    other = (1 - mean_worth - math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1)) / spread
    got = pass_at_k([0.0] * wrong + [1.0] * 3, k, eps=1e-12)
    close(got, [other] * wrong + [right] * 3)


def test_numbers_of_known_groups() -> None:
    close(mc([0.0, 1.0]), [-0.70710678, 0.70710678])
    assert grpo([0.0, 1.0])[1] == pytest.approx(0.5 / (math.sqrt(0.5) + STD_EPS))
    assert dr_grpo([0.0, 0.0, 0.0, 1.0]).tolist() == [-0.25, -0.25, -0.25, 0.75]
    assert rloo([0.0, 0.0, 1.0]).tolist() == [-0.5, -0.5, 1.0]
    assert opo([0.0, 1.0], [3, 1]).tolist() == [-0.25, 0.75]


COMPARING: dict[str, Callable[[Any], NDArray[np.float64]]] = {
    "grpo": grpo,
    "mc": mc,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": lambda rewards: opo(rewards, np.ones(np.shape(rewards))),
    "pass_at_k": lambda rewards: pass_at_k(rewards, 1),
}


@pytest.mark.parametrize("kind", COMPARING)
def test_equal_rewards_give_exactly_zero(kind: str) -> None:
    # In floating point the mean of three times 0.1 is not 0.1.
    assert np.mean([0.1] * 3) != 0.1 and COMPARING[kind]([0.1] * 3).tolist() == [0.0] * 3


@pytest.mark.parametrize("kind", COMPARING)
@pytest.mark.parametrize("rewards", [[], [1.0], [[0.0, 1.0]], [0.0, float("nan")], [0.0, float("inf")]])
def test_group_of_one_and_rewards_that_are_no_numbers_are_refused(kind: str, rewards: Any) -> None:
    with pytest.raises(ValueError, match=r"2 or more rewards|must be finite"):
        COMPARING[kind](rewards)


def test_a_set_as_large_as_the_group_and_lengths_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pass@3 compares sets of 3 among 3 members: use k from 1 to 2"):
        pass_at_k([0.0, 1.0, 1.0], 3)
    with pytest.raises(ValueError, match="positive length"):
        opo([0.0, 1.0], [0, 4])


# ---------------------------------------------------------------- whole batches


def batch(sizes: Sequence[int], seed: int = 0, **fields: Any) -> Scored:
    """Random rewards and lengths of groups of these sizes."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, sum(sizes))
    return Scored(np.round(rng.normal(size=sum(sizes)), 3), lengths, sizes, **fields)


def config(kind: str, **fields: Any) -> AdvantageConfig:
    return AdvantageConfig(kind=kind, **fields)


def rows(scored: Scored, values: Any) -> list[NDArray[np.float64]]:
    """Values of tokens, a list a trajectory."""
    return np.split(values, np.cumsum(scored.lengths_N)[:-1])


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(5, 8), min_size=1, max_size=4), seed=st.integers(0, 999))
@pytest.mark.parametrize("kind", ["grpo", "mc", "dr_grpo", "rloo", "opo", "pass_at_k"])
def test_each_group_is_its_own_and_each_token_has_its_members_advantage(
    kind: str, sizes: list[int], seed: int
) -> None:
    scored, cfg = batch(sizes, seed), config(kind)
    got = rows(scored, compute_advantages(scored, cfg).advantages_M)
    ends = np.cumsum(sizes)
    for end, size in zip(ends, sizes, strict=True):
        members = slice(end - size, end)
        alone = Scored(scored.rewards_N[members], scored.lengths_N[members], [size])
        expected = rows(alone, compute_advantages(alone, cfg).advantages_M)
        for a, b, length in zip(got[members], expected, alone.lengths_N, strict=True):
            assert len(a) == length and len(set(a.tolist())) == 1 and a[0] == b[0]


def test_groups_keep_their_true_sizes() -> None:
    rewards = np.random.default_rng(0).normal(size=9)
    parts = [grpo(rewards[:4]), grpo(rewards[4:6]), grpo(rewards[6:])]
    got = compute_advantages(Scored(rewards, np.ones(9, int), [4, 2, 3]), config("grpo"))
    assert np.array_equal(got.advantages_M, np.concatenate(parts)) and got.returns_M is None


@pytest.mark.parametrize("kind", ["grpo", "rloo", "opo", "reinforce_pp_baseline"])
def test_segments_of_one_session_count_once_and_share_their_advantage(kind: str) -> None:
    # The first session has three segments, and would weigh threefold.
    lengths, once = np.asarray([2, 1, 4, 3, 5]), np.asarray([7, 3, 5])
    scored = Scored(np.asarray([1.0, 1, 1, 0, 0.5]), lengths, [5], sessions_N=["a", "a", "a", "b", "c"])
    got = compute_advantages(scored, config(kind)).advantages_M
    alone = compute_advantages(Scored(np.asarray([1.0, 0, 0.5]), once, [3]), config(kind)).advantages_M
    close(got, alone)


@pytest.mark.parametrize("how, expected", [("last", 3.0), ("sum", 6.0), ("mean", 2.0), ("max", 3.0)])
def test_a_session_is_worth_what_the_configuration_says(how: str, expected: Any) -> None:
    scored = Scored(np.asarray([1.0, 2, 3, 0]), np.ones(4, int), [4], sessions_N=[1, 1, 1, 2])
    got = compute_advantages(scored, config("dr_grpo", session_reward=how)).advantages_M
    close(got, [expected / 2] * 3 + [-expected / 2])


def test_sessions_of_two_groups_with_the_same_id_are_two() -> None:
    scored = Scored(np.asarray([1.0, 0, 5, 0]), np.ones(4, int), [2, 2], sessions_N=[0, 1, 0, 1])
    close(compute_advantages(scored, config("dr_grpo")).advantages_M, [0.5, -0.5, 2.5, -2.5])


def naive_whitened(values: Any, eps: float = STD_EPS) -> list[float]:
    if len(set(values)) == 1:
        return [0.0] * len(values)
    return [(v - mean(values)) / (std(values) + eps) for v in values]


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(2, 4), min_size=1, max_size=4), seed=st.integers(0, 999))
def test_reinforce_pp_baseline_is_the_group_mean_and_then_the_batch(sizes: list[int], seed: int) -> None:
    scored = batch(sizes, seed)
    flat, n = [], 0
    for size in sizes:
        rewards = scored.rewards_N[n : n + size].tolist()
        for i, r in enumerate(rewards):
            flat += [r - mean(rewards)] * int(scored.lengths_N[n + i])
        n += size
    close(compute_advantages(scored, config("reinforce_pp_baseline")).advantages_M, naive_whitened(flat))


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), seed=st.integers(0, 999),
       discount=st.sampled_from([1.0, 0.9]))  # fmt: skip
def test_reinforce_pp_is_the_sum_from_each_token_on_and_then_the_batch(
    sizes: list[int], seed: int, discount: float
) -> None:
    scored = batch(sizes, seed)
    penalties = np.random.default_rng(seed).normal(size=scored.lengths_N.sum())
    scored = Scored(scored.rewards_N, scored.lengths_N, sizes, token_rewards_M=penalties)
    flat = []
    for reward, part in zip(scored.rewards_N, rows(scored, penalties), strict=True):
        rewards = part.tolist()
        rewards[-1] += reward
        for t in range(len(rewards)):
            flat.append(sum(discount ** (i - t) * rewards[i] for i in range(t, len(rewards))))
    got = compute_advantages(scored, config("reinforce_pp", discount=discount)).advantages_M
    close(got, naive_whitened(flat))
    raw = compute_advantages(scored, config("reinforce_pp", discount=discount, whiten=False)).advantages_M
    close(raw, flat)


def naive_gae(rewards: Any, values: Any, bootstrap: Any, discount: float, lam: float) -> list[float]:
    """As the sum that defines it, not as the recursion."""
    after = [*values[1:], bootstrap]
    deltas = [r + discount * v1 - v for r, v, v1 in zip(rewards, values, after, strict=True)]
    n = len(deltas)
    return [sum((discount * lam) ** (i - t) * deltas[i] for i in range(t, n)) for t in range(n)]


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), seed=st.integers(0, 999), cut=st.booleans(),
       discount=st.sampled_from([1.0, 0.95]), lam=st.sampled_from([0.0, 0.9, 1.0]))  # fmt: skip
def test_gae_is_its_sum_over_the_trained_tokens(
    sizes: list[int], seed: int, cut: bool, discount: float, lam: float
) -> None:
    rng = np.random.default_rng(seed)
    scored = batch(sizes, seed)
    m, n = int(scored.lengths_N.sum()), sum(sizes)
    values, bootstrap = rng.normal(size=m), rng.normal(size=n) if cut else None
    scored = Scored(scored.rewards_N, scored.lengths_N, sizes, values_M=values, bootstrap_N=bootstrap)
    expected: list[float] = []
    for i, (reward, part) in enumerate(zip(scored.rewards_N, rows(scored, values), strict=True)):
        rewards = [0.0] * (len(part) - 1) + [reward]
        expected += naive_gae(
            rewards, part.tolist(), 0.0 if bootstrap is None else bootstrap[i], discount, lam
        )
    cfg = config("gae", discount=discount, gae_lambda=lam, whiten=False)
    got = compute_advantages(scored, cfg)
    close(got.advantages_M, expected)
    close(got.returns_M, np.asarray(expected) + values)
    white = compute_advantages(scored, config("gae", discount=discount, gae_lambda=lam))
    close(white.advantages_M, naive_whitened(expected))
    close(white.returns_M, got.returns_M)


def test_gae_goes_through_the_segments_of_a_session_as_one() -> None:
    values = np.asarray([0.1, 0.2, 0.3, 0.4, 0.9])
    scored = Scored(
        np.asarray([1.0, 0.0, 2.0]), np.asarray([2, 1, 2]), [3], sessions_N=["a", "b", "a"], values_M=values
    )
    for how, rewards in (("last", [0, 0, 0, 2.0]), ("sum", [0, 1.0, 0, 2.0]), ("max", [0, 0, 0, 2.0])):
        got = compute_advantages(scored, config("gae", whiten=False, session_reward=how)).advantages_M
        close(got[[0, 1, 3, 4]], naive_gae(rewards, [0.1, 0.2, 0.4, 0.9], 0.0, 1.0, 0.95))
        close(got[2], -0.3)


def test_lambda_one_is_the_reward_minus_the_value_and_lambda_zero_one_step() -> None:
    advantages, returns = gae([0, 0, 1.0], [0.5, 0.25, 0.125], 0.0, 1.0, 1.0)
    assert advantages.tolist() == [0.5, 0.75, 0.875] and returns.tolist() == [1.0, 1.0, 1.0]
    assert gae([0, 0, 1.0], [0.5, 0.25, 0.125], 0.0, 1.0, 0.0)[0].tolist() == [-0.25, -0.125, 0.875]


def test_token_rewards_count_in_a_members_return() -> None:
    scored = Scored(
        np.asarray([1.0, 1.0]), np.asarray([2, 3]), [2], token_rewards_M=np.asarray([-1.0, 0, 0, -0.5, -0.5])
    )
    assert not compute_advantages(scored, config("dr_grpo")).advantages_M.any()
    scored = Scored(
        np.asarray([1.0, 1.0]), np.asarray([2, 3]), [2], token_rewards_M=np.asarray([-1.0, 0, 0, 0, -0.5])
    )
    close(compute_advantages(scored, config("dr_grpo")).advantages_M, [-0.25, -0.25, 0.25, 0.25, 0.25])


def test_whitening_has_mean_0_and_deviation_1_and_equal_values_become_0() -> None:
    white = whitened(np.random.default_rng(0).normal(3, 7, 500))
    assert abs(white.mean()) < 1e-12 and white.std(ddof=1) == pytest.approx(1, abs=1e-6)
    assert whitened(np.full(3, 0.1)).tolist() == [0.0] * 3 and whitened(np.asarray([4.0])).tolist() == [0.0]
    scored = Scored(np.asarray([1.0, 0.0, 0.0]), np.asarray([1, 2, 3]), [3])
    plain = compute_advantages(scored, config("dr_grpo")).advantages_M
    close(
        compute_advantages(scored, config("dr_grpo", whiten=True)).advantages_M,
        naive_whitened(plain.tolist()),
    )


# ---------------------------------------------------------------- one's own


def half_of_the_reward(scored: Scored, _: Any) -> NDArray[np.float64]:
    return scored.rewards_N / 2


def by_token(scored: Scored, cfg: AdvantageConfig) -> NDArray[np.float64]:
    return np.arange(scored.lengths_N.sum()) * cfg.std_eps


def too_few(scored: Scored, _: Any) -> NDArray[np.float64]:
    return np.zeros(1)


def no_number(scored: Scored, _: Any) -> NDArray[np.float64]:
    return scored.rewards_N * float("nan")


def test_a_function_by_import_path_gives_a_number_a_trajectory_or_a_token() -> None:
    scored = Scored(np.asarray([1.0, 4.0]), np.asarray([2, 1]), [1, 1])
    here = __name__
    assert compute_advantages(scored, config(f"{here}:half_of_the_reward")).advantages_M.tolist() == [
        0.5,
        0.5,
        2.0,
    ]
    assert compute_advantages(scored, config(f"{here}:by_token", std_eps=2)).advantages_M.tolist() == [
        0,
        2,
        4,
    ]
    for name in ("too_few", "no_number"):
        with pytest.raises(
            ValueError, match=r"must return 2 \(trajectories\) or 3 \(tokens\) finite numbers"
        ):
            compute_advantages(scored, config(f"{here}:{name}"))
    with pytest.raises(ConfigError, match="has no 'nothing'"):
        compute_advantages(scored, config(f"{here}:nothing"))


# ---------------------------------------------------------------- what is refused


def test_configuration_names_what_exists() -> None:
    with pytest.raises(ValueError, match=r"advantage.kind is 'gpo'; there are grpo, dr_grpo"):
        config("gpo")
    assert {kind: config(kind).smallest_group for kind in ADVANTAGES} == {
        "grpo": 2, "dr_grpo": 2, "rloo": 2, "opo": 2, "mc": 2, "reinforce_pp_baseline": 2,
        "pass_at_k": 5, "reinforce_pp": 1, "gae": 1,
    }  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in ADVANTAGES if kind not in ("reinforce_pp", "gae")])
def test_a_group_that_is_too_small_is_named(kind: str) -> None:
    scored = Scored(
        np.asarray([1.0, 0.0, 1.0]), np.ones(3, int), [2, 1], group_names=["('sum', 7)", "('sum', 9)"]
    )
    with pytest.raises(ValueError, match=r"group \('sum', [79]\): "):
        compute_advantages(scored, config(kind, k=2))


def test_one_session_is_one_member_however_many_segments_it_has() -> None:
    scored = Scored(np.asarray([1.0, 0.0]), np.ones(2, int), [2], sessions_N=["a", "a"])
    with pytest.raises(ValueError, match="group 0: a group-relative advantage needs 2 or more"):
        compute_advantages(scored, config("grpo"))


@pytest.mark.parametrize("fields, text", [
    ({"rewards_N": np.asarray([0.0, 1, 2, np.nan])}, r"group b member 1 has reward nan: it must be finite"),
    ({"lengths_N": np.asarray([1, 2, 0, 3]), "values_M": None}, r"group b member 0 has no trained token: leave"),
    ({"group_sizes": [2, 1]}, r"groups of \[2, 1\] trajectories do not make 4 rewards"),
    ({"group_sizes": [4, 0]}, r"groups of \[4, 0\] trajectories do not make 4 rewards"),
    ({"group_names": ["a"]}, r"1 names for 2 groups"),
    ({"lengths_N": np.asarray([1, 2, 3])}, r"lengths_N has 3 entries, but there are 4"),
    ({"sessions_N": [1]}, r"sessions_N has 1 entries, but there are 4"),
    ({"values_M": np.zeros(3)}, r"values_M has 3 entries, but there are 8"),
    ({"values_M": np.asarray([0, 0, 0, np.inf, 0, 0, 0, 0])}, r"group b member 0 has value inf"),
    ({"token_rewards_M": np.asarray([0] * 7 + [np.nan])}, r"group b member 1 has token reward nan"),
    ({"bootstrap_N": np.asarray([0, np.nan, 0, 0])}, r"group a member 1 has bootstrap value nan"),
])  # fmt: skip
def test_what_cannot_be_scored_is_refused_by_the_name_of_its_group(fields: Any, text: str) -> None:
    good: dict[str, Any] = {"rewards_N": np.zeros(4), "lengths_N": np.asarray([1, 2, 2, 3]), "group_sizes": [2, 2],
            "group_names": ["a", "b"], "values_M": np.zeros(8)}  # fmt: skip
    Scored(**good)
    with pytest.raises(ValueError, match=text):
        Scored(**(good | fields))


def test_gae_without_a_critic_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the critic's values, but there are none"):
        compute_advantages(batch([2]), config("gae"))


def test_no_groups_have_no_advantages() -> None:
    for kind in ADVANTAGES:
        got = compute_advantages(
            Scored(np.empty(0), np.empty(0, int), [], values_M=np.empty(0)), config(kind)
        )
        assert got.advantages_M.shape == (0,)


# ---------------------------------------------------------------- credit by turn

COMPARED = ["grpo", "dr_grpo", "rloo", "opo", "mc", "reinforce_pp_baseline"]


def of_turns(rewards: Sequence[Sequence[float]], extra: Sequence[float], tokens: int = 2) -> Scored:
    """One group: the turns' rewards of each member, and what a judge adds; each turn has so many tokens."""
    return Scored(
        np.asarray([math.fsum(own) + more for own, more in zip(rewards, extra, strict=True)]),
        np.asarray([tokens * len(own) for own in rewards]),
        [len(rewards)],
        turns_M=np.concatenate([np.repeat(np.arange(len(own)), tokens) for own in rewards]),
        turn_rewards_N=[np.asarray(own) for own in rewards],
    )


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(COMPARED),
    final=GROUP,
    turns=st.integers(1, 5),
    tokens=st.integers(1, 3),
    judged=st.booleans(),
)
def test_by_turn_is_by_outcome_where_the_only_reward_is_at_the_end_and_all_have_as_many_turns(
    kind: str, final: Any, turns: int, tokens: int, judged: bool
) -> None:
    own = [[0.0] * (turns - 1) + [0.0 if judged else r] for r in final]
    scored = of_turns(own, final if judged else [0.0] * len(final), tokens)
    close(
        compute_advantages(scored, config(kind, credit="turn")).advantages_M,
        compute_advantages(scored, config(kind)).advantages_M,
    )


@settings(max_examples=60, deadline=None)
@given(
    rewards=st.lists(st.lists(REWARD, min_size=1, max_size=4), min_size=2, max_size=5),
    discount=st.sampled_from([1.0, 0.5]),
    data=st.data(),
)
def test_a_turn_is_compared_by_its_reward_to_go_among_the_members_that_reached_it(
    rewards: Any, discount: float, data: st.DataObject
) -> None:
    extra = data.draw(st.lists(REWARD, min_size=len(rewards), max_size=len(rewards)))
    got = compute_advantages(
        of_turns(rewards, extra), config("dr_grpo", credit="turn", turn_discount=discount)
    ).advantages_M
    whole = [[*own[:-1], own[-1] + more] for own, more in zip(rewards, extra, strict=True)]
    to_go = [
        [sum(discount ** (k - t) * own[k] for k in range(t, len(own))) for t in range(len(own))]
        for own in whole
    ]
    expected = []
    for own in to_go:
        for t, value in enumerate(own):
            reached = [other[t] for other in to_go if len(other) > t]
            expected += [value - mean(reached) if len(reached) > 1 else 0.0] * 2
    close(got, expected)


def test_the_turns_of_a_session_follow_one_another_over_its_trajectories() -> None:
    """Member a has two trajectories of a turn each, b one of two turns: the same to whoever compares them."""
    scored = Scored(
        np.asarray([3.0, 3.0, 1.0]),
        np.asarray([1, 1, 2]),
        [3],
        sessions_N=["a", "a", "b"],
        turns_M=np.asarray([0, 1, 0, 1]),
        turn_rewards_N=[np.asarray([2.0]), np.asarray([2.0, 1.0]), np.asarray([0.0, 1.0])],
    )
    got = compute_advantages(scored, config("dr_grpo", credit="turn")).advantages_M
    assert got.tolist() == [1.0, 0.0, -1.0, 0.0]


def test_kinds_that_compare_nothing_have_no_credit_by_turn() -> None:
    for kind in ("gae", "reinforce_pp"):
        with pytest.raises(ValueError, match="compares none"):
            config(kind, credit="turn")
    with pytest.raises(ValueError, match="set credit to 'turn'"):
        config("grpo", turn_discount=0.5)
