"""Log-probabilities of a rollout, and how far the engine's are from those that training computes.

Every step is checked: so is the first one of a run, and the first one after a resume, when weights that reached the
engine wrong would show. What `mask` and `stop` act on is computed before the step trains; else the training pass may be
what gives the log-probabilities, see `config.prev_logprobs`. Either way it is one table, of `losses.kl`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from nemo_rl_mcore.config import ClippedPGLossConfig, GRPOMasterConfig, PPOMasterConfig
from nemo_rl_mcore.config.generation import MismatchConfig
from nemo_rl_mcore.config.loss import KLType
from nemo_rl_mcore.config.master import reader_of_prev_logprobs
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.driver.rollouts.transcript import WEIGHT_VERSIONS, EpisodeRows
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.losses import ClippedPGLossFn, LossFunction, make_loss
from nemo_rl_mcore.losses.kl import COLUMNS, ROW_NUMBER, sampler_table

_NAMED_SAMPLES = 4
_ROWS_AT_A_TIME = 64
"""Double precision of a whole batch would be several times the batch."""
_COMPARED = ("token_mask", "sample_mask", "generation_logprobs", "prev_logprobs")


class MismatchError(RunStoppedError):
    """The engine and training disagree by more than policy.generation.mismatch allows."""


def model_inputs(batch: BatchedDataDict, *more: str) -> BatchedDataDict:
    """Return the columns that a pass without a loss needs; of the trained tokens alone it needs `token_mask` more."""
    return BatchedDataDict({key: batch[key] for key in ("input_ids", "input_lengths", *more)})


def policy_loss(config: GRPOMasterConfig | PPOMasterConfig) -> LossFunction:
    """Return the policy's loss; one without prev_logprobs where no pass before training gives them."""
    fused = config.policy.megatron_cfg.use_fused_linear_logprobs
    if reader_of_prev_logprobs(config) is not None:
        return make_loss(config.loss_fn, fused)
    return ClippedPGLossFn(config.loss_fn, fused, own_previous=True)


def add_logprobs(
    batch: BatchedDataDict, policy: Policy, loss: ClippedPGLossConfig, *, previous: bool = True
) -> None:
    """Add prev_logprobs and, for a KL penalty, reference_policy_logprobs, fp32 [B, S], 0 where token_mask is."""
    inputs = model_inputs(batch, "token_mask")
    if previous:
        batch["prev_logprobs"] = policy.get_logprobs(inputs, trained_only=True)["logprobs"]
    if loss.reference_policy_kl_penalty != 0:
        reference = policy.get_reference_policy_logprobs(inputs, trained_only=True)
        batch["reference_policy_logprobs"] = reference["reference_logprobs"]


def table_of_batch(batch: BatchedDataDict, kl_type: KLType = "k3") -> Tensor:
    """Return the `sampler_table` of prev_logprobs, where token_mask and sample_mask are set."""
    compared = BatchedDataDict({name: batch[name] for name in _COMPARED})
    parts = [torch.zeros(0, len(COLUMNS), dtype=torch.float64)]
    for start in range(0, batch.size, _ROWS_AT_A_TIME):
        rows = compared.slice(start, min(start + _ROWS_AT_A_TIME, batch.size))
        trained = (rows["token_mask"] * rows["sample_mask"].unsqueeze(1))[:, 1:] > 0
        drawn, trains = rows["generation_logprobs"][:, 1:], rows["prev_logprobs"][:, 1:]
        parts.append(sampler_table(drawn, trains, trained, kl_type))
    return torch.cat(parts)


def table_of_training(result: Mapping[str, Any], rows: int) -> Tensor:
    """Return the same of a step's training pass, for a batch of `rows` that went out with their `row_number`."""
    table = torch.zeros(rows, len(COLUMNS), dtype=torch.float64)
    found = result.get("row_table")
    if found is not None:
        # What fills up a microbatch has no token, and the number of a row that it is not.
        numbers, found = found[:, 0].long(), found[:, 1:]
        counts = found[:, 0] > 0
        table[numbers[counts]] = found[counts]
    return table


def with_row_numbers(columns: BatchedDataDict, first: int = 0) -> BatchedDataDict:
    """Return the columns, and with them the number of each row in the table of the step, from `first` on."""
    return BatchedDataDict(columns | {ROW_NUMBER: torch.arange(first, first + columns.size)})


