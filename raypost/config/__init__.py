"""The configuration of a run: every knob, its unit and its default. Import its models from here."""

from raypost.config.agent_loops import AgentLoopConfig
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
from raypost.config.evaluation import EvalConfig
from raypost.config.judges import JudgeConfig
from raypost.config.load import load_config, parse_config
from raypost.config.models import ModelConfig, RewardModelConfig
from raypost.config.resources import (
    ConfigModel,
    EnginePoolConfig,
    PoolConfig,
    RankPoolConfig,
    WorkerPoolConfig,
)
from raypost.config.rollout import AutoscaleConfig, RolloutConfig
from raypost.config.run import BufferConfig, CheckpointConfig, Config, FaultsConfig
from raypost.config.source import SourceConfig
from raypost.config.sync import SyncConfig, VerifyWeights
from raypost.config.tasks import StrategyConfig, TaskConfig
from raypost.config.train import CriticConfig, LoraConfig, TrainConfig

__all__ = [
    "AdvantageConfig",
    "AdvantageKind",
    "AgentLoopConfig",
    "AutoscaleConfig",
    "BoundsConfig",
    "BufferConfig",
    "CheckpointConfig",
    "Config",
    "ConfigModel",
    "CorrectionConfig",
    "CriticConfig",
    "EnginePoolConfig",
    "EvalConfig",
    "FaultsConfig",
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
    "VerifyWeights",
    "WorkerPoolConfig",
    "load_config",
    "parse_config",
]
