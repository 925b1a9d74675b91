"""Sources, and functions that a configuration may name, for tests that send them to other processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from raypost.config import JudgeConfig, SourceConfig, TaskConfig
from raypost.data.prompt import Prompt
from raypost.data.sampler import Sampler

STOP = 2


def number(index: int) -> Prompt:
    """The prompt that is one number."""
    return Prompt(str(index), {"answer": str(index)})


class Numbers:
    """A source whose prompt i is the number i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def sample(self, index: int) -> Prompt:
        return number(index)


class NumberStream:
    """The numbers below `size`, one after the other."""

    def __init__(self, size: int) -> None:
        self.size = size

    def prompts(self) -> Iterator[Prompt]:
        return map(number, range(self.size))


class Slow(Numbers):
    """Takes `seconds` a prompt."""

    def __init__(self, size: int, seconds: float) -> None:
        super().__init__(size)
        self.seconds = seconds

    def sample(self, index: int) -> Prompt:
        time.sleep(self.seconds)
        return super().sample(index)


class Deadly(Numbers):
    """Kills the process that asks for this number."""

    def __init__(self, size: int, number: int) -> None:
        super().__init__(size)
        self.number = number

    def sample(self, index: int) -> Prompt:
        if index == self.number:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample(index)


class Broken(Numbers):
    """Raises for this number."""

    def __init__(self, size: int, number: int) -> None:
        super().__init__(size)
        self.number = number

    def sample(self, index: int) -> Prompt:
        if index == self.number:
            raise ZeroDivisionError(f"number {index}")
        return super().sample(index)


class Unsendable(Numbers):
    """Holds what cannot be sent to another process."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.lock = threading.Lock()


def encode(prompt: Prompt) -> Any:
    return np.arange(3, 3 + len(prompt.text), dtype=np.int32)


def task_config(name: str = "default", *, num_workers: int = 0, **changes: Any) -> TaskConfig:
    source = SourceConfig(kind="jsonl", dataset="numbers", num_workers=num_workers)
    return TaskConfig(name=name, source=source, judge=JudgeConfig(kind="exact"), **changes)


def of(source: Any, num_workers: int = 0, timeout_s: float = 60.0) -> Sampler:
    """A sampler of that source."""
    return Sampler(task_config(num_workers=num_workers), source, encode, (STOP,), 0, timeout_s=timeout_s)


def answers(sampler: Sampler, count: int) -> list[str]:
    """The next so many prompts."""
    return [sampler.sample().states[0].metadata["answer"] for _ in range(count)]


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"What is {n}?", "answer": n, "level": n % 3} for n in range(start, start + count)]


def sequence(count: int = 100) -> list[dict[str, Any]]:
    return rows(count)


def stream(count: int = 100) -> Iterator[dict[str, Any]]:
    yield from rows(count)


def endless() -> Iterator[dict[str, Any]]:
    number = 0
    while True:
        yield from rows(1, number)
        number += 1


def one_shot() -> Iterator[dict[str, Any]]:
    return ONE_SHOT


ONE_SHOT = stream()


def raising() -> Iterator[dict[str, Any]]:
    yield from rows(3)
    raise OSError("the network is gone")


def text() -> str:
    return "no rows"


def numbers() -> list[int]:
    return [1, 2, 3]


NOT_A_FUNCTION = 3


def paths(count: int = 20) -> list[dict[str, Any]]:
    """Return rows with a field that is no plain data."""
    return [{**row, "file": Path("rows")} for row in rows(count)]
