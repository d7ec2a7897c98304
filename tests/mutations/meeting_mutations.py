"""Make the mistakes of features that meet, one at a time, and show which check of the test suite catches each.

    .venv/bin/python tests/mutations/meeting_mutations.py

Prints a table as `train_step_mutations.py` does.
"""

import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from nemo_rl_mcore.config import AdvantageEstimatorConfig, ClippedPGLossConfig
from nemo_rl_mcore.driver.algorithms import advantages
from nemo_rl_mcore.driver.algorithms.advantages import GroupStatistics, make_advantage_estimator
from nemo_rl_mcore.rank.worker import MegatronPolicyWorker

sys.path.insert(0, str(Path(__file__).parents[1]))

from mutations.harness import Check, Mutation, run_table


def _close(found: Any, wanted: Any, tolerance: float) -> bool:
    return bool(abs(found - wanted).max() <= tolerance)


DEVIATION = Check(
    "meeting_mutations", "advantage_of_the_only_winner", (), lambda found: abs(found[0] - 0.9) < 1e-6
)
BALANCE = Check(
    "test_moe",
    "balancing_gradient_and_oracle",
    ("aux_loss", False, 2, (3, 5)),
    lambda found: _close(*found[0], 2e-6),
)
PREDICTION = Check(
    "test_mtp", "gradients_and_oracle", (False, 2, (3, 5)), lambda found: max(found[0][0].values()) < 1e-4
)
REFERENCE = Check(
    "test_backend_contract",
    "holds",
    ("the_temperature_divides_the_logits", "megatron", None),
    lambda _found: True,
)


def advantage_of_the_only_winner() -> float:
    """One answer of eight earns 1, the others 0.1 each."""
    rewards = torch.tensor([0.1] * 7 + [1.0])
    estimator = make_advantage_estimator(AdvantageEstimatorConfig(), ClippedPGLossConfig())
    advantages = estimator.compute_advantage(
        prompt_ids=torch.zeros(8).long(), rewards=rewards, mask=torch.ones(8, 2)
    )
    return float(advantages[-1, 0])


def deviation_by_cancelling_sums() -> AbstractContextManager[Any]:
    """The mean of squares less the square of the mean, with the row taken out of the sums of its group."""

    def statistics(_prompt_ids: Any, rewards: Any, *, leave_one_out: bool) -> GroupStatistics:
        rewards = rewards.double()
        count = len(rewards) - 1
        mean = (rewards.sum() - rewards) / count
        of_squares = (rewards.square().sum() - rewards.square()) / count
        variance = (of_squares - mean.square()).clamp(min=0) * count / (count - 1)
        return GroupStatistics(baseline=mean, std=variance.sqrt())

    return patch.object(advantages, "group_statistics", statistics)


def _scaled_terms(**factors: float) -> AbstractContextManager[Any]:
    from nemo_rl_mcore.rank.megatron.auxiliary_losses import AuxiliaryLosses

    terms = AuxiliaryLosses.terms

    def scaled(self: AuxiliaryLosses, *args: Any) -> Any:
        right = terms(self, *args)
        return right and replace(right, **{name: getattr(right, name) * by for name, by in factors.items()})

    return patch.object(AuxiliaryLosses, "terms", scaled)


def balance_of_experts_scaled_twice() -> AbstractContextManager[Any]:
    return _scaled_terms(router=2.0)


def prediction_layers_scaled_twice() -> AbstractContextManager[Any]:
    return _scaled_terms(prediction=2.0)


def reference_read_at_another_temperature() -> AbstractContextManager[Any]:
    """The reference's log-probabilities at the sampling temperature, whatever the worker was told."""
    read = MegatronPolicyWorker.get_reference_policy_logprobs

    def at_sampling(self: MegatronPolicyWorker, **given: Any) -> Any:
        forward = self.backend.forward
        passes = replace(forward.passes, temperature=self.policy.generation.temperature)
        with patch.dict(forward.__dict__, passes=passes):
            return read(self, **given)

    return patch.object(MegatronPolicyWorker, "get_reference_policy_logprobs", at_sampling)


MUTATIONS = (
    Mutation(deviation_by_cancelling_sums, (DEVIATION,)),
    Mutation(balance_of_experts_scaled_twice, (BALANCE,)),
    Mutation(prediction_layers_scaled_twice, (PREDICTION,)),
    Mutation(reference_read_at_another_temperature, (REFERENCE,)),
)


if __name__ == "__main__":
    sys.exit(run_table(MUTATIONS))
