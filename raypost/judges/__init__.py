"""Judges: they score finished responses, by rule (`rules`) or by asking a model (`reward_model`)."""

from raypost.judges.reward_model import RewardModel, RewardModelJudge
from raypost.judges.rules import RuleJudge, build_judge

__all__ = ["RewardModel", "RewardModelJudge", "RuleJudge", "build_judge"]
