"""Compute a rollout's log-probabilities and compare them with the engine's.

Every step is checked. The first step after a start or resume would reveal weights that were corrupted on their way to
the engine. For `mask` and `stop`, a pass before training computes the log-probabilities; otherwise, the training pass
may compute them (see `reader_of_prev_logprobs`). Both yield the same kind of table, defined in `losses.kl`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from nemo_rl_mcore.config import ClippedPGLossConfig, GRPOMasterConfig, PPOMasterConfig
from nemo_rl_mcore.config.generation import GenerationConfig
from nemo_rl_mcore.config.loss import KLType
from nemo_rl_mcore.config.master import reader_of_prev_logprobs
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import ROUTED_EXPERTS
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.driver.rollouts.transcript import WEIGHT_VERSIONS, EpisodeRows
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.losses.kl import COLUMNS, ROW_NUMBER, sampler_table

_NAMED_SAMPLES = 4
_ROWS_AT_A_TIME = 64
"""Limits memory: intermediates in double precision for a whole batch would take several times its size."""
_COMPARED = ("token_mask", "sample_mask", "generation_logprobs", "prev_logprobs")


class MismatchError(RunStoppedError):
    """The engine and training disagree by more than policy.generation.mismatch_threshold allows."""


def model_inputs(batch: BatchedDataDict, *more: str) -> BatchedDataDict:
    """Return the columns for a pass without a loss; a pass over trained tokens alone also needs `token_mask`."""
    return BatchedDataDict({key: batch[key] for key in ("input_ids", "input_lengths", *more)})


def add_logprobs(
    batch: BatchedDataDict, policy: Policy, loss: ClippedPGLossConfig, *, previous: bool = True
) -> None:
    """Add fp32 [B, S] prev_logprobs and, for a KL penalty, reference_policy_logprobs; 0 where token_mask is 0.

    With router replay the pass for prev_logprobs replays the batch's routes, or adds them.
    """
    inputs = model_inputs(batch, "token_mask")
    if previous:
        routes = [ROUTED_EXPERTS] if ROUTED_EXPERTS in batch else []
        found = policy.get_logprobs(model_inputs(batch, "token_mask", *routes), trained_only=True)
        batch["prev_logprobs"] = found["logprobs"]
        if ROUTED_EXPERTS in found:
            batch[ROUTED_EXPERTS] = found[ROUTED_EXPERTS]
    if loss.reference_policy_kl_penalty != 0:
        reference = policy.get_reference_policy_logprobs(inputs, trained_only=True)
        batch["reference_policy_logprobs"] = reference["reference_logprobs"]


def table_of_batch(batch: BatchedDataDict, kl_type: KLType = "k3") -> Tensor:
    """Return the `sampler_table` of prev_logprobs, over tokens whose token_mask and sample_mask are set."""
    compared = BatchedDataDict({name: batch[name] for name in _COMPARED})
    parts = [torch.zeros(0, len(COLUMNS), dtype=torch.float64)]
    for start in range(0, batch.size, _ROWS_AT_A_TIME):
        rows = compared.slice(start, min(start + _ROWS_AT_A_TIME, batch.size))
        trained = (rows["token_mask"] * rows["sample_mask"].unsqueeze(1))[:, 1:] > 0
        drawn, trains = rows["generation_logprobs"][:, 1:], rows["prev_logprobs"][:, 1:]
        parts.append(sampler_table(drawn, trains, trained, kl_type))
    return torch.cat(parts)


def table_of_training(result: Mapping[str, Any], rows: int) -> Tensor:
    """Return the same table from a step's training pass; `rows` is the batch size, and rows carried `row_number`."""
    table = torch.zeros(rows, len(COLUMNS), dtype=torch.float64)
    found = result.get("row_table")
    if found is not None:
        # Padding rows of a microbatch have no tokens and repeat another row's number.
        real = found[found[:, 1] > 0]
        table[real[:, 0].long()] = real[:, 1:]
    return table


def with_row_numbers(columns: BatchedDataDict, first: int = 0) -> BatchedDataDict:
    """Return the columns with each row's number in the step's table added, counting from `first`."""
    return BatchedDataDict(columns | {ROW_NUMBER: torch.arange(first, first + columns.size)})


