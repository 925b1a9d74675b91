"""The configuration of the algorithm: advantage, loss, off-policy correction.

A kind that is documented with `or module:function` also takes a function by import path; its signature is in the
module that calls it (advantage.py, losses.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from raypost.config.resources import ConfigModel, PoolConfig

KlKind = Literal["k1", "k2", "k3"]
Level = Literal["token", "sequence", "geometric"]
Aggregation = Literal["token", "sequence", "constant"]
Proximal = Literal["recompute", "interpolate", "rollout"]

Selector = Literal["first", "uniform", "balanced"]
SessionReward = Literal["last", "sum", "mean", "max"]
AdvantageKind = Literal[
    "grpo", "dr_grpo", "rloo", "opo", "pass_at_k", "mc",
    "reinforce_pp", "reinforce_pp_baseline", "gae",
]  # fmt: skip
"""Names of `train.advantage.kind`; each has an entry of raypost.trainer.algorithm.advantage.ADVANTAGES."""
LossKind = Literal["ppo", "gspo", "cispo"]
"""Names of `train.loss.kind`; each has an entry of raypost.trainer.algorithm.losses.POLICY_LOSSES."""


class SelectionConfig(ConfigModel):
    """Which members of an over-sampled group are trained, by their rewards (dynamic sampling, arXiv 2503.14476)."""

    size: Annotated[int, Field(ge=1)]
    """Members that are trained; a task's group_size is how many are sampled. A group with fewer trains all."""
    selector: Selector = "balanced"
    """first: the first ones. uniform: evenly spread over the order of reward. balanced: those whose mean reward is
    closest to the middle of the bounds, of equal ones those that differ most."""
    bounds: tuple[float, float]
    """The mean reward of the chosen members lies strictly between these two; a group without such a choice is left
    out."""

    @model_validator(mode="after")
    def _bounds_differ(self) -> SelectionConfig:
        if not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"select.bounds are {list(self.bounds)}: the first must be below the second")
        return self


class AdvantageConfig(ConfigModel):
    """How much better than expected a trajectory, or a token, was."""

    kind: AdvantageKind | str = "grpo"
    """How advantages are computed: grpo, dr_grpo (no division by the deviation), rloo, opo, pass_at_k, mc,
    reinforce_pp, reinforce_pp_baseline, gae (needs a critic), or module:function."""
    std_eps: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the standard deviation of rewards, so that nearly equal ones are not blown up."""
    k: Annotated[int, Field(ge=2)] = 4
    """With pass_at_k: number of attempts of which the best counts. A group needs more members than that."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount (gamma) per trained token, with reinforce_pp and gae."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda of generalised advantage estimation: 0 trusts the critic, 1 the rewards."""
    whiten: bool | None = None
    """Whether the advantages of a batch's tokens are brought to mean 0 and deviation 1; null: as the kind defines it,
    which is yes for reinforce_pp, reinforce_pp_baseline and gae."""
    session_reward: SessionReward = "last"
    """Reward of a session of several trajectories, from theirs; the session counts as one member of its group."""
    credit: Literal["outcome", "turn"] = "outcome"
    """What a token of a trajectory of several turns is compared by. outcome: the whole reward. turn: the rewards from
    its turn on (what a judge gives belongs to the last), among the members that reached that turn."""
    turn_discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """With credit turn: what the reward of the next turn is worth in this one."""
    select: SelectionConfig | None = None
    """Train some members of each group only; null: all that can be trained."""
    overlong_buffer: Annotated[int, Field(ge=0)] = 0
    """Tokens before a response's limit over which its reward falls (DAPO); 0: it does not fall."""
    overlong_penalty: Annotated[float, Field(gt=0)] = 1.0
    """What the reward has fallen by at the limit."""

    @property
    def smallest_group(self) -> int:
        """Trainable members from which a group has an advantage; a smaller one is left out."""
        if self.kind == "pass_at_k":
            return self.k + 1
        return 1 if self.kind in ("reinforce_pp", "gae") or ":" in self.kind else 2

    @property
    def whitens(self) -> bool:
        """`whiten`, or what the kind is defined as."""
        if self.whiten is not None:
            return self.whiten
        return self.kind in ("reinforce_pp", "reinforce_pp_baseline", "gae")

    @model_validator(mode="after")
    def _kind_exists(self) -> AdvantageConfig:
        _check_kind("advantage.kind", self.kind, AdvantageKind)
        if self.credit == "turn" and self.kind in ("reinforce_pp", "gae"):
            raise ValueError(
                f"advantage.credit 'turn' compares members turn by turn, and {self.kind!r} compares none: use another "
                "kind, or credit 'outcome'"
            )
        if self.credit == "outcome" and self.turn_discount != 1:
            raise ValueError(
                f"advantage.turn_discount is {self.turn_discount:g}, but credit is 'outcome': set credit to 'turn'"
            )
        if self.select is not None and self.select.size < self.smallest_group:
            raise ValueError(
                f"advantage.select.size is {self.select.size}, but {self.kind!r} "
                f"compares {self.smallest_group} members or more: use a larger size"
            )
        return self


