"""A Megatron-Core policy worker for RL post-training. Importing this package imports no framework."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nemo_rl_mcore.api.algorithms import DPO, GRPO, PPO, SFT, Distillation, load_recipe
    from nemo_rl_mcore.api.run import Run
    from nemo_rl_mcore.config.base import ConfigError
    from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict
    from nemo_rl_mcore.driver.actors.cluster import RayCluster
    from nemo_rl_mcore.driver.policy import Policy
    from nemo_rl_mcore.errors import ChangedRunError, RunStoppedError
    from nemo_rl_mcore.losses import (
        ClippedPGLossFn,
        DistillationLossFn,
        DPOLossFn,
        LossFunction,
        MseValueLossFn,
        NLLLossFn,
    )
    from nemo_rl_mcore.rank.worker import MegatronPolicyWorker
    from nemo_rl_mcore.recipe.load import load_config

__all__ = [
    "DPO",
    "GRPO",
    "PPO",
    "SFT",
    "BatchedDataDict",
    "ChangedRunError",
    "ClippedPGLossFn",
    "ConfigError",
    "DPOLossFn",
    "Distillation",
    "DistillationLossFn",
    "LossFunction",
    "MegatronPolicyWorker",
    "MseValueLossFn",
    "NLLLossFn",
    "Policy",
    "RayCluster",
    "Run",
    "RunStoppedError",
    "load_config",
    "load_recipe",
]

_MODULES = {
    "api.algorithms": ("DPO", "GRPO", "PPO", "SFT", "Distillation", "load_recipe"),
    "api.run": ("Run",),
    "config.base": ("ConfigError",),
    "recipe.load": ("load_config",),
    "data.batched_data_dict": ("BatchedDataDict",),
    "errors": ("ChangedRunError", "RunStoppedError"),
    "losses": (
        *("ClippedPGLossFn", "DPOLossFn", "DistillationLossFn"),
        *("LossFunction", "MseValueLossFn", "NLLLossFn"),
    ),
    "driver.actors.cluster": ("RayCluster",),
    "driver.policy": ("Policy",),
    "rank.worker": ("MegatronPolicyWorker",),
}


def __getattr__(name: str) -> object:
    """Import a public name on first access."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"nemo_rl_mcore.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
