"""Advantages of a batch: how much better than expected each trained token was. Pure functions over NumPy arrays.

    rewards, sessions -> one return a member -> estimator (estimators.py, or a chain of tokens) -> whitened or not
    rewards of turns  -> one return a turn   -> estimator over the members that reached it      -> the same

A member of a group is a session: one trajectory, or several that name the same session, which then count once
and share their advantage. Groups have their true size: those left out (failed, filtered) are not in the arrays.

An estimator of one's own is `module:function` of (Scored, AdvantageConfig) that returns N or M numbers.

Axes: G members of one group; N trajectories of all groups, in the groups' order; M trained tokens of all
trajectories, one after the other; T those of one member.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raypost.config import AdvantageConfig, AdvantageKind
from raypost.config.imports import load_function
from raypost.trainer.algorithm.estimators import (
    STD_EPS,
    Floats,
    centred,
    dr_grpo,
    grpo,
    mc,
    opo,
    pass_at_k,
    rloo,
)
from raypost.trainer.batch.selection import member_reward


@dataclass(frozen=True, slots=True)
class Scored:
    """What the advantages of a batch are computed from. Raises ValueError, naming the group, if it is unusable."""

    rewards_N: Floats
    lengths_N: NDArray[np.int64]
    """Trained tokens of each trajectory, 1 or more."""
    group_sizes: Sequence[int]
    """Trajectories of each group, consecutive, 1 or more."""
    group_names: Sequence[str] = ()
    """How errors call the groups; without, by their number."""
    sessions_N: Sequence[Hashable] | None = None
    """Trajectories of a group with equal ids are one session; None: each trajectory is one."""
    turns_M: NDArray[np.int64] | None = None
    """Turn of its trajectory in which each token was said, from 0; None: all are one turn."""
    turn_rewards_N: Sequence[Floats] | None = None
    """Rewards of the turns of each trajectory, which are part of its reward; None: there are none."""
    token_rewards_M: Floats | None = None
    """Reward of each token besides its trajectory's, such as a KL penalty."""
    values_M: Floats | None = None
    """The critic's value of the state that each token was chosen in."""
    bootstrap_N: Floats | None = None
    """The critic's value of the state after a trajectory's last token, where it was cut off there; 0 where it
    came to an end. None: all ended."""

    def __post_init__(self) -> None:
        """Check that all fields describe the same trajectories."""
        n, m = len(self.rewards_N), int(np.sum(self.lengths_N))
        if sum(self.group_sizes) != n or any(size < 1 for size in self.group_sizes):
            raise ValueError(f"groups of {list(self.group_sizes)[:16]} trajectories do not make {n} rewards")
        if self.group_names and len(self.group_names) != len(self.group_sizes):
            raise ValueError(f"{len(self.group_names)} names for {len(self.group_sizes)} groups")
        for name, wanted in (
            ("lengths_N", n), ("sessions_N", n), ("bootstrap_N", n), ("token_rewards_M", m), ("values_M", m),
            ("turns_M", m), ("turn_rewards_N", n),
        ):  # fmt: skip
            values = getattr(self, name)
            if values is not None and len(values) != wanted:
                raise ValueError(f"{name} has {len(values)} entries, but there are {wanted}")
        self._refuse(self.rewards_N, "reward", per_token=False)
        self._refuse(self.bootstrap_N, "bootstrap value", per_token=False)
        self._refuse(self.token_rewards_M, "token reward", per_token=True)
        self._refuse(self.values_M, "value", per_token=True)
        empty = np.flatnonzero(np.asarray(self.lengths_N) < 1)
        if len(empty):
            raise ValueError(f"{self.member_name(int(empty[0]))} has no trained token: leave it out")

    def group_name(self, group: int) -> str:
        """Return the group's name for errors."""
        return f"group {self.group_names[group] if self.group_names else group}"

    def member_name(self, n: int) -> str:
        """Return trajectory n's name for errors."""
        ends = np.cumsum(self.group_sizes)
        group = int(np.searchsorted(ends, n, side="right"))
        return f"{self.group_name(group)} member {n - int(ends[group]) + self.group_sizes[group]}"

    def _refuse(self, values: Floats | None, what: str, *, per_token: bool) -> None:
        if values is None or np.isfinite(values).all():
            return
        i = int(np.flatnonzero(~np.isfinite(values))[0])
        n = int(np.searchsorted(np.cumsum(self.lengths_N), i, side="right")) if per_token else i
        raise ValueError(
            f"{self.member_name(n)} has {what} {values[i]}: it must be finite, and a failure is no reward"
        )


@dataclass(frozen=True, slots=True)
class Advantages:
    """What `compute_advantages` gives, float64."""

    advantages_M: Floats
    returns_M: Floats | None = None
    """What the critic should have said, before whitening; None without a critic."""


