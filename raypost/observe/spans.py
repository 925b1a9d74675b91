"""Spans: when an actor was busy, and with what.

Owns the kinds of spans and how an actor collects its own; what is computed from them is in report/busy_time.py.

Invariant: a SpanLog never holds more than its bound.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Literal, get_args

SpanKind = Literal[
    "rollout", "train", "sync", "evaluate", "wait", "pause", "checkpoint", "judge", "tool", "environment", "sandbox"
]  # fmt: skip
"""What an actor is busy with."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Span:
    """A time interval of one actor, in seconds since the epoch."""

    actor: str
    kind: SpanKind
    start_s: float
    end_s: float


ROLLOUT: Final = "rollout"
TRAIN: Final = "train"
SYNC: Final = "sync"
EVALUATE: Final = "evaluate"
WAIT: Final = "wait"
PAUSE: Final = "pause"
CHECKPOINT: Final = "checkpoint"
JUDGE: Final = "judge"
TOOL: Final = "tool"
ENVIRONMENT: Final = "environment"
SANDBOX: Final = "sandbox"
KINDS: tuple[SpanKind, ...] = get_args(SpanKind)

MERGE_GAP_S = 0.005
MAX_SPANS = 20_000


_CURRENT: ContextVar[SpanLog | None] = ContextVar("span_log", default=None)
"""The log in a span of which this work is done."""


@contextmanager
def inner_span(kind: SpanKind) -> Iterator[None]:
    """Record the block in the log of the span that it is in; outside of any it is not recorded."""
    log = _CURRENT.get()
    with contextlib.nullcontext() if log is None else log.span(kind):
        yield


@dataclass(slots=True)
class _Open:
    kind: SpanKind
    start_s: float
    end_s: float


class SpanLog:
    """Collects one actor's spans until they are drained. May be used from several threads.

    An interval that starts within `merge_gap_s` of the end of the last one of its kind extends it, so that
    a stream of short requests is one span. Holds at most `max_spans`; beyond that the oldest goes and
    `dropped` counts it.
    """

    def __init__(self, actor: str, merge_gap_s: float = MERGE_GAP_S, max_spans: int = MAX_SPANS) -> None:
        """Collect nothing yet."""
        self._actor = actor
        self._merge_gap_s = merge_gap_s
        self._max_spans = max_spans
        self._spans: deque[_Open] = deque()
        self._last: dict[SpanKind, _Open] = {}
        self._lock = threading.Lock()
        self.dropped = 0
        """Spans lost because nobody drained them in time."""

    def __len__(self) -> int:
        """Return the number of spans that wait to be drained."""
        return len(self._spans)

    @contextmanager
    def span(self, kind: SpanKind) -> Iterator[None]:
        """Record the block as one span of `kind`, also when it raises."""
        start_s, start = time.time(), time.monotonic()
        outer = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(outer)
            # The wall clock may be set back meanwhile; a duration never is.
            self.add(kind, start_s, start_s + time.monotonic() - start)

    def add(self, kind: SpanKind, start_s: float, end_s: float) -> None:
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
        """Return all spans since the last call, in the order they began to be recorded."""
        with self._lock:
            spans = self._spans
            self._spans = deque()
            self._last.clear()
        return [Span(actor=self._actor, kind=s.kind, start_s=s.start_s, end_s=s.end_s) for s in spans]
