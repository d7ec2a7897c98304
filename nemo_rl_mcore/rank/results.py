"""What the worker answers of finished train steps, and of rows whose loss is only reported."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses.base import LossFunction
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.policy_backend import DTYPES, PolicyBackend
from nemo_rl_mcore.rank.sums import neutral_value
from nemo_rl_mcore.rank.train_step import OptimizerOutcome, StepResult


def evaluate(backend: PolicyBackend, data: BatchedDataDict, loss_fn: LossFunction, mbs: int) -> StepResult:
    """Evaluate `mbs` rows at once, without gradients; lr and wd are those that the next step would use."""
    started = time.monotonic()
    totals = backend.evaluate(data, loss_fn, mbs)
    lr, wd = backend.learning_rate_and_weight_decay()
    outcome = OptimizerOutcome(update_successful=False, grad_norm=0.0, lr=lr, wd=wd, skip_reason="eval_mode")
    return StepResult(totals, outcome, time.monotonic() - started)


_GIB = 1 << 30


def as_result(steps: Sequence[StepResult], policy: PolicyConfig) -> dict[str, Any]:
    """Return one entry a step in each list; the keys are those of `MegatronPolicyWorker.finish_train_step`."""
    kinds = {name: kind for step in steps for name, kind in step.totals.kinds.items()}
    metrics: dict[str, list[float]] = {
        name: [step.totals.metrics.get(name, neutral_value(kind)) for step in steps]
        for name, kind in kinds.items()
    }
    metrics |= {
        "lr": [step.outcome.lr for step in steps],
        "wd": [step.outcome.wd for step in steps],
        "global_valid_seqs": [step.totals.valid_seqs for step in steps],
        "global_valid_toks": [step.totals.valid_toks for step in steps],
    }
    row_tables = [step.totals.row_table for step in steps if step.totals.row_table is not None]
    gpu_name, loss = accelerator.gpu_name(), torch.tensor([step.totals.metrics["loss"] for step in steps])
    elapsed = sum(step.elapsed for step in steps)
    of_experts = _means([step.totals.moe_metrics for step in steps])
    of_prediction_layers = _means([step.totals.mtp_metrics for step in steps])
    return {
        **({"row_table": torch.cat(row_tables)} if row_tables else {}),
        **({"moe_metrics": of_experts} if policy.model.num_moe_experts else {}),
        **({"mtp_metrics": of_prediction_layers} if policy.model.mtp_num_layers else {}),
        **({"gpu_name": gpu_name} if gpu_name else {}),
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "model_dtype": DTYPES[policy.precision],
        "loss": loss,
        "global_loss": loss,
        "grad_norm": torch.tensor([step.outcome.grad_norm for step in steps]),
        "all_mb_metrics": metrics,
        "metric_kinds": kinds,
        "update_successful": all(step.outcome.update_successful for step in steps),
        "skip_reasons": [step.outcome.skip_reason for step in steps],
        "elapsed": elapsed,
        "train_elapsed_seconds": elapsed,
        "peak_memory_gib": accelerator.peak_memory_bytes() / _GIB,
    }


def _means(steps: list[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the steps that have it."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: fmean(step[name] for step in steps if name in step) for name in names}
