"""GRPO: answer prompts, score the answers, compare them within their group, train.

No Ray and no Megatron here: the policy and the groups come in behind `interfaces` and `rollouts.steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from nemo_rl_mcore.config import GRPOMasterConfig
from nemo_rl_mcore.config.prev_logprobs import reader_of_prev_logprobs
from nemo_rl_mcore.config.vllm import MismatchConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms.advantages import (
    clip_advantages,
    warn_of_large_advantages,
)
from nemo_rl_mcore.driver.algorithms.algorithm import Algorithm, StepOutcome
from nemo_rl_mcore.driver.algorithms.custom_estimator import estimator_of
from nemo_rl_mcore.driver.algorithms.logprobs import add_logprobs, policy_loss
from nemo_rl_mcore.driver.algorithms.mismatch import (
    Mismatch,
    compare_with_engine,
    comparison_metrics,
    drawn_by,
    table_of_batch,
    table_of_training,
    with_row_numbers,
)
from nemo_rl_mcore.driver.algorithms.step_metrics import train_metrics
from nemo_rl_mcore.driver.rollouts.player import Rollout
from nemo_rl_mcore.driver.rollouts.sampled_ids import require_sampled_ids
from nemo_rl_mcore.driver.rollouts.steps import StepGroups
from nemo_rl_mcore.driver.rollouts.transcript import trained_columns
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.losses import LossFunction


class GRPO(Algorithm[GRPOMasterConfig]):
    """Group relative policy optimization, https://arxiv.org/abs/2402.03300.

    Log-probabilities and advantages are computed by the weights that train: the ratio of the policy gradient is 1 in
    the first optimizer step, and samples of older weights are corrected by importance sampling. A step may begin before
    its last group is answered (`config.streams`); it is then one optimizer step, to which groups are added in chunks.
    """

    def train(self, step: int, groups: StepGroups | None, begin_update: Callable[[], None]) -> StepOutcome:
        """Judge the groups, train on them."""
        assert groups is not None
        with self._split_step(step):
            chunks = [*self._chunks(step, groups)]
            rollout = Rollout.concatenate(
                [chunk for chunk, _ in chunks], self.collector.tokenizer.pad_token_id
            )
            begin_update()
            with self.training(step, rollout) as metrics:
                result = self._finish(rollout)
        metrics |= groups.finish()
        found = self._compared(step, rollout.batch, [found for _, found in chunks], result)
        metrics |= comparison_metrics(
            found, rollout.batch, self._mismatch.threshold, asynchronous=self.config.asynchronous
        )
        metrics |= train_metrics(result)
        return StepOutcome(metrics, result["skip_reasons"], rollout.batch)

    def _chunks(self, step: int, groups: StepGroups) -> Iterator[tuple[Rollout, Mismatch | None]]:
        """Yield the step's groups, judged; each is added to the split step where there is one."""
        rows = 0
        for rollout in self._answered(groups):
            found = self._judge(step, rollout)
            if self.config.streams:
                with self.observer.phase("train"):
                    self.policy.train_microbatch(self._trained(rollout, rows), chunk_id=f"rows from {rows}")
            rows += rollout.batch.size
            yield rollout, found

    def _answered(self, groups: StepGroups) -> Iterator[Rollout]:
        """Yield the whole step, or its chunks as they are answered; to wait for them is the phase `generation`."""
        if not self.config.streams:
            with self.observer.phase("generation"):
                whole = groups.whole()
            yield whole
            return
        chunks = groups.chunks(self.config.min_groups_per_chunk)
        while True:
            with self.observer.phase("generation"):
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk

    def _judge(self, step: int, rollout: Rollout) -> Mismatch | None:
        """Add to whole groups what the loss needs besides the answers: log-probabilities and advantages.

        Returns the comparison with the engine where a pass before training makes it.
        """
        loss, batch = self.config.loss_fn, rollout.batch
        with self.observer.phase("logprobs"):
            add_logprobs(batch, self.policy, loss, previous=self._passes_before)
        found = None
        if self._passes_before:
            table = table_of_batch(batch, loss.reference_policy_kl_type)
            found = compare_with_engine(step, batch, table, self._mismatch)
        section = self.config.grpo
        estimator_of(self.config, loss).add_to(batch)
        clip_advantages(batch, section.advantage_clip_low, section.advantage_clip_high)
        warn_of_large_advantages(step, rollout)
        require_sampled_ids(batch)
        return found

    def _trained(self, rollout: Rollout, first_row: int = 0) -> BatchedDataDict:
        """Return the columns that go to the ranks; first_row: the number of the first row in the step."""
        columns = trained_columns(rollout.batch)
        return columns if self._passes_before else with_row_numbers(columns, first_row)

    @contextmanager
    def _split_step(self, step: int) -> Generator[None]:
        """Open a train step of chunks, where groups are trained on as they come; aborted when the block fails."""
        if not self.config.streams:
            yield
            return
        self.policy.begin_train_step(self._loss_fn, step_id=f"step {step}")
        try:
            yield
        except BaseException as error:
            self._abort(error)
            raise

    def _abort(self, error: BaseException) -> None:
        try:
            self.policy.abort_train_step()
        except RunStoppedError as also:
            # Where the ranks are gone, the error that is raised already says so.
            error.add_note(f"the open step was not aborted: {str(also).partition(': ')[0]}")

    def _finish(self, rollout: Rollout) -> dict[str, Any]:
        if self.config.streams:
            return self.policy.finish_train_step()
        return self.policy.train(self._trained(rollout), self._loss_fn)

    def _compared(
        self, step: int, batch: BatchedDataDict, of_chunks: list[Mismatch | None], result: dict[str, Any]
    ) -> Mismatch:
        """Return the comparison with the engine over the whole step; the action was taken chunk by chunk."""
        found = [one for one in of_chunks if one is not None]
        if not found:
            return compare_with_engine(step, batch, table_of_training(result, batch.size), self._mismatch)
        if len(found) == 1:
            return found[0]
        return Mismatch.of(batch, torch.cat([one.table for one in found]), drawn_by(step - 1, batch))

    @property
    def _mismatch(self) -> MismatchConfig:
        return self.config.policy.generation.mismatch

    @cached_property
    def _passes_before(self) -> bool:
        """Return whether a pass before training gives prev_logprobs."""
        return reader_of_prev_logprobs(self.config) is not None

    @cached_property
    def _loss_fn(self) -> LossFunction:
        return policy_loss(self.config)
