"""Define what every algorithm is: a step, and a validation, over the parts that a run gives it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Protocol

import torch

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.config.offline import GivenRowsConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt, PromptSource
from nemo_rl_mcore.driver.algorithms.step_metrics import join_results, rollout_metrics, train_metrics
from nemo_rl_mcore.driver.interfaces import PolicyInterface
from nemo_rl_mcore.driver.observability import Sample
from nemo_rl_mcore.driver.rollouts.episode_rows import first_rows, uncounted_rows
from nemo_rl_mcore.driver.rollouts.player import Rollout, RolloutCollector
from nemo_rl_mcore.driver.rollouts.samples import samples_of
from nemo_rl_mcore.driver.rollouts.steps import StepGroups, StepSource
from nemo_rl_mcore.losses import LossFunction
from nemo_rl_mcore.rank import activity


class StepObserver(Protocol):
    """Watches the run: timed phases, metrics, samples."""

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

    def checkpointed(self, step: int) -> None:
        """Take note that the checkpoint of a step is whole."""
        ...

    def give_back_room(self) -> None:
        """Free what is kept on the disk for the end of the run."""
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

    def checkpointed(self, step: int) -> None:
        """See `StepObserver.checkpointed`."""

    def give_back_room(self) -> None:
        """See `StepObserver.give_back_room`."""

    def add_samples(self, samples: Iterable[Sample]) -> None:
        """See `StepObserver.add_samples`."""


@dataclass(frozen=True)
class StepOutcome:
    """Says what a step was.

    metrics: its numbers. skip_reasons: of its optimizer steps in order, None for one that was applied.
    batch: what it trained on.
    """

    metrics: dict[str, float]
    skip_reasons: Sequence[str | None]
    batch: BatchedDataDict


@dataclass(frozen=True)
class Algorithm[Config: RunConfig](ABC):
    """An algorithm over its parts; `TrainingLoop` runs it.

    A subclass writes `train`, and extends `validate` where there is more to judge than the policy's answers. A further
    model is a separate field. rollouts: where the groups of a step come from; None where the data set gives answers.
    """

    config: Config
    policy: PolicyInterface
    collector: RolloutCollector
    prompts: PromptSource
    observer: StepObserver
    rollouts: StepSource | None = field(default=None, kw_only=True)

    @abstractmethod
    def train(self, step: int, groups: StepGroups | None, begin_update: Callable[[], None]) -> StepOutcome:
        """Train the models on the groups of a step; None where the data set gives the rows.

        `begin_update` is called before the first change of a weight, `groups.finish` after the last.
        """

    def step(self, step: int, begin_update: Callable[[], None]) -> StepOutcome:
        """Train the models one step further.

        `begin_update` is called before the first change of a weight: until then the step may be dropped, and from
        then on a stop waits until it is finished and recorded. An engine that shares the ranks' memory sleeps when its
        answers are there.
        """
        if self.rollouts is None:
            return self.train(step, None, begin_update)
        with self.rollouts.open_step(step) as groups:

            def begin() -> None:
                begin_update()
                groups.finishing()

            outcome = self.train(step, groups, begin)
            for rollout in groups.unused():
                rollout.batch["sample_mask"] = torch.zeros(rollout.batch.size)
                self.record(step, rollout, trained=False)
            return outcome

    def redo(self, step: int) -> StepOutcome:
        """Train a finished step again, from the same answers, on models that are as they were before it."""
        groups = None if self.rollouts is None else self.rollouts.known_step(step)
        return self.train(step, groups, lambda: None)

    def checkpointed(self, step: int) -> None:
        """Hear that the checkpoint of a finished step is whole: none up to it will be trained again."""
        if self.rollouts is not None:
            self.rollouts.checkpointed(step)

    @contextmanager
    def training(self, step: int, rollout: Rollout | None) -> Generator[dict[str, float]]:
        """Time a block as the phase `train`, and meanwhile record the answers that it trains on, where it has some.

        Gives a dict that has the metrics of the answers once the block has ended. A second thread does that while the
        block waits for the ranks; neither of the two changes the batch.
        """
        metrics = dict[str, float]()
        with self.observer.phase("train"):
            if rollout is None:
                yield metrics
                return
            with ThreadPoolExecutor(1, "records of a step") as second:
                recorded = second.submit(self.record, step, rollout)
                counted = second.submit(rollout_metrics, rollout)
                yield metrics
        recorded.result()
        metrics |= counted.result()

    def record(self, step: int, rollout: Rollout, *, trained: bool = True) -> None:
        """Have answers of a step written down, the first of those that are trained on token by token."""
        tables = self.config.logger.rollouts.token_tables if trained else 0
        self.observer.add_samples(samples_of(rollout, step, self.collector.tokenizer, tables=tables))

    def validate(self, step: int) -> dict[str, float]:
        """Answer the held-out prompts: mean reward and share of full marks; the engine then sleeps.

        The likeliest ones, unless the recipe says otherwise; of several to a prompt also pass_k.
        Where the prompts have several sources, the same of each of them besides.
        Episodes that are dropped or not scored do not count.
        """
        loop = self.config.loop
        answers, greedy = loop.validation_answers
        prompts = [] if loop.max_val_samples == 0 else self.prompts.validation(loop.max_val_samples)
        samples: list[Sample] = []
        judged: list[Sample] = []
        kept: list[bool] = []
        for start in range(0, len(prompts), loop.val_batch_size):
            asked = prompts[start : start + loop.val_batch_size]
            with activity.at(f"prompt {start} of {len(prompts)} of a validation", timed=False):
                rollout = self.collector.collect(asked, answers, step=step, greedy=greedy)
            tables = self.config.logger.rollouts.token_tables - len(samples)
            of_rows = samples_of(rollout, step, self.collector.tokenizer, tables=tables, of_validation=True)
            first = first_rows(rollout.batch)
            samples += of_rows
            judged += [of_rows[row] for row in first]
            kept += map(bool, ~uncounted_rows(rollout.batch)[first])
        self.collector.generation.offload()
        self.observer.add_samples(samples)  # of a validation that is whole
        by_source: dict[str, list[float]] = {"validation": []}
        answered = [prompt for prompt in prompts for _ in range(answers)]
        for prompt, sample in compress(zip(answered, judged, strict=True), kept):
            by_source["validation"].append(sample.reward)
            if prompt.source:
                by_source.setdefault(f"validation/{prompt.source}", []).append(sample.reward)
        means = {
            f"{name}/{metric}": value
            for name, some in by_source.items()
            if some
            for metric, value in _means(some).items()
        }
        return means | (_pass_k([one.reward for one in judged], kept, answers) if answers > 1 else {})

    def evaluate(
        self,
        loop: GivenRowsConfig,
        loss_fn: LossFunction,
        rows: Callable[[Sequence[Prompt]], BatchedDataDict],
    ) -> dict[str, float]:
        """Measure the loss of held-out samples as if they were one batch, whatever the batches that they are taken in.

        rows: makes those that the loss reads of the prompts of a batch.
        """
        policy = self.config.policy
        held_out = self.prompts.validation(self.config.val_loss_samples)
        size, per_pass = (
            loop.val_global_batch_size or policy.train_global_batch_size,
            loop.val_micro_batch_size,
        )
        mbs = per_pass and per_pass * loss_fn.rows_per_sample
        results: list[dict[str, Any]] = []
        for first in range(0, len(held_out), size):
            with activity.at(f"the loss of row {first} of {len(held_out)} of a validation", timed=False):
                batch = rows(held_out[first : first + size])
                results.append(self.policy.train(batch, loss_fn, eval_mode=True, mbs=mbs))
        return train_metrics(join_results(results), "validation")


def _pass_k(rewards: Sequence[float], kept: Sequence[bool], answers: int) -> dict[str, float]:
    """Return the share of prompts with at least one rewarded answer, counted as in NeMo RL; dropped ones have none."""
    given = [reward > 0 and counts for reward, counts in zip(rewards, kept, strict=True)]
    prompts = [any(given[first : first + answers]) for first in range(0, len(given), answers)]
    return {"validation/pass_k": sum(prompts) / len(prompts)} if prompts else {}


def _means(rewards: Sequence[float]) -> dict[str, float]:
    perfect = sum(reward >= 1.0 for reward in rewards)
    return {"reward": sum(rewards) / len(rewards), "accuracy": perfect / len(rewards)}
