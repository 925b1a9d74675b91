"""The configuration of a run: every knob, its unit and its default. Import its models from here."""

from raypost.config.algorithm import (
    AdvantageConfig,
    AdvantageKind,
    BoundsConfig,
    CorrectionConfig,
    KlConfig,
    KlKind,
    Level,
    LossConfig,
    LossKind,
    SelectionConfig,
    SftConfig,
)
from raypost.config.judges import JudgeConfig
from raypost.config.load import load_config, parse_config
from raypost.config.resources import (
    ConfigModel,
    EnginePoolConfig,
    PoolConfig,
    RankPoolConfig,
    WorkerPoolConfig,
)
from raypost.config.run import (
    BufferConfig,
    CheckpointConfig,
    Config,
    EvalConfig,
    ModelConfig,
    RewardModelConfig,
    RolloutConfig,
    SyncConfig,
)
from raypost.config.source import SourceConfig
from raypost.config.tasks import AgentLoopConfig, StrategyConfig, TaskConfig
from raypost.config.train import CriticConfig, LoraConfig, TrainConfig

__all__ = [
    "AdvantageConfig",
    "AdvantageKind",
    "AgentLoopConfig",
    "BoundsConfig",
    "BufferConfig",
    "CheckpointConfig",
    "Config",
    "ConfigModel",
    "CorrectionConfig",
    "CriticConfig",
    "EnginePoolConfig",
    "EvalConfig",
    "JudgeConfig",
    "KlConfig",
    "KlKind",
    "Level",
    "LoraConfig",
    "LossConfig",
    "LossKind",
    "ModelConfig",
    "PoolConfig",
    "RankPoolConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "SelectionConfig",
    "SftConfig",
    "SourceConfig",
    "StrategyConfig",
    "SyncConfig",
    "TaskConfig",
    "TrainConfig",
    "WorkerPoolConfig",
    "load_config",
    "parse_config",
]
