"""Which configurations describe the same run, and which the same recipe.

Two questions with two answers. A run folder and its checkpoints belong to one run: another seed is another run, more
steps or other deadlines are not, so that a run can be continued by what its own error message recommends. A report
names its recipe: runs of it differ in their seed alone. Neither depends on where files lie.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from fnmatch import translate
from functools import cache
from typing import Any

from raypost.config.run import Config

ABOUT_FILES = (
    "name",
    "runs_dir",
    "keep_samples",
    "trackers*",
    "stall_s",
    "model.cache_dir",
    "*source.index_dir",
)
"""Where files lie, and which records are kept."""

MAY_CHANGE = (
    *ABOUT_FILES,
    # How long it goes on, what is kept of it, and how it is looked at.
    "train.num_steps", "checkpoint.*", "eval.*",
    # Where and how fast it runs.
    "autoscaling", "rollout.*", "buffer.max_*", "tasks.*.source.num_workers", "sync.canary_tolerance",
    "sync.pause_mode",
    "train.num_workers", "train.zero_stage", "train.threads", "train.num_cpus", "train.resources*", "train.labels*",
    "train.micro_batch_tokens", "train.packing", "train.share_prompts", "train.logits_mb", "train.bucket_mb",
    "train.gradient_checkpointing", "train.critic.num_workers", "train.critic.zero_stage", "train.critic.threads",
    "train.critic.num_cpus", "train.critic.resources*", "train.critic.labels*",
    # How long is waited, and what is done about failures.
    "*timeout_s", "faults.*", "tasks.*.judge.*url", "tasks.*.judge.*api_key_file", "tasks.*.judge.*retries",
    "tasks.*.judge.*concurrency", "tasks.*.strategy.max_retries", "tasks.*.strategy.on_failed_member",
    "tasks.*.strategy.min_group_size",
    # What the next steps learn, and how fast.
    "train.learning_rate", "train.critic.learning_rate", "train.lr_schedule", "train.warmup_steps",
    "train.max_grad_norm", "tasks.*.weight", "tasks.*.weight_schedule*",
    "tasks.*.strategy.max_pending", "tasks.*.strategy.over_sample_threshold",
    "tasks.*.agent_loop.max_concurrent*",
)  # fmt: skip
"""Settings with which a run may be continued although it began with others; `*` stands for anything."""

MUST_STAY = ("eval.source*", "tasks.*.judge.*weight", "checkpoint.start_*")
"""Of those, what may not: it decides what is trained, and for which reward."""


def flat(plain: Any, place: str = "") -> dict[str, Any]:
    """Return the leaves of plain data by their place, such as `tasks.0.weight`; empty lists and dicts are leaves."""
    if not plain or not isinstance(plain, dict | list):
        return {place: plain}
    parts = plain.items() if isinstance(plain, dict) else enumerate(plain)
    found: dict[str, Any] = {}
    for name, value in parts:
        found |= flat(value, f"{place}.{name}" if place else str(name))
    return found


@cache
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(translate(one) for one in patterns) or "(?!)")


def _without(config: Config, patterns: tuple[str, ...], but: tuple[str, ...] = ()) -> dict[str, Any]:
    left_out, kept = _any_of(patterns), _any_of(but)
    return {
        place: value
        for place, value in flat(config.model_dump(mode="json")).items()
        if not left_out.match(place) or kept.match(place)
    }


def run_identity(config: Config) -> dict[str, Any]:
    """Return what makes a run this run, as plain data by place: all but MAY_CHANGE."""
    return _without(config, MAY_CHANGE, MUST_STAY)


def run_digest(config: Config) -> str:
    """Return 16 hex digits of `run_identity`; checkpoints carry them."""
    return _digest(run_identity(config), 16)


def recipe_digest(config: Config) -> str:
    """Return 12 hex digits, equal for runs that differ in nothing but files, records and seed."""
    return _digest(_without(config, (*ABOUT_FILES, "seed")), 12)


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return where two sets of settings by place differ, as `place: value there, value here`."""
    places = [*there, *(place for place in here if place not in there)]
    return [
        f"{place}: {there.get(place)!r:.80} there, {here.get(place)!r:.80} here"
        for place in places
        if there.get(place) != here.get(place)
    ]


def changed_settings(there: Config, here: Config) -> list[str]:
    """Return where two configurations of one run differ, but for files and records."""
    return differences(_without(there, ABOUT_FILES), _without(here, ABOUT_FILES))


def _digest(plain: dict[str, Any], num_digits: int) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:num_digits]