class KlConfig(ConfigModel):
    """The divergence from a frozen reference model, which is loaded only if the coefficient is positive."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence, in nats a token; 0: no reference model."""
    kind: KlKind = "k3"
    """Estimator of KL(policy || reference) at a token: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, where d is the
    policy's logprob minus the reference's. The gradient of k1 in the loss is 0 on average: use it in the reward."""
    unbiased: bool = False
    """In the loss: multiply the estimate by the ratio of policy and proximal policy, so that the gradient of k1 and k3
    is that of the divergence."""
    place: Literal["loss", "reward"] = "loss"
    """Where the divergence counts. loss: as a term with a gradient. reward: subtracted from each token's reward."""
    pool: PoolConfig | None = None
    """Engines that compute the reference's logprobs, which needs temperature 1, top_p 1 and top_k 0; null: the trainer
    ranks compute them, with a copy of the reference that is split as the policy is."""

    @model_validator(mode="after")
    def _is_used(self) -> KlConfig:
        if self.unbiased and self.place == "reward":
            raise ValueError("kl.unbiased is about a gradient, but kl.place is 'reward': leave it out")
        if self.pool is not None and not self.coefficient:
            raise ValueError(
                f"kl.pool is {self.pool.name!r}, but kl.coefficient is 0, so that there is no reference: raise it, or "
                "leave pool out"
            )
        return self


class LossConfig(ConfigModel):
    """What the policy minimises."""

    kind: LossKind | str = "ppo"
    """The policy's loss: ppo (clipped ratio of each token), gspo (of each sequence), cispo (capped ratio without
    gradient times the logprob), or module:function."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The ratio is clipped below 1 - clip_low; 1: not clipped below."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio where the advantage is negative (dual-clip PPO); null: no bound."""
    aggregation: Aggregation = "token"
    """How token losses become one number. token: mean over the minibatch's tokens. sequence: mean over its
    trajectories of their token means. constant: sum over its tokens, divided by the number of trajectories times the
    largest `max_tokens` of a task (Dr.GRPO)."""
    kl: KlConfig = KlConfig()
    """Divergence from a frozen reference model."""
    entropy_coefficient: float = 0.0
    """Weight of the mean entropy (nats a token), which is subtracted from the loss."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Most that the critic's value may move from the one before the step; beyond, it is clipped. null: not clipped."""

    @model_validator(mode="after")
    def _kind_exists(self) -> LossConfig:
        _check_kind("loss.kind", self.kind, LossKind)
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip is {self.dual_clip}, not above 1 + clip_high = {1 + self.clip_high}: it would cut what "
                "the clip allows; use more, for instance 3"
            )
        return self


class BoundsConfig(ConfigModel):
    """Bounds of the ratio exp(proximal - rollout logprob), which is 1 where both agree."""

    level: Level = "token"
    """Which ratio is bounded. token: each token's own. sequence: the product over its sequence. geometric: the
    geometric mean over its sequence."""
    lower: Annotated[float, Field(ge=0, le=1)] | None = None
    """Lower bound of the ratio; null: none."""
    upper: Annotated[float, Field(ge=1)] | None
    """Upper bound of the ratio; null: none."""

    @model_validator(mode="after")
    def _bounds_differ(self) -> BoundsConfig:
        if self.lower is not None and self.lower == self.upper:
            raise ValueError(f"lower and upper are both {self.lower}: no ratio would be left")
        return self


class CorrectionConfig(ConfigModel):
    """What is done about data that another policy sampled than the one that is trained on it."""

    proximal: Proximal = "recompute"
    """Policy that the loss's ratio is taken against. recompute: the trainer's before the step. interpolate: a mean of
    the rollout policy and the current one, weighted by each token's staleness, without a forward pass. rollout: the
    one that sampled, so that the loss's own ratio is the correction."""
    weight: BoundsConfig | None = BoundsConfig(upper=2.0)
    """Bounds that each token's importance weight is cut at (truncated importance sampling); null: every weight is 1."""
    reject: BoundsConfig | None = None
    """Bounds outside which tokens or sequences are not trained (masked importance sampling); null: all are trained."""
    veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Smallest ratio of any token of a sequence that is trained; null: no bound."""
    staleness_power: Annotated[float, Field(ge=0)] = 0.0
    """Power of (1 + staleness in train steps) by which importance weights are divided; 0: not divided."""


class SftConfig(ConfigModel):
    """Supervised examples that every train step learns in addition to its batch."""

    path: Path
    """JSONL file with {"prompt": ..., "response": ...} in each line."""
    samples: Annotated[int, Field(ge=1)]
    """Examples in each train step."""
    chat: bool = False
    """Wrap each prompt in the tokenizer's chat template as one user message."""
    coefficient: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the examples' mean cross entropy (nats a token) in the loss."""


def _check_kind(field: str, kind: str, kinds: object) -> None:
    known = get_args(kinds)
    if kind not in known and ":" not in kind:
        raise ValueError(
            f"{field} is {kind!r}; there are {', '.join(known)}, or an import path module:function"
        )
