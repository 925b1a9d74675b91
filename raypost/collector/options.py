"""CollectorOptions: what a collector delivers and where to, and which options exclude each other.

Options that TorchRL's LLM collectors have too are named as there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypedDict

from raypost.errors import ConfigError
from raypost.ledger.ledger import Ledger
from raypost.types.pause import PauseMode


class CollectorOptions(TypedDict, total=False):
    """What a collector delivers, and where to."""

    dialog_turns_per_batch: int | None
    """Turns a batch. Batches of trajectories have at least so many, those of last turns so many trajectories.
    None: what one take brings."""
    total_dialog_turns: int
    """Turns after which the collector ends; -1: never. The last batch of turns is cut to it, a trajectory is not."""
    yield_completed_trajectories: bool | None
    """Deliver whole trajectories (RolloutState) instead of turns (DialogTurn). None: `yield_only_last_steps`."""
    yield_only_last_steps: bool
    """Deliver the last turn of each trajectory only."""
    postproc: Callable[[list[Any]], Any] | None
    """Makes of a batch what is delivered."""
    replay_buffer: Any
    """Anything with `extend`: gets the batches, and the iterator yields None."""
    queue: Any
    """Anything with `put`: gets the items one by one, and the iterator yields None. Full, it holds production."""
    weight_updater: Callable[[int], Any] | None
    """Brings the weights of a version to the generator; called by `update_policy` while nothing is generated."""
    policy_version: int
    """The version at the beginning."""
    version_type: Literal["int", "uuid"]
    """How versions are called in what is delivered."""
    pause_mode: PauseMode
    """What an update does to generation: abort (unless given), wait, or keep where the generator is a pool."""
    ledger: Ledger | None
    """Where every group is, delivered ones as trained; one without a journal if None."""
    pause_timeout_s: float
    """Longest time that generator and environments may take to stop; 60 unless given."""
    take_timeout_s: float
    """Longest time that a group may take; 3600 unless given."""
    retryable: tuple[type[BaseException], ...]
    """Errors that mean "the process that ran the group died"; see Producer."""


DEFAULTS: CollectorOptions = {
    "total_dialog_turns": -1,
    "yield_only_last_steps": False,
    "policy_version": 0,
    "version_type": "int",
    "pause_mode": "abort",
    "pause_timeout_s": 60.0,
    "take_timeout_s": 3600.0,
    "retryable": (),
}
"""What holds unless given; other options are None then."""


def check_options(options: CollectorOptions) -> None:
    """Raise ConfigError if the options, defaults included, cannot work together."""
    per_batch, total = options.get("dialog_turns_per_batch"), options["total_dialog_turns"]
    if options.get("replay_buffer") is not None and options.get("queue") is not None:
        raise ConfigError("a collector delivers to a replay_buffer or to a queue, not to both: drop one")
    if options["yield_only_last_steps"] and options.get("yield_completed_trajectories") is False:
        raise ConfigError(
            "yield_only_last_steps needs completed trajectories, but yield_completed_trajectories is False: leave "
            "it out"
        )
    if per_batch is not None and per_batch < 1:
        raise ConfigError(f"dialog_turns_per_batch must be >= 1, got {per_batch}; None takes what comes")
    if total != -1 and total < 1:
        raise ConfigError(f"total_dialog_turns must be >= 1, got {total}; -1 never ends")
    if options["version_type"] not in ("int", "uuid"):
        raise ConfigError(f"version_type must be 'int' or 'uuid', got {options['version_type']!r}")
