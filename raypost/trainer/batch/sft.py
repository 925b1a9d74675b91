"""Supervised examples that every train step learns in addition to its batch: which ones, encoded for the packer.

Owns reading, encoding and their order, which depends on the seed and the step alone: all ranks agree, and a resumed
run goes on where it was. The loss is losses.sft_loss; what a rank does with the examples is in policy_rank.py.
Imports neither torch nor transformers, so that a configuration is checked without them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from raypost.config import SftConfig
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError
from raypost.trainer.batch.train_batch import Sample
from raypost.types import NO_VERSION, RolloutState, SampleParams, Status

TASK = "sft"
"""`RolloutState.task` of an example."""


class SftExamples:
    """The encoded examples of a file."""

    def __init__(self, config: SftConfig, tokenizer: Tokenizer, seed: int, max_tokens: int) -> None:
        """Read and encode the file.

        Raises ConfigError naming the line that is no example or is longer than `max_tokens`, or if the file has fewer
        lines than a step takes.
        """
        self._count = config.samples
        self._seed = seed
        self._states = list(_encoded(config, read_examples(config), tokenizer, max_tokens))

    def of_step(self, step: int) -> list[Sample]:
        """Return the examples of a 1-based train step: each once before any repeats, in another order every time.

        `Sample.start` counts their own response tokens, as in a batch of them alone. All tokens of a response are
        trained, its end of sequence included.
        """
        samples, start, size = [], 0, len(self._states)
        first, end = (step - 1) * self._count, step * self._count
        epochs = range(first // size, (end - 1) // size + 1)
        orders = {epoch: np.random.default_rng([self._seed, epoch]).permutation(size) for epoch in epochs}
        for position in range(first, end):
            epoch, place = divmod(position, size)
            state = self._states[orders[epoch][place]]
            samples.append(Sample(state, start))
            start += state.num_tokens
        return samples

    def of_updates(self, step: int, num_updates: int) -> list[list[Sample]]:
        """Return those of a step by its optimizer steps: as equally many as can be, each example in one of them."""
        samples = self.of_step(step)
        bounds = [len(samples) * update // num_updates for update in range(num_updates + 1)]
        return [samples[bounds[update] : bounds[update + 1]] for update in range(num_updates)]


def check_examples(
    config: SftConfig, tokenizer: Tokenizer | None, max_tokens: int, within_s: float = 0.3
) -> None:
    """Raise ConfigError, naming file and line, unless every line is an example and the first ones fit `max_tokens`.

    As many are encoded as `within_s` allows; without a tokenizer none is.
    """
    rows = read_examples(config)
    if tokenizer is None:
        return
    deadline = time.monotonic() + within_s
    for _ in _encoded(config, rows, tokenizer, max_tokens):
        if time.monotonic() > deadline:
            return


def read_examples(config: SftConfig) -> list[tuple[str, dict[str, str]]]:
    """Return (file:line, example) of each line of the file that is not blank. Raises ConfigError."""
    path = config.path.expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read train.sft.path {path}: {error}") from error
    rows = [_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if len(rows) < config.samples:
        raise ConfigError(
            f"{path} holds {len(rows)} examples, fewer than train.sft.samples {config.samples}: use fewer samples"
        )
    return rows


def _row(path: Path, number: int, line: str) -> tuple[str, dict[str, str]]:
    place = f"{path}:{number}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} is no JSON: {error}") from error
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("prompt", "response")):
        raise ConfigError(f'{place} must read {{"prompt": "...", "response": "..."}}, got {row!r:.80}')
    return place, row


def _encoded(
    config: SftConfig, rows: list[tuple[str, dict[str, str]]], tokenizer: Tokenizer, max_tokens: int
) -> Iterator[RolloutState]:
    if config.chat and not tokenizer.has_chat_template:
        raise ConfigError("train.sft.chat is true, but the model's tokenizer has no chat template: use false")
    for number, (place, row) in enumerate(rows):
        yield _state(row, place, number, config.chat, tokenizer, max_tokens)


def _state(
    row: dict[str, Any], place: str, number: int, chat: bool, tokenizer: Tokenizer, max_tokens: int
) -> RolloutState:
    text = tokenizer.chat([{"role": "user", "content": row["prompt"]}]) if chat else row["prompt"]
    prompt_ids = tokenizer.encode(text, add_special_tokens=not chat)
    response_ids = tokenizer.encode(row["response"], add_special_tokens=False)
    response_ids = np.append(response_ids, np.int32(tokenizer.eos_ids[0]))
    length = len(prompt_ids) + len(response_ids)
    if not len(prompt_ids):
        raise ConfigError(f"{place} has a prompt without tokens: a response needs something before it")
    if length > max_tokens:
        raise ConfigError(
            f"{place} has {length} tokens, more than the {max_tokens} of max_prompt_tokens + max_tokens: shorten "
            "or drop it"
        )
    return RolloutState(
        task=TASK,
        group_id=number,
        sample_index=0,
        prompt_ids=prompt_ids,
        sample_params=SampleParams(max_tokens=len(response_ids)),
        status=Status.COMPLETED,
        response_ids=response_ids,
        logprobs=np.zeros(len(response_ids), np.float32),
        policy_versions=np.full(len(response_ids), NO_VERSION, np.int32),
        response_mask=np.ones(len(response_ids), np.bool_),
        reward=0.0,
    )
