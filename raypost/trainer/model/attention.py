"""Attention inside one flat row that holds many trajectories: each token sees its own trajectory only.

A row is cut into segments. A segment sees itself causally and, if it has one, the whole of its prefix: a
prompt is a segment without prefix, and the responses that share it are segments with that prefix.

    row:  [prompt A | response A1 | response A2 | prompt B | response B1]
    A2 sees prompt A and itself; positions of A1 and of A2 both go on from prompt A's last

Owns which positions see which, and their computation, which replaces the attention of a Hugging Face model
under the name `ATTENTION`. No mask of a row's length squared exists: segments of like length are computed
together, each in a rectangle of its own. Knows neither trajectories nor losses.

Axes: L tokens of the row, S segments, H heads, D head size, N segments of one block, Q and K its longest query
and key ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from raypost.errors import ConfigError
from raypost.trainer.batch.packing import CAUSAL_SHARE, Segment, attention_pairs

ATTENTION = "raypost_row"
"""Name of this attention among those of transformers."""

_CALL_PAIRS = 1024
"""Pairs of tokens whose attention takes about as long on CPU as another call would."""


@dataclass(frozen=True, slots=True)
class _SegmentBlock:
    """N segments whose attention is one call. `causal`: queries and keys are the same tokens."""

    size: int
    queries: int
    keys: int
    prefix: int
    causal: bool


@dataclass(slots=True)
class RowAttention:
    """Where the queries and keys of every block lie in the row, and where a token's result lies among theirs.

    An index of None is the identity.
    """

    blocks: list[_SegmentBlock]
    query_index: Tensor | None
    key_index: Tensor | None
    result_index_L: Tensor | None
    masks: dict[tuple[int, int, int, int | None], Tensor] = field(default_factory=dict)


def positions_of(segments: Sequence[Segment]) -> NDArray[np.int64]:
    """Return the position of every token within its trajectory. `segments` cover the row in order."""
    parts = [np.arange(s.prefix_length, s.prefix_length + s.length) for s in segments]
    return np.concatenate([np.empty(0, np.int64), *parts])


def row_attention(segments: Sequence[Segment], device: torch.device) -> RowAttention:
    """Return how to compute the attention of a row that `segments` cover in order, without gaps."""
    num_tokens = sum(segment.length for segment in segments)
    result_L = np.empty(num_tokens, np.int64)
    blocks: list[_SegmentBlock] = []
    queries: list[NDArray[np.int64]] = []
    keys: list[NDArray[np.int64]] = []
    at = 0
    for members in _blocks(segments):
        longest, prefix = members[0].length, members[0].prefix_length
        masked = prefix > 0 and longest * (prefix + longest) < CAUSAL_SHARE * (prefix + longest) ** 2
        # Without a mask the prefix asks as well, in vain: cheaper where it is short.
        asking = 0 if masked else prefix
        for segment in members:
            own = np.arange(segment.start, segment.start + segment.length)
            own = np.pad(own, (0, longest - segment.length), mode="edge")
            seen = np.arange(segment.prefix_start, segment.prefix_start + prefix)
            keys.append(np.concatenate([seen, own]))
            queries.append(own if masked else keys[-1])
            result_L[segment.start : segment.start + segment.length] = at + asking + np.arange(segment.length)
            at += asking + longest
        blocks.append(_SegmentBlock(len(members), asking + longest, prefix + longest, prefix, not masked))
    return RowAttention(
        blocks, _index(queries, num_tokens, device), _index(keys, num_tokens, device),
        _index([result_L], at, device),
    )  # fmt: skip


def _blocks(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments that are computed together: one prefix length, and so alike that padding costs less than calls."""
    order = sorted(segments, key=lambda s: (s.prefix_length, -s.length, s.start))
    blocks: list[list[Segment]] = []
    for segment in order:
        if blocks and segment.prefix_length == blocks[-1][0].prefix_length:
            longest, prefix = blocks[-1][0].length, segment.prefix_length
            if attention_pairs(longest, prefix) - attention_pairs(segment.length, prefix) <= _CALL_PAIRS:
                blocks[-1].append(segment)
                continue
        blocks.append([segment])
    return blocks


