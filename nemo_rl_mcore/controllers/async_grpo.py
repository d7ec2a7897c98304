"""GRPO whose groups are answered while earlier ones train: the train step of an asynchronous run, chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_rl_mcore.algorithms.algorithm import StepOutcome
from nemo_rl_mcore.algorithms.episodes import WEIGHT_VERSIONS
from nemo_rl_mcore.algorithms.grpo import GRPO
from nemo_rl_mcore.algorithms.mismatch import Mismatch, table_of_training
from nemo_rl_mcore.algorithms.rollout import (
    Rollout,
    concatenate_batches,
)
from nemo_rl_mcore.algorithms.sampling import Sampling
from nemo_rl_mcore.algorithms.step_metrics import rollout_metrics, train_metrics
from nemo_rl_mcore.controllers.group_store import GroupStore
from nemo_rl_mcore.controllers.metrics import (
    Pace,
    age_metrics,
    correction_metrics,
    pace_metrics,
)
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.errors import RunStoppedError


class StepGroups(Protocol):
    """Where the groups of a step come from; `Rollouts` in a run, `ReplayedRollouts` when its log is replayed."""

    groups: GroupStore

    def begin(self) -> int:
        """Open the next step; returns its number."""
        ...

    def chunks(self, at_least: int) -> Iterator[Sequence[int]]:
        """The positions of the open step's groups, as soon as so many more are answered, until it is full."""
        ...

    def chunks_of(self, step: int) -> Sequence[Sequence[int]]:
        """The positions of each chunk that a finished step was trained on, if they are kept."""
        ...

    def prompt_of(self, position: int) -> Prompt:
        """The prompt of a group."""
        ...

    def finishing(self) -> None:
        """Take note that the optimizer is about to step."""
        ...

    def finish(self) -> Pace:
        """Take note that it has; returns what happened since the last step."""
        ...

    def give_up(self, reason: str) -> None:
        """Take note that the open step leaves no trace; its groups can be trained again."""
        ...

    def checkpointed(self, step: int) -> None:
        """Take note that the checkpoint of a step is whole: what was trained up to it is not needed any more."""
        ...


