"""Count optimizer steps that were skipped because something was not finite, and stop a run that cannot recover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.rank.train_step import EMPTY_STEP

_NAMED_SAMPLES = 8
_LOGARITHMS_OF_NOTHING = ("teacher_tail_logmass",)
"""Columns in which -inf is a value: a teacher that names the whole vocabulary leaves no mass."""


class TooManySkippedStepsError(RunStoppedError):
    """More optimizer steps in a row were skipped than `max_consecutive_skips` allows."""


@dataclass
class SkipGuard:
    """Follows the optimizer steps of a run.

    limit: steps skipped in a row, for a loss or gradient that was not finite, after which the run stops.
    total: all steps skipped so. empty: steps that had nothing to train on, which say nothing of the run's health.
    """

    limit: int
    total: int = 0
    empty: int = 0
    in_a_row: int = 0
    last_reason: str = ""

    @classmethod
    def accepts(cls, counters: Mapping[str, object]) -> bool:
        """Say whether the constructor takes these counters, which were read from a file."""
        kinds = {name: type(value) for name, value in cls(limit=1).counters().items()}
        return all(
            type(value) is kinds.get(name) and (not isinstance(value, int) or value >= 0)
            for name, value in counters.items()
        )

    def counters(self) -> dict[str, int | str]:
        """Return what a run that goes on later gives the constructor besides `limit`."""
        counted = asdict(self)
        del counted["limit"]
        return counted

    def record(self, skip_reasons: Sequence[str | None]) -> None:
        """Take note of a rollout's optimizer steps, in order; None is a step that was applied."""
        for reason in skip_reasons:
            if reason == EMPTY_STEP:
                self.empty += 1
            elif reason is None:
                self.in_a_row = 0
            else:
                self.total += 1
                self.in_a_row += 1
                self.last_reason = reason

    def stop_if_too_many(self, step: int, batch: BatchedDataDict) -> None:
        """Raise TooManySkippedStepsError, naming step, reason and samples, when the limit is reached."""
        if self.in_a_row >= self.limit:
            raise TooManySkippedStepsError(
                f"step {step}: the optimizer step was skipped {self.in_a_row} times in a row "
                f"(max_consecutive_skips: {self.limit}); {self.last_reason}; {_suspects(batch)}"
            )


def _suspects(batch: BatchedDataDict) -> str:
    """Return the samples with a value that is not finite, or all of them when the batch itself is sound."""
    prompts, samples = batch["prompt_index"].tolist(), batch["sample_index"].tolist()
    broken: dict[int, list[str]] = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            sound = value.isfinite() | (value == -torch.inf if key in _LOGARITHMS_OF_NOTHING else False)
            for row in (~sound.reshape(len(value), -1).all(1)).nonzero().flatten():
                broken.setdefault(int(row), []).append(key)
    if not broken:
        return (
            f"the batch itself is finite, so the weights or the loss are at fault (policy.recompute_prev_logprobs: "
            f"always names rows whose log-probabilities are not finite); its prompts are "
            f"{sorted(set(prompts))[:_NAMED_SAMPLES]}{' ...' if len(set(prompts)) > _NAMED_SAMPLES else ''}"
        )
    named = [
        f"prompt {prompts[row]} sample {samples[row]} ({', '.join(keys)})" for row, keys in broken.items()
    ]
    more = f" and {len(named) - _NAMED_SAMPLES} more" if len(named) > _NAMED_SAMPLES else ""
    return f"not finite in: {'; '.join(named[:_NAMED_SAMPLES])}{more}"
