"""A sharded state dict in a folder, in Megatron's torch_dist format: written without helpers, read without trust.

The format is self-describing: what one layout wrote, another reads. All ranks must see the folder.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_saver import save

ShardedStateDict = dict[str, Any]

_METADATA_FILE = ".metadata"
_MAY_BE_UNPICKLED = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("TensorProperties", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float32", "bfloat16", "int64", "int32", "bool"},
    "pathlib": {"PosixPath"},
}


def layout_independent() -> dict[str, Any]:
    """Megatron's `metadata` for sharded state dicts that any layout can read.

    A new one for each call: Megatron notes the process groups of the present layout in it.
    """
    return {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False}


class _DirectSave(TorchDistSaveShardedStrategy):
    """Each rank writes its own file, itself.

    Megatron's synchronous save first starts a manager process for the results of writers: it imports the main program
    again, which takes seconds, and it outlives a rank that is killed.
    """

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        save(
            mcore_to_pyt_state_dict(by_key),  # type: ignore[arg-type]  # a defaultdict of lists
            storage_writer=FileSystemWriter(checkpoint_dir, sync_files=True),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
            ),
        )


def save_sharded(state: ShardedStateDict, folder: Path) -> None:
    """Write a state dict of ShardedTensors; every rank takes part. The folder is made, and must be empty."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder), _DirectSave())


def load_sharded(state: ShardedStateDict, folder: Path) -> dict[str, Any]:
    """Fill a state dict of ShardedTensors, in place where it can be; every rank takes part.

    Raises ValueError, naming the folder, when it holds no checkpoint, tensors of other names or shapes, or objects
    other than tensors and plain values.
    """
    _refuse_foreign_objects(folder)
    try:
        loaded = dist_checkpointing.load(state, str(folder), strict=StrictHandling.RAISE_ALL)
    # The second comes from torch, and is no Exception.
    except (CheckpointingException, CheckpointException) as error:
        raise ValueError(f"{folder} does not fit this model: {error}") from error
    return cast("dict[str, Any]", loaded)


class _MetadataUnpickler(pickle.Unpickler):
    """Reads torch's description of a checkpoint, and nothing that could run code."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name in _MAY_BE_UNPICKLED.get(module_name, ()):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def _refuse_foreign_objects(folder: Path) -> None:
    """Look through all that torch and Megatron will unpickle, since both do so without a limit."""
    try:
        with (folder / _METADATA_FILE).open("rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        for index, place in (metadata.storage_data or {}).items():
            if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
                with (folder / place.relative_path).open("rb") as file:
                    file.seek(place.offset)
                    torch.load(io.BytesIO(file.read(place.length)), weights_only=True)
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is no checkpoint of a policy: {error.filename} does not exist") from error
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{folder} holds something other than tensors and plain values: {error}; do not load it"
        ) from error
