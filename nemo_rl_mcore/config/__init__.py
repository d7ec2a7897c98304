"""The sections of a recipe: passive, without I/O, and importable by every process; they refuse unknown keys."""

from nemo_rl_mcore.config.algorithm import (
    AdvantageEstimatorConfig,
    DistillationConfig,
    GRPOConfig,
    LoopConfig,
    PPOConfig,
    RewardScalingConfig,
    RewardShapingConfig,
    RolloutConfig,
)
from nemo_rl_mcore.config.asynchronous import AsyncRolloutsConfig
from nemo_rl_mcore.config.base import ConfigError, Problem, checked
from nemo_rl_mcore.config.cluster import CheckpointingConfig, ClusterConfig
from nemo_rl_mcore.config.data import ArithmeticEnvConfig, DataConfig, EnvConfig
from nemo_rl_mcore.config.engines import EmbeddedConfig, EngineConfig
from nemo_rl_mcore.config.generation import GenerationConfig
from nemo_rl_mcore.config.logger import (
    LoggerConfig,
    MLflowConfig,
    RolloutsConfig,
    TensorBoardConfig,
    WandbConfig,
)
from nemo_rl_mcore.config.loss import (
    ClippedPGLossConfig,
    DistillationLossConfig,
    DPOLossConfig,
    MseValueLossConfig,
    NLLLossConfig,
)
from nemo_rl_mcore.config.master import (
    DistillationMasterConfig,
    DPOMasterConfig,
    GRPOMasterConfig,
    PPOMasterConfig,
    SFTMasterConfig,
)
from nemo_rl_mcore.config.megatron import (
    DistributedDataParallelConfig,
    MegatronConfig,
    OptimizerConfig,
    SchedulerConfig,
)
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.config.offline import DPOConfig, SFTConfig
from nemo_rl_mcore.config.policy import (
    DynamicBatchingConfig,
    PolicyConfig,
    SequencePackingConfig,
    TokenizerConfig,
)
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.run_models import ModelPlan, Role, TeacherConfig, ValueConfig

__all__ = [
    "AdvantageEstimatorConfig",
    "ArithmeticEnvConfig",
    "AsyncRolloutsConfig",
    "CheckpointingConfig",
    "ClippedPGLossConfig",
    "ClusterConfig",
    "ConfigError",
    "DPOConfig",
    "DPOLossConfig",
    "DPOMasterConfig",
    "DataConfig",
    "DistillationConfig",
    "DistillationLossConfig",
    "DistillationMasterConfig",
    "DistributedDataParallelConfig",
    "DynamicBatchingConfig",
    "EmbeddedConfig",
    "EngineConfig",
    "EnvConfig",
    "GRPOConfig",
    "GRPOMasterConfig",
    "GenerationConfig",
    "LoggerConfig",
    "LoopConfig",
    "MLflowConfig",
    "MegatronConfig",
    "ModelConfig",
    "ModelPlan",
    "MseValueLossConfig",
    "NLLLossConfig",
    "OptimizerConfig",
    "PPOConfig",
    "PPOMasterConfig",
    "PolicyConfig",
    "Problem",
    "RewardScalingConfig",
    "RewardShapingConfig",
    "Role",
    "RolloutConfig",
    "RolloutsConfig",
    "RunConfig",
    "SFTConfig",
    "SFTMasterConfig",
    "SchedulerConfig",
    "SequencePackingConfig",
    "TeacherConfig",
    "TensorBoardConfig",
    "TokenizerConfig",
    "ValueConfig",
    "WandbConfig",
    "checked",
]
