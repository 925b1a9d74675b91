"""Problems that reasoning-gym makes, each when it is asked for."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import itertools
import json
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from raypost.config import SourceConfig, TaskConfig
from raypost.data.lengths import not_dropped
from raypost.data.prompt import Prompt, fill, is_held_out
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError

DEFAULT_SIZE = 100_000
"""Problems of an epoch where the configuration says nothing."""

_PROBES = 64
"""Problems tried for one index before giving up: the chance that all are held out is 10**-64."""

_SEED_SPACE = 2**31
"""Datasets hand their seed to generators that take 31 bits at least."""

_IMPORTING = threading.Lock()


class _WhenUsed(ModuleType):
    """Stands in for a module, which is imported when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(self.__name__), name)

    def leave(self) -> None:
        """Have the next import find the module itself."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


def gym_factory() -> Any:
    """Import reasoning-gym, and return its module of datasets. A job on files need not pay for it.

    Without cellpylib, which two datasets use when they make a problem and which brings matplotlib's windows: a third of
    the time, and 30 MB of each process.
    """
    with _IMPORTING:
        stand_in = _WhenUsed("cellpylib")
        sys.modules.setdefault("cellpylib", stand_in)
        try:
            return importlib.import_module("reasoning_gym.factory")
        finally:
            stand_in.leave()


class GymSource:
    """The problems of a reasoning-gym dataset, none of them held out."""

    def __init__(self, task: TaskConfig, seed: int, tokenizer: Tokenizer | None = None) -> None:
        """Raise ConfigError for an unknown dataset or parameters it refuses.

        With a tokenizer, the place of what is too long is taken by a neighbour, if the task says so.
        """
        self._task = task
        self._tokenizer = tokenizer
        self._seed = seed
        self._dataset = gym_dataset(task.source, seed, part=0)
        self._size = len(self._dataset)
        source, version = task.source, importlib.metadata.version("reasoning-gym")
        self.identity = (
            f"reasoning-gym {version} {source.dataset} {json.dumps(source.params, sort_keys=True)}"
        )
        """What decides the problems, besides the seed."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a call that makes the dataset again."""
        # A dataset of reasoning-gym may hold what cannot be pickled.
        return GymSource, (self._task, self._seed, self._tokenizer)

    def __len__(self) -> int:
        """Return the number of problems in an epoch."""
        return self._size

    def sample(self, index: int) -> Prompt:
        """Return the problem at `index`, or a neighbour in its place when that one is held out."""
        if not 0 <= index < self._size:
            raise IndexError(f"index {index} of a source of {self._size} problems")
        for probe in range(_PROBES):
            entry = self._dataset[(index + probe * 7919) % self._size]
            if self._task.source.hold_out and is_held_out(entry["question"]):
                continue
            for prompt in not_dropped([_gym_prompt(self._task, entry)], self._task, self._tokenizer):
                return prompt
        raise ConfigError(
            f"task {self._task.name!r}: {_PROBES} problems of {self._task.source.dataset!r} in a row are held "
            f"out or dropped, so it has too few different ones (size {self._size}): raise size or change params"
        )


def gym_held_out(task: TaskConfig, seed: int, limit: int) -> Iterator[Prompt]:
    """Return the held-out ones among the first `limit` problems."""
    # Another part than training's: the stream of candidates differs even where the split is small.
    dataset = gym_dataset(task.source, seed, part=1)
    for entry in map(dataset.__getitem__, itertools.islice(range(len(dataset)), limit)):
        if is_held_out(entry["question"]):
            yield _gym_prompt(task, entry)


def gym_dataset(source: SourceConfig, seed: int, part: int) -> Any:
    """Return the reasoning-gym dataset of `source`; each `part` of a seed has its own problems.

    Raises ConfigError for an unknown dataset or parameters it refuses.
    """
    factory = gym_factory()
    if source.dataset not in factory.DATASETS:
        raise ConfigError(
            f"reasoning-gym has no dataset {source.dataset!r}: see reasoning_gym.factory.DATASETS"
        )
    mixed = hashlib.blake2b(f"{seed}/{part}".encode(), digest_size=8).digest()
    gym_seed = int.from_bytes(mixed, "big") % _SEED_SPACE
    size = source.size or DEFAULT_SIZE
    try:
        return factory.create_dataset(source.dataset, **source.params, seed=gym_seed, size=size)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"reasoning-gym's {source.dataset} refuses params {source.params} with size {size}: {error}"
        ) from error


def _gym_prompt(task: TaskConfig, entry: dict[str, Any]) -> Prompt:
    question = str(entry["question"])
    metadata = {"question": question, "answer": str(entry["answer"]), "entry": entry}
    return Prompt(fill(task.prompt_template, question), metadata)
