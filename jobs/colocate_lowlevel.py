"""Colocated placement with the train step spelled out: what `fit` does, call by call.

    old, reference logprobs, values -> advantages -> the policy's and the critic's optimizer steps -> sync

Every call takes refs and gives a ref, so a column travels from rank to rank and never through the driver. This is
where an algorithm of one's own goes: put another call between these, or leave one out.

    ray job submit --working-dir . -- python -m jobs.colocate_lowlevel --config jobs/recipes/colocate.yaml
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the repository root is not on the path yet
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from jobs.colocate import colocate
from jobs.driver import main
from jobs.roles import Roles
from raypost.types import Ref
from raypost.types.packed import PackedGroups


async def train_step(roles: Roles, batch_ref: Ref[PackedGroups], step: int) -> dict[str, float]:
    """Train one step on a batch; returns its metrics."""
    train, trainer, critic = roles.cfg.train, roles.trainer, roles.trainer.critic
    old = await trainer.compute_old_logprobs(batch_ref) if train.needs_old_logprobs else None
    ref = await trainer.compute_ref_logprobs(batch_ref) if train.needs_ref_logprobs else None
    values = await critic.compute_values(batch_ref) if critic else None
    advantages = await trainer.compute_advantages(batch_ref, old, ref, values)
    metrics = await trainer.train(batch_ref, advantages, old, ref, step=step)
    if critic:
        metrics |= await critic.train_values(batch_ref, advantages, values, step=step)
    return metrics


colocate_lowlevel = functools.partial(colocate, train_step=train_step)
"""The loop of jobs/colocate.py with this step."""


if __name__ == "__main__":
    sys.exit(main(colocate_lowlevel, placement="colocate"))
