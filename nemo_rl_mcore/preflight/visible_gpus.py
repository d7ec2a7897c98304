"""How many GPUs this process may use, as far as the machine's devices tell."""

import os
from pathlib import Path


def visible_gpus() -> int:
    """Return the number of GPUs, found out without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = len([*Path("/dev").glob("nvidia[0-9]*")])
    return there if visible is None else min(there, len([one for one in visible.split(",") if one.strip()]))
