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
from nemo_rl_mcore.config.algorithm import GivenRowsConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt, PromptSource
from nemo_rl_mcore.driver.algorithms.mismatch import Mismatch
from nemo_rl_mcore.driver.algorithms.step_metrics import (
    join_results,
    rollout_metrics,
    samples_of,
    train_metrics,
)
from nemo_rl_mcore.driver.observability import Sample
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.driver.rollouts.episode_rows import first_rows, uncounted_rows
from nemo_rl_mcore.driver.rollouts.player import Rollout, RolloutCollector
from nemo_rl_mcore.driver.rollouts.scheduler import Scheduler, Step
from nemo_rl_mcore.losses import LossFunction
from nemo_rl_mcore.rank import activity


class StepObserver(Protocol):
    """Watches a step, as `RunRecorder` does; a subclass without methods keeps nothing."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def add_samples(self, samples: Iterable[Sample]) -> None:
        """Take answers of the step, which are written down when it is logged."""


@dataclass(frozen=True)
class Judged:
    """What a step trains on, with all that the loss needs besides.

    batch: its rows. rollout: the answers among them, None where the data set gives the rows. mismatch: of each chunk
    the comparison with the engine, where a pass before training makes it. metrics: what the choice of the rows tells.
    """

    batch: BatchedDataDict
    rollout: Rollout | None = None
    mismatch: Sequence[Mismatch] = ()
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class StepOutcome:
    """The numbers of a step, why each optimizer step was skipped (None: it was not), and what it trained on."""

    metrics: dict[str, float]
    skip_reasons: Sequence[str | None]
    batch: BatchedDataDict


@dataclass(frozen=True)
class Algorithm[Config: RunConfig](ABC):
    """An algorithm over its parts; `TrainingLoop` runs it.

    A subclass writes `judge` and `update`, and extends `validate` where there is more to judge than the policy's
    answers. rollouts: where the groups of a step come from; None where the data set gives answers.
    """

    config: Config
    policy: Policy
    collector: RolloutCollector
    prompts: PromptSource
    observer: StepObserver
    rollouts: Scheduler[Any] | None = field(default=None, kw_only=True)

    @abstractmethod
    def judge(self, step: Step) -> Judged:
        """Take the rows of a step, and add what the loss needs: log-probabilities, values, advantages.

        No weight changes: the step may be dropped. An engine in the ranks' memory sleeps when its answers are there.
        """

    @abstractmethod
    def update(self, step: Step, judged: Judged) -> StepOutcome:
        """Train the models; `step.finish` is called behind the last change of a weight."""

    @contextmanager
    def open_step(self, number: int) -> Generator[Step]:
        """Open a step; where the block fails its groups can be trained again, else those of no use are recorded."""
        if self.rollouts is None:
            yield Step(number)
            return
        with self.rollouts.open_step(number) as step:
            yield step
            for rollout in self.rollouts.take_unused():
                rollout.batch["sample_mask"] = torch.zeros(rollout.batch.size)
                self.record(number, rollout, trained=False)

    def redo(self, number: int) -> StepOutcome:
        """Train a finished step again, from the same answers, on models that are as they were before it."""
        step = Step(number) if self.rollouts is None else self.rollouts.known_step(number)
        return self.update(step, self.judge(step))

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
        tables = self.config.logger.rollouts.token_tables if trained else 0
        self.observer.add_samples(samples_of(rollout, step, self.collector.tokenizer, tables=tables))

    def validate(self, step: int) -> dict[str, float]:
        """Answer the held-out prompts: mean reward and share of full marks, of each source too; the engine then sleeps.

        The likeliest answers, unless the recipe says otherwise; of several to a prompt also pass_k. Episodes that are
        dropped or not scored do not count.
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
        metrics: dict[str, float] = {}
        for name, rewards in by_source.items():
            if rewards:
                metrics[f"{name}/reward"] = sum(rewards) / len(rewards)
                metrics[f"{name}/accuracy"] = sum(reward >= 1.0 for reward in rewards) / len(rewards)
        if answers > 1 and prompts:
            # The share of prompts with at least one rewarded answer, counted as in NeMo RL; dropped ones have none.
            given = [one.reward > 0 and counts for one, counts in zip(judged, kept, strict=True)]
            passed = [any(given[first : first + answers]) for first in range(0, len(given), answers)]
            metrics["validation/pass_k"] = sum(passed) / len(passed)
        return metrics

    def evaluate(
        self,
        loop: GivenRowsConfig,
        loss_fn: LossFunction,
        rows: Callable[[Sequence[Prompt]], BatchedDataDict],
    ) -> dict[str, float]:
        """Measure the loss of held-out samples as one batch, whatever the batches; rows: makes what the loss reads."""
        held_out = self.prompts.validation(self.config.val_loss_samples)
        size = loop.val_global_batch_size or self.config.policy.train_global_batch_size
        mbs = loop.val_micro_batch_size and loop.val_micro_batch_size * loss_fn.rows_per_sample
        results: list[dict[str, Any]] = []
        for first in range(0, len(held_out), size):
            with activity.at(f"the loss of row {first} of {len(held_out)} of a validation", timed=False):
                batch = rows(held_out[first : first + size])
                results.append(self.policy.train(batch, loss_fn, eval_mode=True, mbs=mbs))
        return train_metrics(join_results(results), "validation")