def compute_advantages(scored: Scored, config: AdvantageConfig) -> Advantages:
    """Return the advantages of a whole batch, per trained token.

    Kinds that compare members give all tokens of a member one advantage; a member's return is its reward
    (`config.session_reward` of its trajectories' rewards) plus all its token rewards. reinforce_pp: the discounted
    sum of the rewards from a token on (REINFORCE++, arXiv 2501.03262). gae: see `gae`. Then, if `config.whitens`, all
    tokens of the batch are brought to mean 0 and deviation 1. Raises ValueError naming the group if one is too small,
    if gae has no values, or if a function given by import path returns something else.
    """
    result = ADVANTAGES.get(config.kind, _by_import_path)(scored, config)
    if config.whitens:
        return replace(result, advantages_M=whitened(result.advantages_M, config.std_eps))
    return result


def whitened(values: Floats, eps: float = STD_EPS) -> Floats:
    """Return (x - mean) / (std + eps) over all values, std unbiased. Equal values, or a single one, give exactly 0."""
    centre = centred(values)
    if not centre.any():
        return centre
    return centre / (float(values.std(ddof=1)) + eps)


def gae(
    rewards_T: ArrayLike, values_T: ArrayLike, bootstrap: float, discount: float, gae_lambda: float
) -> tuple[Floats, Floats]:
    """Generalised advantage estimation, arXiv 1506.02438. -> advantages_T, returns_T = advantages_T + values_T.

    delta_t = r_t + discount * V_(t+1) - V_t; A_t = delta_t + discount * lambda * A_(t+1). T are the trained tokens
    of one member: what a tool or the environment wrote between two of them takes no step. `values_T[t]` is the value of
    the state in which token t was chosen; after the last token it is `bootstrap`: 0 where the member came to an
    end, the critic's value where it was cut off.
    """
    rewards, values = np.asarray(rewards_T, np.float64), np.asarray(values_T, np.float64)
    if rewards.shape != values.shape:
        raise ValueError(f"{rewards.shape} rewards, but {values.shape} values")
    deltas = rewards + discount * np.append(values[1:], bootstrap) - values
    sums, after = [], 0.0
    for delta in reversed(deltas.tolist()):
        after = delta + discount * gae_lambda * after
        sums.append(after)
    advantages = np.asarray(sums[::-1], np.float64)
    return advantages, advantages + values


# ---------------------------------------------------------------- members


def _members(scored: Scored) -> list[list[NDArray[np.int64]]]:
    """By group and member: the member's trajectories, in the batch's order."""
    bounds = np.cumsum([0, *scored.group_sizes]).tolist()
    groups = []
    for start, end in pairwise(bounds):
        sessions: dict[Hashable, list[int]] = {}
        for n in range(start, end):
            sessions.setdefault(scored.sessions_N[n] if scored.sessions_N is not None else n, []).append(n)
        groups.append([np.asarray(one, np.int64) for one in sessions.values()])
    return groups


def _compared(estimate: GroupEstimator, scored: Scored, config: AdvantageConfig) -> Advantages:
    if config.credit == "turn":
        return _compared_by_turn(estimate, scored, config)
    token_sums_N = _token_sums(scored)
    advantages_N = np.empty(len(scored.rewards_N))
    for g, members in enumerate(_members(scored)):
        rewards_G = np.asarray(
            [
                member_reward(scored.rewards_N[one], config.session_reward) + token_sums_N[one].sum()
                for one in members
            ]
        )
        lengths_G = np.asarray([scored.lengths_N[one].sum() for one in members], np.float64)
        try:
            values_G = estimate(rewards_G, lengths_G, config)
        except ValueError as error:
            raise ValueError(f"{scored.group_name(g)}: {error}") from error
        for one, value in zip(members, values_G, strict=True):
            advantages_N[one] = value
    return Advantages(np.repeat(advantages_N, scored.lengths_N))


def _compared_by_turn(estimate: GroupEstimator, scored: Scored, config: AdvantageConfig) -> Advantages:
    """Compare the members that reached a turn by their rewards from it on; too few of them: advantage 0."""
    advantages_M = np.zeros(int(np.sum(scored.lengths_N)))
    ends_N = np.cumsum(scored.lengths_N)
    for g, members in enumerate(_members(scored)):
        turns = [_turns(scored, ends_N, one, config) for one in members]
        lengths_G = np.asarray([scored.lengths_N[one].sum() for one in members], np.float64)
        for number in range(max(map(len, turns))):
            reached = [member for member, of_member in enumerate(turns) if number < len(of_member)]
            if number and len(reached) < config.smallest_group:
                break
            rewards_G = np.asarray([turns[member][number][1] for member in reached])
            try:
                values_G = estimate(rewards_G, lengths_G[reached], config)
            except ValueError as error:
                raise ValueError(f"{scored.group_name(g)}: {error}") from error
            for member, value in zip(reached, values_G, strict=True):
                advantages_M[turns[member][number][0]] = value
    return Advantages(advantages_M)


