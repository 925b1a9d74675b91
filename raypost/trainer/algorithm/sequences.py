"""Sums over the tokens of each sequence, where tokens are flat. Axes: T tokens, B sequences."""

from __future__ import annotations

import torch
from torch import Tensor


def row_sums(values_T: Tensor, rows_T: Tensor, num_rows: int) -> Tensor:
    """values_T, rows_T int64 in [0, B) -> sums_B; 0 where a sequence has no token."""
    return torch.zeros(num_rows, dtype=values_T.dtype, device=values_T.device).index_add(0, rows_T, values_T)


def row_means(values_T: Tensor, rows_T: Tensor, num_rows: int) -> Tensor:
    """As `row_sums`, divided by each sequence's tokens; 0 where it has none."""
    counts_B = torch.bincount(rows_T, minlength=num_rows).clamp(min=1)
    return row_sums(values_T, rows_T, num_rows) / counts_B
