"""What the embedded environments of several turns say to one answer, and to a batch of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from nemo_rl_mcore.environment.interface import EnvironmentReturn


class Said(NamedTuple):
    """To one answer. reward: of it, a multiple of 1/128, so that sums are exact; state: of the episode."""

    reward: float
    terminated: bool
    observation: str
    state: dict[str, Any]


def returned(said: Sequence[Said]) -> EnvironmentReturn:
    """To a batch."""
    return EnvironmentReturn(
        observations=[{"role": "environment", "content": one.observation} for one in said],
        metadata=[one.state for one in said],
        next_stop_strings=[None] * len(said),
        rewards=torch.tensor([one.reward for one in said], dtype=torch.float64),
        terminateds=torch.tensor([one.terminated for one in said]),
    )


def is_number(text: str) -> bool:
    """Return whether the text is digits, and no more."""
    return text.isascii() and text.isdigit()
