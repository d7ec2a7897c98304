"""Strict configuration: every class is importable without torch, and refuses what it does not know."""

from nemo_rl_mcore.config.algorithm import (
    AdvantageEstimatorConfig,
    GRPOConfig,
    RewardScalingConfig,
    RewardShapingConfig,
)
from nemo_rl_mcore.config.base import ConfigError, Problem
from nemo_rl_mcore.config.cluster import CheckpointingConfig, ClusterConfig, LoggerConfig, WandbConfig
from nemo_rl_mcore.config.data import ArithmeticEnvConfig, DataConfig, EnvConfig
from nemo_rl_mcore.config.generation import GenerationConfig
from nemo_rl_mcore.config.load import load_config
from nemo_rl_mcore.config.loss import (
    ClippedPGLossConfig,
    DistillationLossConfig,
    DPOLossConfig,
    MseValueLossConfig,
    NLLLossConfig,
)
from nemo_rl_mcore.config.master import GRPOMasterConfig
from nemo_rl_mcore.config.megatron import (
    DistributedDataParallelConfig,
    MegatronConfig,
    OptimizerConfig,
    SchedulerConfig,
)
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.config.policy import (
    DynamicBatchingConfig,
    PolicyConfig,
    SequencePackingConfig,
    TokenizerConfig,
)

__all__ = [
    "AdvantageEstimatorConfig",
    "ArithmeticEnvConfig",
    "CheckpointingConfig",
    "ClippedPGLossConfig",
    "ClusterConfig",
    "ConfigError",
    "DPOLossConfig",
    "DataConfig",
    "DistillationLossConfig",
    "DistributedDataParallelConfig",
    "DynamicBatchingConfig",
    "EnvConfig",
    "GRPOConfig",
    "GRPOMasterConfig",
    "GenerationConfig",
    "LoggerConfig",
    "MegatronConfig",
    "ModelConfig",
    "MseValueLossConfig",
    "NLLLossConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "Problem",
    "RewardScalingConfig",
    "RewardShapingConfig",
    "SchedulerConfig",
    "SequencePackingConfig",
    "TokenizerConfig",
    "WandbConfig",
    "load_config",
]
