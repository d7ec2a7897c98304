"""The sections of a recipe: plain data without I/O, importable by every process, rejecting unknown keys."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_rl_mcore.config.algorithm import (
        AdvantageEstimatorConfig,
        AsyncRolloutsConfig,
        DistillationConfig,
        DPOConfig,
        GRPOConfig,
        LoopConfig,
        PPOConfig,
        RewardScalingConfig,
        RewardShapingConfig,
        RolloutConfig,
        SFTConfig,
    )
    from nemo_rl_mcore.config.base import ConfigError, Problem, checked
    from nemo_rl_mcore.config.cluster import CheckpointingConfig, ClusterConfig
    from nemo_rl_mcore.config.data import DataConfig, EnvConfig
    from nemo_rl_mcore.config.generation import GenerationConfig
    from nemo_rl_mcore.config.logger import LoggerConfig, MLflowConfig, WandbConfig
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
    from nemo_rl_mcore.config.policy import (
        DynamicBatchingConfig,
        PolicyConfig,
        Role,
        SequencePackingConfig,
        TokenizerConfig,
    )
    from nemo_rl_mcore.config.run_config import ModelPlan, RunConfig, TeacherConfig, ValueConfig

__all__ = [
    "AdvantageEstimatorConfig",
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
    "RunConfig",
    "SFTConfig",
    "SFTMasterConfig",
    "SchedulerConfig",
    "SequencePackingConfig",
    "TeacherConfig",
    "TokenizerConfig",
    "ValueConfig",
    "WandbConfig",
    "checked",
]

_MODULES = {
    "algorithm": (
        "AdvantageEstimatorConfig",
        "AsyncRolloutsConfig",
        "DistillationConfig",
        "DPOConfig",
        "GRPOConfig",
        "LoopConfig",
        "PPOConfig",
        "RewardScalingConfig",
        "RewardShapingConfig",
        "RolloutConfig",
        "SFTConfig",
    ),
    "base": ("ConfigError", "Problem", "checked"),
    "cluster": ("CheckpointingConfig", "ClusterConfig"),
    "data": ("DataConfig", "EnvConfig"),
    "generation": ("GenerationConfig",),
    "logger": ("LoggerConfig", "MLflowConfig", "WandbConfig"),
    "loss": (
        "ClippedPGLossConfig",
        "DistillationLossConfig",
        "DPOLossConfig",
        "MseValueLossConfig",
        "NLLLossConfig",
    ),
    "master": (
        "DistillationMasterConfig",
        "DPOMasterConfig",
        "GRPOMasterConfig",
        "PPOMasterConfig",
        "SFTMasterConfig",
    ),
    "megatron": ("DistributedDataParallelConfig", "MegatronConfig", "OptimizerConfig", "SchedulerConfig"),
    "model": ("ModelConfig",),
    "policy": ("DynamicBatchingConfig", "PolicyConfig", "Role", "SequencePackingConfig", "TokenizerConfig"),
    "run_config": ("ModelPlan", "RunConfig", "TeacherConfig", "ValueConfig"),
}


def __getattr__(name: str) -> object:
    """Import a section on first access, so that a process loads only the modules that it uses."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"nemo_rl_mcore.config.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
