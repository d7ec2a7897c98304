"""A policy's checkpoint: weights, reference weights, optimizer, schedule and random state, in one folder.

weights/, reference/, optimizer/   torch_dist, which any parallel layout reads
random/rank_R.pt                   the generators of one rank, of use to the same layout only
state.json                         the counters of optimizer and schedule, the layout, the last committed step_ids
SHA256SUMS                         the checksum of every file
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_rl_mcore.config import MegatronConfig
from nemo_rl_mcore.data.strict_json import read_json
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank.agreement import agreed, agreed_on_first
from nemo_rl_mcore.rank.megatron import random_files
from nemo_rl_mcore.rank.megatron.checkpoint_sums import require_sums_together, write_sums_together
from nemo_rl_mcore.rank.megatron.optimizer_state import (
    load_optimizer_state,
    optimizer_step,
    sharded_optimizer_state,
)
from nemo_rl_mcore.rank.megatron.parameters import gather_parameters
from nemo_rl_mcore.rank.megatron.reference_policy import ReferencePolicy
from nemo_rl_mcore.rank.megatron.sharded_files import (
    PreparedState,
    ShardedStateDict,
    layout_independent,
    load_sharded,
)
from nemo_rl_mcore.rank.megatron.train_backend import MegatronTrainBackend
from nemo_rl_mcore.rank.megatron.value_head import VALUE_HEAD
from nemo_rl_mcore.rank.rendezvous import patient_group

WEIGHTS = "weights"
REFERENCE = "reference"
OPTIMIZER = "optimizer"
RANDOM = "random"
STATE_FILE = "state.json"


class _State(BaseModel):
    """`state.json`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    optimizer_step: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    schedule_samples: Annotated[int, Field(ge=0)]
    layout: dict[str, int | None]
    committed_step_ids: list[str] = []
    has_checksums: bool = False  # as in the folders of older versions


def save_policy(
    backend: MegatronTrainBackend,
    config: MegatronConfig,
    reference: ReferencePolicy | None,
    folder: Path,
    committed_step_ids: Sequence[str] = (),
) -> None:
    """Write everything that the next step depends on; every rank takes part, and returns when all have written.

    Raises ValueError on all ranks, before anything is written, when the folder holds something; OSError on all ranks
    when one of them cannot write.
    """
    agreed_on_first(lambda: _require_empty(folder))
    group = patient_group()  # one rank may write for long
    for name, state in _parts(backend, config, reference):
        PreparedState.of(state, copied=False).write(folder / name, group)
    _Rest.of(backend, config, committed_step_ids).write(folder, group)


def copy_policy(
    backend: MegatronTrainBackend,
    config: MegatronConfig,
    reference: ReferencePolicy | None,
    folder: Path,
    committed_step_ids: Sequence[str] = (),
) -> Callable[[dist.ProcessGroup], None]:
    """Copy what `save_policy` writes into the CPU's memory, and return what writes the copy; every rank takes part.

    What is returned is to be called once on every rank, with a group of all ranks that no other thread uses; the
    policy may be trained meanwhile. The errors are those of `save_policy`.
    """
    agreed_on_first(lambda: _require_empty(folder))
    parts = {name: PreparedState.of(state, copied=True) for name, state in _parts(backend, config, reference)}
    rest = _Rest.of(backend, config, committed_step_ids)

    def write(group: dist.ProcessGroup) -> None:
        for name in [*parts]:
            parts.pop(name).write(folder / name, group)  # what is written is needed no more
        rest.write(folder, group)

    return write


def _parts(
    backend: MegatronTrainBackend, config: MegatronConfig, reference: ReferencePolicy | None
) -> Iterator[tuple[str, ShardedStateDict]]:
    """Yield the sharded state of each folder; its tensors are the model's until the next one is asked for."""
    yield WEIGHTS, _model_state(backend.chunks)
    if reference is not None:
        with reference.swapped_in():
            yield REFERENCE, _model_state(backend.chunks)
    yield OPTIMIZER, _optimizer_state(backend, config, loading=False)


