"""From samples to micro-batches: on which rank, in which forward pass, at which place of a row.

Owns the arrays that a forward pass reads. Owns no formula. Everything is a function of the samples and of the
number of ranks, so every rank plans the whole minibatch alone and all plans agree.

    samples -> units (a prompt and the responses that share it) -> ranks -> micro-batches -> arrays

Packed, a micro-batch is one row without padding, cut into segments whose tokens do not see each other
(attention.py). Unpacked, it has a row a sample, padded on the right.

Invariants: each sample is in exactly one micro-batch; a micro-batch has at most `max_tokens` tokens, padding
included; every rank has the same number of micro-batches, made up with empty ones, because each forward and
backward pass may be a collective.

Axes: B rows, L positions of a row, T trained tokens, flat, sample after sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from raypost.trainer.batch.train_batch import Sample

Number = TypeVar("Number", bound=np.generic)

_UNEVEN = 1.05
"""Load of the busiest rank over the mean, above which a unit is split."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start` to `start + length` of a row, which also see `prefix_start` to + `prefix_length`."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True, slots=True)
class PackingRule:
    """How samples become micro-batches."""

    max_tokens: int
    packed: bool = True
    share_prompts: bool = True
    pair_cost: float = 0.0
    """Time of one pair of tokens in all attention layers, in times of one token in all other layers."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass. `samples` is empty for a filler, whose T is 0.

    Trained token t is predicted at `index_T[t]` = b * L + position of the token *before* it. Under causal
    attention no real token sees the padding on its right, so an unpacked row needs no mask.
    """

    samples: tuple[Sample, ...]
    input_ids_BL: NDArray[np.int64]
    segments: tuple[Segment, ...] | None
    """Of the one row, in order and without gaps; None: unpacked."""
    index_T: NDArray[np.int64]
    targets_T: NDArray[np.int64]
    places_T: NDArray[np.int64]
    """In the batch's columns."""
    sample_T: NDArray[np.int64]
    """Which of `samples`."""
    rollout_logprobs_T: NDArray[np.float32]
    policy_versions_T: NDArray[np.int32]
    temperatures_T: NDArray[np.float32]
    top_p_T: NDArray[np.float32] | None
    """None, as top_k_T, where neither cuts anything."""
    top_k_T: NDArray[np.int64] | None
    barred_TS: NDArray[np.int64] | None
    """Ids that `min_tokens` kept each token from being, filled up with -1; None where it keeps none."""

    @property
    def num_trained(self) -> int:
        """Trained tokens, T."""
        return len(self.targets_T)

    @property
    def num_inputs(self) -> int:
        """Tokens the model computes, padding included."""
        return self.input_ids_BL.size


def attention_pairs(length: int, prefix: int = 0) -> float:
    """Return the pairs of tokens whose attention is computed for a segment: its cost but for a constant.

    With a mask it is the rectangle of queries and keys; the square of all tokens without one takes less than
    its area, since what lies after the diagonal is skipped. The cheaper of both is chosen (attention.py).
    """
    return min(float(length * (prefix + length)), CAUSAL_SHARE * (prefix + length) ** 2)


CAUSAL_SHARE = 0.6
"""Share of a square of pairs that attention without a mask takes on CPU, in long rows."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Samples whose prompt is computed once: they must be in one micro-batch. One sample: shares nothing."""

    samples: tuple[Sample, ...]

    @property
    def tokens(self) -> int:
        """Tokens the model computes."""
        prompt = len(self.samples[0].state.prompt_ids)
        return prompt + sum(sample.num_inputs - prompt for sample in self.samples)

    def cost(self, rule: PackingRule) -> float:
        """Return the cost of its forward pass, in tokens."""
        if len(self.samples) == 1:
            return self.tokens + rule.pair_cost * attention_pairs(self.tokens)
        prompt = len(self.samples[0].state.prompt_ids)
        pairs = attention_pairs(prompt)
        pairs += sum(attention_pairs(sample.num_inputs - prompt, prompt) for sample in self.samples)
        return self.tokens + rule.pair_cost * pairs


