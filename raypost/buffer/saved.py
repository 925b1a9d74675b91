"""What a checkpoint holds of the replay buffer: its groups as arrays, and the state as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from raypost.buffer.encoding import from_plain, to_plain
from raypost.buffer.expiry import Expiry
from raypost.buffer.group_store import GroupStore
from raypost.buffer.state import BufferState, Change
from raypost.buffer.status_index import StoredGroup
from raypost.errors import CheckpointError
from raypost.ledger.ordinals import OrdinalSet
from raypost.types import Status
from raypost.types.packed import PackedGroups, join_groups

FORMAT = 4
_STATUSES = tuple(Status)


def saved(state: BufferState, groups: GroupStore, tasks: Sequence[str]) -> dict[str, Any]:
    """Return everything needed to restore a buffer with this state and these groups."""
    stored = sorted(state.groups.values(), key=lambda one: one.sequence)
    trained = {task: state.trained[task].ranges() if task in state.trained else [] for task in tasks}
    return {
        "format": FORMAT,
        "groups": to_plain(groups.gather([one.key for one in stored])) if stored else None,
        "status": np.asarray([_STATUSES.index(one.status) for one in stored], np.int8),
        "sequence": np.asarray([one.sequence for one in stored], np.int64),
        "leased_for": np.asarray([state.leased.get(one.key, 0) for one in stored], np.int64),
        "next_sequence": state.next,
        "acknowledged": state.acknowledged,
        "trained": trained,
    }


def check_format(raw: dict[str, Any]) -> None:
    """Raise CheckpointError unless this version reads it."""
    if raw.get("format") != FORMAT:
        raise CheckpointError(
            f"the buffer was saved in format {raw.get('format', 1)}, this version reads format {FORMAT}: "
            "continue the run with the version that saved it, or begin another one"
        )


def restoring(raw: dict[str, Any], expiry: Expiry) -> tuple[Change, PackedGroups | None]:
    """Return the change that makes an empty buffer what was saved, and the groups that it puts.

    Raises CheckpointError for damage, and for tasks that `expiry` does not know.
    """
    try:
        packed = join_groups([from_plain(raw["groups"])]) if raw["groups"] is not None else None
        expiry.check_tasks({*(packed.tasks if packed is not None else ()), *raw["trained"]}, "buffer state")
        keys, facts = (packed.keys, expiry.facts(packed)) if packed is not None else ((), ())
        statuses = [_STATUSES[code] for code in raw["status"].tolist()]
        change: Change = {
            "reset": True,
            "put": [
                StoredGroup(key, sequence, status, *of_age)
                for key, sequence, status, of_age in zip(
                    keys, raw["sequence"].tolist(), statuses, facts, strict=True
                )
            ],
            "trained": {str(task): OrdinalSet(ranges).ranges() for task, ranges in raw["trained"].items()},
            "next": int(raw["next_sequence"]),
            "ack": int(raw["acknowledged"]),
            "restored": True,
        }
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(f"damaged buffer state: {error!r}") from error
    return change, packed
