"""Judges: they score finished responses, by rule, with a function of the user's, or by asking a model."""

from raypost.judges.build import build_judge
from raypost.judges.generative import LanguageModel
from raypost.judges.reward_model import RewardModel, RewardModelJudge
from raypost.judges.rules import RuleJudge
from raypost.judges.task_judge import TaskJudge

__all__ = ["LanguageModel", "RewardModel", "RewardModelJudge", "RuleJudge", "TaskJudge", "build_judge"]