def make_units(samples: Sequence[Sample], rule: PackingRule) -> list[Unit]:
    """Put samples of a group with the same prompt together, where that costs less than each for itself.

    Raises ValueError naming a sample that is longer than `max_tokens`.
    """
    for sample in samples:
        if sample.num_inputs > rule.max_tokens:
            raise ValueError(
                f"group {sample.key} sample {sample.state.sample_index} has {sample.num_inputs} tokens, more than "
                f"train.micro_batch_tokens {rule.max_tokens}: raise it"
            )
    alone = [Unit((sample,)) for sample in samples]
    if not (rule.packed and rule.share_prompts):
        return alone
    siblings: dict[object, list[Sample]] = {}
    for sample in samples:
        siblings.setdefault((sample.key, sample.state.prompt_ids.tobytes()), []).append(sample)
    units = []
    for members in siblings.values():
        for part in _fitting(members, rule.max_tokens):
            shared, single = Unit(tuple(part)), [Unit((sample,)) for sample in part]
            pays = shared.cost(rule) < sum(unit.cost(rule) for unit in single)
            units += [shared] if pays else single
    return units


def _fitting(members: list[Sample], max_tokens: int) -> list[list[Sample]]:
    """Siblings in parts that fit one micro-batch each."""
    prompt = len(members[0].state.prompt_ids)
    parts: list[list[Sample]] = []
    used = 0
    for sample in members:
        added = sample.num_inputs - prompt
        if parts and used + added <= max_tokens:
            parts[-1].append(sample)
            used += added
        else:
            parts.append([sample])
            used = prompt + added
    return parts


def spread(units: Sequence[Unit], world_size: int, rule: PackingRule) -> list[list[Unit]]:
    """Distribute units over ranks, balanced by cost: costliest first, each to the rank with the least so far.

    While a rank has far more than the mean, its largest unit of several samples is split in two.
    """
    units = list(units)
    while True:
        ranks, loads = _assigned(units, world_size, rule)
        busiest = max(range(world_size), key=loads.__getitem__)
        shared = [unit for unit in ranks[busiest] if len(unit.samples) > 1]
        if loads[busiest] * world_size <= _UNEVEN * sum(loads) or not shared:
            return ranks
        largest = max(shared, key=lambda unit: unit.cost(rule))
        order = sorted(largest.samples, key=lambda sample: -sample.num_inputs)
        halves = [Unit(tuple(order[0::2])), Unit(tuple(order[1::2]))]
        split = [unit for unit in units if unit is not largest] + halves
        if max(_assigned(split, world_size, rule)[1]) >= loads[busiest]:
            return ranks
        units = split


def _assigned(
    units: Sequence[Unit], world_size: int, rule: PackingRule
) -> tuple[list[list[Unit]], list[float]]:
    costs = [unit.cost(rule) for unit in units]
    ranks: list[list[Unit]] = [[] for _ in range(world_size)]
    loads = [0.0] * world_size
    for i in sorted(range(len(units)), key=lambda i: (-costs[i], i)):
        rank = loads.index(min(loads))
        loads[rank] += costs[i]
        ranks[rank].append(units[i])
    return ranks, loads


def fill(units: Sequence[Unit], rule: PackingRule) -> list[list[Unit]]:
    """Put one rank's units into micro-batches of at most `max_tokens`: largest first, each where it fits first.

    Unpacked, a micro-batch takes as much as its longest sample times their number.
    """
    batches: list[list[Unit]] = []
    used: list[int] = []
    for unit in sorted(units, key=lambda unit: -unit.tokens):
        for i, batch in enumerate(batches):
            size = used[i] + unit.tokens if rule.packed else (len(batch) + 1) * batch[0].tokens
            if size <= rule.max_tokens:
                batch.append(unit)
                used[i] = size
                break
        else:
            batches.append([unit])
            used.append(unit.tokens)
    return batches


def micro_batches(
    samples: Sequence[Sample], rank: int, world_size: int, rule: PackingRule
) -> list[MicroBatch]:
    """Return this rank's micro-batches of one minibatch, at least one, equally many on every rank."""
    ranks = [fill(units, rule) for units in spread(make_units(samples, rule), world_size, rule)]
    most = max(1, *map(len, ranks))
    fillers: list[list[Unit]] = [[] for _ in range(most - len(ranks[rank]))]
    build = _packed if rule.packed else _padded
    return [build(units) for units in ranks[rank] + fillers]


