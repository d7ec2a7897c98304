"""A policy's checkpoint: weights, reference weights, optimizer, schedule and random state, in one folder.

weights/, reference/, optimizer/   torch_dist, which any parallel layout reads
random/rank_R.pt                   the generators of one rank, of use to the same layout only
state.json                         the counters of optimizer and schedule, and the layout
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from nemo_rl_mcore import accelerator
from nemo_rl_mcore.config import MegatronConfig
from nemo_rl_mcore.megatron.backend import MegatronBackend
from nemo_rl_mcore.megatron.optimizer_state import (
    load_optimizer_state,
    optimizer_step,
    sharded_optimizer_state,
)
from nemo_rl_mcore.megatron.parameters import gather_parameters
from nemo_rl_mcore.megatron.reference_policy import ReferencePolicy
from nemo_rl_mcore.megatron.sharded_files import (
    ShardedStateDict,
    layout_independent,
    load_sharded,
    save_sharded,
)
from nemo_rl_mcore.megatron.value_head import VALUE_HEAD

WEIGHTS = "weights"
REFERENCE = "reference"
OPTIMIZER = "optimizer"
RANDOM = "random"
STATE_FILE = "state.json"


@dataclass(frozen=True)
class _State:
    """`state.json`."""

    optimizer_step: float
    schedule_samples: int
    layout: dict[str, int | None]


def save_policy(
    backend: MegatronBackend, config: MegatronConfig, reference: ReferencePolicy | None, folder: Path
) -> None:
    """Write everything that the next step depends on; every rank takes part, and returns when all have written."""
    save_sharded(_model_state(backend.chunks), folder / WEIGHTS)
    if reference is not None:
        with reference.swapped_in():
            save_sharded(_model_state(backend.chunks), folder / REFERENCE)
    state = sharded_optimizer_state(backend.optimizer, _model_state(backend.chunks), loading=False)
    save_sharded(state, folder / OPTIMIZER)
    _save_random_state(folder / RANDOM)
    if dist.get_rank() == 0:
        counters = _State(
            optimizer_step(backend.optimizer), int(backend.scheduler.num_steps), _layout(config)
        )
        (folder / STATE_FILE).write_text(json.dumps(asdict(counters)), encoding="utf-8")
    dist.barrier()


def load_policy(
    backend: MegatronBackend, config: MegatronConfig, reference: ReferencePolicy | None, folder: Path
) -> ReferencePolicy | None:
    """Set everything back that `save_policy` wrote, and return the reference policy; every rank takes part.

    Generators are set back only where the layout is the one that was saved. A checkpoint of a run without a reference
    policy leaves the given one.
    """
    if reference is not None and (folder / REFERENCE).is_dir():
        load_weights(backend.chunks, folder / REFERENCE)
        reference = ReferencePolicy(backend.chunks)
    load_weights(backend.chunks, folder / WEIGHTS)
    saved = _read_state(folder)
    state = sharded_optimizer_state(backend.optimizer, _model_state(backend.chunks), loading=True)
    load_optimizer_state(backend.optimizer, load_sharded(state, folder / OPTIMIZER), saved.optimizer_step)
    backend.scheduler.num_steps = saved.schedule_samples
    backend.scheduler.step(0)  # the rates of that place in the schedule
    if saved.layout == _layout(config):
        _load_random_state(folder / RANDOM)
    return reference


def load_weights(chunks: Sequence[torch.nn.Module], folder: Path, *, of_a_policy: bool = False) -> None:
    """Fill this rank's weights and buffers; an optimizer with copies of its own must be told to read them anew.

    A critic begins with the weights of a policy (`of_a_policy`), which has no value head: its own stays as it is.
    """
    state = _model_state(chunks)
    if of_a_policy:
        state = {
            number: {name: part for name, part in chunk.items() if not name.startswith(VALUE_HEAD)}
            for number, chunk in state.items()
        }
    loaded = load_sharded(state, folder)
    for number, chunk in enumerate(chunks):
        # What else is left out is Transformer Engine's state of FP8, see `_model_state`.
        _model(chunk).load_state_dict(loaded[str(number)], strict=False)


def _model_state(chunks: Sequence[torch.nn.Module]) -> ShardedStateDict:
    """The sharded weights and buffers of each chunk; they are the model's own tensors, not copies."""
    state: ShardedStateDict = {}
    gather_parameters(chunks)
    for number, chunk in enumerate(chunks):
        whole = _model(chunk).sharded_state_dict(metadata=layout_independent())
        # Transformer Engine keeps the scales of FP8 as pickled objects; there is no FP8 here.
        _, tensors = extract_matching_values(whole, lambda entry: isinstance(entry, ShardedObject))
        state[str(number)] = tensors
    return state


def _model(chunk: torch.nn.Module) -> MegatronModule:
    """The model inside of what Megatron wraps around it."""
    return cast(MegatronModule, unwrap_model(chunk))


def _layout(config: MegatronConfig) -> dict[str, int | None]:
    return {
        "ranks": dist.get_world_size(),
        "tensor": config.tensor_model_parallel_size,
        "pipeline": config.pipeline_model_parallel_size,
        "virtual_pipeline": config.virtual_pipeline_model_parallel_size,
        "context": config.context_parallel_size,
        "expert": config.expert_model_parallel_size,
        "expert_tensor": config.expert_tensor_parallel_size,
    }


def _read_state(folder: Path) -> _State:
    path = folder / STATE_FILE
    try:
        return _State(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is not the state of a policy: {error}") from error


def _save_random_state(folder: Path) -> None:
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    name, keys, position, has_gauss, cached = cast("tuple[Any, ...]", np.random.get_state())
    state = {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), position, has_gauss, cached),
        "device": accelerator.device_rng_states(),
        "tracker": _tracker().get_states(),
    }
    torch.save(state, _random_file(folder))


def _load_random_state(folder: Path) -> None:
    path = _random_file(folder)
    try:
        state = torch.load(path, weights_only=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    accelerator.restore_device_rng_states(state["device"])
    _tracker().set_states(state["tracker"])


def _random_file(folder: Path) -> Path:
    return folder / f"rank_{dist.get_rank()}.pt"


def _tracker() -> CudaRNGStatesTracker:
    return cast(CudaRNGStatesTracker, get_cuda_rng_tracker())
