"""The policy as its own engine: it answers the prompts itself, with the weights it trains."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.interfaces import PolicyInterface


@dataclass(frozen=True)
class EmbeddedGeneration:
    """Generation on the training model. The decode loop lives in `megatron.generation`.

    stop_ids: token ids that end a response and belong to it.
    """

    policy: PolicyInterface
    stop_ids: tuple[int, ...]

    def generate(self, data: BatchedDataDict, *, step: int, greedy: bool = False) -> BatchedDataDict:
        """See `interfaces.GenerationInterface.generate`."""
        return self.policy.generate(data, step=step, stop_ids=self.stop_ids, greedy=greedy)

    def update_weights(self, version: int) -> None:
        """Nothing to do: the weights are those of training."""

    def offload(self) -> None:
        """Nothing to do: the memory is that of training."""
