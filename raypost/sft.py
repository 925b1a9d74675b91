"""Supervised examples that are mixed into every train step: which ones, and as what the packer takes.

Owns reading, encoding and their order, which depends on the seed and the step alone: all ranks agree, and a resumed
run goes on where it was. The loss is losses.sft_loss.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from raypost.algorithm_config import SftConfig
from raypost.errors import ConfigError
from raypost.tokenizer import Tokenizer
from raypost.train_batch import Sample
from raypost.types import NO_VERSION, RolloutState, SampleParams, Status

TASK = "sft"
"""`RolloutState.task` of an example."""


class SftExamples:
    """The encoded examples of a file."""

    def __init__(self, config: SftConfig, tokenizer: Tokenizer, seed: int, max_tokens: int) -> None:
        """Raises ConfigError naming the line that is no example, or is longer than `max_tokens`, or if the file has
        fewer lines than a step takes."""
        self._count, self._seed = config.samples, seed
        self._states = [
            _state(row, place, number, config.chat, tokenizer, max_tokens)
            for number, (place, row) in enumerate(_rows(config.path))
        ]
        if len(self._states) < self._count:
            raise ConfigError(
                f"{config.path} holds {len(self._states)} examples, fewer than train.sft.samples {self._count}: "
                "use fewer samples"
            )

    def of_step(self, step: int) -> list[Sample]:
        """The examples of a 1-based train step: each once before any comes again, in another order every time.

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


def _rows(path: Path) -> list[tuple[str, Any]]:
    """(place, value) of each line that is not blank."""
    try:
        lines = path.expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read train.sft.path {path}: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append((f"{path}:{number}", json.loads(line)))
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}:{number} is no JSON: {error}") from error
    return rows


def _state(
    row: Any, place: str, number: int, chat: bool, tokenizer: Tokenizer, max_tokens: int
) -> RolloutState:
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("prompt", "response")):
        raise ConfigError(f'{place} must read {{"prompt": "...", "response": "..."}}, got {row!r:.80}')
    text = tokenizer.chat([{"role": "user", "content": row["prompt"]}]) if chat else row["prompt"]
    prompt_ids = tokenizer.encode(text, add_special_tokens=not chat)
    response_ids = tokenizer.encode(row["response"], add_special_tokens=False)
    response_ids = np.append(response_ids, np.int32(tokenizer.eos_ids[0]))
    length = len(prompt_ids) + len(response_ids)
    if not len(prompt_ids):
        raise ConfigError(f"{place} has a prompt without tokens: a response needs something before it")
    if length > max_tokens:
        raise ConfigError(f"{place} has {length} tokens, more than {max_tokens}: shorten or drop it")
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
