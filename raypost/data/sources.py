"""Sources of prompts, none of them held out: rows in any order, or a stream in its own order.

Owns what becomes of rows. Owns neither reading them (rows.py does) nor the order (the sampler does).
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import json
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from raypost.config import TaskConfig
from raypost.config.imports import load_function
from raypost.data.lengths import fitting, not_dropped, prompt_lengths, tracked
from raypost.data.prompt import (
    ANSWER,
    HELD_OUT_ONE_IN,
    Prompt,
    is_held_out,
    is_held_out_digest,
    question_digest,
    reserved,
    reserved_names,
    row_prompt,
    row_question,
    unusable,
)
from raypost.data.rows import Findings, Row, Rows, Split
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError


class Source(Protocol):
    """A fixed number of prompts, addressed by index. With an `identity`, a restored state must have the same one."""

    def __len__(self) -> int:
        """Return the number of prompts."""
        ...

    def sample(self, index: int) -> Prompt:
        """Return the prompt at `index`, the same one whenever asked."""
        ...


@runtime_checkable
class Stream(Protocol):
    """Prompts in an order of their own, their number unknown. May have an `identity` as well."""

    def prompts(self) -> Iterator[Prompt]:
        """Return one pass over all prompts, the same whenever asked: an epoch."""
        ...


class RowSource:
    """The rows that are not held out."""

    def __init__(
        self,
        task: TaskConfig,
        rows: Rows,
        seconds: float | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Read every question once, or as many as possible in `seconds`; with a tokenizer drop what is too long.

        Raises ConfigError if a row holds no prompt, or nothing is left to train.
        """
        self._task = task
        self._rows = rows
        split = rows.known_split() or read_split(task, rows, seconds)
        self._index = split.trained
        if tokenizer is not None and task.on_long_prompt == "drop":
            fits = fitting(task, prompt_lengths(task, rows, split.content, tokenizer))
            self._index = np.asarray(split.trained, np.int64)[fits[np.asarray(split.trained, np.int64)]]
        self.identity = f"{task.source.kind} {split.content}"
        """Of the questions and their order, wherever they lie."""
        if not len(self):
            read = min(len(rows), task.source.size or len(rows))
            dropped = len(split.trained)
            lost = (
                f", and {dropped} longer than max_prompt_tokens {task.max_prompt_tokens} are dropped"
                * bool(dropped)
            )
            raise ConfigError(
                f"task {task.name!r}: {task.source.dataset} has {read} prompts and none left to train on after one "
                f"in {HELD_OUT_ONE_IN} is held out{lost}: give it more"
            )

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self._index)

    def sample(self, index: int) -> Prompt:
        """Return the prompt at `index`."""
        return _prompt(self._task, self._rows, int(self._index[index]))

    def place(self, index: int) -> str:
        """Return where the prompt at `index` stands, for messages."""
        return self._rows.place(int(self._index[index]))


def read_split(task: TaskConfig, rows: Rows, seconds: float | None) -> Split:
    """Read every question, or as many as possible in `seconds`; keep what was found if it was every one."""
    trained, source, content = array("q"), task.source, hashlib.blake2b(digest_size=12)
    digests, blank = array("Q"), array("q")
    deadline = None if seconds is None else time.monotonic() + seconds
    names = reserved_names(source)
    fields = rows.scan(source.prompt_field, source.answer_field or ANSWER, *names)
    every: Iterable[tuple[Any, ...]] = itertools.islice(fields, source.size)
    if seconds is None:
        every = tracked(every, source.size or len(rows), f"task {task.name!r}: reading {len(rows)} rows")
    for number, (value, answer, *taken) in enumerate(every):
        try:
            question = row_question(task, value, answer, _nowhere, {})
        except ConfigError:
            # Once more, for the message: finding a row's place takes time.
            row_question(task, value, answer, functools.partial(rows.place, number), rows.row(number))
            raise
        if any(one is not None for one in taken):
            there = [name for name, one in zip(names, taken, strict=True) if one is not None]
            raise reserved(there, rows.place(number))
        digest = question_digest(question)
        content.update(digest)
        if source.messages_field is not None:
            content.update(json.dumps(value, sort_keys=True, default=str).encode())
        digests.append(int.from_bytes(digest, "big"))
        if answer is not None and not str(answer).strip():
            blank.append(number)
        if not (source.hold_out and is_held_out_digest(digest)):
            trained.append(number)
        if deadline is not None and trained and time.monotonic() > deadline:
            return Split(trained, content.hexdigest())
    found = Findings(*_twins(digests), blank_answers=len(blank), blank_answer=blank[0] if blank else -1)
    split = Split(trained, content.hexdigest(), found)
    rows.keep_split(split)
    return split


