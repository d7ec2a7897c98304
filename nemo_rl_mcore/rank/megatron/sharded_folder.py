"""A sharded state dict in a folder, in the format torch_dist, which every parallel layout can read.

`dist_checkpointing.save` and `load` are composed here from their parts: upstream all ranks wait for files of the first
rank alone, and unpickle without a limit. torch's description of a folder, `.metadata`, is a pickle, and is read without
trusting it.
"""

from __future__ import annotations

import io
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank import activity
from nemo_rl_mcore.rank.agreement import agreed, agreed_on_first, together
from nemo_rl_mcore.rank.megatron.sharded_metadata import COMMON_STATE, read_metadata


@dataclass(frozen=True)
class PreparedState:
    """A state dict for torch's writer: this rank's part of each tensor."""

    by_key: dict[str, Any]

    @classmethod
    def of(cls, state: ShardedStateDict, *, copied: bool) -> Self:
        """Prepare a state dict of ShardedTensors; collective. copied: to CPU memory, so that the model may change."""
        part, common = save_preprocess(state)
        sharded = cast(ShardedStateDict, part)
        # Needed by dist_checkpointing.load.
        sharded[COMMON_STATE] = ShardedObject(COMMON_STATE, common, (1,), (0,), replica_id=dist.get_rank())
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)

        if copied:
            tensors = [entry for entry in nested_values(by_key) if isinstance(entry, ShardedTensor)]
            agreed(lambda: _copy(tensors))  # one rank may lack the memory
        return cls(mcore_to_pyt_state_dict(by_key))  # type: ignore[arg-type]  # a defaultdict of lists

    def write(self, folder: Path, group: dist.ProcessGroup | None) -> None:
        """Write to a new folder; all ranks take part, and raise OSError if one of them cannot write."""
        activity.advance(f"writing {folder}")
        agreed_on_first(lambda: folder.mkdir(parents=True), group)
        try:
            # Each rank writes its file in this process. The save of dist_checkpointing/strategies/torch.py starts a
            # manager process for its writers' results (filesystem_async.py), which imports the main program again, for
            # seconds, and outlives a killed rank.
            save(
                self.by_key,
                storage_writer=FileSystemWriter(folder, sync_files=True),
                planner=_SavePlanner(
                    dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
                ),
                process_group=group,
            )
        except CheckpointException as error:  # torch's, no subclass of Exception
            raise OSError(f"{folder} cannot be written: {_cause(error)}") from error
        agreed_on_first(lambda: save_config(CheckpointingConfig("torch_dist"), str(folder)), group)


def _copy(tensors: list[ShardedTensor]) -> None:
    for entry in tensors:
        activity.advance(f"copying {entry.key}")
        entry.data = cast(torch.Tensor, entry.data).detach().to("cpu", copy=True)


def load_sharded(state: ShardedStateDict, folder: Path) -> dict[str, Any]:
    """Fill a state dict of ShardedTensors, in place if possible; every rank takes part, and nothing is unpickled.

    Raises ValueError on all ranks, naming the folder and, if there is one, the file at fault.
    """
    metadata = agreed(lambda: read_metadata(folder))
    preprocessed, loaded, factories = load_preprocess(state)
    part, _ = extract_sharded_base(preprocessed)
    sharded = cast(ShardedStateDict, part)
    of_this_rank, of_all = determine_global_metadata(sharded)
    with together():
        try:
            described = TorchDistLoadShardedStrategy().load_tensors_metadata(folder, metadata)
            validate_integrity_and_strict_load(
                sharded, StrictHandling.RAISE_ALL, True, of_this_rank, of_all, described
            )
            merge(loaded, _read(sharded, _Reader(folder, metadata)))
        except (CheckpointingException, CheckpointException) as error:
            raise RefusedError(
                f"{folder} does not fit this model: {_cause(error)}", code="other-model"
            ) from error
    return cast("dict[str, Any]", apply_factory_merges(loaded, cast(ShardedStateDict, factories)))


def _read(state: ShardedStateDict, reader: _Reader) -> ShardedStateDict:
    """As `TorchDistLoadShardedStrategy.load`, but with a reader that unpickles nothing."""
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


def _cause(error: BaseException) -> str:
    """Return an error's message; for torch's collection of ranks' errors, the message of the first one."""
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))
    return str(error) or type(error).__name__


class _SavePlanner(MCoreSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        activity.advance(f"writing {write_item.index.fqn}")
        return super().resolve_data(write_item)


class _LoadPlanner(MCoreLoadPlanner):
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        activity.advance(f"reading {read_item.dest_index.fqn}")
        return super().resolve_tensor(read_item)


class _Reader(FileSystemReader):
    """Reads with a checked description, which torch's own reader would unpickle."""

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
