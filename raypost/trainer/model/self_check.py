"""Whether a model computes in packed rows, and with its logits in chunks, what it computes by itself.

Owns the comparison that runs once, when an engine starts, on a few short sequences of random tokens. Transformers
cannot promise either for every architecture: a state that runs along a row (Mamba), or an attention of its own,
would mix the trajectories of a row in silence.

Axes: L tokens of a row, T compared positions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raypost.errors import ConfigError
from raypost.trainer.batch.packing import Segment
from raypost.trainer.model.head import Sampling
from raypost.trainer.model.policy import Critic, Policy

log = logging.getLogger(__name__)

Forward = Callable[..., Any]
"""The model's forward pass, through whatever wraps it. A collective where its weights are spread over ranks."""

_PROMPT, _RESPONSES, _OTHER = 6, (5, 9, 2), 7
"""Lengths of the sequences that are compared."""
_LAYERS = {"full_attention", "sliding_attention"}
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest difference of a logprob. bfloat16 rounds to about a tenth; another trajectory's tokens do far more."""


def check_packing(forward: Forward, model: Policy | Critic, max_length: int) -> None:
    """Raise ConfigError unless packed rows give what single sequences give; leaves the model packed.

    `max_length`: longest sequence to come; a sliding window that is shorter is tried as well.
    """
    name = type(model.model).__name__
    config = model.model.config.get_text_config()
    foreign = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if foreign:
        raise _refused(name, f"it has layers of type {', '.join(sorted(foreign))}")
    segments, row_L, places = _row(config.vocab_size, _window(config, max_length))
    with _quiet(model):
        parts = [_values(forward, model, row_L[place], np.arange(len(place)), None) for place in places]
        try:
            model.set_packed(True)
            got_T = _values(forward, model, row_L, np.concatenate(places), segments)
        except (TypeError, ValueError) as error:
            model.set_packed(False)
            raise _refused(name, str(error)) from error
    worst = (got_T - torch.cat(parts)).abs().max().item()
    tolerance = _TOLERANCE[model.model.dtype]
    if not worst <= tolerance:
        model.set_packed(False)
        raise _refused(name, f"packed rows change its outputs by {worst:.2g}, more than {tolerance}")


def check_head(forward: Forward, policy: Policy) -> None:
    """Switch the chunked head off unless it gives what the model's own forward pass gives."""
    if not policy.chunked:
        return
    ids = _tokens(policy.model.config.get_text_config().vocab_size, _OTHER)
    index_T = np.arange(len(ids))
    with _quiet(policy):
        got_T = _values(forward, policy, ids, index_T, None)
        policy.chunked = False
        own_T = _values(forward, policy, ids, index_T, None)
    policy.chunked = bool((got_T - own_T).abs().max() <= _TOLERANCE[policy.model.dtype])
    if not policy.chunked:
        log.info("%s has a head of its own: its logits are made whole", type(policy.model).__name__)


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(f"{name} cannot train on packed rows: {why}; use train.packing: false")


def _window(config: Any, max_length: int) -> int:
    """Length of one more sequence, which does not fit the model's window; 0 if every one will."""
    for name in ("sliding_window", "attention_chunk_size"):
        size = getattr(config, name, None)
        if size and size < max_length:
            return int(size) + 2
    return 0


def _tokens(vocabulary: int, length: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng([seed, length]).integers(0, vocabulary, length)


def _row(vocabulary: int, longer: int) -> tuple[list[Segment], NDArray[np.int64], list[NDArray[np.int64]]]:
    """One row of all sequences: its segments, its tokens, and where those of each sequence are."""
    pieces: list[NDArray[np.int64]] = []
    segments: list[Segment] = []
    places: list[NDArray[np.int64]] = []

    def append(tokens: NDArray[np.int64], prompt: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        start = sum(map(len, pieces))
        shared = (0, 0) if prompt is None else (int(prompt[0]), len(prompt))
        pieces.append(tokens)
        segments.append(Segment(start, len(tokens), *shared))
        return np.arange(start, start + len(tokens))

    for length in (_OTHER, longer):
        if length:
            places.append(append(_tokens(vocabulary, length)))
    prompt = append(_tokens(vocabulary, _PROMPT))
    for length in _RESPONSES:
        own = append(_tokens(vocabulary, length, seed=1), prompt)
        places.append(np.concatenate([prompt, own]))
    return segments, np.concatenate(pieces), places


@torch.no_grad()
def _values(
    forward: Forward,
    model: Policy | Critic,
    ids_L: NDArray[np.int64],
    index_T: NDArray[np.int64],
    segments: Sequence[Segment] | None,
) -> Tensor:
    """Logprob of each place's own token, or its value."""
    device = next(model.parameters()).device
    ids, index = torch.from_numpy(ids_L).to(device), torch.from_numpy(index_T).to(device)
    if isinstance(model, Critic):
        hidden: Tensor = forward(ids[None], index, segments)
        return hidden
    logprobs_T: Tensor = forward(
        ids[None], index, ids[index], Sampling(torch.ones(len(index), device=device)), segments
    )[0]
    return logprobs_T


@contextmanager
def _quiet(model: Policy | Critic) -> Iterator[None]:
    """Without gradient checkpointing's remarks about passes that have no gradient."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
