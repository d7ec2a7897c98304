"""A step that updates nothing: the loss and metrics of rows, reported as those of a train step are."""

from __future__ import annotations

import time

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses.base import LossFunction
from nemo_rl_mcore.training.policy_backend import PolicyBackend
from nemo_rl_mcore.training.train_step import OptimizerOutcome, StepResult


def evaluate(backend: PolicyBackend, data: BatchedDataDict, loss_fn: LossFunction, mbs: int) -> StepResult:
    """Evaluate `mbs` rows at once, without gradients; lr and wd are those that the next step would use."""
    started = time.monotonic()
    totals = backend.evaluate(data, loss_fn, mbs)
    lr, wd = backend.learning_rate_and_weight_decay()
    outcome = OptimizerOutcome(update_successful=False, grad_norm=0.0, lr=lr, wd=wd, skip_reason="eval_mode")
    return StepResult(totals, outcome, time.monotonic() - started)