@dataclass(frozen=True)
class AsyncGRPO(GRPO):
    """GRPO over groups that come as they are answered; its engine is `rollouts`.

    With a maximal age of 0 and whole steps it is GRPO to the bit. Log-probabilities and advantages are computed inside
    the open step, by the weights that train: the ratio of the policy gradient is 1 in the first epoch, and what the
    engines' older weights drew is corrected by importance sampling. Several optimizer steps are taken over the whole
    step, as a synchronous one takes them; one is taken chunk by chunk.
    """

    rollouts: StepGroups

    def step(self, step: int, begin_update: Callable[[], None]) -> StepOutcome:
        """Train on the next groups, in order; the optimizer first steps once all of the step's are in."""
        with self._open_step(step):
            chunks = [*self._train_chunks(step)]
            parts = [chunk for chunk, _ in chunks]
            whole = Rollout.concatenate(parts, self.collector.tokenizer.pad_token_id)
            self.collector.check_drops(step, whole.batch)
            begin_update()
            self.rollouts.finishing()
            with self.observer.phase("train"):
                result = self._finish(whole)
            pace = self.rollouts.finish()
        self.record(step, whole)
        metrics = self._sampler_metrics(step, whole.batch, [found for _, found in chunks], result)
        metrics |= rollout_metrics(whole) | train_metrics(result)
        metrics |= age_metrics(whole.batch, step - 1, self.config.grpo.async_grpo.max_trajectory_age_steps)
        metrics |= pace_metrics(pace, time.monotonic())
        metrics |= self.collector.environments.take_counts()
        return StepOutcome(metrics, result["skip_reasons"], whole.batch)

    def redo(self, step: int) -> StepOutcome:
        """See `Algorithm.redo`: the same chunks; for the ledger nothing has happened."""
        self._begin(step)
        chunks = [self._train_chunk(step, positions, 0)[0] for positions in self.rollouts.chunks_of(step)]
        whole = Rollout.concatenate(chunks, self.collector.tokenizer.pad_token_id)
        result = self._finish(whole)
        return StepOutcome(train_metrics(result), result["skip_reasons"], whole.batch)

    def checkpointed(self, step: int) -> None:
        """See `Algorithm.checkpointed`: what the step was trained on is not kept any longer."""
        self.rollouts.checkpointed(step)

    @contextmanager
    def _open_step(self, step: int) -> Generator[None]:
        """The ledger's and the ranks' step together: both leave no trace when the block fails."""
        self.rollouts.begin()
        try:
            self._begin(step)
            yield
        except BaseException as error:
            try:
                self.rollouts.give_up(type(error).__name__)
            finally:
                self._abort(error)
            raise

    @cached_property
    def _in_chunks(self) -> bool:
        """Say whether a train step is one optimizer step, to which groups can be added as they come."""
        return self.config.samples_per_step == self.config.policy.train_global_batch_size

    def _begin(self, step: int) -> None:
        if self._in_chunks:
            self.policy.begin_train_step(self._loss_fn, step_id=_id_of(step))

    def _finish(self, whole: Rollout) -> dict[str, Any]:
        if self._in_chunks:
            return self.policy.finish_train_step()
        return self.policy.train(self._trained(whole), self._loss_fn)

    def _abort(self, error: BaseException) -> None:
        if not self._in_chunks:  # `train` has taken back what can be
            return
        try:
            self.policy.abort_train_step()
        except RunStoppedError as also:
            # Where the ranks are gone, the error that is told already says so.
            error.add_note(f"the open step was not aborted: {str(also).partition(': ')[0]}")

    def _train_chunks(self, step: int) -> Iterator[tuple[Rollout, Mismatch | None]]:
        chunks, rows = self.rollouts.chunks(self.config.grpo.min_groups_per_chunk), 0
        while (positions := self._wait_for(chunks)) is not None:
            rollout, found = self._train_chunk(step, positions, rows)
            rows += rollout.batch.size
            yield rollout, found

    def _train_chunk(
        self, step: int, positions: Sequence[int], first_row: int
    ) -> tuple[Rollout, Mismatch | None]:
        rollout = self._rollout_of(positions)
        found = self._judge(step, rollout)
        if not self._in_chunks:
            return rollout, found
        with self.observer.phase("train"):
            self.policy.train_microbatch(
                self._trained(rollout, first_row), chunk_id=f"groups from {positions[0]}"
            )
        return rollout, found

    def _wait_for(self, chunks: Iterator[Sequence[int]]) -> Sequence[int] | None:
        with self.observer.phase("generation"):
            return next(chunks, None)

    def _rollout_of(self, positions: Sequence[int]) -> Rollout:
        """The groups, with shaped rewards."""
        groups = [self.rollouts.groups.get(position) for position in positions]
        batch = concatenate_batches(groups, self.collector.tokenizer.pad_token_id)
        prompts = [self.rollouts.prompt_of(position) for position in positions]
        rollout = self.collector.as_rollout(prompts, batch)
        Sampling(self, self.config.grpo).shape(rollout)
        return rollout

    def _on_policy_rows(self, step: int, batch: BatchedDataDict) -> Tensor:
        """See `GRPO._on_policy_rows`: what older weights drew differs by its age."""
        return _drawn_on_policy(step - 1, batch)

    def _sampler_metrics(
        self, step: int, batch: BatchedDataDict, of_chunks: Sequence[Mismatch | None], result: dict[str, Any]
    ) -> dict[str, float]:
        """Compare the weights that train with those that drew, over a whole step: the engine's, and older ones."""
        tables = [found.table for found in of_chunks if found is not None]
        if tables:  # the action was taken chunk by chunk
            table = torch.cat(tables)
            found = Mismatch.of(batch, table, self._on_policy_rows(step, batch))
        else:
            table = table_of_training(result, batch.size)
            found = self._compare(step, batch, table)
        of_engine = found.metrics(self._mismatch.threshold) if found.rows.any() else {}
        return of_engine | correction_metrics(table[batch["sample_mask"] > 0])


def _drawn_on_policy(version: int, batch: BatchedDataDict) -> Tensor:
    """Bool [B]: no token of the response, in none of its rows, was drawn by other weights."""
    versions_BS = batch[WEIGHT_VERSIONS]
    young_B = ~((versions_BS >= 0) & (versions_BS != version)).any(1)
    for rows in batch.samples():
        young_B[rows.start : rows.stop] = young_B[rows.start : rows.stop].all()
    return young_B


def _id_of(step: int) -> str:
    return f"step {step}"
