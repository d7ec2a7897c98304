"""How far the generation engine's log-probabilities are from those that training computes, and what follows from it.

Every step is checked: so is the first one of a run, and the first one after a resume, when weights that reached the
engine wrong would show. What `mask` and `stop` act on is computed before the step trains; else the training pass may be
what gives the log-probabilities, see `config.prev_logprobs`.

Shapes: [B,S-1] in the next-token frame.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_mcore.algorithms.episode_rows import EpisodeRows
from nemo_rl_mcore.config.loss import KLType
from nemo_rl_mcore.config.vllm import MismatchConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.losses.kl import kl_estimate
from nemo_rl_mcore.losses.sampler_check import SamplerSums
from nemo_rl_mcore.output import write_line

_NAMED_SAMPLES = 4
_ROWS_AT_A_TIME = 64
"""Double precision of a whole batch would be several times the batch."""
_COMPARED = ("token_mask", "sample_mask", "generation_logprobs", "prev_logprobs")


class MismatchError(RunStoppedError):
    """The engine and training disagree by more than policy.generation.mismatch allows."""


@dataclass(frozen=True)
class Mismatch:
    """The disagreement of a rollout: means over its trained tokens, and the mean over each response's [E].

    Responses are the episodes that were not dropped. token_mult_prob_error is exp|g - p|, gen_kl_error estimates the
    divergence of training from generation. A response without trained tokens agrees perfectly.
    """

    token_mult_prob_error: float
    gen_kl_error: float
    per_sequence: Tensor

    def metrics(self, threshold: float | None) -> dict[str, float]:
        """What a step reports; the largest value is 1 where nothing is trained on."""
        metrics = {
            "mismatch/token_mult_prob_error": self.token_mult_prob_error,
            "mismatch/gen_kl_error": self.gen_kl_error,
            "mismatch/max_seq_mult_prob_error": float(self.per_sequence.max())
            if len(self.per_sequence)
            else 1.0,
        }
        if threshold is not None:
            above = self.above(threshold)
            metrics["mismatch/seqs_above_threshold"] = float(above.double().mean()) if len(above) else 0.0
        return metrics

    def above(self, threshold: float) -> Tensor:
        """Which responses disagree by more [E]; one that is not a number does."""
        return ~(self.per_sequence <= threshold)


def measure_mismatch(batch: BatchedDataDict, kl_type: KLType = "k3") -> Mismatch:
    """Compare generation_logprobs with prev_logprobs where token_mask and sample_mask are set."""
    compared = BatchedDataDict({name: batch[name] for name in _COMPARED})
    sums_3B = torch.zeros(3, batch.size, dtype=torch.float64)
    for start in range(0, batch.size, _ROWS_AT_A_TIME):
        end = min(start + _ROWS_AT_A_TIME, batch.size)
        sums_3B[:, start:end] = _sums_of_rows(compared.slice(start, end), kl_type)
    tokens_B, error_B, divergence_B = sums_3B
    episodes, total = EpisodeRows.of(batch), int(tokens_B.sum())
    tokens_E, error_E = episodes.total(tokens_B), episodes.total(error_B)
    per_sequence = torch.where(tokens_E > 0, error_E / tokens_E.clamp(min=1), 1.0)
    return Mismatch(
        token_mult_prob_error=float(error_B.sum()) / total if total else 1.0,
        gen_kl_error=float(divergence_B.sum()) / max(total, 1),
        per_sequence=per_sequence,
    )


def _sums_of_rows(batch: BatchedDataDict, kl_type: KLType) -> Tensor:
    """[3, B]: how many tokens are trained, and the sums over them of exp|g - p| and of the divergence."""
    trained = (batch["token_mask"] * batch["sample_mask"].unsqueeze(1))[:, 1:] > 0
    generated = batch["generation_logprobs"][:, 1:].double()
    computed = batch["prev_logprobs"][:, 1:].double()
    # Columns that do not count may hold anything, and infinity times zero is not zero.
    error = torch.exp((generated - computed).abs()).masked_fill(~trained, 0.0)
    divergence = kl_estimate(generated, computed, kl_type).masked_fill(~trained, 0.0)
    return torch.stack([trained.sum(1), error.sum(1), divergence.sum(1)])


def check_mismatch(
    step: int, batch: BatchedDataDict, config: MismatchConfig, kl_type: KLType = "k3"
) -> dict[str, float]:
    """Measure a rollout, do what `action` says about responses above the threshold, and return the step's metrics.

    `warn` writes a line to standard error; `mask` sets their sample_mask to 0, so that they are not trained on.
    Raises MismatchError for `stop`.
    """
    found = measure_mismatch(batch, kl_type)
    metrics = found.metrics(config.threshold)
    if config.threshold is None:
        return metrics
    above = found.above(config.threshold)
    if not above.any():
        return metrics
    text = _describe(step, batch, found, above, config.threshold)
    match config.action:
        case "stop":
            raise MismatchError(f"{text}; are the engine's weights those of training, and its precision?")
        case "mask":
            batch["sample_mask"] = batch["sample_mask"] * ~EpisodeRows.of(batch).on_rows(above)
        case "warn":
            write_line(sys.stderr, text)
    return metrics


def responses(batch: BatchedDataDict) -> int:
    """How many episodes were not dropped."""
    return len(EpisodeRows.of(batch).first)


def mismatch_of_training(
    step: int, sums: SamplerSums, responses: int, config: MismatchConfig
) -> dict[str, float]:
    """The same metrics of a step whose training pass gave the log-probabilities; `warn` then writes no names.

    responses: episodes that were not dropped, of those that the weights that train have drawn.
    """
    largest = max(sums.largest, 1.0)  # below 1 is nothing to measure
    metrics = {
        "mismatch/token_mult_prob_error": sums.error / sums.tokens if sums.tokens else 1.0,
        "mismatch/gen_kl_error": sums.divergence / max(sums.tokens, 1.0),
        "mismatch/max_seq_mult_prob_error": largest,
    }
    if config.threshold is None:
        return metrics
    if sums.above:
        write_line(
            sys.stderr,
            f"step {step}: training and generation disagree about {sums.above:.0f} of {responses} responses by more "
            f"than policy.generation.mismatch.threshold: {config.threshold} (up to {largest:.4g})",
        )
    return metrics | {"mismatch/seqs_above_threshold": sums.above / responses if responses else 0.0}


def _describe(step: int, batch: BatchedDataDict, found: Mismatch, above: Tensor, threshold: float) -> str:
    numbers = [number for number, differs in enumerate(above) if differs]
    episodes = EpisodeRows.of(batch)
    prompts = episodes.one_each(batch["prompt_index"])
    samples = episodes.one_each(batch["sample_index"])
    named = [
        f"prompt {int(prompts[number])} sample {int(samples[number])}: {float(found.per_sequence[number]):.4g}"
        for number in numbers[:_NAMED_SAMPLES]
    ]
    more = ", ..." if len(numbers) > _NAMED_SAMPLES else ""
    return (
        f"step {step}: training and generation disagree about {len(numbers)} of {len(above)} responses by more than "
        f"policy.generation.mismatch.threshold: {threshold} ({', '.join(named)}{more})"
    )
