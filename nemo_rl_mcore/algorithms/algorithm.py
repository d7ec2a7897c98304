"""What every algorithm is: a step, and a validation, over the parts that a run gives it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import compress
from typing import Protocol

from nemo_rl_mcore import activity
from nemo_rl_mcore.algorithms.episode_rows import dropped_rows, first_rows
from nemo_rl_mcore.algorithms.rollout import Rollout, RolloutCollector
from nemo_rl_mcore.algorithms.samples import samples_of
from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import PromptSource
from nemo_rl_mcore.interfaces import PolicyInterface
from nemo_rl_mcore.observability import Sample


class StepObserver(Protocol):
    """What watches the run: timed phases, metrics, samples."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a phase of the step."""
        ...

    def attempt(self) -> AbstractContextManager[None]:
        """Take the samples that are added in a block only where it does not raise."""
        ...

    def redoing(self) -> AbstractContextManager[None]:
        """Time a block as one phase, `recovery`: steps that it trains again were recorded before."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a finished step."""
        ...

    def add_samples(self, samples: Iterable[Sample]) -> None:
        """Take answers of the step at hand, which are written down when it is logged."""
        ...


class QuietObserver:
    """A `StepObserver` that keeps nothing."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """See `StepObserver.phase`."""
        return nullcontext()

    def attempt(self) -> AbstractContextManager[None]:
        """See `StepObserver.attempt`."""
        return nullcontext()

    def redoing(self) -> AbstractContextManager[None]:
        """See `StepObserver.redoing`."""
        return nullcontext()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `StepObserver.log`."""

    def add_samples(self, samples: Iterable[Sample]) -> None:
        """See `StepObserver.add_samples`."""


@dataclass(frozen=True)
class StepOutcome:
    """What a step was.

    metrics: its numbers. skip_reasons: of its optimizer steps in order, None for one that was applied.
    batch: what it trained on.
    """

    metrics: dict[str, float]
    skip_reasons: Sequence[str | None]
    batch: BatchedDataDict


@dataclass(frozen=True)
class Algorithm[Config: RunConfig](ABC):
    """An algorithm over its parts; `TrainingLoop` runs it.

    A subclass writes `step`, and extends `validate` where there is more to judge than the policy's answers. A further
    model is a field of its own.
    """

    config: Config
    policy: PolicyInterface
    collector: RolloutCollector
    prompts: PromptSource
    observer: StepObserver

    @abstractmethod
    def step(self, step: int, begin_update: Callable[[], None]) -> StepOutcome:
        """Train the models one step further.

        `begin_update` is called before the first change of a weight: until then the step may be dropped, and from
        then on a stop waits until it is finished and recorded. The engine sleeps when its answers are there.
        """

    def redo(self, step: int) -> StepOutcome:
        """Train a finished step again, from the same answers, on models that are as they were before it."""
        return self.step(step, lambda: None)

    def checkpointed(self, step: int) -> None:
        """Hear that the checkpoint of a finished step is whole: none up to it will be trained again."""
        self.collector.kept.forget(step)

    def record(self, step: int, rollout: Rollout, *, trained: bool = True) -> None:
        """Have answers of a step written down, the first of those that are trained on token by token."""
        tables = self.config.logger.rollouts.token_tables if trained else 0
        self.observer.add_samples(samples_of(rollout, step, self.collector.tokenizer, tables=tables))

    def validate(self, step: int) -> dict[str, float]:
        """The greedy answers to the held-out prompts: mean reward and share of full marks; the engine then sleeps.

        Where the prompts have several sources, the same of each of them besides. Dropped episodes do not count.
        """
        loop = self.config.loop
        prompts = self.prompts.validation(loop.max_val_samples)
        samples: list[Sample] = []
        judged: list[Sample] = []
        kept: list[bool] = []
        for start in range(0, len(prompts), loop.val_batch_size):
            asked = prompts[start : start + loop.val_batch_size]
            with activity.at(f"prompt {start} of {len(prompts)} of a validation", timed=False):
                rollout = self.collector.collect(asked, 1, step=step, greedy=True)
            tables = self.config.logger.rollouts.token_tables - len(samples)
            of_rows = samples_of(rollout, step, self.collector.tokenizer, tables=tables, of_validation=True)
            first = first_rows(rollout.batch)
            samples += of_rows
            judged += [of_rows[row] for row in first]
            kept += map(bool, ~dropped_rows(rollout.batch)[first])
        self.collector.generation.offload()
        self.observer.add_samples(samples)  # of a validation that is whole
        by_source: dict[str, list[float]] = {"validation": []}
        for prompt, sample in compress(zip(prompts, judged, strict=True), kept):
            by_source["validation"].append(sample.reward)
            if prompt.source:
                by_source.setdefault(f"validation/{prompt.source}", []).append(sample.reward)
        return {
            f"{name}/{metric}": value
            for name, some in by_source.items()
            if some
            for metric, value in _means(some).items()
        }


def _means(rewards: Sequence[float]) -> dict[str, float]:
    perfect = sum(reward >= 1.0 for reward in rewards)
    return {"reward": sum(rewards) / len(rewards), "accuracy": perfect / len(rewards)}
