"""Count optimizer steps that were skipped because something was not finite, and stop a run that cannot recover."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.errors import RunStoppedError

_NAMED_SAMPLES = 8


class TooManySkippedStepsError(RunStoppedError):
    """More optimizer steps in a row were skipped than `max_consecutive_skips` allows."""


@dataclass
class SkipGuard:
    """Follows the outcome of each step.

    limit: skipped steps in a row after which the run stops. total: all skipped steps so far.
    """

    limit: int
    total: int = 0
    in_a_row: int = 0

    def check(
        self, step: int, result: dict[str, Any], batch: BatchedDataDict
    ) -> TooManySkippedStepsError | None:
        """Take note of a step's result; at the limit, the error to raise: it names step, reason and samples."""
        if result["update_successful"]:
            self.in_a_row = 0
            return None
        self.total += 1
        self.in_a_row += 1
        if self.in_a_row < self.limit:
            return None
        return TooManySkippedStepsError(
            f"step {step}: the optimizer step was skipped {self.in_a_row} times in a row "
            f"(max_consecutive_skips: {self.limit}); {', '.join(result['skip_reasons'])}; {_suspects(batch)}"
        )


def _suspects(batch: BatchedDataDict) -> str:
    """The samples with a value that is not finite, or all of them when the batch itself is sound."""
    prompts, samples = batch["prompt_index"].tolist(), batch["sample_index"].tolist()
    broken: dict[int, list[str]] = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            for row in (
                (~value.flatten(1).isfinite().all(1) if value.ndim > 1 else ~value.isfinite())
                .nonzero()
                .flatten()
            ):
                broken.setdefault(int(row), []).append(key)
    if not broken:
        return (
            f"the batch itself is finite, so the weights or the loss are at fault; its prompts are "
            f"{sorted(set(prompts))[:_NAMED_SAMPLES]}{' ...' if len(set(prompts)) > _NAMED_SAMPLES else ''}"
        )
    named = [
        f"prompt {prompts[row]} sample {samples[row]} ({', '.join(keys)})" for row, keys in broken.items()
    ]
    more = f" and {len(named) - _NAMED_SAMPLES} more" if len(named) > _NAMED_SAMPLES else ""
    return f"not finite in: {'; '.join(named[:_NAMED_SAMPLES])}{more}"
