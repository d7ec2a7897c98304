"""Say so when all answers of many steps have had one reward: there is nothing to learn from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

_STEPS = 10


class EqualRewardsSink:
    """A metric sink that tells of ten such steps in a row, once a row, or of a shorter run that had no others."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._in_a_row = self._steps = 0
        self._reward = 0.0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count a step whose lowest reward is its highest."""
        if "train/reward_min" not in metrics:
            return
        self._steps += 1
        self._reward = metrics["train/reward_min"]
        self._in_a_row = self._in_a_row + 1 if self._reward == metrics["train/reward_max"] else 0
        if self._in_a_row == _STEPS:
            self._tell()

    def close(self) -> None:
        """Tell of a run that is shorter."""
        if 0 < self._in_a_row == self._steps < _STEPS:
            self._tell()
        self._steps = 0

    def _tell(self) -> None:
        self._notify(
            f"all answers of the last {self._in_a_row} steps have had the reward {self._reward:g}, which teaches "
            "nothing: read some in rollouts/, and what env compares them with (check --full)"
        )
