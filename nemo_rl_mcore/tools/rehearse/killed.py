"""A rank that dies as it is about to train."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, cast

from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.driver.run import Watch


class Killer(Watch):
    """Kills the last rank of the policy by SIGKILL, once, in the first step that it trains; all ranks are local."""

    summary = False

    def model(self, name: str, model: Policy) -> Policy:
        """Return the policy with its last rank about to die; any other model as it is."""
        return cast("Policy", _Doomed(model)) if name == "policy" else model


class _Doomed:
    def __init__(self, policy: Policy) -> None:
        self._policy, self._killed = policy, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def train(self, *rows: Any, eval_mode: bool = False, **sizes: Any) -> dict[str, Any]:
        if not eval_mode:
            self._kill()
        return self._policy.train(*rows, eval_mode=eval_mode, **sizes)

    def train_microbatch(self, *rows: Any, **of_chunk: Any) -> None:
        self._kill()
        self._policy.train_microbatch(*rows, **of_chunk)

    def _kill(self) -> None:
        if not self._killed:
            self._killed = True
            write_line(sys.stdout, "the rehearsal now kills a rank by itself, which is to be replaced:")
            os.kill(self._policy.processes[-1], signal.SIGKILL)
