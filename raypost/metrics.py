"""Names of metrics, the log of an actor's time, and the figures that are computed from both.

Owns what a span means, how spans are collected inside an actor, and the arithmetic of busy, idle and
overlapping time. Writes nothing and talks to nobody: report/ and actors/telemetry.py do.

Invariants: a SpanLog never holds more than its bound; time is never counted twice, because every sum is
taken over the union of intervals. Intervals_N2 is a float64 array of (start, end) in seconds since the
epoch; after `union` it is sorted and disjoint.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raypost.types import Span

ROLLOUT, TRAIN, SYNC, EVALUATE = "rollout", "train", "sync", "evaluate"
WAIT, PAUSE, CHECKPOINT = "wait", "pause", "checkpoint"
KINDS = (ROLLOUT, TRAIN, SYNC, EVALUATE, WAIT, PAUSE, CHECKPOINT)
"""Every kind of span."""

# What a train step reports, by name.
LOSS = "loss"
REWARD_MEAN = "reward_mean"
"""Of the trained samples."""
RAW_REWARD_MEAN = "raw_reward_mean"
"""Of all judged samples, before any filter."""
LOGPROB_MISMATCH_MAX = "logprob_mismatch_max"
"""Largest absolute difference between a rollout's logprob and the trainer's, over the on-policy tokens."""
RESPONSE_TOKENS_MEAN = "response_tokens_mean"
"""Of the trained samples."""
STALENESS = "staleness"
"""A list: staleness of each group of the batch."""
STALENESS_MAX = "staleness_max"
STALENESS_MEAN = "staleness_mean"
BUFFER_GROUPS = "buffer_groups"
PRODUCED_TOKENS = "produced_tokens"
EXPIRED_GROUPS = "expired_groups"
EXPIRED_TOKENS_MEAN = "expired_tokens_mean"
SYNC_S = "sync_s"
HELD_OUT = "held_out"
"""Mean held-out score, in an evaluation's scores and in the steps after it."""
EVAL_FAILED = "eval_failed"
"""Responses of an evaluation that have no score."""
EVAL_TOKENS_MEAN = "eval_tokens_mean"
"""Of an evaluation's responses, failed ones included."""

MERGE_GAP_S = 0.005
MAX_SPANS = 20_000

Intervals_N2 = NDArray[np.float64]
SpanTable = dict[tuple[str, str], Intervals_N2]
"""(actor, kind) -> its intervals, as a union."""


@dataclass(slots=True)
class _Open:
    kind: str
    start_s: float
    end_s: float


class SpanLog:
    """Collects one actor's spans until they are drained. May be used from several threads.

    An interval that starts within `merge_gap_s` of the end of the last one of its kind extends it, so that
    a stream of short requests is one span. Holds at most `max_spans`; beyond that the oldest goes and
    `dropped` counts it.
    """

    def __init__(self, actor: str, merge_gap_s: float = MERGE_GAP_S, max_spans: int = MAX_SPANS) -> None:
        if max_spans < 1:
            raise ValueError(f"max_spans must be >= 1, got {max_spans}")
        self._actor = actor
        self._merge_gap_s = merge_gap_s
        self._max_spans = max_spans
        self._spans: deque[_Open] = deque()
        self._last: dict[str, _Open] = {}
        self._lock = threading.Lock()
        self.dropped = 0
        """Spans lost because nobody drained them in time."""

    def __len__(self) -> int:
        return len(self._spans)

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Record the block as one span of `kind`, also when it raises."""
        start_s, start = time.time(), time.monotonic()
        try:
            yield
        finally:
            # The wall clock may be set back meanwhile; a duration never is.
            self.add(kind, start_s, start_s + time.monotonic() - start)

    def add(self, kind: str, start_s: float, end_s: float) -> None:
        """Record one span (seconds since the epoch). Raises ValueError for an unknown kind."""
        if kind not in KINDS:
            raise ValueError(f"span kind {kind!r} is unknown, use one of {', '.join(KINDS)}")
        end_s = max(start_s, end_s)
        with self._lock:
            last = self._last.get(kind)
            if last is not None and last.start_s <= start_s <= last.end_s + self._merge_gap_s:
                last.end_s = max(last.end_s, end_s)
                return
            self._last[kind] = _Open(kind, start_s, end_s)
            self._spans.append(self._last[kind])
            if len(self._spans) > self._max_spans:
                oldest = self._spans.popleft()
                self.dropped += 1
                if self._last.get(oldest.kind) is oldest:
                    del self._last[oldest.kind]

    def drain(self) -> list[Span]:
        """All spans since the last call, in the order of their first instant recorded."""
        with self._lock:
            spans = self._spans
            self._spans = deque()
            self._last.clear()
        return [Span(actor=self._actor, kind=s.kind, start_s=s.start_s, end_s=s.end_s) for s in spans]


# ---------------------------------------------------------------- intervals


def union(intervals: Intervals_N2) -> Intervals_N2:
    """Sorted, disjoint intervals that cover the same instants. Empty intervals vanish."""
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
    """Instants in both; `a` and `b` are unions, and so is the result."""
    if not len(a) or not len(b):
        return np.empty((0, 2))
    # Instants in both are those covered twice when both lists are laid over each other.
    edges = np.concatenate([a[:, 0], b[:, 0], a[:, 1], b[:, 1]])
    steps = np.concatenate([np.ones(len(a) + len(b)), -np.ones(len(a) + len(b))])
    order = np.argsort(edges, kind="stable")
    depth = np.cumsum(steps[order])
    starts = np.flatnonzero(depth == 2)
    return union(np.stack([edges[order][starts], edges[order][starts + 1]], axis=1))


def subtract(a: Intervals_N2, b: Intervals_N2) -> Intervals_N2:
    """Instants of `a` that are not in `b`; both are unions, and so is the result."""
    if not len(a) or not len(b):
        return a
    gaps = np.stack([np.append(-np.inf, b[:, 1]), np.append(b[:, 0], np.inf)], axis=1)
    return intersect(a, gaps)


def length_s(intervals: Intervals_N2) -> float:
    """Total seconds of a union."""
    return float(np.sum(intervals[:, 1] - intervals[:, 0])) if len(intervals) else 0.0


def span_table(spans: Iterable[Span]) -> SpanTable:
    """Spans by actor and kind."""
    lists: dict[tuple[str, str], array[float]] = {}
    for span in spans:
        lists.setdefault((span.actor, span.kind), array("d")).extend((span.start_s, span.end_s))
    return {key: union(np.asarray(flat).reshape(-1, 2)) for key, flat in lists.items()}


def any_busy(table: SpanTable, kind: str) -> Intervals_N2:
    """When at least one actor had a span of `kind`."""
    parts = [intervals for (_, of_kind), intervals in table.items() if of_kind == kind]
    return union(np.concatenate([np.empty((0, 2)), *parts]))


# ---------------------------------------------------------------- figures


def training_windows(table: SpanTable, sessions: Sequence[tuple[float, float]]) -> Intervals_N2:
    """The time over which idle fractions are measured: one window for each session that trained.

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