def _index(parts: list[NDArray[np.int64]], identity: int, device: torch.device) -> Tensor | None:
    index = np.concatenate([np.empty(0, np.int64), *parts])
    if len(index) == identity and np.array_equal(index, np.arange(identity)):
        return None
    return torch.from_numpy(index).to(device)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    row: RowAttention | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query, key, value [1, H, L, D] -> [1, L, H, D]: the attention that transformers calls as `ATTENTION`."""
    if row is None:
        raise ConfigError(f"{type(module).__name__} is not told how its row is packed: use packing: false")
    q_LHD, k_LHD, v_LHD = (one[0].transpose(0, 1) for one in (query, key, value))
    q = _gathered(q_LHD, row.query_index)
    k, v = _gathered(k_LHD, row.key_index), _gathered(v_LHD, row.key_index)
    results = []
    q_parts = torch.split(q, [block.size * block.queries for block in row.blocks])
    sizes = [block.size * block.keys for block in row.blocks]
    for block, q_part, k_part, v_part in zip(
        row.blocks, q_parts, torch.split(k, sizes), torch.split(v, sizes), strict=True
    ):
        mask_QK = _mask(row, block, sliding_window, query.device)
        q_NHQD = torch.unflatten(q_part, 0, (block.size, block.queries)).transpose(1, 2)
        k_NHKD, v_NHKD = (
            torch.unflatten(part, 0, (block.size, block.keys)).transpose(1, 2) for part in (k_part, v_part)
        )
        if softcap is not None:
            out_NHQD = _capped(q_NHQD, k_NHKD, v_NHKD, mask_QK, scaling, softcap)
        else:
            out_NHQD = scaled_dot_product_attention(
                q_NHQD, k_NHKD, v_NHKD,
                attn_mask=mask_QK,
                is_causal=mask_QK is None,
                scale=scaling,
                enable_gqa=k.shape[1] != q.shape[1],
            )  # fmt: skip
        results.append(out_NHQD.transpose(1, 2).flatten(0, 1))
    out = results[0] if len(results) == 1 else torch.cat(results)
    return _gathered(out, row.result_index_L)[None], None


def _capped(
    q_NHQD: Tensor, k_NHKD: Tensor, v_NHKD: Tensor, mask_QK: Tensor | None, scale: float | None, cap: float
) -> Tensor:
    """Attention with scores cap * tanh(score / cap), of which PyTorch has no fused form."""
    repeats = q_NHQD.shape[1] // k_NHKD.shape[1]
    k_NHKD, v_NHKD = k_NHKD.repeat_interleave(repeats, 1), v_NHKD.repeat_interleave(repeats, 1)
    scale = q_NHQD.shape[-1] ** -0.5 if scale is None else scale
    scores_NHQK = torch.tanh(q_NHQD @ k_NHKD.transpose(-1, -2) * (scale / cap)) * cap
    if mask_QK is None:
        mask_QK = scores_NHQK.new_ones(scores_NHQK.shape[-2:], dtype=torch.bool).tril()
    scores_NHQK = scores_NHQK.masked_fill(~mask_QK, -torch.inf)
    return torch.softmax(scores_NHQK, -1, dtype=torch.float32).to(q_NHQD.dtype) @ v_NHKD


def _gathered(values: Tensor, index: Tensor | None) -> Tensor:
    return values if index is None else values.index_select(0, index)


def _mask(row: RowAttention, block: _SegmentBlock, window: int | None, device: torch.device) -> Tensor | None:
    """Return what each query of a block sees, or None where plain causal attention says the same."""
    if window is not None and window >= block.keys:
        window = None
    if block.causal and window is None:
        return None
    key = (block.queries, block.keys, block.prefix, window)
    if key not in row.masks:
        query_Q1 = torch.arange(block.keys - block.queries, block.keys, device=device)[:, None]
        key_K = torch.arange(block.keys, device=device)
        mask_QK = key_K <= query_Q1
        if window is not None:
            mask_QK &= query_Q1 - key_K < window
        row.masks[key] = mask_QK
    return row.masks[key]


def _no_mask(*_: Any, **__: Any) -> None:
    """Make no mask: which token sees which is part of the row."""


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, _no_mask)
