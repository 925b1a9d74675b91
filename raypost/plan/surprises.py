"""Settings that do nothing, or hardly what was meant: named, not refused."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
from pydantic import BaseModel

from raypost.config import Config, JudgeConfig, TaskConfig

SHORTEST_TIMEOUT_S = 1.0
"""A timeout below this ends what works, on a busy machine."""

_USED_BY = {
    "k": ("pass_at_k",),
    "gae_lambda": ("gae",),
    "discount": ("reinforce_pp", "gae"),
}
"""Kinds of advantage that use an option of few."""


def surprises(config: Config) -> Iterator[str]:
    """Yield the settings that what was chosen does not use, and the timeouts that end what works."""
    for task in config.tasks:
        yield from (f"task {task.name!r}: {text}" for text in _of_task(task))
    advantage, loss = config.train.advantage, config.train.loss
    for name in sorted(_USED_BY.keys() & changed(advantage)):
        kinds = _USED_BY[name]
        if advantage.kind not in kinds and ":" not in advantage.kind:
            yield f"train.advantage.{name} is not used by kind {advantage.kind!r}, but by {' and '.join(kinds)}"
    if "overlong_penalty" in changed(advantage) and not advantage.overlong_buffer:
        yield "train.advantage.overlong_penalty is not used: overlong_buffer is 0"
    if "value_clip" in changed(loss) and config.train.critic is None:
        yield "train.loss.value_clip is not used: there is no train.critic"
    if loss.dual_clip is not None and loss.kind == "cispo":
        yield "train.loss.dual_clip is not used by kind 'cispo'"
    if not loss.kl.coefficient:
        for name in sorted(changed(loss.kl)):
            yield f"train.loss.kl.{name} is not used: kl.coefficient is 0"
    if not config.checkpoint.interval and config.checkpoint.every_s is None:
        yield (
            "nothing is saved before the end (checkpoint.interval is 0, checkpoint.every_s null): a trainer rank that "
            "dies has all steps trained again, and the run folder keeps every batch until then"
        )
    yield from _short_timeouts(config, "")
    yield from _too_large(config)


def _too_large(config: Config) -> Iterator[str]:
    """Yield what this machine has no memory for; another one may have."""
    there = psutil.virtual_memory().total / 2**30
    rollout, train = config.rollout, config.train
    caches = [one.num_workers * one.kv_cache_gb for one in rollout.by_pool().values()]
    if config.device == "cpu" and sum(caches) > there:
        yield (
            f"rollout.kv_cache_gb of {rollout.num_engines} engine(s) comes to {sum(caches):g} GiB, more than the "
            f"{there:.0f} that this machine has"
        )
    for name, mb in (("bucket_mb", train.bucket_mb), ("logits_mb", train.logits_mb)):
        if mb / 1024 > there:
            yield f"train.{name} {mb} is more than the {there:.0f} GiB that this machine has"


def changed(model: BaseModel) -> set[str]:
    """Return the fields of a model that differ from their defaults."""
    return {
        name
        for name, field in type(model).model_fields.items()
        if not field.is_required()
        and getattr(model, name) != field.get_default(call_default_factory=True, validated_data={})
    }


def _of_task(task: TaskConfig) -> Iterator[str]:
    loop = task.agent_loop
    if loop.kind == "environment" and (names := changed(task.judge)):
        of = ", ".join(sorted(names & JudgeConfig.model_fields.keys()))
        yield f"judge ({of}) is not used: agent_loop.kind is environment, which gives the rewards itself"
    if loop.kind == "single_turn":
        for name in sorted({"max_turns", "max_turn_tokens", "step_timeout_s", "params"} & changed(loop)):
            yield f"agent_loop.{name} is not used by kind 'single_turn', which has one turn and no environment"


def _short_timeouts(model: BaseModel, place: str) -> Iterator[str]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        if name.endswith("timeout_s") and isinstance(value, float | int) and value < SHORTEST_TIMEOUT_S:
            yield f"{place}{name} is {value:g} s: what takes longer fails, and on a busy machine most things do"
        several = isinstance(value, tuple)
        for index, part in enumerate(value if several else (value,)):
            if isinstance(part, BaseModel):
                yield from _short_timeouts(part, f"{place}{name}.{index}." if several else f"{place}{name}.")
