"""What goes wrong as faults.py and test_stalls.py ask; recipes name it, such as `chaos_parts:FaultyPG`."""

import os
import signal
import time
from pathlib import Path

from nemo_rl_mcore.losses import ClippedPGLossFn

EVER = 3600


class FaultyPG(ClippedPGLossFn):
    """From its call number `at` on, on one rank: kill or stop the process, raise, or sleep in the forward pass."""

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
            self._go_wrong()
        return sums

    def _go_wrong(self):
        match self.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise ValueError("a planted fault")
            case "sleep":
                time.sleep(EVER)


class SleepyReward:
    """Scores every response 0.5, and from its call number `at` on never comes to an end."""

    def __init__(self, *, marker, at=3):
        self.marker, self.at, self.calls = marker, at, 0

    def score(self, prompts, responses, finished):
        self.calls += 1
        if self.calls >= self.at:
            Path(self.marker).touch()
            try:
                time.sleep(EVER)
            except Exception:  # noqa: BLE001  # as custom code likes to
                return [0.0] * len(responses)
        return [0.5] * len(responses)
