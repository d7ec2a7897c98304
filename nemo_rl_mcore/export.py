"""Writing a checkpoint's weights as a Hugging Face folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from nemo_rl_mcore.config import PolicyConfig, RunConfig
from nemo_rl_mcore.config.hf_config import missing_family
from nemo_rl_mcore.config.hub import local_folder
from nemo_rl_mcore.config.saved_run import read_recipe_of
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.launch import exit_status, print_line, tokenizer_of
from nemo_rl_mcore.training.checkpoints import require_checkpoint
from nemo_rl_mcore.workers.cluster import RayCluster
from nemo_rl_mcore.workers.policy import Policy

_EXPORT_TIMEOUT_S = 4 * 3600.0


def run_export(config: RunConfig, output: str) -> int:
    """Write the weights of `policy.init_checkpoint` to the folder; see `exit_status`."""
    return exit_status(lambda: _export(config, Path(output).absolute()), f"{output!r} was not written")


def _export(config: RunConfig, output: Path) -> None:
    origin = _origin(config.policy, output)
    with (
        RayCluster(config.cluster) as cluster,
        Policy(config.policy, cluster, seed=config.seed, trained=False) as policy,
    ):
        policy.export_hf(str(output), origin=origin, timeout_s=_EXPORT_TIMEOUT_S)
    print_line(sys.stdout, f"the weights are in {output}")


def _origin(policy: PolicyConfig, output: Path) -> str | None:
    """The model that the run started from, if it is still here; refuses what would fail after the ranks started."""
    assert policy.init_checkpoint is not None
    folder = Path(policy.init_checkpoint)
    try:
        require_checkpoint(folder, "--checkpoint")
        recipe: Any = read_recipe_of(folder)
    except ValueError as error:
        raise RunStoppedError(str(error)) from error
    if reason := missing_family(policy.model):
        raise RunStoppedError(f"--checkpoint {str(folder)!r}: {reason}")
    if output.exists():
        raise RunStoppedError(f"--output {str(output)!r} exists already; name another folder")
    tokenizer_of(policy)
    name: str | None = recipe["policy"].get("model_name")
    return name if name is not None and local_folder(name) is not None else None
