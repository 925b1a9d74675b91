"""Judges: they score finished responses. See `rules` for those that need no model."""

from raypost.judges.rules import RuleJudge, build_judge

__all__ = ["RuleJudge", "build_judge"]
