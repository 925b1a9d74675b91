"""A prompt, how a row becomes one, whether it is held out, and how it becomes token ids.

Invariant: whether a question is held out depends on its text alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raypost.config import SourceConfig, TaskConfig
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError
from raypost.types import IntArray

HELD_OUT_ONE_IN = 10
"""One question in this many is kept for evaluation."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem.

    `metadata` has `question` and `answer`, whatever their fields are called in the source; for reasoning-gym also the
    dataset's whole `entry`, for other sources every further field under its own name.
    """

    text: str
    metadata: dict[str, Any] = field(default_factory=dict)


def question_digest(question: str) -> bytes:
    """Return 8 bytes that tell questions apart, equal in every process and every run."""
    return hashlib.blake2b(question.strip().encode(), digest_size=8).digest()


def is_held_out_digest(digest: bytes) -> bool:
    """Return whether the question with this digest belongs to evaluation."""
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def is_held_out(question: str) -> bool:
    """Return whether this question belongs to evaluation, decided by a hash: equal in every process and every run."""
    return is_held_out_digest(question_digest(question))


def fill(template: str, question: str) -> str:
    """Return the text of a prompt."""
    # Not str.format: a template for a model is full of braces that mean themselves.
    return template.replace("{question}", question)


def is_usable(question: Any, answer: Any) -> bool:
    """Return whether a row with these two values is a prompt: a text that is not blank, and any answer."""
    return isinstance(question, str) and bool(question.strip()) and answer is not None


def row_prompt(task: TaskConfig, row: Mapping[str, Any], place: Callable[[], str]) -> Prompt:
    """Return the prompt in a row. Raises ConfigError, which names the row's `place`, if there is none."""
    source = task.source
    question, answer = row.get(source.question_field), row.get(source.answer_field)
    if not is_usable(question, answer):
        raise unusable(source, place(), row)
    others = {k: v for k, v in row.items() if k not in (source.question_field, source.answer_field)}
    metadata = {**others, "question": question, "answer": str(answer)}
    return Prompt(fill(task.prompt_template, str(question)), metadata)


def unusable(source: SourceConfig, place: str, got: object) -> ConfigError:
    """Return the error for a row that is no prompt."""
    return ConfigError(
        f'{place} must be like {{"{source.question_field}": "...", "{source.answer_field}": "..."}}, got '
        f"{got!r:.120}; source.question_field and source.answer_field say what the fields are called"
    )


def render(prompt: Prompt, tokenizer: Tokenizer, task: TaskConfig) -> IntArray:
    """Return the token ids of the prompt, shape [P], in the tokenizer's chat template when `task.chat` is set."""
    if task.chat:
        text = tokenizer.chat([{"role": "user", "content": prompt.text}])
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode(prompt.text)
