"""raypost: post-train language models by reinforcement learning, with every role a Ray actor.

What a user imports has its name here and is loaded when it is first used: `import raypost` alone loads neither
torch nor pydantic, so that small actors and commands start at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from raypost.version import __version__

if TYPE_CHECKING:
    from raypost.agent_loop.custom import LoopContext
    from raypost.agent_loop.environment import Environment, EnvironmentAgentLoop, Observation
    from raypost.agent_loop.session import Session
    from raypost.agent_loop.single_turn import SingleTurnAgentLoop
    from raypost.collector import Collector, DialogTurn, collect
    from raypost.config import Config, TaskConfig, load_config, parse_config
    from raypost.data.prompt import Prompt
    from raypost.data.tokenizer import Tokenizer
    from raypost.errors import (
        AlignmentError,
        BatchMemoryError,
        CheckpointError,
        ClusterError,
        ConfigError,
        EngineLostError,
        JudgeError,
        LedgerError,
        NoWorkersError,
        ProductionError,
        RaypostError,
        StaleWeightsError,
        StoppedError,
        ToolError,
        WaitTimeoutError,
        WeightError,
    )
    from raypost.ledger.ledger import Ledger
    from raypost.types import (
        AgentLoop,
        GenerateRequest,
        GenerateResult,
        Generator,
        Group,
        GroupCounts,
        Judge,
        ProduceBatchStatus,
        RolloutControl,
        RolloutState,
        Sample,
        SampleParams,
        Score,
        Status,
    )

__all__ = [
    "AgentLoop",
    "AlignmentError",
    "BatchMemoryError",
    "CheckpointError",
    "ClusterError",
    "Collector",
    "Config",
    "ConfigError",
    "DialogTurn",
    "EngineLostError",
    "Environment",
    "EnvironmentAgentLoop",
    "GenerateRequest",
    "GenerateResult",
    "Generator",
    "Group",
    "GroupCounts",
    "Judge",
    "JudgeError",
    "Ledger",
    "LedgerError",
    "LoopContext",
    "NoWorkersError",
    "Observation",
    "ProduceBatchStatus",
    "ProductionError",
    "Prompt",
    "RaypostError",
    "RolloutControl",
    "RolloutState",
    "Sample",
    "SampleParams",
    "Score",
    "Session",
    "SingleTurnAgentLoop",
    "StaleWeightsError",
    "Status",
    "StoppedError",
    "TaskConfig",
    "Tokenizer",
    "ToolError",
    "WaitTimeoutError",
    "WeightError",
    "__version__",
    "collect",
    "load_config",
    "parse_config",
]

_MODULES = {
    "raypost.agent_loop.custom": "LoopContext",
    "raypost.agent_loop.environment": "Environment EnvironmentAgentLoop Observation",
    "raypost.agent_loop.session": "Session",
    "raypost.agent_loop.single_turn": "SingleTurnAgentLoop",
    "raypost.collector": "Collector DialogTurn collect",
    "raypost.config": "Config TaskConfig load_config parse_config",
    "raypost.data.prompt": "Prompt",
    "raypost.data.tokenizer": "Tokenizer",
    "raypost.errors": (
        "AlignmentError BatchMemoryError CheckpointError ClusterError ConfigError EngineLostError JudgeError "
        "LedgerError NoWorkersError ProductionError RaypostError StaleWeightsError StoppedError ToolError "
        "WaitTimeoutError WeightError"
    ),
    "raypost.ledger.ledger": "Ledger",
    "raypost.types": (
        "AgentLoop GenerateRequest GenerateResult Generator Group GroupCounts Judge ProduceBatchStatus "
        "RolloutControl RolloutState Sample SampleParams Score Status"
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


if not TYPE_CHECKING:  # to a type checker, a module with this function has every name

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'raypost' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
