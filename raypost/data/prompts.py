"""Prompts: where they come from, which are held out, and how one becomes token ids.

    files, saved datasets, sequences --> Rows --> RowSource   --.
    iterables without a length ---------------> StreamSource --+--> Sampler
    reasoning-gym ----------------------------> GymSource    --'

Owns the sources and the split. Owns neither the order in which prompts are trained (the sampler does) nor
their scores (judges do). Imports no torch and no transformers.

Invariants: whether a question is held out depends on its text alone, so nothing that a source yields, for
any seed and any parameters, is ever an evaluation problem; the same seed gives the same prompts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator

from raypost.config import TaskConfig
from raypost.data.gym import GymSource, gym_dataset, gym_held_out
from raypost.data.prompt import HELD_OUT_ONE_IN, Prompt, is_held_out, render
from raypost.data.rows import HubRows, JsonlRows, ParquetRows, Rows
from raypost.data.sources import RowSource, Source, StreamSource, python_rows, row_prompts, stream_prompts
from raypost.errors import ConfigError, RaypostError

__all__ = [
    "HELD_OUT_LIMIT",
    "HELD_OUT_ONE_IN",
    "Prompt",
    "Source",
    "StreamSource",
    "build_source",
    "check_source",
    "gym_dataset",
    "held_out",
    "is_held_out",
    "render",
]

HELD_OUT_LIMIT = 512
"""Held-out prompts `held_out` looks for unless told otherwise."""

CHECK_PROMPTS = 64
CHECK_S = 1.0
"""How many prompts `check_source` returns at most, and how long it reads rows, and then prompts."""


def build_source(task: TaskConfig, seed: int) -> Source | StreamSource:
    """What `task` trains on. Raises ConfigError if it is missing, malformed or empty."""
    return _build(task, seed, seconds=None)


def check_source(task: TaskConfig, seed: int) -> list[Prompt]:
    """The first prompts of the task's source, one at least, after as many of its rows as CHECK_S allows were
    looked at.

    Raises ConfigError if the source is missing, malformed or empty, whatever the reason.
    """
    try:
        source, found = _build(task, seed, seconds=CHECK_S), []
        deadline = time.monotonic() + CHECK_S
        for prompt in itertools.islice(_first(source), CHECK_PROMPTS):
            found.append(prompt)
            if time.monotonic() > deadline:
                break
        if not found:
            raise ConfigError(
                f"task {task.name!r}: {task.source.dataset!r} gives no prompt to train after one in "
                f"{HELD_OUT_ONE_IN} is held out: give it more"
            )
        return found
    except RaypostError:
        raise
    # A user's function may raise anything; to the caller it is a source that cannot be read.
    except Exception as error:
        raise ConfigError(
            f"task {task.name!r}: reading source.dataset {task.source.dataset!r} failed with "
            f"{type(error).__name__}: {error}"
        ) from error


def held_out(task: TaskConfig, seed: int, num_prompts: int = HELD_OUT_LIMIT) -> list[Prompt]:
    """Up to `num_prompts` distinct evaluation prompts. Raises ConfigError if there are none.

    A stream may never end: it is read as far as so many should lie, eight times over.
    """
    limit = 8 * HELD_OUT_ONE_IN * num_prompts
    if task.source.kind == "reasoning_gym":
        prompts = gym_held_out(task, seed, limit)
    else:
        rows = _rows(task)
        every = stream_prompts(task) if rows is None else row_prompts(task, rows)
        looked_at = itertools.islice(every, limit if rows is None else None)
        prompts = (prompt for prompt in looked_at if is_held_out(prompt.metadata["question"]))
    found = _distinct(prompts, num_prompts)
    if not found:
        raise ConfigError(
            f"task {task.name!r}: no held-out problem among those of {task.source.dataset!r}; one question in "
            f"{HELD_OUT_ONE_IN} is held out by its text: give it more problems"
        )
    return found


def _build(task: TaskConfig, seed: int, seconds: float | None) -> Source | StreamSource:
    if task.source.kind == "reasoning_gym":
        return GymSource(task, seed)
    rows = _rows(task)
    return StreamSource(task) if rows is None else RowSource(task, rows, seconds)


def _rows(task: TaskConfig) -> Rows | None:
    """The rows of the source; None if it is a stream."""
    match task.source.kind:
        case "jsonl":
            return JsonlRows(task)
        case "parquet":
            return ParquetRows(task)
        case "hf_disk":
            return HubRows(task)
        case _:
            return python_rows(task)


def _first(source: Source | StreamSource) -> Iterator[Prompt]:
    if isinstance(source, StreamSource):
        return source.prompts()
    return map(source.sample, range(len(source)))


def _distinct(prompts: Iterable[Prompt], limit: int) -> list[Prompt]:
    """The first `limit` prompts that differ in their question."""
    found: dict[str, Prompt] = {}
    for prompt in prompts:
        if len(found) >= limit:
            break
        found.setdefault(prompt.metadata["question"], prompt)
    return list(found.values())
