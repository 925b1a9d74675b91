"""Reward functions as they stand in a script for TRL's GRPOTrainer: nothing in them knows raypost."""

import re


def accuracy_reward(completions: list[str], answer: list[str], **kwargs: object) -> list[float]:
    """Return 1.0 for each completion whose last number is the answer."""
    found = [re.findall(r"-?\d+", completion) for completion in completions]
    return [
        float(bool(numbers) and numbers[-1] == wanted) for numbers, wanted in zip(found, answer, strict=True)
    ]


def length_reward(completions: list[str], completion_ids: list[list[int]], **kwargs: object) -> list[float]:
    """Return more for a shorter completion, at most 1.0."""
    return [1.0 / (1 + len(ids)) for ids in completion_ids]
