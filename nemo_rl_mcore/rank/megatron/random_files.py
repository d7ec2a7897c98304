"""The random generators of a rank in a file of a checkpoint: Python's, NumPy's, torch's and Megatron's."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker

from nemo_rl_mcore.data.strict_json import read_regular
from nemo_rl_mcore.rank import accelerator


def of_this_rank(folder: Path) -> Path:
    """Return the file of this rank."""
    return folder / f"rank_{dist.get_rank()}.pt"


def present_state() -> bytes:
    """Return the file's content, in types that are read without a pickle's reach."""
    name, keys, position, has_gauss, cached = cast("tuple[Any, ...]", np.random.get_state())
    state = {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), position, has_gauss, cached),
        "device": accelerator.device_rng_states(),
        "tracker": _tracker().get_states(),
    }
    torch.save(state, file := io.BytesIO())
    return file.getvalue()


def read(folder: Path) -> dict[str, Any]:
    """Return the saved generators; each is tried on one of its own kind, so that restoring cannot fail half-way.

    Raises ValueError, naming the file, when it is not a state of these generators.
    """
    path = of_this_rank(folder)
    try:
        state = torch.load(io.BytesIO(read_regular(path, follow_links=False)), weights_only=True)
        random.Random().setstate(state["python"])
        np.random.RandomState().set_state(state["numpy"])
        on_device = torch.Generator(accelerator.device())
        for own, saved in zip((torch.Generator(), on_device), state["device"], strict=False):
            own.set_state(saved)
        if state["tracker"].keys() != _tracker().get_states().keys():
            raise ValueError("it has other generators than this layout")
        for saved in state["tracker"].values():
            on_device.set_state(saved)
    except Exception as error:  # of four libraries, for whatever is not a state
        raise ValueError(f"{path} is not the random state of a rank: {error}") from error
    return cast("dict[str, Any]", state)


def restore(state: dict[str, Any]) -> None:
    """Set the generators to what `read` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    accelerator.restore_device_rng_states(state["device"])
    _tracker().set_states(state["tracker"])


def _tracker() -> CudaRNGStatesTracker:
    return cast(CudaRNGStatesTracker, get_cuda_rng_tracker())