@dataclass(frozen=True)
class _Rest:
    """What is small: the counters, and this rank's generators as their file has them."""

    counters: _State
    generators: bytes

    @classmethod
    def of(
        cls, backend: MegatronTrainBackend, config: MegatronConfig, committed_step_ids: Sequence[str]
    ) -> Self:
        counters = _State(
            optimizer_step=optimizer_step(backend.optimizer),
            schedule_samples=int(backend.scheduler.num_steps),
            layout=_layout(config),
            committed_step_ids=[*committed_step_ids],
            has_checksums=True,
        )
        return cls(counters, agreed(random_files.present_state))

    def write(self, folder: Path, group: dist.ProcessGroup | None) -> None:
        """Write it, and the checksums of all that the folder then holds; every rank takes part."""
        agreed_on_first((folder / RANDOM).mkdir, group)
        agreed(lambda: random_files.of_this_rank(folder / RANDOM).write_bytes(self.generators), group)
        text = self.counters.model_dump_json()
        agreed_on_first(lambda: (folder / STATE_FILE).write_text(text, encoding="utf-8"), group)
        write_sums_together(folder, group)


def load_policy(
    backend: MegatronTrainBackend,
    config: MegatronConfig,
    reference: ReferencePolicy | None,
    folder: Path,
    *,
    verify_checksums: bool = True,
) -> Sequence[str]:
    """Set everything back that `save_policy` wrote, and return the step_ids that were committed; every rank takes part.

    Generators are set back only where the layout is the one that was saved. A checkpoint of a run without a reference
    policy leaves the given one. Raises ValueError on all ranks, naming the file, when one is broken.
    """
    saved = agreed(lambda: _read_state(folder))
    if verify_checksums:
        require_sums_together(folder, required=saved.has_checksums)
    same_layout = saved.layout == _layout(config)
    generators = agreed(lambda: random_files.read(folder / RANDOM) if same_layout else None)
    if reference is not None and (folder / REFERENCE).is_dir():
        load_weights(backend.chunks, folder / REFERENCE)
        reference.keep()
    load_weights(backend.chunks, folder / WEIGHTS)
    state = load_sharded(_optimizer_state(backend, config, loading=True), folder / OPTIMIZER)
    load_optimizer_state(backend.optimizer, state, saved.optimizer_step, folder / OPTIMIZER)
    backend.scheduler.num_steps = saved.schedule_samples
    backend.scheduler.step(0)  # the rates of that place in the schedule
    if generators is not None:
        random_files.restore(generators)
    return saved.committed_step_ids


def load_weights_of(
    chunks: Sequence[torch.nn.Module],
    policy: Path,
    *,
    of_a_policy: bool = False,
    verify_checksums: bool = True,
) -> None:
    """`load_weights` of a folder that `save_policy` wrote."""
    if verify_checksums:
        required = agreed(lambda: _read_state(policy)).has_checksums
        require_sums_together(policy, f"{WEIGHTS}/", required=required)
    load_weights(chunks, policy / WEIGHTS, of_a_policy=of_a_policy)


def load_weights(chunks: Sequence[torch.nn.Module], folder: Path, *, of_a_policy: bool = False) -> None:
    """Fill this rank's weights and buffers; an optimizer with copies of its own must be told to read them again.

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


def _optimizer_state(
    backend: MegatronTrainBackend, config: MegatronConfig, *, loading: bool
) -> ShardedStateDict:
    # Layers are one tensor, unless some of them have no state of a weight that others have.
    weights = _model_state(backend.chunks, one_tensor_for_all_layers=not config.freeze)
    return sharded_optimizer_state(backend.optimizer, weights, loading=loading)


def _model_state(
    chunks: Sequence[torch.nn.Module], *, one_tensor_for_all_layers: bool = True
) -> ShardedStateDict:
    """Return the sharded weights and buffers of each chunk; they are the model's own tensors, not copies."""
    state: ShardedStateDict = {}
    gather_parameters(chunks)
    for number, chunk in enumerate(chunks):
        metadata = layout_independent() | {"non_homogeneous_layers": not one_tensor_for_all_layers}
        whole = _model(chunk).sharded_state_dict(metadata=metadata)
        # Transformer Engine keeps the scales of FP8 as pickled objects; there is no FP8 here.
        _, tensors = extract_matching_values(whole, lambda entry: isinstance(entry, ShardedObject))
        state[str(number)] = tensors
    return state


def _model(chunk: torch.nn.Module) -> MegatronModule:
    """Return the model inside of what Megatron wraps around it."""
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


def _require_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RefusedError(
            f"{folder} is there and not an empty folder; a checkpoint is written into a new one",
            code="folder-not-empty",
        )


def _read_state(folder: Path) -> _State:
    path = folder / STATE_FILE
    try:
        return _State.model_validate(read_json(path, follow_links=False))
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in details["loc"])
        raise ValueError(f"{path} is not the state of a policy: {place}: {details['msg']}") from error
    except FileNotFoundError as error:
        raise RefusedError(
            f"{folder} is no checkpoint of a policy: {path} does not exist", code="no-checkpoint"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not the state of a policy: {error}") from error