@dataclass(frozen=True)
class Mismatch:
    """The disagreement between engine and training about a batch's responses.

    table: `sampler_table` of the B rows. rows: bool [B], which rows are compared; a response's rows are all equal here.
    episodes: the E responses that were not dropped. per_sequence: [E], each response's mean of exp|generation -
    training| over its tokens; 1, meaning agreement, for a response without trained tokens.
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
        tokens_E = episodes.total(table[:, 0])
        error_E = episodes.total(table[:, 1])
        per_sequence = torch.where(tokens_E > 0, error_E / tokens_E.clamp(min=1), 1.0)
        return cls(table, rows, episodes, per_sequence)

    def metrics(self, threshold: float | None) -> dict[str, float]:
        """Return means over tokens and the responses' maximum; errors are 1 if nothing is trained on."""
        tokens, error, divergence = (self.table[self.rows, column].sum() for column in range(3))
        compared = self.rows[self.episodes.first]
        responses = self.per_sequence[compared]
        metrics = {
            "mismatch/token_mult_prob_error": float(error) / int(tokens) if tokens else 1.0,
            "mismatch/gen_kl_error": float(divergence) / max(int(tokens), 1),
            "mismatch/max_seq_mult_prob_error": float(responses.max()) if len(responses) else 1.0,
        }
        if threshold is not None:
            above = self.above(threshold)[compared]
            metrics["mismatch/seqs_above_threshold"] = float(above.double().mean()) if len(above) else 0.0
        return metrics

    def above(self, threshold: float) -> Tensor:
        """Return bool [E], True for compared responses that disagree by more than the threshold or by NaN."""
        return ~(self.per_sequence <= threshold) & self.rows[self.episodes.first]


def drawn_by(version: int, batch: BatchedDataDict) -> Tensor:
    """Return bool [B], True for rows of responses that only this version sampled; all True if versions are unknown."""
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
    """Add the log-probabilities that the loss needs; return the comparison if a pass before training makes one."""
    loss = config.loss_fn
    passes_before = reader_of_prev_logprobs(config) is not None
    add_logprobs(batch, policy, loss, previous=passes_before)
    if not passes_before:
        return []
    table = table_of_batch(batch, loss.reference_policy_kl_type)
    return [compare_with_engine(step, batch, table, config.policy.generation)]


def compare_with_engine(
    step: int, batch: BatchedDataDict, table: Tensor, config: GenerationConfig
) -> Mismatch:
    """Compare the responses that a step's own weights sampled, and act on those above the threshold.

    `warn` writes a line to standard error, `mask` sets sample_mask to 0, and `stop` raises MismatchError. Only `mask`
    also applies to responses from older weights, which differ because of their age.
    """
    found = Mismatch.of(batch, table, drawn_by(step - 1, batch))
    if config.mismatch_threshold is None:
        return found
    judged = Mismatch.of(batch, table) if config.mismatch_action == "mask" else found
    above = judged.above(config.mismatch_threshold)
    if not above.any():
        return found
    rows, errors = judged.episodes.first[above], judged.per_sequence[above]
    named = [
        f"prompt {int(batch['prompt_index'][row])} sample {int(batch['sample_index'][row])}: {float(error):.4g}"
        for row, error in zip(rows[:_NAMED_SAMPLES], errors, strict=False)
    ]
    more = ", ..." if len(rows) > _NAMED_SAMPLES else ""
    compared = int(judged.rows[judged.episodes.first].sum())
    text = (
        f"step {step}: training and generation disagree about {len(rows)} of {compared} responses "
        f"by more than policy.generation.mismatch_threshold: {config.mismatch_threshold} ({', '.join(named)}{more})"
    )
    match config.mismatch_action:
        case "stop":
            raise MismatchError(f"{text}; are the engine's weights those of training, and its precision?")
        case "mask":
            batch["sample_mask"] = batch["sample_mask"] * ~judged.episodes.on_rows(above)
        case "warn":
            write_line(sys.stderr, text)
    return found


def comparison_metrics(
    config: GRPOMasterConfig | PPOMasterConfig,
    step: int,
    batch: BatchedDataDict,
    compared: Sequence[Mismatch],
    result: Mapping[str, Any],
) -> dict[str, float]:
    """Return a step's metrics of the mismatch with the engine and, in asynchronous runs, with older weights.

    compared: each chunk's comparison before training; if empty, `result` of the training pass is compared.
    """
    settings = config.policy.generation
    match compared:
        case []:
            found = compare_with_engine(step, batch, table_of_training(result, batch.size), settings)
        case [found]:
            pass
        case chunks:  # each chunk's mismatches have been acted on
            found = Mismatch.of(batch, torch.cat([one.table for one in chunks]), drawn_by(step - 1, batch))
    if not config.asynchronous:
        return found.metrics(settings.mismatch_threshold)
    of_engine = found.metrics(settings.mismatch_threshold) if found.rows.any() else {}
    return of_engine | correction_metrics(found.table[batch["sample_mask"] > 0])


def correction_metrics(table: Tensor) -> dict[str, float]:
    """Measure how far the trained weights are from the weights that sampled; table: `sampler_table` of trained rows.

    async/ess: effective sample size of the importance weights, as a share of the tokens; NaN if all weights are 0.
    async/behaviour_kl: k3 estimate (https://joschu.net/blog/kl-approx.html) of the divergence.
    """
    tokens, _, _, ratio, ratio_squares, behaviour_kl = (float(total) for total in table[:, :-1].sum(0))
    if not tokens:
        return {}
    return {
        "async/ess": ratio / ratio_squares * ratio / tokens if ratio_squares else float("nan"),
        "async/importance_ratio_max": float(table[:, -1].max()),
        "async/behaviour_kl": behaviour_kl / tokens,
    }
