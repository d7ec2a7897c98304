"""Exports a checkpoint's weights as a Hugging Face folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.data.hub import local_folder
from nemo_rl_mcore.driver.algorithms.run_checkpoints import require_whole
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.parts import tokenizer_of
from nemo_rl_mcore.driver.policy import open_place, start_frozen
from nemo_rl_mcore.driver.run_folder import read_recipe_of
from nemo_rl_mcore.driver.signals import exit_status
from nemo_rl_mcore.errors import RunStoppedError, code_of
from nemo_rl_mcore.models import missing_family
from nemo_rl_mcore.recipe.interpolations import value_now


def run_export(config: RunConfig, output: str, *, adapters: bool = False) -> int:
    """Export the weights of `policy.init_checkpoint`, or only its adapters; see `exit_status`."""
    folder = Path(output).absolute()
    was_there = folder.exists()

    def result() -> str:
        # The folder gets its name when it is complete. A signal waits for the call that writes it, which may succeed.
        written = folder.exists() and not was_there
        return f"the weights are in {folder}" if written else f"{output!r} was not written"

    return exit_status(lambda: export(config, folder, adapters=adapters), result)


def export(config: RunConfig, output: Path, *, adapters: bool = False) -> None:
    """Export the weights; raises RunStoppedError, before any rank starts, for errors that are known by then."""
    policy = config.policy
    assert policy.init_checkpoint is not None
    folder = Path(policy.init_checkpoint)
    require_whole(str(folder), "--checkpoint")
    try:
        recipe: Any = read_recipe_of(folder)
    except ValueError as error:
        raise RunStoppedError(str(error), code=code_of(error)) from error
    if reason := missing_family(policy.model):
        raise RunStoppedError(f"--checkpoint {str(folder)!r}: {reason}")
    if adapters and not policy.megatron_cfg.peft.enabled:
        raise RunStoppedError(f"--checkpoint {str(folder)!r} holds no adapters; leave --adapters out")
    if output.exists():
        raise RunStoppedError(f"--output {str(output)!r} exists already; name another folder")
    tokenizer_of(policy)
    given: str | None = recipe["policy"].get("model_name")
    origin = given and value_now(given)
    if origin is not None and local_folder(origin) is None:
        origin = None
    with open_place(config) as cluster, start_frozen(config, cluster) as ranks:
        # Adapters name their base model even if it is not on this machine.
        ranks.export_hf(str(output), origin=given if adapters else origin, adapters=adapters)
    write_line(sys.stdout, f"the weights are in {output}")