def _turns(
    scored: Scored, ends_N: NDArray[np.int64], member: NDArray[np.int64], config: AdvantageConfig
) -> list[tuple[NDArray[np.int64], float]]:
    """Return the trained turns of a member in their order: each one's tokens, and its reward to go."""
    tokens, rewards = list[NDArray[np.int64]](), list[float]()
    for n in member:
        places = np.arange(ends_N[n] - scored.lengths_N[n], ends_N[n])
        numbers = np.zeros_like(places) if scored.turns_M is None else scored.turns_M[places]
        for number in np.unique(numbers):
            tokens.append(places[numbers == number])
            rewards.append(0.0 if scored.turn_rewards_N is None else float(scored.turn_rewards_N[n][number]))
    # What no turn has, such as a judge's reward, belongs to the last one.
    rewards[-1] += member_reward(scored.rewards_N[member], config.session_reward) - sum(rewards)
    if scored.token_rewards_M is not None:
        rewards = [r + float(scored.token_rewards_M[t].sum()) for r, t in zip(rewards, tokens, strict=True)]
    to_go = list(accumulate(reversed(rewards), lambda after, own: own + config.turn_discount * after))
    return list(zip(tokens, reversed(to_go), strict=True))


def _chained(scored: Scored, config: AdvantageConfig) -> Advantages:
    ends_N = np.cumsum(scored.lengths_N)
    rewards_M = np.zeros(int(ends_N[-1]) if len(ends_N) else 0)
    # A critic that always says 0 leaves the discounted sum of the rewards.
    values_M, bootstrap_N, gae_lambda = np.zeros_like(rewards_M), None, 1.0
    if config.kind == "gae":
        if scored.values_M is None:
            raise ValueError(
                "advantage 'gae' needs the critic's values, but there are none: compute them first"
            )
        values_M, bootstrap_N, gae_lambda = scored.values_M, scored.bootstrap_N, config.gae_lambda
    if scored.token_rewards_M is not None:
        rewards_M += scored.token_rewards_M
    advantages_M, returns_M = np.empty_like(rewards_M), np.empty_like(rewards_M)
    for one in (one for members in _members(scored) for one in members):
        if config.session_reward == "sum":
            rewards_M[ends_N[one] - 1] += scored.rewards_N[one]
        else:
            rewards_M[ends_N[one[-1]] - 1] += member_reward(scored.rewards_N[one], config.session_reward)
        tokens = np.concatenate([np.arange(ends_N[n] - scored.lengths_N[n], ends_N[n]) for n in one])
        last = 0.0 if bootstrap_N is None else float(bootstrap_N[one[-1]])
        advantages_M[tokens], returns_M[tokens] = gae(
            rewards_M[tokens], values_M[tokens], last, config.discount, gae_lambda
        )
    return Advantages(advantages_M, returns_M if config.kind == "gae" else None)


def _token_sums(scored: Scored) -> Floats:
    """Token rewards of each trajectory."""
    if scored.token_rewards_M is None or not len(scored.rewards_N):
        return np.zeros(len(scored.rewards_N))
    starts_N = np.cumsum([0, *scored.lengths_N[:-1]])
    return np.add.reduceat(np.asarray(scored.token_rewards_M, np.float64), starts_N)


def _by_import_path(scored: Scored, config: AdvantageConfig) -> Advantages:
    function = load_function(config.kind, "train.advantage.kind")
    values = np.asarray(function(scored, config), np.float64)
    n, m = len(scored.rewards_N), int(np.sum(scored.lengths_N))
    if values.shape not in ((n,), (m,)) or not np.isfinite(values).all():
        raise ValueError(
            f"advantage {config.kind!r} must return {n} (trajectories) or {m} (tokens) finite numbers, got shape "
            f"{values.shape}, {np.count_nonzero(~np.isfinite(values))} not finite"
        )
    return Advantages(values if len(values) == m else np.repeat(values, scored.lengths_N))


GroupEstimator = Callable[[Floats, Floats, AdvantageConfig], Floats]
"""rewards_G, lengths_G, config -> advantages_G."""

_COMPARED: dict[str, GroupEstimator] = {
    "grpo": lambda rewards_G, _, config: grpo(rewards_G, config.std_eps),
    "dr_grpo": lambda rewards_G, *_: dr_grpo(rewards_G),
    "rloo": lambda rewards_G, *_: rloo(rewards_G),
    "opo": lambda rewards_G, lengths_G, _: opo(rewards_G, lengths_G),
    "pass_at_k": lambda rewards_G, _, config: pass_at_k(rewards_G, config.k, config.std_eps),
    "mc": lambda rewards_G, _, config: mc(rewards_G, config.std_eps),
    # Whitened over the batch afterwards.
    "reinforce_pp_baseline": lambda rewards_G, *_: dr_grpo(rewards_G),
}

ADVANTAGES: dict[str, Callable[[Scored, AdvantageConfig], Advantages]] = {
    **{kind: partial(_compared, estimate) for kind, estimate in _COMPARED.items()},
    "reinforce_pp": _chained,
    "gae": _chained,
}
"""By the names that raypost.config.AdvantageKind lists."""
assert ADVANTAGES.keys() == set(get_args(AdvantageKind)), "every name of AdvantageKind has one entry"
