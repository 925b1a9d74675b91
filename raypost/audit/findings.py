"""What an audit looks at, and what it found: counts of what was compared, and contradictions in words."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MAX_SHOWN = 10
"""Contradictions of one check that are kept in words; the others are counted."""


class Check(StrEnum):
    """What is checked."""

    FILES = "files"
    """Each file can be read to its end."""
    MOVES = "moves"
    """A group is sampled once, moves only while it lives, and ends once."""
    LOST = "lost"
    """A group that was sampled is somewhere."""
    TWICE = "twice"
    """No group is in two train steps of the model that survives."""
    STEPS = "steps"
    """Train steps follow each other without a hole."""
    STALENESS = "staleness"
    """Nothing was trained at or above its threshold, and the staleness is that of its tokens."""
    VERSIONS = "versions"
    """Versions of the weights never go back, and no token is of a version that was not there yet."""
    TOKENS = "tokens"
    """Tokens that were trained are those that were generated."""
    METRICS = "metrics"
    """A line a step, of the groups that the ledger has for it."""
    REPORT = "report"
    """Its counts are those of the ledger."""
    CHECKPOINT = "checkpoint"
    """It is undamaged, and its account, its buffer, its samplers and the journal of then agree."""
    BUFFER = "buffer"
    """The journal of the buffer holds what the ledger says it holds."""
    BATCHES = "batches"
    """The batches that are kept are those that the ledger says were trained."""


@dataclass
class Findings:
    """What was compared and what contradicts."""

    compared: Counter[Check] = field(default_factory=Counter)
    contradictions: Counter[Check] = field(default_factory=Counter)
    texts: dict[Check, list[str]] = field(default_factory=lambda: defaultdict(list))
    notes: list[str] = field(default_factory=list)
    """What could not be compared, and why."""

    def add(self, check: Check, text: str) -> None:
        """Take down a contradiction."""
        self.contradictions[check] += 1
        if len(self.texts[check]) < MAX_SHOWN:
            self.texts[check].append(text)

    def unless(self, agrees: bool, check: Check, text: str) -> None:
        """Count one comparison, and take down the contradiction unless it agrees."""
        self.compared[check] += 1
        if not agrees:
            self.add(check, text)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "contradictions": {str(check): count for check, count in self.contradictions.items()},
            "compared": {str(check): self.compared[check] for check in Check},
            "texts": {str(check): texts for check, texts in self.texts.items()},
            "notes": self.notes,
        }
