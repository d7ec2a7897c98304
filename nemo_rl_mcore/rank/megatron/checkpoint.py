"""A policy's checkpoint: weights, reference weights, optimizer, schedule and random state, in one folder.

weights/, reference/, optimizer/   torch_dist, which any parallel layout reads; of adapters, theirs alone
base/                              the weights beside adapters, where no name leads to them
random/rank_R.pt                   the generators of one rank, of use to the same layout only
state.json                         the counters of optimizer and schedule, the layout, the last committed step_ids
SHA256SUMS                         the checksum of every file

torch_dist is self-describing: what one layout wrote, another reads. All ranks must see the folder.
`dist_checkpointing.save` and `load` are composed here from their parts: there the first rank writes alone what the
others wait for, and what is unpickled is read without a limit.
"""

from __future__ import annotations

import io
import logging
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import (
    StrictHandling,
    determine_global_metadata,
    validate_integrity_and_strict_load,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from nemo_rl_mcore.config import MegatronConfig, PolicyConfig
from nemo_rl_mcore.data.strict_json import read_json, read_regular
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank import accelerator, activity
from nemo_rl_mcore.rank.agreement import agreed, agreed_on_first
from nemo_rl_mcore.rank.checkpoints import (
    POLICY_FOLDER,
    SUMS_FILE,
    read_sums,
    require_sums,
    sha256,
    write_sums,
)
from nemo_rl_mcore.rank.megatron.hf_weights.export import full_tensors
from nemo_rl_mcore.rank.megatron.hf_weights.load import OF_ADAPTERS, load_pretrained
from nemo_rl_mcore.rank.megatron.lora import adapter_state
from nemo_rl_mcore.rank.megatron.optimizer_state import (
    gather_parameters,
    load_optimizer_state,
    optimizer_step,
    sharded_optimizer_state,
)
from nemo_rl_mcore.rank.megatron.parallel_groups import rng_tracker
from nemo_rl_mcore.rank.megatron.reference_policy import ReferencePolicy
from nemo_rl_mcore.rank.megatron.sharded_metadata import COMMON_STATE, read_metadata
from nemo_rl_mcore.rank.megatron.train_backend import MegatronTrainBackend
from nemo_rl_mcore.rank.megatron.value_head import VALUE_HEAD
from nemo_rl_mcore.rank.refit import digests
from nemo_rl_mcore.rank.rendezvous import patient_group

_log = logging.getLogger(__name__)
_WRITER = re.compile(r"(?:__|rank_)(\d+)[_.]")


def write_sums_together(folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write the list of a folder that all ranks have filled; each reads what it wrote, which its machine still holds.

    group: of all ranks; None is as in `agreement.together`. Raises OSError on all ranks when one of them cannot.
    """
    rank = dist.get_rank()

    def own_sums() -> dict[str, str]:
        sums: dict[str, str] = {}
        for name in _files(folder):
            match = _WRITER.match(Path(name).name)
            if rank == (int(match[1]) if match is not None else 0):
                sums[name] = sha256(folder / name)
        return sums

    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, agreed(own_sums, group), group)
    together = {name: value for part in of_all for name, value in part.items()}
    agreed_on_first(lambda: write_sums(folder, together), group)


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


def generators_file(folder: Path) -> Path:
    return folder / f"rank_{dist.get_rank()}.pt"


def present_generators() -> bytes:
    """Return the file's content, in types that are read without a pickle's reach."""
    name, keys, position, has_gauss, cached = cast("tuple[Any, ...]", np.random.get_state())
    state = {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), position, has_gauss, cached),
        "device": accelerator.device_rng_states(),
        "tracker": rng_tracker().get_states(),
    }
    torch.save(state, file := io.BytesIO())
    return file.getvalue()


def read_generators(folder: Path) -> dict[str, Any]:
    """Return the saved generators; each is tried on one of its own kind, so that restoring cannot fail half-way."""
    path = generators_file(folder)
    try:
        state = torch.load(io.BytesIO(read_regular(path, follow_links=False)), weights_only=True)
        random.Random().setstate(state["python"])
        np.random.RandomState().set_state(state["numpy"])
        on_device = torch.Generator(accelerator.device())
        for own, saved in zip((torch.Generator(), on_device), state["device"], strict=False):
            own.set_state(saved)
        if state["tracker"].keys() != rng_tracker().get_states().keys():
            raise ValueError("it has other generators than this layout")
        for saved in state["tracker"].values():
            on_device.set_state(saved)
    except Exception as error:  # of four libraries, for whatever is not a state
        raise ValueError(f"{path} is not the random state of a rank: {error}") from error
    return cast("dict[str, Any]", state)


BASE = "base"
WEIGHTS = "weights"
REFERENCE = "reference"
OPTIMIZER = "optimizer"
RANDOM = "random"
STATE_FILE = "state.json"


class Base(BaseModel):
    """The model that adapters are beside: the key of its name, none for random weights, and a digest of the bits."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model_name: str | None = None
    init_checkpoint: str | None = None
    digest: str = ""

    @classmethod
    def of(cls, policy: PolicyConfig) -> Self:
        return cls(model_name=policy.model_name, init_checkpoint=policy.init_checkpoint)

    @property
    def named(self) -> bool:
        return self.model_name is not None or self.init_checkpoint is not None


class _State(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    optimizer_step: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    schedule_samples: Annotated[int, Field(ge=0)]
    layout: dict[str, int | None]
    committed_step_ids: list[str] = []
    has_checksums: bool = False  # as in the folders of older versions
    base: Base | None = None


@dataclass(frozen=True)
class SavedModel:
    """What a checkpoint is made of, and set back into.

    base: None where all of the model is trained.
    """

    backend: MegatronTrainBackend
    policy: PolicyConfig
    reference: ReferencePolicy | None
    base: Base | None = None

    def parts(self) -> Iterator[tuple[str, ShardedStateDict]]:
        """Yield the sharded state of each folder; its tensors are the model's until the next one is asked for."""
        chunks = self.backend.chunks
        if self.base is not None and not self.base.named:
            yield BASE, _model_state(chunks)
        yield WEIGHTS, self._trained_state()
        if self.reference is not None:
            with self.reference.swapped_in():
                yield REFERENCE, _model_state(chunks)
        yield OPTIMIZER, self.optimizer_state(loading=False)

    def optimizer_state(self, *, loading: bool) -> ShardedStateDict:
        weights = self._trained_state(one_tensor_for_all_layers=not self.policy.megatron_cfg.freeze)
        return sharded_optimizer_state(self.backend.optimizer, weights, loading=loading)

    def _trained_state(self, *, one_tensor_for_all_layers: bool = True) -> ShardedStateDict:
        if self.base is not None:
            return adapter_state(self.backend.chunks, self.policy)
        return _model_state(self.backend.chunks, one_tensor_for_all_layers=one_tensor_for_all_layers)

    def rest(self, committed_step_ids: Sequence[str]) -> Callable[[Path, dist.ProcessGroup | None], None]:
        """Take what is small, and return what writes it, with the checksums of all that the folder then holds."""
        counters = _State(
            optimizer_step=optimizer_step(self.backend.optimizer),
            schedule_samples=int(self.backend.scheduler.num_steps),
            layout=_layout(self.policy.megatron_cfg),
            committed_step_ids=[*committed_step_ids],
            has_checksums=True,
            base=self.base,
        )
        generators, text = agreed(present_generators), counters.model_dump_json()

        def write(folder: Path, group: dist.ProcessGroup | None) -> None:
            agreed_on_first((folder / RANDOM).mkdir, group)
            agreed(lambda: generators_file(folder / RANDOM).write_bytes(generators), group)
            agreed_on_first(lambda: (folder / STATE_FILE).write_text(text, encoding="utf-8"), group)
            write_sums_together(folder, group)

        return write


def save_policy(saved: SavedModel, folder: Path, committed_step_ids: Sequence[str] = ()) -> None:
    """Write everything that the next step depends on; every rank takes part, and returns when all have written.

    Raises ValueError on all ranks, before anything is written, when the folder holds something; OSError on all ranks
    when one of them cannot write.
    """
    _require_empty(folder)
    group = patient_group()  # one rank may write for long
    for name, state in saved.parts():
        PreparedState.of(state, copied=False).write(folder / name, group)
    saved.rest(committed_step_ids)(folder, group)


def copy_policy(
    saved: SavedModel, folder: Path, committed_step_ids: Sequence[str] = ()
) -> Callable[[dist.ProcessGroup], None]:
    """Copy what `save_policy` writes into the CPU's memory, and return what writes the copy; every rank takes part.

    What is returned is to be called once on every rank, with a group of all ranks that no other thread uses; the
    policy may be trained meanwhile. The errors are those of `save_policy`.
    """
    _require_empty(folder)
    parts = {name: PreparedState.of(state, copied=True) for name, state in saved.parts()}
    write_rest, device = saved.rest(committed_step_ids), accelerator.device()

    def write(group: dist.ProcessGroup) -> None:
        accelerator.compute_on(device)  # also in a thread that has not yet
        for name in [*parts]:
            parts.pop(name).write(folder / name, group)  # what is written is needed no more
        write_rest(folder, group)

    return write


def load_policy(model: SavedModel, folder: Path, *, verify_checksums: bool = True) -> Sequence[str]:
    """Set everything back that `save_policy` wrote, and return the step_ids that were committed; every rank takes part.

    Generators are set back only where the layout is the one that was saved. A checkpoint of a run without a reference
    policy leaves the given one. Raises ValueError on all ranks, naming the file, when one is broken, and RefusedError
    for adapters beside another model.
    """
    backend, config, reference = model.backend, model.policy.megatron_cfg, model.reference
    saved = agreed(lambda: _read_state(folder))
    if verify_checksums:
        require_sums_together(folder, required=saved.has_checksums)
    same_layout = saved.layout == _layout(config)
    generators = agreed(lambda: read_generators(folder / RANDOM) if same_layout else None)
    if reference is not None and (folder / REFERENCE).is_dir():
        load_weights(backend.chunks, folder / REFERENCE)
        reference.keep()
    if (saved.base is None) != (model.base is None):
        have, has = ("", "no ") if model.base is None else ("no ", "")
        raise RefusedError(
            f"{folder} holds {have}adapters, and the model has {has}of them: see policy.megatron_cfg.peft.enabled",
            code="other-model",
        )
    if saved.base is None:
        load_weights(backend.chunks, folder / WEIGHTS)
    else:
        if (folder / BASE).is_dir():
            load_weights(backend.chunks, folder / BASE)
        _load_adapters(backend.chunks, model.policy, folder, saved.base)
    state = load_sharded(model.optimizer_state(loading=True), folder / OPTIMIZER)
    load_optimizer_state(backend.optimizer, state, saved.optimizer_step, folder / OPTIMIZER)
    backend.scheduler.num_steps = saved.schedule_samples
    backend.scheduler.step(0)  # the rates of that place in the schedule
    if generators is not None:
        random.setstate(generators["python"])
        np.random.set_state(generators["numpy"])
        accelerator.restore_device_rng_states(generators["device"])
        rng_tracker().set_states(generators["tracker"])
    return saved.committed_step_ids


def _load_adapters(chunks: Sequence[torch.nn.Module], policy: PolicyConfig, folder: Path, base: Base) -> None:
    """Fill this rank's adapters; RefusedError on all ranks where the model beside them is not theirs, bit for bit."""
    found = base_digest(chunks, policy)
    if found != base.digest:
        named = base.model_name or base.init_checkpoint
        origin = "random weights" if named is None else repr(named)
        raise RefusedError(
            f"{folder} holds adapters beside {origin} with the digest {base.digest}, and this model has {found}: "
            "its weights are others",
            code="other-model",
        )
    loaded = load_sharded(adapter_state(chunks, policy), folder / WEIGHTS)
    for number, chunk in enumerate(chunks):
        cast(MegatronModule, unwrap_model(chunk)).load_state_dict(loaded[str(number)], strict=False)


def base_digest(chunks: Sequence[torch.nn.Module], policy: PolicyConfig) -> str:
    """Return one digest of the weights beside adapters, the same on every layout; every rank takes part."""
    return digests.of_all(digests.digests(full_tensors(chunks, policy, merged=False)))


def load_weights_of(
    chunks: Sequence[torch.nn.Module],
    policy: PolicyConfig,
    folder: Path,
    *,
    of_a_policy: bool = False,
    verify_checksums: bool = True,
) -> Base | None:
    """`load_weights` of a folder that `save_policy` wrote; into a model with adapters, a whole one goes beside them.

    Of adapters the model beside them is loaded too, where it has a name, and returned.
    """
    saved = agreed(lambda: _read_state(folder))
    if verify_checksums:
        for part in [WEIGHTS, *([BASE] if (folder / BASE).is_dir() else [])]:
            require_sums_together(folder, f"{part}/", required=saved.has_checksums)
    base = saved.base
    if base is None:
        load_weights(chunks, folder / WEIGHTS, of_a_policy=of_a_policy)
        return None
    if not policy.megatron_cfg.peft.enabled:
        raise RefusedError(
            f"{folder} holds adapters, and the model has none: set policy.megatron_cfg.peft as it was, or export "
            "the checkpoint and name that folder",
            code="other-model",
        )
    if base.model_name is not None:
        if policy.model_name is None:  # else it is there already
            load_pretrained(policy.model_copy(update={"model_name": base.model_name}), chunks)
    elif base.init_checkpoint is not None:
        of_base = Path(base.init_checkpoint) / POLICY_FOLDER
        load_weights_of(chunks, policy, of_base, verify_checksums=verify_checksums)
    else:
        load_weights(chunks, folder / BASE)
        base = Base(init_checkpoint=str(folder.parent), digest=base.digest)
    _load_adapters(chunks, policy, folder, base)
    return base


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
        cast(MegatronModule, unwrap_model(chunk)).load_state_dict(loaded[str(number)], strict=False)


def _model_state(
    chunks: Sequence[torch.nn.Module], *, one_tensor_for_all_layers: bool = True
) -> ShardedStateDict:
    """one_tensor_for_all_layers: false where some have no state of a weight that others have."""
    state: ShardedStateDict = {}
    gather_parameters(chunks)
    for number, chunk in enumerate(chunks):
        metadata = layout_independent() | {"non_homogeneous_layers": not one_tensor_for_all_layers}
        whole = cast(MegatronModule, unwrap_model(chunk)).sharded_state_dict(metadata=metadata)
        # Transformer Engine keeps the scales of FP8 as pickled objects; there is no FP8 here.
        _, tensors = extract_matching_values(whole, lambda entry: isinstance(entry, ShardedObject))
        named = cast("dict[str, Any]", tensors)
        state[str(number)] = {name: part for name, part in named.items() if not OF_ADAPTERS.fullmatch(name)}
    return state


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
    """Raise RefusedError on all ranks where the first one finds something."""

    def look() -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RefusedError(
                f"{folder} is there and not an empty folder; a checkpoint is written into a new one",
                code="folder-not-empty",
            )

    agreed_on_first(look)


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


def layout_independent() -> dict[str, Any]:
    """Megatron's `metadata` for sharded state dicts that any layout can read.

    A new one for each call: Megatron notes the process groups of the present layout in it.
    """
    return {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False}


@dataclass(frozen=True)
class PreparedState:
    """A state dict as torch's writer takes it: of each tensor what this rank is to write."""

    by_key: dict[str, Any]

    @classmethod
    def of(cls, state: ShardedStateDict, *, copied: bool) -> Self:
        """Prepare a state dict of ShardedTensors; every rank takes part.

        copied: into the CPU's memory, so that it may be written while the tensors change; else they must not.
        """
        part, common = save_preprocess(state)
        sharded = cast(ShardedStateDict, part)
        # dist_checkpointing.load reads it.
        sharded[COMMON_STATE] = ShardedObject(COMMON_STATE, common, (1,), (0,), replica_id=dist.get_rank())
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
        if copied:
            tensors = [entry for entry in nested_values(by_key) if isinstance(entry, ShardedTensor)]
            agreed(lambda: _copy(tensors))  # one rank may lack the memory
        return cls(mcore_to_pyt_state_dict(by_key))  # type: ignore[arg-type]  # a defaultdict of lists

    def write(self, folder: Path, group: dist.ProcessGroup | None) -> None:
        """Write it into a folder, which is made; every rank of the group takes part, which is of all ranks.

        Raises OSError on all ranks, naming the folder, when one of them cannot write.
        """
        activity.advance(f"writing {folder}")
        agreed_on_first(lambda: folder.mkdir(parents=True), group)
        try:
            # Each rank writes its own file, itself. The save of dist_checkpointing/strategies/torch.py first starts a
            # manager process for the results of writers (filesystem_async.py): it imports the main program again,
            # which takes seconds, and outlives a killed rank.
            save(
                self.by_key,
                storage_writer=FileSystemWriter(folder, sync_files=True),
                planner=_SavePlanner(
                    dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
                ),
                process_group=group,
            )
        except CheckpointException as error:  # from torch, and no Exception
            failure, _ = next(iter(error.failures.values()))
            told = str(failure) or type(failure).__name__
            raise OSError(f"{folder} cannot be written: {told}") from error
        agreed_on_first(lambda: save_config(CheckpointingConfig("torch_dist"), str(folder)), group)


def load_sharded(state: ShardedStateDict, folder: Path) -> dict[str, Any]:
    """Fill a state dict of ShardedTensors, in place where it can be; every rank takes part.

    Raises ValueError on all ranks, naming the folder and, where one is at fault, the file, when it holds no checkpoint,
    tensors of other names or shapes, or anything else than tensors.
    """
    metadata = agreed(lambda: read_metadata(folder))
    sharded, loaded, factories = load_preprocess(state)
    part, _ = extract_sharded_base(sharded)
    sharded = cast(ShardedStateDict, part)
    of_this_rank, of_all = determine_global_metadata(sharded)

    def fill() -> None:
        try:
            described = TorchDistLoadShardedStrategy().load_tensors_metadata(folder, metadata)
            validate_integrity_and_strict_load(
                sharded, StrictHandling.RAISE_ALL, True, of_this_rank, of_all, described
            )
            merge(loaded, _read(sharded, _Reader(folder, metadata)))
        except (CheckpointingException, CheckpointException) as error:
            failure = error
            if isinstance(error, CheckpointException):
                failure, _ = next(iter(error.failures.values()))
            told = str(failure) or type(failure).__name__
            raise RefusedError(f"{folder} does not fit this model: {told}", code="other-model") from error

    agreed(fill)
    return cast("dict[str, Any]", apply_factory_merges(loaded, cast(ShardedStateDict, factories)))


def _read(state: ShardedStateDict, reader: _Reader) -> ShardedStateDict:
    """As `TorchDistLoadShardedStrategy.load` does, by a reader that unpickles nothing."""
    tensors = [entry for entry in nested_values(state) if isinstance(entry, ShardedTensor)]
    by_key, places, names = _replace_state_dict_keys_with_sharded_keys(state)
    wanted = mcore_to_pyt_state_dict(by_key, is_loading=True)
    planner = _LoadPlanner(
        shapes_validation_sharded_tensors=[entry for entry in tensors if not entry.allow_shape_mismatch],
        allow_shape_mismatch_sharded_tensors={e.key: e for e in tensors if e.allow_shape_mismatch},
        flatten_state_dict=False,
        flatten_sharded_tensors=False,
    )
    load(wanted, storage_reader=reader, planner=planner, no_dist=True)
    found = {key: _unwrap_pyt_sharded_tensor(value) for key, value in wanted.items()}  # type: ignore[arg-type]
    read = _replace_sharded_keys_with_state_dict_keys(found, places, names)  # type: ignore[arg-type]
    _restore_dict_types(read, state)
    return cast(ShardedStateDict, read)


def _copy(tensors: Sequence[ShardedTensor]) -> None:
    for entry in tensors:
        activity.advance(f"copying {entry.key}")
        entry.data = cast(torch.Tensor, entry.data).detach().to("cpu", copy=True)


class _SavePlanner(MCoreSavePlanner):
    """Tells of each tensor that is written: the whole may take long."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        activity.advance(f"writing {write_item.index.fqn}")
        return super().resolve_data(write_item)


class _LoadPlanner(MCoreLoadPlanner):
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        activity.advance(f"reading {read_item.dest_index.fqn}")
        return super().resolve_tensor(read_item)


class _Reader(FileSystemReader):
    """Reads by a description that was looked through before; torch's own would unpickle it, and others on failure."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._folder, self._metadata = folder, metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read one file after another, so that an error names its file."""
        items_of: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            items_of[self.storage_data[item.storage_index].relative_path].append(item)
        for name, items in sorted(items_of.items()):
            activity.advance(f"reading {self._folder / name}")
            try:
                super().read_data(replace(plan, items=items), planner)
            except Exception as error:
                raise ValueError(f"{self._folder / name} is broken: {error}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done