def _twins(digests: array[int]) -> tuple[int, int, int]:
    """Return how many digests occurred before, where the first of them is, and where it was first."""
    values = np.frombuffer(digests, np.uint64)
    order = np.argsort(values, kind="stable")
    again = order[1:][values[order][1:] == values[order][:-1]]
    if not len(again):
        return 0, -1, -1
    first = int(again.min())
    return len(again), first, int(np.flatnonzero(values == values[first])[0])


def _nowhere() -> str:
    return ""


class StreamSource:
    """The prompts of an iterable without a length that are not held out, in the iterable's own order."""

    def __init__(self, task: TaskConfig, tokenizer: Tokenizer | None = None) -> None:
        """Read nothing yet. With a tokenizer, drop what is too long if the task says so."""
        self._task = task
        self._tokenizer = tokenizer

    @property
    def identity(self) -> str:
        """What makes the prompts."""
        source = self._task.source
        return f"{source.dataset} {json.dumps(source.params, sort_keys=True, default=repr)} {source.size}"

    def prompts(self) -> Iterator[Prompt]:
        """Return one pass over them. Raises ConfigError if a row holds no prompt."""
        every = not_dropped(stream_prompts(self._task), self._task, self._tokenizer)
        if not self._task.source.hold_out:
            return every
        return (one for one in every if not is_held_out(one.metadata["question"]))


class SequenceRows(Rows):
    """The rows of a sequence that a function returned. Another process calls the function again."""

    def __init__(self, task: TaskConfig, data: Any) -> None:
        """Raise ConfigError if it is empty."""
        self._task = task
        self._data = data
        if len(self) < 1:
            raise ConfigError(f"{task.source.dataset} holds 0 prompts: it must return at least one row")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a call that asks the function again."""
        return _call_again, (self._task, len(self))

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._data)

    def row(self, number: int) -> Row:
        """Return the row; see Rows."""
        return _checked(self._task, self._data[number], self.place(number))

    def place(self, number: int) -> str:
        """Return where the row stands."""
        return f"{self._task.source.dataset}: row {number}"


def _call_again(task: TaskConfig, size: int) -> SequenceRows:
    rows = SequenceRows(task, call(task))
    if len(rows) != size:
        raise ConfigError(
            f"{task.source.dataset} returned {size} rows, and in another process {len(rows)}: it must return the "
            "same ones whenever it is called"
        )
    return rows


def python_rows(task: TaskConfig) -> SequenceRows | None:
    """Return the rows of a function that returns a sequence; None if it returns an iterable without a length.

    Raises ConfigError for an iterator that it returns again: checks would read what training needs.
    """
    data = call(task)
    if _is_sequence(data):
        return SequenceRows(task, data)
    if isinstance(data, Iterator) and call(task) is data:
        raise ConfigError(
            f"task {task.name!r}: source.dataset is {task.source.dataset!r}, which returned the same iterator twice: "
            "rows are read more than once, so each call must make an iterator of its own"
        )
    return None


def stream_prompts(task: TaskConfig) -> Iterator[Prompt]:
    """Yield all prompts of an iterable, held-out ones too, once."""
    for number, row in enumerate(itertools.islice(call(task), task.source.size)):
        place = f"{task.source.dataset}: row {number}"
        yield row_prompt(task, _checked(task, row, place), functools.partial(str, place))


def row_prompts(task: TaskConfig, rows: Rows) -> Iterator[Prompt]:
    """Return the prompts of all rows, held-out ones too, in order."""
    return (_prompt(task, rows, number) for number in range(len(rows))[: task.source.size])


def call(task: TaskConfig) -> Any:
    """Call the source's function and return its data. Raises ConfigError if that fails or it gives no iterable."""
    what, source = f"task {task.name!r}: source.dataset", task.source
    function = load_function(str(source.dataset), what)
    try:
        inspect.signature(function).bind(**source.params)
    except TypeError as error:
        raise ConfigError(
            f"{what} is {source.dataset!r}, which cannot be called with source.params {source.params}: {error}"
        ) from error
    found = function(**source.params)
    # A torch dataset has a length and items, but no iterator.
    if isinstance(found, str | bytes | Mapping) or not (_is_sequence(found) or isinstance(found, Iterable)):
        raise ConfigError(
            f"{what} is {source.dataset!r}, which returned a {type(found).__name__}: it must return a sequence or "
            "an iterable of rows"
        )
    return found


def _is_sequence(data: Any) -> bool:
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def _prompt(task: TaskConfig, rows: Rows, number: int) -> Prompt:
    return row_prompt(task, rows.row(number), lambda: rows.place(number))


def _checked(task: TaskConfig, row: Any, place: str) -> Row:
    if not isinstance(row, Mapping):
        raise unusable(task, place, row)
    return dict(row)
