"""How many workers a part of the run has, and what the cluster reserves for each of them.

Every part that has actors of its own inherits its fields from here: `rollout`, its pools, reward models, `train` and
the critic. How much that is in all, and whether a cluster has it, is in plan/cluster.py.
"""

from __future__ import annotations

import functools
import re
from typing import Annotated, Any, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)


@functools.cache
def _number_fields(model: type[BaseModel]) -> frozenset[str]:
    """Return the names of the fields that hold a number and nothing like a truth value."""

    def kinds(annotation: Any) -> set[Any]:
        return {annotation}.union(*map(kinds, get_args(annotation)))

    found = {name: kinds(field.annotation) for name, field in model.model_fields.items()}
    return frozenset(name for name, those in found.items() if those & {int, float} and bool not in those)


class ConfigModel(BaseModel):
    """Base of all parts of a configuration: frozen, without unknown keys, infinities or NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # Python takes True for 1: `num_steps: yes` would be a run of one step.
        if isinstance(value, bool) and info.field_name in _number_fields(cls):
            raise ValueError(f"must be a number, got {value}: write one")
        return value


_LABEL_NAME = r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_LABEL_KEY = re.compile(rf"([a-zA-Z0-9.-]{{1,253}}/)?{_LABEL_NAME}")
_SELECTOR = re.compile(rf"!?({_LABEL_NAME}|in\({_LABEL_NAME}(,{_LABEL_NAME})*\))")


def _selectors(labels: dict[str, str]) -> dict[str, str]:
    """Check names and values of labels, which Ray would refuse in the middle of a start."""
    for name, value in labels.items():
        if not _LABEL_KEY.fullmatch(name) or not _SELECTOR.fullmatch(value):
            raise ValueError(
                f"{name}: {value!r} selects no node: write NAME: VALUE, !VALUE, in(A,B) or !in(A,B), each of letters, "
                "digits, '-', '_' and '.'"
            )
    return labels


class WorkerPoolConfig(ConfigModel):
    """Workers of one kind, one actor each."""

    num_workers: Annotated[int, Field(ge=1)] = 1
    """Number of workers: engines, or ranks of a trainer."""
    num_cpus: Annotated[float, Field(gt=0)] = 1
    """CPU cores that Ray reserves for each worker."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Compute threads of each worker where `device` is cpu."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Amounts of custom Ray resources that each worker needs on its node, for instance {"rollout": 1}."""

    labels: Annotated[dict[str, str], AfterValidator(_selectors)] = Field(default_factory=dict)
    """Labels that each worker's node must have, as Ray selects by them, for instance {"market": "spot"},
    {"zone": "in(a,b)"} or {"market": "!spot"}."""


class RankPoolConfig(WorkerPoolConfig):
    """Workers with a rank of a trainer each."""

    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """ZeRO stage of DeepSpeed: what the ranks split. 1: optimizer states; 2: gradients too; 3: weights too; 0:
    nothing."""


class EnginePoolConfig(WorkerPoolConfig):
    """Workers with an inference engine each."""

    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """GPUs of each engine, which split its model."""
    fallback_labels: tuple[Annotated[dict[str, str], AfterValidator(_selectors)], ...] = ()
    """Labels that will do for an engine instead, tried in this order, where no node with `labels` is to be had."""

    @model_validator(mode="after")
    def _falls_back_from_something(self) -> Self:
        if self.fallback_labels and not self.labels:
            raise ValueError("fallback_labels need labels, which they replace: set labels, or remove them")
        return self


class PoolConfig(EnginePoolConfig):
    """Further engines with a placement of their own; what is not set here is as in `rollout`."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
    """Name of the pool. Its workers carry it after their role: `rollout-<name>-0`, `reference-<name>-0`,
    `reward-<name>-0`."""
