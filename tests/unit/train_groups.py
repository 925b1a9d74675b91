"""Groups of trajectories with random tokens, and the batch that training makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from raypost.config import AdvantageConfig
from raypost.trainer.batch.train_batch import TrainBatch, plan_batch
from raypost.types import Group, RolloutState, SampleParams, Status
from raypost.types.packed import pack_groups


def make_state(
    group_id: int = 0,
    index: int = 0,
    prompt: int = 3,
    response: int = 4,
    reward: float | None = 1.0,
    status: Status = Status.COMPLETED,
    **params: Any,
) -> RolloutState:
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


def make_groups(
    num_groups: int = 6, size: int = 4, seed: int = 0, longest_prompt: int = 9, longest: int = 12
) -> list[Group]:
    """Groups of trajectories of random length whose members share a prompt."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(num_groups):
        prompt = int(rng.integers(1, longest_prompt))
        states = [
            make_state(g, i, prompt, int(rng.integers(1, longest)), float(rng.normal())) for i in range(size)
        ]
        groups.append(Group(task="task", group_id=g, states=states))
    return groups


def planned(groups: Sequence[Group], minibatches: int = 1) -> TrainBatch:
    return plan_batch(pack_groups(groups), AdvantageConfig(), minibatches)
