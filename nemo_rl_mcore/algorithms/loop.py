"""The loop that all algorithms share: a step, validation, the records, the checkpoint; then the next step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from nemo_rl_mcore.algorithms.run_checkpoints import RunCheckpoints
from nemo_rl_mcore.algorithms.skip_guard import SkipGuard
from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.interfaces import GenerationInterface, TrainedModel
from nemo_rl_mcore.observability import Sample


class StepObserver(Protocol):
    """What watches the run: timed phases, metrics, samples."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a phase of the step."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a finished step."""
        ...

    def add_samples(self, samples: Iterable[Sample]) -> None:
        """Keep answers for the report."""
        ...


@dataclass(frozen=True)
class StepOutcome:
    """What a step was.

    metrics: its numbers. skip_reasons: of its optimizer steps in order, None for one that was applied.
    batch: what it trained on.
    """

    metrics: dict[str, float]
    skip_reasons: Sequence[str | None]
    batch: BatchedDataDict


class Algorithm(Protocol):
    """What an algorithm adds to the loop."""

    def step(self, step: int) -> StepOutcome:
        """Train the models one step further."""
        ...

    def validate(self, step: int) -> dict[str, float]:
        """Judge the policy on held-out data."""
        ...


@dataclass(frozen=True)
class TrainingLoop:
    """The loop over its parts.

    models: what it saves and restores, by the name of their folder. engine: what samples with the policy's weights,
    and is given them after every step.
    """

    config: RunConfig
    models: Mapping[str, TrainedModel]
    engine: GenerationInterface
    observer: StepObserver
    checkpoints: RunCheckpoints = field(default_factory=RunCheckpoints)

    def run(self, algorithm: Algorithm) -> None:
        """Train up to the loop's `max_num_steps`, from the first step or from where the checkpoints say.

        Raises TooManySkippedStepsError when `max_consecutive_skips` optimizer steps in a row were skipped.
        """
        loop = self.config.loop
        guard = SkipGuard(self.config.max_consecutive_skips, **self.checkpoints.restore(self.models))
        behind = self.checkpoints.resumed_step
        self.engine.update_weights(behind or 0)
        if loop.val_at_start and behind is None:
            self.observer.log(0, algorithm.validate(0))
        for step in range((behind or 0) + 1, loop.max_num_steps + 1):
            outcome = algorithm.step(step)
            with self.observer.phase("weight_sync"):
                self.engine.update_weights(step)
            metrics = dict(outcome.metrics)
            last = step == loop.max_num_steps
            if (loop.val_period and step % loop.val_period == 0) or (last and loop.val_at_end):
                with self.observer.phase("validation"):
                    metrics |= algorithm.validate(step)
            guard.record(outcome.skip_reasons)
            metrics |= {"train/skipped_steps": guard.total, "train/empty_steps": guard.empty}
            self.observer.log(step, metrics)
            guard.stop_if_too_many(step, outcome.batch)
            if self.checkpoints.due(step):
                with self.observer.phase("checkpoint"):  # counted in the step that follows
                    self.checkpoints.save(step, self.models, metrics, guard.counters())