def busy_fraction(table: SpanTable, kind: str, windows: Intervals_N2, num_actors: int = 0) -> float | None:
    """Share of the windows in which an actor had a span of `kind`, as the mean over the actors.

    `num_actors`: how many there were, if more than left a span: those were idle throughout. None when
    there is no window or no actor.
    """
    busy = [length_s(intersect(spans, windows)) for (_, of_kind), spans in table.items() if of_kind == kind]
    actors, total_s = max(num_actors, len(busy)), length_s(windows)
    return sum(busy) / (actors * total_s) if actors and total_s > 0 else None


def idle_fraction(table: SpanTable, kind: str, windows: Intervals_N2, num_actors: int = 0) -> float | None:
    """1 - busy_fraction. For trainers `kind` is "train"; for rollout workers "rollout", which an engine is
    in while it has at least one request, those of an evaluation included."""
    busy = busy_fraction(table, kind, windows, num_actors)
    return None if busy is None else 1.0 - busy


def overlap_s(table: SpanTable, windows: Intervals_N2) -> float:
    """Seconds in which some trainer rank trained while some rollout worker generated."""
    return length_s(intersect(intersect(any_busy(table, TRAIN), any_busy(table, ROLLOUT)), windows))


def time_shares_s(table: SpanTable, windows: Intervals_N2) -> dict[str, float]:
    """The windows' seconds split without overlap, in this order of precedence: `both` (training and
    rollout), `train` (alone), `evaluate`, `sync`, `rollout` (alone), `neither`."""
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


def staleness_histogram(batches: Iterable[Iterable[int]]) -> dict[int, int]:
    """Trained groups by staleness, in steps: every value from 0 to the largest, also those that are empty."""
    counts = Counter(int(value) for batch in batches for value in batch)
    return {value: counts[value] for value in range(max(counts, default=-1) + 1)}


def bounds_of(name: str) -> tuple[str, str]:
    """Names of the bounds of an evaluation's statistic, over all tasks or of one: `x_low/task` for `x/task`."""
    statistic, slash, task = name.partition("/")
    return f"{statistic}_low{slash}{task}", f"{statistic}_high{slash}{task}"


def bounds(scores: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    """The interval of a statistic among an evaluation's scores; None where it has none."""
    low, high = (scores.get(bound) for bound in bounds_of(name))
    return None if low is None or high is None else (low, high)


def median(values: Iterable[float]) -> float | None:
    """Median of the finite values; None without any."""
    finite = [value for value in values if np.isfinite(value)]
    return float(np.median(finite)) if finite else None


def weighted_mean(values_and_weights: Iterable[tuple[float, float]]) -> float | None:
    """Mean of values by weight, over the pairs in which both are finite; None if the weights sum to 0."""
    pairs = [(v, w) for v, w in values_and_weights if np.isfinite(v) and np.isfinite(w)]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else None


def finite_floats(metrics: Mapping[str, object]) -> dict[str, float]:
    """The entries that are single finite numbers, as floats."""
    found = {}
    for name, value in metrics.items():
        if isinstance(value, (bool, int, float, np.number, np.bool_)) and np.isfinite(value):
            found[name] = float(value)
    return found
