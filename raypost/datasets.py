"""Prompts: where they come from, which are held out, and how one becomes token ids.

Owns the sources and the split. Owns neither the order in which prompts are trained (the sampler does) nor
their scores (judges do). Imports no torch and no transformers.

Invariants: whether a question is held out depends on its text alone, so nothing that `sample` yields, for
any seed and any parameters, is ever an evaluation problem; the same seed gives the same prompts.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from raypost.config import SourceConfig, TaskConfig
from raypost.errors import ConfigError
from raypost.tokenizer import Tokenizer
from raypost.types import IntArray

HELD_OUT_ONE_IN = 10
"""One question in this many is kept for evaluation."""

HELD_OUT_LIMIT = 512
"""Held-out prompts `held_out` looks for unless told otherwise."""

_PROBES = 64
"""Problems tried for one index before giving up: the chance that all are held out is 10**-64."""

_SEED_SPACE = 2**31
"""Datasets hand their seed to generators that take 31 bits at least."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem. `metadata` has `question`, `answer` and, for reasoning-gym, the dataset's whole `entry`."""

    text: str
    metadata: dict[str, Any] = field(default_factory=dict)


class Source(Protocol):
    """A fixed number of prompts, addressed by index."""

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Prompt:
        """The prompt at `index`, the same one whenever asked."""
        ...


def is_held_out(question: str) -> bool:
    """Whether this text belongs to evaluation. Decided by a hash, alike in every process and every run."""
    digest = hashlib.blake2b(question.strip().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def build_source(task: TaskConfig, seed: int) -> Source:
    """What `task` trains on. Raises ConfigError if it is missing, malformed or empty."""
    if task.source.kind == "jsonl":
        return JsonlSource(task)
    return GymSource(task, seed)


def held_out(task: TaskConfig, seed: int, num_prompts: int = HELD_OUT_LIMIT) -> list[Prompt]:
    """Up to `num_prompts` distinct evaluation prompts. Raises ConfigError if there are none."""
    if task.source.kind == "jsonl":
        rows = [prompt for prompt in _read_jsonl(task) if is_held_out(prompt.metadata["question"])]
        prompts = _distinct(rows, num_prompts)
    else:
        # Another seed than training's: the stream of candidates differs even where the split is small.
        dataset = gym_dataset(task.source, seed, part=1)
        size = min(len(dataset), 8 * HELD_OUT_ONE_IN * num_prompts)
        found = (
            _gym_prompt(task, entry)
            for entry in map(dataset.__getitem__, range(size))
            if is_held_out(entry["question"])
        )
        prompts = _distinct(found, num_prompts)
    if not prompts:
        raise ConfigError(
            f"task {task.name!r}: no held-out problem among those of {task.source.dataset!r}; one question in "
            f"{HELD_OUT_ONE_IN} is held out by its text: give it more problems"
        )
    return prompts


def render(prompt: Prompt, tokenizer: Tokenizer, task: TaskConfig) -> IntArray:
    """Token ids of the prompt, shape [P], in the tokenizer's chat template when `task.chat` is set."""
    if task.chat:
        text = tokenizer.chat([{"role": "user", "content": prompt.text}])
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode(prompt.text)


class GymSource:
    """`source.size` problems of a reasoning-gym dataset, none of them held out. Made when asked for."""

    def __init__(self, task: TaskConfig, seed: int) -> None:
        """Raises ConfigError for an unknown dataset or parameters it refuses."""
        self._task = task
        self._size = task.source.size
        self._dataset = gym_dataset(task.source, seed, part=0)

    def __len__(self) -> int:
        return self._size

    def sample(self, index: int) -> Prompt:
        """The problem at `index`, or a neighbour in its place when that one is held out."""
        if not 0 <= index < self._size:
            raise IndexError(f"index {index} of a source of {self._size} problems")
        for probe in range(_PROBES):
            entry = self._dataset[(index + probe * 7919) % self._size]
            if not is_held_out(entry["question"]):
                return _gym_prompt(self._task, entry)
        raise ConfigError(
            f"task {self._task.name!r}: {_PROBES} problems of {self._task.source.dataset!r} in a row are held "
            f"out, so it has too few different ones (size {self._size}): raise size or change params"
        )


class JsonlSource:
    """The lines of a JSONL file that are not held out."""

    def __init__(self, task: TaskConfig) -> None:
        """Raises ConfigError if the file cannot be read, a line is malformed, or nothing is left to train."""
        prompts = _read_jsonl(task)
        self._prompts = [p for p in prompts if not is_held_out(p.metadata["question"])]
        if not self._prompts:
            raise ConfigError(
                f"task {task.name!r}: {task.source.dataset} has {len(prompts)} prompts and none left to train on "
                f"after one in {HELD_OUT_ONE_IN} is held out: give it more lines"
            )

    def __len__(self) -> int:
        return len(self._prompts)

    def sample(self, index: int) -> Prompt:
        """The prompt at `index`."""
        return self._prompts[index]


def gym_dataset(source: SourceConfig, seed: int, part: int) -> Any:
    """The reasoning-gym dataset of `source`; each `part` of a seed has its own problems.

    Raises ConfigError for an unknown dataset or parameters it refuses.
    """
    # Imported here: it takes a second, which a job on a JSONL file need not pay.
    from reasoning_gym.factory import DATASETS, create_dataset

    if source.dataset not in DATASETS:
        raise ConfigError(
            f"reasoning-gym has no dataset {source.dataset!r}: see reasoning_gym.factory.DATASETS"
        )
    mixed = hashlib.blake2b(f"{seed}/{part}".encode(), digest_size=8).digest()
    gym_seed = int.from_bytes(mixed, "big") % _SEED_SPACE
    try:
        return create_dataset(source.dataset, **source.params, seed=gym_seed, size=source.size)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"reasoning-gym's {source.dataset} refuses params {source.params} with size {source.size}: {error}"
        ) from error


def _gym_prompt(task: TaskConfig, entry: dict[str, Any]) -> Prompt:
    question = str(entry["question"])
    metadata = {"question": question, "answer": str(entry["answer"]), "entry": entry}
    return Prompt(_fill(task.prompt_template, question), metadata)


def _fill(template: str, question: str) -> str:
    # Not str.format: a template for a model is full of braces that mean themselves.
    return template.replace("{question}", question)


def _read_jsonl(task: TaskConfig) -> list[Prompt]:
    path = Path(task.source.dataset).expanduser()
    try:
        rows = _load_rows(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise ConfigError(f"task {task.name!r}: cannot read {path}: {error.strerror}") from error
    return [
        Prompt(_fill(task.prompt_template, question), {"question": question, "answer": answer})
        for question, answer in rows[: task.source.size]
    ]


@functools.lru_cache(maxsize=4)
def _load_rows(path: Path, _mtime_ns: int) -> list[tuple[str, str]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.append((str(row["prompt"]), str(row["answer"])))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f'{path} line {number} must be like {{"prompt": "...", "answer": "..."}}, got {line!r:.80} ({error})'
            ) from error
    if not rows:
        raise ConfigError(f"{path} holds 0 prompts: give it at least one line")
    return rows


def _distinct(prompts: Any, limit: int) -> list[Prompt]:
    """The first `limit` prompts that differ in their question."""
    found: dict[str, Prompt] = {}
    for prompt in prompts:
        if len(found) >= limit:
            break
        found.setdefault(prompt.metadata["question"], prompt)
    return list(found.values())
