"""What two evaluations must have in common for one to go on with the samples of the other."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.hub import fetched_folder
from nemo_rl_mcore.evaluation.folder import digest_of
from nemo_rl_mcore.training.checkpoints import INFO_FILE
from nemo_rl_mcore.training.checksums import SUMS_FILE, sha256

_SECTIONS = {"seed", "policy", "env", "eval", "cluster"}
_OF_THE_PLACE = ("init_checkpoint", "model_name", "tokenizer")
"""Keys of the policy that say where its weights lie, and not which they are."""

_NOT_ASKED = ("sets", "save_path", "k_values")
"""Keys of eval that say nothing of a prompt or an answer; of the sets, their prompts do."""


def identity_of(config: RunConfig, sets: Mapping[str, Sequence[Prompt]]) -> dict[str, object]:
    """The weights, the prompts of each set, and what of the recipe an answer and its score depend on."""
    recipe = config.model_dump(mode="json", include=_SECTIONS)
    recipe["policy"] = {
        key: value
        for key, value in recipe["policy"].items()
        if key not in _OF_THE_PLACE and not key.endswith("_timeout_s")
    }
    recipe["eval"] = {key: value for key, value in recipe["eval"].items() if key not in _NOT_ASKED}
    return {
        "weights": _weights(config),
        "sets": {name: digest_of(prompts) for name, prompts in sets.items()},
        "batch_size": config.loop.val_batch_size,
        **recipe,
    }


def _weights(config: RunConfig) -> str:
    """Of a checkpoint the checksum of its checksums; of a Hugging Face folder its files by name, size and time."""
    policy = config.policy
    if policy.init_checkpoint is not None:
        folder = Path(policy.init_checkpoint)
        sums = folder / SUMS_FILE
        return f"checkpoint {sha256(sums if sums.is_file() else folder / INFO_FILE)}"
    if policy.model_name is None:
        return "drawn at random by the seed"
    whole = hashlib.sha256()
    folder = fetched_folder(policy.model_name)
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*.json"))):
        status = path.stat()
        whole.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return f"Hugging Face {whole.hexdigest()}"
