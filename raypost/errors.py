"""The errors raypost raises on purpose. A message names the thing, the value, the bound and the fix.

RaypostError
├── ConfigError          a configuration that cannot work; raised before anything starts (also a ValueError)
├── AlignmentError       token arrays of one trajectory disagree in length (also a ValueError)
├── JudgeError           a judge could not score; never turned into a reward
├── ToolError            a tool's own: the policy called it wrongly, and is told the text
├── SandboxError         a program could not be run in the sandbox; says nothing about the program
├── WeightError          weights that arrived differ from what was sent
│   ├── StaleWeightsError    a worker was asked to serve a version it does not hold
│   └── EngineLostError      a worker's process was started again and has no engine yet
├── NoWorkersError       no rollout worker came back within its deadline
├── ProductionError      production can never deliver the batch that was asked for
├── RoleLostError        a role died and is not brought back within the run
├── RankLostError        a rank of the trainer died, or was started again and has no model yet
├── BatchMemoryError     a micro-batch does not fit the memory of its rank
├── LedgerError          a group changed state in a way the ledger forbids
├── RunFilesError        a file of a run folder is damaged (also a ValueError)
├── CheckpointError      a checkpoint is damaged, or belongs to another run
│   └── BufferCutError       the replay buffer lost a part of its journal, and is not whole yet
├── WaitTimeoutError     a named wait passed its deadline (also a TimeoutError)
│   └── RanksLateError       ranks of the trainer did not answer a call in time
├── StoppedError         a stop was asked for before training began: there is nothing to save
└── ClusterError         the cluster cannot give what the placement needs
"""

from __future__ import annotations

from enum import StrEnum


class Boundary(StrEnum):
    """Where the world failed a trajectory: what is there beside the policy. It begins the text of the failure."""

    JUDGE = "judge"
    SANDBOX = "sandbox"
    ENVIRONMENT = "environment"
    ENGINE = "engine"
    AGENT_LOOP = "agent_loop"


def blame(boundary: Boundary, text: str) -> str:
    """Return the text of a failure with the boundary's name before it, unless one is there."""
    return text if _named(text) else f"{boundary}: {text}"


def at(place: str, text: str) -> str:
    """Return the text of a failure with where it was, after the name of a boundary if it begins with one."""
    boundary = _named(text)
    return f"{place}: {text}" if boundary is None else f"{boundary}: {place}: {text[len(boundary) + 2 :]}"


def boundary_of(text: str | None) -> Boundary:
    """Return the boundary that a failure's text begins with; without one it is the agent loop's."""
    return _named(text or "") or Boundary.AGENT_LOOP


def _named(text: str) -> Boundary | None:
    head, colon, _ = text.partition(":")
    return Boundary(head) if colon and head in Boundary.__members__.values() else None


class RaypostError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(RaypostError, ValueError):
    """A configuration that cannot work: what is wrong, the value, the bound, the fix."""


class AlignmentError(RaypostError, ValueError):
    """Ids, logprobs, mask and versions of one trajectory do not have one length."""


class JudgeError(RaypostError):
    """A judge failed. The trajectory becomes FAILED; a failure is never a zero reward.

    A text that begins with the name of another Boundary, such as "sandbox: ", puts it down to that.
    """


class ToolError(RaypostError):
    """Raised by a tool: the policy asked for what cannot be, and reads the text.

    Anything else that a tool raises is the world's failure.
    """


class SandboxError(RaypostError):
    """The sandbox could not run a program, or end it. What a program does wrong is an Outcome, and no error."""


class WeightError(RaypostError):
    """What an engine holds is not what the trainer sent."""


class TransportError(WeightError):
    """A way by which weights travel failed; they may come by another."""


class NotStagedError(WeightError):
    """A version was to be loaded from where it was brought before, and is not there."""


class StaleWeightsError(WeightError):
    """A worker does not hold the version it was asked to serve."""


class EngineLostError(WeightError):
    """A worker's process was started again behind its caller's back: it has no engine yet."""


class NoWorkersError(RaypostError):
    """Every rollout worker is gone and none came back within the deadline."""


class ProductionError(RaypostError):
    """Production can never deliver what the consumer waits for; the message lists every counter."""


class RoleLostError(RaypostError):
    """A role died, and died too often or has no way back; the message has cause, history and what to do."""


class RankLostError(RaypostError):
    """A rank of the trainer died, or its process was started again behind its caller's back: the gang must restart."""


class BatchMemoryError(RaypostError):
    """A micro-batch does not fit a rank's memory; the message names its groups, its size and what lowers it."""


class LedgerError(RaypostError):
    """A group took a transition the ledger forbids, such as being trained twice."""


class RunFilesError(RaypostError, ValueError):
    """A file that a run wrote is damaged; the message names it, the place, and what to do."""


class CheckpointError(RaypostError):
    """A checkpoint is missing a part, damaged, or was written by another run."""


class BufferCutError(CheckpointError):
    """The replay buffer came back without all that it held, and answers once it was compared with the ledger."""


class WaitTimeoutError(RaypostError, TimeoutError):
    """A wait passed its deadline; the message names its owner and what it waited for."""


class RanksLateError(WaitTimeoutError):
    """Ranks of the trainer did not answer a call in time: one of them hangs."""


class StoppedError(RaypostError):
    """A stop was asked for before training began."""


class ClusterError(RaypostError):
    """The cluster lacks resources for the placement; the message has both numbers."""
