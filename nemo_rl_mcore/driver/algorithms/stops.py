"""What stops a run before its last step: optimizer steps that are skipped again and again, and a limit of time."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Self

import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.signals import current_stop_signals
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


class TimeLimit:
    """A context manager that ends a run while its last step can still be saved, as long as steps and saves have taken.

    seconds: from the start of the process's command to the end of the save; None: no limit. Until a save has been
    timed it is taken to be as long as the longest step.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._signals = current_stop_signals()
        self._longest_step = 0.0
        self._longest_save: float | None = None
        self._saves_at_the_end = 1

    def __enter__(self) -> Self:
        """Begin to watch the time."""
        self._set()
        return self

    def __exit__(self, *_error: object) -> None:
        """Watch it no more: how the run has ended is settled."""
        self._signals.limit_time(None)

    @contextmanager
    def step(self) -> Generator[None]:
        """Time a step, validation included."""
        began = time.monotonic()
        yield
        self._longest_step = max(self._longest_step, time.monotonic() - began)
        self._set()

    def saved(self, seconds: float) -> None:
        """Take note of how long a save took, in the background or not."""
        self._longest_save = max(self._longest_save or 0.0, seconds)
        self._set()

    def saving(self, begun: bool) -> None:
        """Take note whether a save goes on in the background: it must end before another one begins."""
        self._saves_at_the_end = 2 if begun else 1
        self._set()

    def stop_if_the_next_step_does_not_fit(self) -> None:
        """Raise TimeLimitReachedError."""
        if self._seconds is None:
            return
        passed = time.monotonic() - self._signals.began
        if passed + self._longest_step + self._time_of_saves() >= self._seconds:
            self._signals.end_for_time()

    def _time_of_saves(self) -> float:
        one = self._longest_step if self._longest_save is None else self._longest_save
        return self._saves_at_the_end * one

    def _set(self) -> None:
        """Have a step that takes longer than those before stopped in time for the save."""
        if self._seconds is not None:
            self._signals.limit_time(self._seconds - self._time_of_saves())
