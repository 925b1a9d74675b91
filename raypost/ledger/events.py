"""The events of a ledger journal, named once for those who write and read them."""

from __future__ import annotations

from enum import StrEnum


class LedgerEvent(StrEnum):
    """What a line of the journal reports."""

    SNAPSHOT = "snapshot"
    """What all lines before came to."""
    STARTED = "started"
    """Production began anew; nothing before this line counts."""
    SAVED = "saved"
    """A checkpoint was saved."""
    RESTORED = "restored"
    """Production went back to a checkpoint."""

    REBUILT = "rebuilt"
    """The producer died, and began again where it was."""
    ALLOTTED = "allotted"
    """How many groups of each task are in the batch of a step."""

    PAUSING = "pausing"
    """Production was asked to pause."""
    PAUSED = "paused"
    RESUMED = "resumed"

    SAMPLED = "sampled"
    """A group's prompt left the dataset."""
    CONTINUED = "continued"
    """A group left the buffer, to be generated further."""
    STORED = "stored"
    """A group was put into the buffer, or changed its status there."""
    LEASED = "leased"
    """A group is in the batch of a train step."""
    TRAINED = "trained"
    """The train step of a group is done."""
    FILTERED = "filtered"
    FAILED = "failed"
    EXPIRED = "expired"


DROPPED = (LedgerEvent.FILTERED, LedgerEvent.FAILED, LedgerEvent.EXPIRED)
"""How a group may end without being trained."""
ENDS = (LedgerEvent.TRAINED, *DROPPED)
"""How a group may end."""
PHASES = (
    LedgerEvent.STARTED,
    LedgerEvent.RESTORED,
    LedgerEvent.PAUSING,
    LedgerEvent.PAUSED,
    LedgerEvent.RESUMED,
)
"""Which of these came last says whether production goes on."""
NOTES = (LedgerEvent.PAUSING, LedgerEvent.PAUSED, LedgerEvent.RESUMED, LedgerEvent.REBUILT)
"""What production as a whole may note."""
