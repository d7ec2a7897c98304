"""The tensors of a policy's checkpoint, read by torch alone."""

from pathlib import Path
from typing import Any

import torch


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor, whole, by part and name; of the parts that there are."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict[str, torch.Tensor] = {}
    for part in (one for one in ("weights", "reference", "optimizer") if (folder / one).is_dir()):
        state: dict[str, Any] = {}
        reader, planner = FileSystemReader(folder / part), _EmptyStateDictLoadPlanner()
        _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
        found |= {f"{part} {name}": value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return found
