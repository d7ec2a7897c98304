"""GRPO: answer prompts, score the answers, compare the scores within each prompt's group, and train."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager

from nemo_rl_mcore.config import GRPOMasterConfig
from nemo_rl_mcore.config.master import reader_of_prev_logprobs
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms.advantages import estimator_of, judge_flaws, warn_of_large_advantages
from nemo_rl_mcore.driver.algorithms.algorithm import Algorithm, Judged, StepOutcome, train_metrics
from nemo_rl_mcore.driver.algorithms.mismatch import (
    Mismatch,
    add_compared_logprobs,
    comparison_metrics,
    with_row_numbers,
)
from nemo_rl_mcore.driver.rollouts.player import Rollout
from nemo_rl_mcore.driver.rollouts.scheduler import Step
from nemo_rl_mcore.driver.rollouts.transcript import require_sampled_ids, trained_columns
from nemo_rl_mcore.errors import RunStoppedError


class GRPOTrainer(Algorithm[GRPOMasterConfig]):
    """Group relative policy optimization, https://arxiv.org/abs/2402.03300.

    The previous log-probabilities come from the weights that train, so the policy gradient's ratio is 1 in the first
    optimizer step, and importance sampling corrects for samples from older weights. If `config.streams` is set, a step
    begins before its last group is answered; it is then a single optimizer step that receives its groups in chunks.
    """

    def judge(self, step: Step) -> Judged:
        config, rollouts, mismatch, rows = self.config, list[Rollout](), list[Mismatch](), 0
        if config.streams:
            self.policy.begin_train_step(self.loss_fn, step_id=f"step {step.number}")
        with self._aborted_where_it_fails():
            for rollout in self._answered(step):
                batch = rollout.batch
                with self.observer.phase("logprobs"):
                    mismatch += add_compared_logprobs(config, self.policy, step.number, batch)
                estimator_of(config, config.loss_fn).add_to(batch)
                low, high = config.grpo.advantage_clip_low, config.grpo.advantage_clip_high
                if low is not None or high is not None:
                    batch["advantages"] = batch["advantages"].clamp(low, high)
                judge_flaws(batch, config.grpo)
                warn_of_large_advantages(step.number, rollout)
                require_sampled_ids(batch)
                if config.streams:
                    with self.observer.phase("train"):
                        columns = self._trained(rollout, rows)
                        self.policy.train_microbatch(columns, chunk_id=f"rows from {rows}")
                rows += batch.size
                rollouts.append(rollout)
        whole = Rollout.concatenate(rollouts, self.collector.tokenizer.pad_token_id)
        return Judged(whole.batch, whole, mismatch)

    def _answered(self, step: Step) -> Iterator[Rollout]:
        """Yield the whole step, or its chunks as they are answered; waiting is timed as the phase `generation`."""
        if not self.config.streams:
            with self.observer.phase("generation"):
                whole = step.whole()
            yield whole
            return
        chunks = step.chunks(self.config.group_limits.per_chunk)
        while True:
            with self.observer.phase("generation"):
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk

    def update(self, step: Step, judged: Judged) -> StepOutcome:
        rollout, batch = judged.rollout, judged.batch
        assert rollout is not None
        with self._aborted_where_it_fails(), self.training(step.number, rollout) as metrics:
            if self.config.streams:
                result = self.policy.finish_train_step()
            else:
                result = self.policy.train(self._trained(rollout), self.loss_fn)
        metrics |= step.finish()
        metrics |= comparison_metrics(self.config, step.number, batch, judged.mismatch, result)
        metrics |= train_metrics(result)
        return StepOutcome(metrics, result["skip_reasons"], batch)

    def _trained(self, rollout: Rollout, first_row: int = 0) -> BatchedDataDict:
        columns = trained_columns(rollout.batch)
        passes_before = reader_of_prev_logprobs(self.config) is not None
        return columns if passes_before else with_row_numbers(columns, first_row)

    @contextmanager
    def _aborted_where_it_fails(self) -> Generator[None]:
        try:
            yield
        except BaseException as error:
            if self.config.streams:
                try:
                    self.policy.abort_train_step()
                except RunStoppedError as also:
                    # Keep only the first part of this error: if the ranks are gone, `error` has the details.
                    error.add_note(f"the open step was not aborted: {str(also).partition(': ')[0]}")
            raise
