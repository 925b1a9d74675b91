"""HttpJudge: a judge that asks a service over HTTP.

Owns the request, what is asked again, and what of an answer is accepted. docs/judges.md has both bodies.

    POST {"id", "task", "samples": [...]}  ->  200 {"scores": [...]}, one for each sample
          +- no connection, timeout, 408, 429, 5xx, no JSON, half a body: asked again, later; then JudgeError
          +- another status, scores that are no numbers or too few: JudgeError at once

Invariants: an answer is read only from the connection that its request was made on, and a connection serves one
request, so that what a service says twice is never taken for another's answer; the key is in no error.
"""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import Callable, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from raypost.config import JudgeConfig, TaskConfig
from raypost.errors import JudgeError, at
from raypost.judges.function import sample_of
from raypost.judges.function_child import RefusedError, number_of
from raypost.observe.waits import waiting
from raypost.types import RolloutState, Sample, Score

BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
"""Wait before a request is made again, which doubles each time, and the longest such wait."""
MAX_ANSWER_BYTES = 16 << 20
_LATER = (408, 429)
"""Statuses below 500 that ask to come again."""


class _AgainError(Exception):
    """The same request may be answered later."""


class HttpJudge:
    """Sends all states of a call in one request."""

    def __init__(
        self, task: TaskConfig, config: JudgeConfig, on_retry: Callable[[], None] | None = None
    ) -> None:
        """Connect to nothing yet. `on_retry` is told of each request that is made again."""
        assert config.url is not None, "the configuration requires it"
        self._task = task
        self._config = config
        self._url = config.url
        self._on_retry = on_retry or (lambda: None)
        self._turns = asyncio.Semaphore(config.concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def judge(self, states: list[RolloutState]) -> list[float]:
        """Return one Score for each state. Raises JudgeError naming the group and the service."""
        samples = [
            sample_of(self._task, one.metadata, one.response_text, one.prompt_ids, one.response_ids)
            for one in states
        ]
        try:
            return [*await self.score(samples)]
        except JudgeError as error:
            raise JudgeError(
                at(f"task {states[0].task!r}, group {states[0].group_id}", str(error))
            ) from error

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Return one Score for each sample. Raises JudgeError."""
        number = uuid.uuid4().hex
        try:
            body = json.dumps(
                {"id": number, "task": self._task.name, "samples": [_plain(sample) for sample in samples]},
                default=_json,
                allow_nan=False,
            ).encode()
        except (TypeError, ValueError) as error:
            raise JudgeError(f"the metadata cannot be sent to {self._url} as JSON: {error}") from error
        for attempt in range(self._config.retries + 1):
            try:
                async with self._turns:
                    answer = await self._ask(body)
                return _scores(answer, number, len(samples))
            except _AgainError as error:
                if attempt == self._config.retries:
                    raise JudgeError(
                        f"{self._url} {error}; it was asked {attempt + 1} times (judge.retries {attempt})"
                    ) from None
            except RefusedError as error:
                raise JudgeError(f"{self._url} {error}") from None
            self._on_retry()
            # Not all at once: whoever failed together would come back together.
            await asyncio.sleep(min(MAX_BACKOFF_S, BACKOFF_S * 2**attempt) * random.uniform(0.75, 1.25))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _ask(self, body: bytes) -> Any:
        timeout_s = self._config.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                with waiting(self._url, timeout_s, outside="judge"):
                    async with self._connected().post(
                        self._url, data=body, allow_redirects=False
                    ) as response:
                        text = await _read(response)
                        status = response.status
        except TimeoutError:
            raise _AgainError(f"took longer than judge.timeout_s {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _AgainError(f"gave no whole answer: {type(error).__name__}: {error}") from None
        if status != 200:
            said = f"answered with status {status}: {text[:200].decode(errors='replace')!r}"
            raise _AgainError(said) if status >= 500 or status in _LATER else RefusedError(said)
        try:
            return json.loads(text)
        except ValueError:
            raise _AgainError(f"answered with no JSON: {text[:200].decode(errors='replace')!r}") from None

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"Content-Type": "application/json", "Accept": "application/json"}
            if self._config.api_key_file is not None:
                headers["Authorization"] = f"Bearer {read_key(self._config.api_key_file)}"
            # One request a connection: a second answer on it would else be the next request's.
            connector = aiohttp.TCPConnector(force_close=True, limit=0)
            # The deadline is that of each request.
            self._session = aiohttp.ClientSession(
                connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=None)
            )
        return self._session

    async def close(self) -> None:
        """Close what is open."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def read_key(file: Path) -> str:
    """Return the key in a file. Raises JudgeError if there is none; the text of it is in no error."""
    try:
        key = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise JudgeError(f"api_key_file {file} cannot be read: {type(error).__name__}") from None
    if not key or not key.isprintable():
        raise JudgeError(f"api_key_file {file} holds no key: it must be one line of text")
    return key


async def _read(response: aiohttp.ClientResponse) -> bytes:
    text = bytearray()
    async for part in response.content.iter_chunked(1 << 16):
        text += part
        if len(text) > MAX_ANSWER_BYTES:
            raise RefusedError(f"answered with more than {MAX_ANSWER_BYTES} bytes")
    return bytes(text)


def _plain(sample: Sample) -> dict[str, Any]:
    return {
        "prompt": sample.prompt,
        "response": sample.response,
        "answer": sample.answer,
        "metadata": sample.metadata,
        "turns": sample.turns,
    }


def _json(value: Any) -> Any:
    """Return what json cannot write itself as what it can."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, date | datetime):
        return value.isoformat()
    raise TypeError(f"it holds a {type(value).__name__}")


def _scores(answer: Any, number: str, num_samples: int) -> list[Score]:
    """Return the scores of an answer. Raises RefusedError."""
    if not isinstance(answer, dict) or not isinstance(answer.get("scores"), list):
        raise RefusedError(f'answered with {answer!r:.200}: it must be {{"scores": [...]}}')
    if answer.get("id", number) != number:
        raise RefusedError(f"answered request {answer['id']!r:.80} when it was asked {number!r}")
    if len(answer["scores"]) != num_samples:
        raise RefusedError(f"answered with {len(answer['scores'])} scores for {num_samples} responses")
    return [_score(score) for score in answer["scores"]]


def _score(given: Any) -> Score:
    fields = given if isinstance(given, dict) else {"reward": given}
    if unknown := fields.keys() - {"reward", "parts", "words"}:
        raise RefusedError(f"gave a score with {sorted(unknown)}: it has reward, parts and words")
    parts, words = fields.get("parts") or {}, fields.get("words") or ""
    if not isinstance(parts, dict) or not isinstance(words, str):
        raise RefusedError(f"gave {given!r:.200}: parts are numbers by name, and words are a text")
    reward = number_of(fields.get("reward"), "gave the score")
    return Score(
        reward, {name: number_of(value, f"gave part {name!r}:") for name, value in parts.items()}, words
    )
