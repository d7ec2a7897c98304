"""A policy's checkpoint: weights, reference weights, optimizer, schedule and random state, in one folder.

weights/, reference/, optimizer/   torch_dist, which any parallel layout reads
random/rank_R.pt                   the generators of one rank, of use to the same layout only
state.json                         the counters of optimizer and schedule, the layout, the last committed step_ids
SHA256SUMS                         the checksum of every file
"""

from __future__ import annotations

import io
import logging
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_rl_mcore.config import MegatronConfig
from nemo_rl_mcore.data.strict_json import read_json, read_regular
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.agreement import agreed, agreed_on_first
from nemo_rl_mcore.rank.checkpoints import SUMS_FILE, read_sums, require_sums, sha256, write_sums
from nemo_rl_mcore.rank.megatron.optimizer_state import (
    gather_parameters,
    load_optimizer_state,
    optimizer_step,
    sharded_optimizer_state,
)
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

_log = logging.getLogger(__name__)
_WRITER = re.compile(r"(?:__|rank_)(\d+)[_.]")


def write_sums_together(folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write the list of a folder that all ranks have filled; each reads what it wrote, which its machine still holds.

    group: of all ranks; None is as in `agreement.together`. Raises OSError on all ranks when one of them cannot.
    """
    rank = dist.get_rank()
    own = agreed(
        lambda: {name: sha256(folder / name) for name in _files(folder) if _writer(name) == rank}, group
    )
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, own, group)
    agreed_on_first(
        lambda: write_sums(folder, {name: value for part in of_all for name, value in part.items()}), group
    )


def require_sums_together(folder: Path, part: str = "", *, required: bool) -> None:
    """Compare the files of a folder, or those below a folder inside, with its list; each rank takes an equal share.

    Raises ValueError on all ranks, naming a file that was changed, is missing or was added. A folder without a list
    passes with a line in the log if none is required, as in those of older versions.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def compare() -> None:
        sums = read_sums(folder)
        if sums is None:
            if required:
                raise RefusedError(f"{folder / SUMS_FILE} is missing", code="missing-checksums")
            if rank == 0:
                _log.warning("%s has no %s: its files are loaded unchecked", folder, SUMS_FILE)
            return
        listed = {name for name in sums if name.startswith(part)}
        there = {name: (folder / name).lstat().st_size for name in _files(folder) if name.startswith(part)}
        if gone := sorted(listed - there.keys()):
            raise RefusedError(
                f"{folder / gone[0]} is missing: {folder / SUMS_FILE} lists it", code="missing-file"
            )
        largest_first = sorted(there, key=lambda name: (-there[name], name))
        require_sums(folder, sums, largest_first[rank::ranks])

    agreed(compare)


def _files(folder: Path) -> Iterator[str]:
    """Return what the list holds: every regular file but the list itself; readers refuse links and pipes."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path != folder / SUMS_FILE:
            yield str(path.relative_to(folder))


def _writer(name: str) -> int:
    """Return the rank that wrote a file."""
    match = _WRITER.match(Path(name).name)
    return int(match[1]) if match is not None else 0


def generators_file(folder: Path) -> Path:
    """Return the file of this rank."""
    return folder / f"rank_{dist.get_rank()}.pt"


def present_generators() -> bytes:
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


def read_generators(folder: Path) -> dict[str, Any]:
    """Return the saved generators; each is tried on one of its own kind, so that restoring cannot fail half-way.

    Raises ValueError, naming the file, when it is not a state of these generators.
    """
    path = generators_file(folder)
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


def restore_generators(state: dict[str, Any]) -> None:
    """Set the generators to what `read` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    accelerator.restore_device_rng_states(state["device"])
    _tracker().set_states(state["tracker"])


def _tracker() -> CudaRNGStatesTracker:
    return cast(CudaRNGStatesTracker, get_cuda_rng_tracker())


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
        return cls(counters, agreed(present_generators))

    def write(self, folder: Path, group: dist.ProcessGroup | None) -> None:
        """Write it, and the checksums of all that the folder then holds; every rank takes part."""
        agreed_on_first((folder / RANDOM).mkdir, group)
        agreed(lambda: generators_file(folder / RANDOM).write_bytes(self.generators), group)
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
    generators = agreed(lambda: read_generators(folder / RANDOM) if same_layout else None)
    if reference is not None and (folder / REFERENCE).is_dir():
        load_weights(backend.chunks, folder / REFERENCE)
        reference.keep()
    load_weights(backend.chunks, folder / WEIGHTS)
    state = load_sharded(_optimizer_state(backend, config, loading=True), folder / OPTIMIZER)
    load_optimizer_state(backend.optimizer, state, saved.optimizer_step, folder / OPTIMIZER)
    backend.scheduler.num_steps = saved.schedule_samples
    backend.scheduler.step(0)  # the rates of that place in the schedule
    if generators is not None:
        restore_generators(generators)
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