def _packed(units: list[Unit]) -> MicroBatch:
    """One row: every unit is its prompt and then its responses; a unit of one sample is one segment."""
    ids: list[NDArray[np.int32]] = []
    segments: list[Segment] = []
    index: list[NDArray[np.int64]] = []
    samples: list[Sample] = []
    at = 0

    def append(tokens: NDArray[np.int32], prefix: tuple[int, int] = (0, 0)) -> None:
        nonlocal at
        if len(tokens):
            segments.append(Segment(at, len(tokens), *prefix))
            ids.append(tokens)
            at += len(tokens)

    for unit in units:
        prompt_ids, start = unit.samples[0].state.prompt_ids, at
        prompt = len(prompt_ids)
        if len(unit.samples) > 1:
            append(prompt_ids)
        for sample in unit.samples:
            response_ids = sample.state.response_ids[:-1]
            if len(unit.samples) == 1:
                append(np.concatenate([prompt_ids, response_ids]))
                before = start + prompt - 1 + sample.trained
            else:
                # The first token of each response is predicted at the prompt's last, which they share.
                before = np.where(sample.trained == 0, start + prompt - 1, at + sample.trained - 1)
                append(response_ids, (start, prompt))
            index.append(before)
            samples.append(sample)
    if not units:
        append(np.zeros(1, np.int32))
    row_L = np.concatenate(ids).astype(np.int64)
    return _micro_batch(samples, row_L[None], tuple(segments), index)


def _padded(units: list[Unit]) -> MicroBatch:
    samples = [sample for unit in units for sample in unit.samples]
    longest = max((sample.num_inputs for sample in samples), default=1)
    input_ids_BL = np.zeros((max(1, len(samples)), longest), np.int64)
    index = []
    for row, sample in enumerate(samples):
        ids = np.concatenate([sample.state.prompt_ids, sample.state.response_ids])
        input_ids_BL[row, : sample.num_inputs] = ids[:-1]
        index.append(row * longest + len(sample.state.prompt_ids) + sample.trained - 1)
    return _micro_batch(samples, input_ids_BL, None, index)


def _micro_batch(
    samples: list[Sample],
    input_ids_BL: NDArray[np.int64],
    segments: tuple[Segment, ...] | None,
    index: list[NDArray[np.int64]],
) -> MicroBatch:
    def flat(parts: Sequence[NDArray[Any]], dtype: type[Number]) -> NDArray[Number]:
        return np.concatenate([np.empty(0, dtype), *parts], dtype=dtype)

    states = [(sample.state, sample.state.response_mask) for sample in samples]
    params = [state.sample_params for state, _ in states]
    counts = [len(one) for one in index]

    def each(values: Sequence[float], dtype: type[Number]) -> NDArray[Number]:
        return np.repeat(np.asarray(values, dtype), counts)

    cut = any(one.top_p < 1 or one.top_k > 0 for one in params)
    return MicroBatch(
        samples=tuple(samples),
        input_ids_BL=input_ids_BL,
        segments=segments,
        index_T=flat(index, np.int64),
        targets_T=flat([state.response_ids[mask] for state, mask in states], np.int64),
        places_T=flat([sample.places for sample in samples], np.int64),
        sample_T=np.repeat(np.arange(len(samples)), counts),
        rollout_logprobs_T=flat([state.logprobs[mask] for state, mask in states], np.float32),
        policy_versions_T=flat([state.policy_versions[mask] for state, mask in states], np.int32),
        temperatures_T=each([one.temperature for one in params], np.float32),
        top_p_T=each([one.top_p for one in params], np.float32) if cut else None,
        top_k_T=each([one.top_k for one in params], np.int64) if cut else None,
        barred_TS=_barred(samples),
    )


def _barred(samples: Sequence[Sample]) -> NDArray[np.int64] | None:
    """Return the stop tokens that could not be sampled at each trained token, [T, S]; None if all could everywhere."""
    params = [sample.state.sample_params for sample in samples]
    width = max((len(one.stop_token_ids) for one in params if one.min_tokens), default=0)
    if not width:
        return None
    rows = []
    for sample, one in zip(samples, params, strict=True):
        stops, ids_S = one.stop_token_ids[:width], np.full(width, -1)
        ids_S[: len(stops)] = stops
        rows.append(np.where(sample.trained[:, None] < one.min_tokens, ids_S, -1))
    return np.concatenate(rows, dtype=np.int64)