@dataclass(frozen=True)
class Mismatch:
    """The disagreement about the responses of a batch that are compared.

    table: of the batch's rows B. rows: bool [B], those that are compared, all rows of a response or none. episodes:
    the responses E that were not dropped. per_sequence: [E], the mean of exp|generation - training| over the tokens of
    each; 1 without trained tokens, which is agreement.
    """

    table: Tensor
    rows: Tensor
    episodes: EpisodeRows
    per_sequence: Tensor

    @classmethod
    def of(cls, batch: BatchedDataDict, table: Tensor, rows: Tensor | None = None) -> Self:
        if rows is None:
            rows = torch.ones(batch.size, dtype=torch.bool)
        episodes = EpisodeRows.of(batch)
        tokens_E, error_E = episodes.total(table[:, 0]), episodes.total(table[:, 1])
        per_sequence = torch.where(tokens_E > 0, error_E / tokens_E.clamp(min=1), 1.0)
        return cls(table, rows, episodes, per_sequence)

    def metrics(self, threshold: float | None) -> dict[str, float]:
        """Return what a step reports: means over tokens, and the largest value, 1 where nothing is trained on."""
        tokens, error, divergence = (self.table[self.rows, column].sum() for column in range(3))
        responses = self.per_sequence[self.episodes.one_each(self.rows)]
        metrics = {
            "mismatch/token_mult_prob_error": float(error) / int(tokens) if tokens else 1.0,
            "mismatch/gen_kl_error": float(divergence) / max(int(tokens), 1),
            "mismatch/max_seq_mult_prob_error": float(responses.max()) if len(responses) else 1.0,
        }
        if threshold is not None:
            above = self.above(threshold)[self.episodes.one_each(self.rows)]
            metrics["mismatch/seqs_above_threshold"] = float(above.double().mean()) if len(above) else 0.0
        return metrics

    def above(self, threshold: float) -> Tensor:
        """Return bool [E], which of the compared responses disagree by more; one that is not a number does."""
        return ~(self.per_sequence <= threshold) & self.episodes.one_each(self.rows)


def drawn_by(version: int, batch: BatchedDataDict) -> Tensor:
    """Return bool [B]: weights of this version, or ranks where none is told, have drawn all rows of the response."""
    if WEIGHT_VERSIONS not in batch:
        return torch.ones(batch.size, dtype=torch.bool)
    versions_BS = batch[WEIGHT_VERSIONS]
    drawn_B = ~((versions_BS >= 0) & (versions_BS != version)).any(1)
    for rows in batch.samples():
        drawn_B[rows.start : rows.stop] = drawn_B[rows.start : rows.stop].all()
    return drawn_B


def add_compared_logprobs(
    config: GRPOMasterConfig | PPOMasterConfig, policy: Policy, step: int, batch: BatchedDataDict
) -> list[Mismatch]:
    """Add the log-probabilities that the loss needs; returns the comparison, if a pass before training makes it."""
    passes_before = reader_of_prev_logprobs(config) is not None
    add_logprobs(batch, policy, config.loss_fn, previous=passes_before)
    if not passes_before:
        return []
    table = table_of_batch(batch, config.loss_fn.reference_policy_kl_type)
    return [compare_with_engine(step, batch, table, config.policy.generation.mismatch)]


def compare_with_engine(step: int, batch: BatchedDataDict, table: Tensor, config: MismatchConfig) -> Mismatch:
    """Compare the responses of a step that its own weights sampled, and do what `action` says of those that differ.

    What older weights sampled differs by its age. `warn` writes a line to standard error; `mask` sets the sample_mask
    of responses above the threshold to 0, so that they are not trained on. Raises MismatchError for `stop`.
    """
    found = Mismatch.of(batch, table, drawn_by(step - 1, batch))
    if config.threshold is None:
        return found
    above = found.above(config.threshold)
    if not above.any():
        return found
    numbers = [number for number, differs in enumerate(above) if differs]
    prompts = found.episodes.one_each(batch["prompt_index"])
    samples = found.episodes.one_each(batch["sample_index"])
    named = [
        f"prompt {int(prompts[number])} sample {int(samples[number])}: {float(found.per_sequence[number]):.4g}"
        for number in numbers[:_NAMED_SAMPLES]
    ]
    more = ", ..." if len(numbers) > _NAMED_SAMPLES else ""
    compared = int(found.episodes.one_each(found.rows).sum())
    text = (
        f"step {step}: training and generation disagree about {len(numbers)} of {compared} responses "
        f"by more than policy.generation.mismatch.threshold: {config.threshold} ({', '.join(named)}{more})"
    )
    match config.action:
        case "stop":
            raise MismatchError(f"{text}; are the engine's weights those of training, and its precision?")
        case "mask":
            batch["sample_mask"] = batch["sample_mask"] * ~found.episodes.on_rows(above)
        case "warn":
            write_line(sys.stderr, text)
    return found


def comparison_metrics(
    found: Mismatch, batch: BatchedDataDict, threshold: float | None, *, asynchronous: bool
) -> dict[str, float]:
    """Return what a step reports of the engine's log-probabilities and, in asynchronous runs, of older weights'."""
    if not asynchronous:
        return found.metrics(threshold)
    of_engine = found.metrics(threshold) if found.rows.any() else {}
    return of_engine | correction_metrics(found.table[batch["sample_mask"] > 0])


def correction_metrics(table: Tensor) -> dict[str, float]:
    """Measure how far the weights that train are from those that sampled, from the `sampler_table` of the trained rows.

    async/ess: effective sample size of the importance weights, as a share of the tokens; NaN where all of them are 0.
    async/behaviour_kl: the k3 estimate (https://joschu.net/blog/kl-approx.html) of the divergence of the weights that
    train from those that sampled.
    """
    tokens, _, _, ratio, ratio_squares, behaviour_kl = (float(total) for total in table[:, :-1].sum(0))
    if not tokens:
        return {}
    return {
        "async/ess": ratio / ratio_squares * ratio / tokens if ratio_squares else float("nan"),
        "async/importance_ratio_max": float(table[:, -1].max()),
        "async/behaviour_kl": behaviour_kl / tokens,
    }
