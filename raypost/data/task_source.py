"""The source of a task's prompts: built, checked before a run, and its held-out part.

    files, saved datasets, sequences --> Rows --> RowSource   --.
    iterables without a length ---------------> StreamSource --+--> Sampler
    reasoning-gym ----------------------------> GymSource    --'

Owns which source a configuration means. Owns neither reading (sources.py, rows.py, gym.py) nor the order in
which prompts are trained (the sampler does) nor their scores (judges do). Imports no torch and no transformers.

Invariants: whether a question is held out depends on its text alone, so nothing that a source yields, for
any seed and any parameters, is ever an evaluation problem; the same seed gives the same prompts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from raypost.config import Config, TaskConfig
from raypost.data.gym import GymSource, gym_held_out
from raypost.data.lengths import not_dropped
from raypost.data.prompt import HELD_OUT_ONE_IN, Prompt, is_held_out
from raypost.data.rows import HubRows, JsonlRows, ParquetRows, Rows
from raypost.data.sources import (
    RowSource,
    Source,
    Stream,
    StreamSource,
    python_rows,
    row_prompts,
    stream_prompts,
)
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError, RaypostError
from raypost.types.plain import to_bytes

HELD_OUT_LIMIT = 512
"""Default number of prompts that `held_out` looks for."""

CHECK_PROMPTS = 64
CHECK_S = 1.0
"""Most prompts that `check_source` returns, and the seconds it spends on rows, and then on prompts."""


def build_source(task: TaskConfig, seed: int, tokenizer: Tokenizer | None = None) -> Source | Stream:
    """Return what `task` trains on; with a tokenizer, without the prompts that it drops.

    Raises ConfigError if it is missing, malformed or empty.
    """
    return _build(task, seed, None, tokenizer)


def check_source(task: TaskConfig, seed: int, tokenizer: Tokenizer | None = None) -> list[Prompt]:
    """Return the first prompts of the task's source, at least one, after reading rows for at most CHECK_S.

    Raises ConfigError if the source is missing, malformed or empty, or its prompts have metadata that is no plain data.
    """
    with reading(task):
        source, found = _build(task, seed, CHECK_S, tokenizer), []
        deadline = time.monotonic() + CHECK_S
        for prompt in itertools.islice(first_prompts(source), CHECK_PROMPTS):
            to_bytes(prompt.metadata)  # as its group will be packed
            found.append(prompt)
            if time.monotonic() > deadline:
                break
        if not found:
            raise ConfigError(
                f"task {task.name!r}: {task.source.dataset!r} gives no prompt to train after one in "
                f"{HELD_OUT_ONE_IN} is held out: give it more"
            )
        return found


@contextmanager
def reading(task: TaskConfig) -> Iterator[None]:
    """Name the task in whatever is raised inside."""
    try:
        yield
    except RaypostError:
        raise
    # A user's function may raise anything; to the caller it is a source that cannot be read.
    except Exception as error:
        raise ConfigError(
            f"task {task.name!r}: reading source.dataset {task.source.dataset!r} failed with "
            f"{type(error).__name__}: {error}"
        ) from error


def evaluation_prompts(
    config: Config, task: TaskConfig, num_prompts: int, tokenizer: Tokenizer | None = None
) -> list[Prompt]:
    """Return up to `num_prompts` distinct prompts that evaluate `task`: of `eval.source`, or held-out ones.

    With a tokenizer, without those that the task drops.

    Raises ConfigError if there are none.
    """
    own = config.evaluated(task)
    if own is None:
        return held_out(task, config.seed, num_prompts, tokenizer)
    found = _distinct(first_prompts(build_source(own, config.seed, tokenizer)), num_prompts)
    if not found:
        raise ConfigError(f"eval.source {own.source.dataset!r} gives no prompt: give it at least one")
    return found


def also_trained(task: TaskConfig, seed: int, prompts: Sequence[Prompt]) -> int:
    """Return how many of the evaluation prompts are found among those trained on, looking for at most CHECK_S."""
    questions, deadline = (
        {prompt.metadata["question"].strip() for prompt in prompts},
        time.monotonic() + CHECK_S,
    )
    found = set[str]()
    for prompt in first_prompts(build_source(task, seed)):
        found |= questions & {prompt.metadata["question"].strip()}
        if time.monotonic() > deadline:
            break
    return len(found)


def held_out(
    task: TaskConfig, seed: int, num_prompts: int = HELD_OUT_LIMIT, tokenizer: Tokenizer | None = None
) -> list[Prompt]:
    """Return up to `num_prompts` distinct evaluation prompts. Raises ConfigError if there are none.

    Of a stream, which may never end, eight times as much is read as should hold so many.
    """
    limit = 8 * HELD_OUT_ONE_IN * num_prompts
    if task.source.kind == "reasoning_gym":
        prompts = gym_held_out(task, seed, limit)
    else:
        rows = source_rows(task)
        every = stream_prompts(task) if rows is None else row_prompts(task, rows)
        looked_at = itertools.islice(every, limit if rows is None else None)
        prompts = (prompt for prompt in looked_at if is_held_out(prompt.metadata["question"]))
    found = _distinct(not_dropped(prompts, task, tokenizer), num_prompts)
    if not found:
        raise ConfigError(
            f"task {task.name!r}: no held-out problem among those of {task.source.dataset!r}; one question in "
            f"{HELD_OUT_ONE_IN} is held out by its text: give it more problems"
        )
    return found


def _build(
    task: TaskConfig, seed: int, seconds: float | None, tokenizer: Tokenizer | None
) -> Source | Stream:
    if task.source.kind == "reasoning_gym":
        return GymSource(task, seed, tokenizer)
    rows = source_rows(task)
    return StreamSource(task, tokenizer) if rows is None else RowSource(task, rows, seconds, tokenizer)


def source_rows(task: TaskConfig) -> Rows | None:
    """Return the rows of the source; None if it is a stream."""
    match task.source.kind:
        case "jsonl":
            return JsonlRows(task)
        case "parquet":
            return ParquetRows(task)
        case "hf_disk":
            return HubRows(task)
        case _:
            return python_rows(task)


def first_prompts(source: Source | Stream) -> Iterator[Prompt]:
    """Return the prompts of a source in its own order, those to train."""
    if isinstance(source, Stream):
        return source.prompts()
    return map(source.sample, range(len(source)))


def _distinct(prompts: Iterable[Prompt], limit: int) -> list[Prompt]:
    """Return the first `limit` prompts that differ in their question."""
    found: dict[str, Prompt] = {}
    for prompt in prompts:
        if len(found) >= limit:
            break
        found.setdefault(prompt.metadata["question"], prompt)
    return list(found.values())
