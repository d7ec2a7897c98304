"""How tensors travel through Ray: as arrays, which Ray keeps out of the pickle and shares between processes.

Besides the copies it saves, it keeps the driver free of Megatron: where Megatron is imported it replaces torch's own
unpickler of storages, and each pickled tensor would make its reader import Megatron too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ray.util import register_serializer

# numpy has no bfloat16; its bits travel as integers.
_AS_INTEGERS = {torch.bfloat16: torch.int16}


def use_arrays_for_tensors() -> None:
    """Make this process send tensors as arrays; a receiver needs nothing. The tensors arrive on the CPU, detached."""
    register_serializer(torch.Tensor, serializer=_to_array, deserializer=_to_tensor)


def _to_array(tensor: torch.Tensor) -> tuple[np.ndarray[Any, Any], torch.dtype]:
    local = tensor.detach().cpu()
    carrier = _AS_INTEGERS.get(tensor.dtype)
    return (local if carrier is None else local.view(carrier)).numpy(), tensor.dtype


def _to_tensor(sent: tuple[np.ndarray[Any, Any], torch.dtype]) -> torch.Tensor:
    array, dtype = sent
    # Arrays out of the object store are read-only, and a tensor must not be.
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(dtype) if dtype in _AS_INTEGERS else tensor
