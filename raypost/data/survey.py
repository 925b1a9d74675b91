"""A look at a whole source before a run: how many prompts it has, how long each is, and what is odd about them.

Rows are all read, once: what was found is kept in `source.index_dir`. Of what has no end, or is made when it is asked
for, the beginning is looked at, and the survey says so.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raypost.config import TaskConfig
from raypost.data.lengths import fitting, prompt_lengths
from raypost.data.prompt import render
from raypost.data.rows import Findings, Rows
from raypost.data.sources import read_split
from raypost.data.task_source import build_source, first_prompts, reading, source_rows
from raypost.data.tokenizer import Tokenizer

BEGINNING, BEGINNING_S = 1000, 1.0
"""Most prompts of an endless source that are looked at, and the seconds that this takes at most."""
NAMED = 3
"""Long prompts that are named."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found in a source."""

    read: int
    """Prompts looked at."""
    whole: bool
    """They are all that there are."""
    trained: int
    """How many of them are trained; those that are dropped are not."""
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Lengths of those that fit; empty without a tokenizer."""
    num_long: int = 0
    """How many do not fit `max_prompt_tokens`, or have no token."""
    long: tuple[str, ...] = ()
    """The first of these, each with its place and its length."""
    findings: Findings = field(default_factory=Findings)
    twin: str = ""
    blank_answer: str = ""
    """Places of the first of each."""


def survey_source(task: TaskConfig, seed: int, tokenizer: Tokenizer | None) -> Survey:
    """Look at the source of `task`. Raises ConfigError if it is malformed, or a prompt cannot be rendered."""
    with reading(task):
        rows = None if task.source.kind == "reasoning_gym" else source_rows(task)
        return _beginning(task, seed, tokenizer) if rows is None else _rows(task, rows, tokenizer)


def _rows(task: TaskConfig, rows: Rows, tokenizer: Tokenizer | None) -> Survey:
    split = rows.known_split() or read_split(task, rows, None)
    read, found = min(len(rows), task.source.size or len(rows)), split.findings
    survey: dict[str, Any] = {"read": read, "whole": True, "trained": len(split.trained), "findings": found}
    if found.twins:
        survey["twin"] = f"{rows.place(found.twin)} repeats {rows.place(found.twin_of)}"
    if found.blank_answers:
        survey["blank_answer"] = rows.place(found.blank_answer)
    if tokenizer is not None:
        lengths = prompt_lengths(task, rows, split.content, tokenizer)
        fits = fitting(task, lengths)
        long = np.flatnonzero(~fits)
        survey["tokens"], survey["num_long"] = lengths[fits], len(long)
        survey["long"] = tuple(f"{rows.place(int(n))} ({lengths[n]} tokens)" for n in long[:NAMED])
        survey["trained"] = int(fits[np.asarray(split.trained, np.int64)].sum())
    return Survey(**survey)


def _beginning(task: TaskConfig, seed: int, tokenizer: Tokenizer | None) -> Survey:
    source, lengths, read, deadline = build_source(task, seed), [], 0, time.monotonic() + BEGINNING_S
    long = []
    for prompt in itertools.islice(first_prompts(source), BEGINNING):
        read += 1
        if tokenizer is not None:
            length = len(render(prompt, tokenizer, task))
            lengths.append(length)
            if not 1 <= length <= task.max_prompt_tokens:
                long.append(f"prompt {read}, {prompt.text!r:.60} ({length} tokens)")
        if time.monotonic() > deadline:
            break
    tokens = np.array(lengths, np.int64)
    return Survey(
        read=read,
        whole=False,
        trained=read - len(long),
        tokens=tokens[fitting(task, tokens)],
        num_long=len(long),
        long=tuple(long[:NAMED]),
    )
