"""The loss that goes wrong as faults.py asks; recipes name it: `chaos_parts:FaultyPG`."""

import os
import time
from pathlib import Path

from nemo_rl_mcore.losses import ClippedPGLossFn

EVER = 3600


class FaultyPG(ClippedPGLossFn):
    """From its call number `at` on, on one rank: raise, or sleep in the forward pass."""

    def __init__(self, cfg, use_fused_linear_logprobs=False, *, action, marker, rank=1, at=3):
        super().__init__(cfg, use_fused_linear_logprobs)
        self.action, self.marker, self.rank, self.at = action, marker, rank, at

    def sums(self, outputs, data):
        sums = super().sums(outputs, data)
        # A loss travels to the ranks again with every step: the count is the process's.
        calls = int(os.environ.get("CHAOS_CALLS", "0")) + 1
        os.environ["CHAOS_CALLS"] = str(calls)
        if calls >= self.at and int(os.environ["RANK"]) == self.rank:
            Path(self.marker).touch()
            if self.action == "raise":
                raise ValueError("a planted fault")
            time.sleep(EVER)
        return sums
