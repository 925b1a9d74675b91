"""Busy, idle and overlapping time, computed from the spans of a run.

Invariant: time is never counted twice, because every sum is taken over the union of intervals. Intervals_N2 is a
float64 array of (start, end) in seconds since the epoch; after `union` it is sorted and disjoint.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from raypost.observe.spans import EVALUATE, ROLLOUT, SYNC, TRAIN, Span, SpanKind

Intervals_N2 = NDArray[np.float64]
SpanTable = dict[tuple[str, SpanKind], Intervals_N2]
"""(actor, kind) -> its intervals, as a union."""


def union(intervals: Intervals_N2) -> Intervals_N2:
    """Return sorted, disjoint intervals that cover the same instants. Empty intervals vanish."""
    intervals = np.asarray(intervals, np.float64).reshape(-1, 2)
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    if not len(intervals):
        return intervals
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reach = np.maximum.accumulate(intervals[:, 1])
    first = np.concatenate([[True], intervals[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([intervals[first, 0], reach[last]], axis=1)


def intersect(a: Intervals_N2, b: Intervals_N2) -> Intervals_N2:
    """Return the instants in both; `a` and `b` are unions, and so is the result."""
    # Instants in both are those covered twice when both lists are laid over each other.
    edges = np.concatenate([a[:, 0], b[:, 0], a[:, 1], b[:, 1]])
    steps = np.concatenate([np.ones(len(a) + len(b)), -np.ones(len(a) + len(b))])
    order = np.argsort(edges, kind="stable")
    depth = np.cumsum(steps[order])
    starts = np.flatnonzero(depth == 2)
    return union(np.stack([edges[order][starts], edges[order][starts + 1]], axis=1))


def subtract(a: Intervals_N2, b: Intervals_N2) -> Intervals_N2:
    """Return the instants of `a` that are not in `b`; both are unions, and so is the result."""
    gaps = np.stack([np.append(-np.inf, b[:, 1]), np.append(b[:, 0], np.inf)], axis=1)
    return intersect(a, gaps)


def length_s(intervals: Intervals_N2) -> float:
    """Return the total seconds of a union."""
    return float(np.sum(intervals[:, 1] - intervals[:, 0]))


def span_table(spans: Iterable[Span]) -> SpanTable:
    """Collect spans by actor and kind."""
    lists: dict[tuple[str, SpanKind], array[float]] = {}
    for span in spans:
        lists.setdefault((span.actor, span.kind), array("d")).extend((span.start_s, span.end_s))
    return {key: union(np.asarray(flat).reshape(-1, 2)) for key, flat in lists.items()}


def any_busy(table: SpanTable, kind: SpanKind) -> Intervals_N2:
    """Return when at least one actor had a span of `kind`."""
    parts = [intervals for (_, of_kind), intervals in table.items() if of_kind == kind]
    return union(np.concatenate([np.empty((0, 2)), *parts]))


def training_windows(table: SpanTable, sessions: Sequence[tuple[float, float]]) -> Intervals_N2:
    """Return the time over which idle fractions are measured: one window for each session that trained.

    A window opens with the first instant of rollout after the evaluation before training (if any), so that
    the wait for the first batch counts; it closes with the end of the last "train" span, so that starting
    up, the last sync and the evaluation after training do not. `sessions` are the (start, end) between
    which the run's processes lived: a resumed run has several, and what lies between them is no idle time.
    """
    train, rollout, evaluate = (any_busy(table, kind) for kind in (TRAIN, ROLLOUT, EVALUATE))
    windows = []
    for start, end in sessions:
        trained = intersect(train, np.array([[start, end]]))
        if not len(trained):
            continue
        first, last = trained[0, 0], trained[-1, 1]
        opens = max([start, *(done for _, done in evaluate if done <= first)])
        produced = intersect(rollout, np.array([[opens, first]]))
        windows.append((produced[0, 0] if len(produced) else first, last))
    return union(np.asarray(windows, np.float64))


def idle_fraction(
    table: SpanTable, kind: SpanKind, windows: Intervals_N2, num_actors: int = 0
) -> float | None:
    """Return the share of the windows in which an actor had no span of `kind`, as the mean over the actors.

    An engine is in "rollout" while it has at least one request, those of an evaluation included. `num_actors`: how
    many there were, if more than left a span: those were idle throughout. None when there is no window or no actor.
    """
    busy = [length_s(intersect(spans, windows)) for (_, of_kind), spans in table.items() if of_kind == kind]
    actors, total_s = max(num_actors, len(busy)), length_s(windows)
    return 1 - sum(busy) / (actors * total_s) if actors and total_s > 0 else None


def time_shares_s(table: SpanTable, windows: Intervals_N2) -> dict[str, float]:
    """Split the windows' seconds without overlap, by what went on.

    In this order of precedence: `both` (training and rollout), `train` (alone), `evaluate`, `sync`, `rollout` (alone),
    `neither`.
    """
    train, rollout = any_busy(table, TRAIN), any_busy(table, ROLLOUT)
    claims = {
        "both": intersect(train, rollout),
        "train": train,
        "evaluate": any_busy(table, EVALUATE),
        "sync": any_busy(table, SYNC),
        "rollout": rollout,
    }
    shares, left = {}, windows
    for name, claim in claims.items():
        shares[name] = length_s(intersect(left, claim))
        left = subtract(left, claim)
    return {**shares, "neither": length_s(left)}
