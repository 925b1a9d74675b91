"""How many tokens prompts have: those of a whole source, found once and kept; and which of them a task drops."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from raypost.config import TaskConfig
from raypost.data import row_index
from raypost.data.functions import tool_schemas
from raypost.data.prompt import ANSWER, Prompt, render, row_prompt, text_for_engine
from raypost.data.rows import Rows
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError

_BATCH = 4096
"""Prompts that are tokenised at once."""

ItemT = TypeVar("ItemT")


def prompt_lengths(task: TaskConfig, rows: Rows, content: str, tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Return the number of tokens of the prompt in every row, shape [rows, or `source.size` of them].

    `content`: digest of the questions. What is known of the same questions, rendered in the same way, is not computed
    again. Raises ConfigError, which names the row, if a prompt cannot be rendered.
    """
    count = min(len(rows), task.source.size or len(rows))
    made_of = ["lengths", content, count, tokenizer.digest, _rendering(task)]
    if (known := row_index.load_arrays(task.source.index_dir, made_of)) is not None:
        return known[0][0]
    lengths = np.zeros(count, np.int64)
    values = itertools.islice(rows.scan(task.source.prompt_field), count)
    numbered = enumerate(tracked(values, count, f"task {task.name!r}: tokens of {count} prompts"))
    for start in range(0, count, _BATCH):
        texts = [
            _text(task, rows, number, value, tokenizer)
            for number, (value,) in itertools.islice(numbered, _BATCH)
        ]
        lengths[start : start + _BATCH] = tokenizer.lengths(texts, add_special_tokens=not task.chat)
    if count >= row_index.MIN_ROWS:
        row_index.keep_arrays(task.source.index_dir, made_of, [lengths])
    return lengths


def fitting(task: TaskConfig, lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which prompts of these lengths an engine may be given."""
    fits: NDArray[np.bool_] = (lengths >= 1) & (lengths <= task.max_prompt_tokens)
    return fits


def not_dropped(prompts: Iterable[Prompt], task: TaskConfig, tokenizer: Tokenizer | None) -> Iterator[Prompt]:
    """Yield the prompts that the task keeps: all, or those that fit where it drops what does not."""
    if tokenizer is None or task.on_long_prompt == "refuse":
        yield from prompts
        return
    for prompt in prompts:
        if 1 <= len(render(prompt, tokenizer, task)) <= task.max_prompt_tokens:
            yield prompt


def tracked(items: Iterable[ItemT], count: int, what: str) -> Iterable[ItemT]:
    """Return the items, with a bar on stderr where there are many of them."""
    if count < row_index.MIN_ROWS:
        return items
    # Imported here: few sources are so large.
    from rich.console import Console
    from rich.progress import track

    return track(items, what, total=count, console=Console(stderr=True))


def _text(task: TaskConfig, rows: Rows, number: int, value: Any, tokenizer: Tokenizer) -> str:
    row = {task.source.prompt_field: value, task.source.answer_field or ANSWER: ""}
    try:
        prompt = row_prompt(task, row, functools.partial(rows.place, number))
        return text_for_engine(prompt, tokenizer, task)
    except ConfigError as error:
        raise ConfigError(f"{rows.place(number)}: {error}") from error


def _rendering(task: TaskConfig) -> str:
    """Return all of a task that decides how its prompts are rendered."""
    names = (
        "chat",
        "system_prompt",
        "chat_template_source",
        "chat_template_kwargs",
        "prompt_template",
    )
    decides = [*(getattr(task, name) for name in names), tool_schemas(task)]
    return json.dumps(decides, sort_keys=True, default=str)
