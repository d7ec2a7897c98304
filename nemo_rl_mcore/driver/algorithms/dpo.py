"""Direct preference optimization: learn to prefer the better of two answers to a prompt.

Offline, the data set contains the pairs; online, a pair is the best and the worst of several answers to a prompt. P
pairs are 2 P rows: chosen, rejected, chosen, ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from nemo_rl_mcore.config import DPOMasterConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.answers import PreferenceSource
from nemo_rl_mcore.data.batched_data_dict import EPISODE
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.driver.algorithms.algorithm import Algorithm, Judged, StepOutcome
from nemo_rl_mcore.driver.algorithms.mismatch import model_inputs
from nemo_rl_mcore.driver.rollouts.player import Rollout
from nemo_rl_mcore.driver.rollouts.scheduler import Step
from nemo_rl_mcore.driver.rollouts.transcript import require_sampled_ids, trained_columns, uncounted_rows
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.losses import DPOLossFn

_ROWS_PER_PAIR = DPOLossFn.rows_per_sample


KEPT_BYTES = 2**30
"""Bound on cached bytes in the driver; at 4 bytes per token, it holds 131,000 pairs with two rows of 1,024 tokens."""

Block = dict[int, list[torch.Tensor]]
"""Each pair's two rows of log-probabilities, by prompt_index; a row has one value per token."""


