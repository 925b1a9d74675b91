"""A prompt, how a row becomes one, whether it is held out, and how it becomes token ids.

    question, or a conversation in the data --> Prompt --> messages --> chat template --> text --> ids
                                                Prompt, where no template is asked for --> text --> ids

Invariants: whether a question is held out depends on its text alone; `text_for_engine` is the one place where what an
engine reads is put together.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raypost.config import SourceConfig, TaskConfig
from raypost.data.functions import tool_schemas
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError
from raypost.types import IntArray

HELD_OUT_ONE_IN = 10
"""One question in this many is kept for evaluation."""

QUESTION, ANSWER, MESSAGES = "question", "answer", "messages"
"""Keys of the metadata that every prompt has, or may have, whatever its fields are called in the source."""

_OF_RUNS = ("session_id", "raypost.turns", "raypost.parked")
"""Keys by which agent loops and the trainer know a trajectory's session and turns."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem.

    `metadata` has `question` and, where the data has one, `answer`, whatever their fields are called in the source; for
    a conversation also `messages`, and then `question` is its text; for reasoning-gym the dataset's whole `entry`, for
    other sources every further field under its own name.
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


# ---------------------------------------------------------------- a row


def row_question(task: TaskConfig, value: Any, answer: Any, place: Callable[[], str], row: object) -> str:
    """Return the question in the value of a row's prompt field: a text, or the text of a conversation.

    Raises ConfigError, which names the row's `place`, if there is none, or no answer where the task needs one.
    """
    source = task.source
    if answer is None and task.needs_answers:
        raise unusable(task, place(), row)
    if source.messages_field is not None:
        try:
            return conversation_text(read_messages(value))
        except ValueError as error:
            raise ConfigError(
                f"{place()}: {source.messages_field!r} must be a conversation such as "
                f'[{{"role": "user", "content": "..."}}]: {error}'
            ) from None
    if not (isinstance(value, str) and value.strip()):
        raise unusable(task, place(), row)
    return value


def row_prompt(task: TaskConfig, row: Mapping[str, Any], place: Callable[[], str]) -> Prompt:
    """Return the prompt in a row. Raises ConfigError, which names the row's `place`, if there is none."""
    source = task.source
    value, answer = row.get(source.prompt_field), row.get(source.answer_field or ANSWER)
    question = row_question(task, value, answer, place, row)
    if taken := [name for name in reserved_names(source) if row.get(name) is not None]:
        raise reserved(taken, place())
    own = {source.prompt_field, source.answer_field, *source.ignore_fields}
    metadata = {**{name: item for name, item in row.items() if name not in own}, QUESTION: question}
    if source.answer_field is not None and answer is not None:
        metadata[ANSWER] = str(answer)
    if source.messages_field is not None:
        metadata[MESSAGES] = read_messages(value)
    return Prompt(prompt_text(task, metadata), metadata)


@functools.cache
def _taken(prompt_field: str, answer_field: str | None, ignored: tuple[str, ...]) -> tuple[str, ...]:
    mapped = {prompt_field, answer_field, *ignored}
    return tuple(name for name in (*_OF_RUNS, QUESTION, ANSWER, MESSAGES) if name not in mapped)


def reserved_names(source: SourceConfig) -> tuple[str, ...]:
    """Return the names that no column of the source may have: raypost gives them another meaning."""
    return _taken(source.prompt_field, source.answer_field, source.ignore_fields)


def reserved(taken: Iterable[str], place: str) -> ConfigError:
    """Return the error for columns with reserved names."""
    names = ", ".join(map(repr, taken))
    return ConfigError(
        f"{place} has {names}, which raypost uses itself in a prompt's metadata: rename the column, name it as "
        f"source.question_field, messages_field or answer_field if it is that, or leave it out with "
        f"source.ignore_fields: [{names}]"
    )


def unusable(task: TaskConfig, place: str, got: object) -> ConfigError:
    """Return the error for a row that is no prompt."""
    source = task.source
    shape = f'"{source.prompt_field}": "..."' + (
        f', "{source.answer_field}": "..."' if task.needs_answers else ""
    )
    value = got.get(source.prompt_field) if isinstance(got, Mapping) else None
    if isinstance(value, list):
        fix = f"a list of messages is read with source.messages_field: {source.prompt_field}"
    else:
        fix = "source.question_field and source.answer_field say what the fields are called"
    return ConfigError(f"{place} must be like {{{shape}}}, got {got!r:.120}; {fix}")


def read_messages(value: Any) -> list[Message]:
    """Return the conversation in a value of the data, without keys that are None (columnar files fill them in).

    Raises ValueError saying what is wrong.
    """
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"got {value!r:.120}")
    messages = []
    for number, one in enumerate(value, 1):
        if not isinstance(one, Mapping) or not isinstance(one.get("role"), str):
            raise ValueError(f"message {number} has no role: {one!r:.120}")
        content = one.get("content")
        if isinstance(content, list | tuple | Mapping):
            raise ValueError(
                f"message {number} has parts of content, {content!r:.80}; it must be one text: multimodal is out of "
                "scope"
            )
        if not isinstance(content, str):
            raise ValueError(f"message {number} has the content {content!r:.80}, which is no text")
        messages.append({name: item for name, item in one.items() if item is not None})
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            "it ends with the assistant's words, and the policy is to say them: cut the last message off"
        )
    if not any(one["content"].strip() for one in messages):
        raise ValueError("nothing is said in it")
    return messages


def conversation_text(messages: list[Message]) -> str:
    """Return a conversation as one text, which decides whether it is held out: of a single message its content."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{one['role']}: {one['content']}" for one in messages)


# ---------------------------------------------------------------- what an engine reads


def prompt_text(task: TaskConfig, metadata: Mapping[str, Any]) -> str:
    """Return the text of the prompt with this metadata, before any chat template."""
    question = str(metadata.get(QUESTION, ""))
    return question if task.source.messages_field is not None else fill(task.prompt_template, question)


def conversation(task: TaskConfig, text: str, metadata: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a prompt: those in the data, or `text` as one of the user, after the system prompt."""
    messages = metadata.get(MESSAGES) if task.source.messages_field is not None else None
    if messages is None:
        messages = [{"role": "user", "content": text}]
    if task.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": task.system_prompt}, *messages]
    return list(messages)


def text_for_engine(prompt: Prompt, tokenizer: Tokenizer, task: TaskConfig) -> str:
    """Return the text whose tokens an engine is given, in the chat template when `task.chat` is set.

    Raises ConfigError without a template, or when it refuses the messages.
    """
    if not task.chat:
        return prompt.text
    return tokenizer.chat(
        conversation(task, prompt.text, prompt.metadata),
        template=task.chat_template_source,
        tools=tool_schemas(task),
        variables=task.chat_template_kwargs,
    )


def render(prompt: Prompt, tokenizer: Tokenizer, task: TaskConfig) -> IntArray:
    """Return the token ids of the prompt, shape [P]. Raises ConfigError as `text_for_engine` does."""
    return tokenizer.encode(text_for_engine(prompt, tokenizer, task), add_special_tokens=not task.chat)