@dataclass
class ReferenceBlocks:
    """Caches the reference's log-probabilities of given answers, which recur in every pass over the data set.

    The last bits of a row's values depend on the other rows in the same forward pass. So each row is always computed in
    the same block, and a resumed run, which recomputes it, gets the same values. A pair's block is the batch of the
    step that first draws it, if KEPT_BYTES can hold all blocks up to that one. All other pairs, and pairs from a source
    that never repeats, are computed in the batch of every step that draws them.

    ask: returns log-probabilities [B, S], 0 where token_mask is 0. count: pairs per step. longest: tokens per row.
    """

    pairs: PreferenceSource
    ask: Callable[[BatchedDataDict], torch.Tensor]
    count: int
    longest: int
    _kept: dict[int, Block] = field(default_factory=dict[int, Block], init=False, repr=False)
    _held_out: dict[tuple[int, ...], torch.Tensor] = field(
        default_factory=dict[tuple[int, ...], torch.Tensor], init=False, repr=False
    )

    def of_step(self, step: int, batch: BatchedDataDict) -> torch.Tensor:
        first = self.pairs.prompts.first_steps(step, self.count)
        if first is None:
            return self.ask(batch)
        kept_steps = KEPT_BYTES // (self.count * _ROWS_PER_PAIR * self.longest * torch.float32.itemsize)
        of_pair = [block if block <= kept_steps else step for block in first]
        blocks: dict[int, Block] = {}
        for number in sorted({*of_pair}):
            block = self._kept.get(number)
            if block is None:
                asked = batch if number == step else self.pairs.train_batch(number, self.count)
                lengths: list[int] = asked["input_lengths"].tolist()
                pairs: list[int] = asked["prompt_index"].tolist()
                block = Block()
                for pair, length, values in zip(pairs, lengths, self.ask(asked), strict=True):
                    block.setdefault(pair, []).append(values[:length].clone())
            if number <= kept_steps:
                self._kept[number] = block
            blocks[number] = block
        indices: list[int] = batch["prompt_index"].tolist()
        found = torch.zeros(batch["input_ids"].shape)
        for row, index in enumerate(indices):
            logprobs = blocks[of_pair[row // _ROWS_PER_PAIR]][index][row % _ROWS_PER_PAIR]
            found[row, : len(logprobs)] = logprobs
        return found

    def of_validation(self, batch: BatchedDataDict) -> torch.Tensor:
        """Return log-probabilities [B, S] of held-out pairs, which are the same in every validation."""
        pairs = tuple[int, ...](batch["prompt_index"].tolist())
        if pairs in self._held_out:
            return self._held_out[pairs]
        found = self.ask(batch)
        if sum(kept.nbytes for kept in (*self._held_out.values(), found)) <= KEPT_BYTES:
            self._held_out[pairs] = found
        return found


@dataclass(frozen=True)
class DPOTrainer(Algorithm[DPOMasterConfig]):
    """Direct preference optimization, https://arxiv.org/abs/2305.18290. pairs: None if pairs are formed online."""

    pairs: PreferenceSource | None

    def judge(self, step: Step) -> Judged:
        rollout, paired = None, dict[str, float]()
        if self.pairs is None:
            with self.observer.phase("generation"):
                rollout = step.whole()
            batch, with_signal = best_against_worst(rollout, self.config.dpo.num_generations_per_prompt or 0)
            paired["train/pairs_with_signal"] = with_signal
        else:
            batch = self.pairs.train_batch(step.number, self.config.policy.train_global_batch_size)
        with self.observer.phase("reference"):
            known = self._reference
            logprobs = self._ask_reference(batch) if known is None else known.of_step(step.number, batch)
        batch["reference_policy_logprobs"] = logprobs.roll(-1, dims=1)  # column i: log p of token i + 1
        require_sampled_ids(batch)
        return Judged(batch, rollout, metrics=paired)

    def update(self, step: Step, judged: Judged) -> StepOutcome:
        outcome = super().update(step, judged)
        return replace(outcome, metrics=outcome.metrics | preference_metrics(outcome.metrics, "train"))

    def validate(self, step: int) -> dict[str, float]:
        """Evaluate the policy's answers and, if pairs are given, the loss of held-out pairs."""
        judged = super().validate(step)
        pairs, reference = self.pairs, self._reference
        if pairs is None or reference is None:
            return judged

        def compared(prompts: Sequence[Prompt]) -> BatchedDataDict:
            batch = pairs.rows(prompts)
            batch["reference_policy_logprobs"] = reference.of_validation(batch).roll(-1, dims=1)
            return trained_columns(batch)

        held_out = self.evaluate(self.config.dpo, compared)
        found = {"validation/loss": held_out["validation/loss"]} | preference_metrics(held_out, "validation")
        return judged | found

    @cached_property
    def _reference(self) -> ReferenceBlocks | None:
        if self.pairs is None:
            return None
        policy = self.config.policy
        count, longest = policy.train_global_batch_size, policy.max_total_sequence_length
        return ReferenceBlocks(self.pairs, self._ask_reference, count, longest)

    def _ask_reference(self, batch: BatchedDataDict) -> torch.Tensor:
        inputs = model_inputs(batch, "token_mask")
        return self.policy.get_reference_policy_logprobs(inputs, trained_only=True)["reference_logprobs"]


def preference_metrics(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the loss's pair metrics under distinct names, as `accuracy` means answer accuracy in other algorithms."""
    chosen, rejected = (metrics[f"{prefix}/rewards_{side}_mean"] for side in ("chosen", "rejected"))
    return {
        f"{prefix}/preference_accuracy": metrics[f"{prefix}/accuracy"],
        f"{prefix}/rewards_chosen_mean": chosen,
        f"{prefix}/rewards_rejected_mean": rejected,
        f"{prefix}/rewards_margin_mean": chosen - rejected,
    }


def best_against_worst(rollout: Rollout, answers: int) -> tuple[BatchedDataDict, float]:
    """Pair each prompt's best and worst answer; return the pairs and the share of pairs whose rewards differ.

    A pair with equal rewards gets a sample_mask of 0; the rollout's sample_mask becomes 1 on answers in other pairs and
    0 elsewhere. Answers that were dropped or not scored are left out. Raises ValueError for answers of several rows.
    """
    if EPISODE in rollout.batch:
        raise RefusedError(
            f"{EPISODE}: a pair compares rows, and the episodes of this rollout may have several",
            code="rows-per-episode",
        )
    uncounted_PA = uncounted_rows(rollout.batch).view(-1, answers)
    rewards_PA = rollout.batch["rewards"].view(-1, answers)
    best_P, chosen_P = rewards_PA.masked_fill(uncounted_PA, -torch.inf).max(1)
    worst_P, rejected_P = rewards_PA.masked_fill(uncounted_PA, torch.inf).min(1)
    first_row_P = torch.arange(len(rewards_PA)) * answers
    rows_P2 = torch.stack([first_row_P + chosen_P, first_row_P + rejected_P], dim=1)
    batch = rollout.batch.select_indices(rows_P2.flatten())
    differs_P = best_P > worst_P
    batch["sample_mask"] = differs_P.float().repeat_interleave(_ROWS_PER_PAIR)
    trained = torch.zeros(rollout.batch.size).scatter(0, rows_P2.flatten(), batch["sample_mask"])
    rollout.batch["sample_mask"] = trained
    return batch, float(differs_P.float().mean())
