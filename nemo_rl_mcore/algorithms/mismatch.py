"""How far the generation engine's log-probabilities are from those that training computes, and what follows from it.

Every step is checked before it trains: so is the first one of a run, and the first one after a resume, when weights
that reached the engine wrong would show.

Shapes: [B,S-1] in the next-token frame.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_mcore.config.loss import KLType
from nemo_rl_mcore.config.vllm import MismatchConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.losses.kl import kl_estimate
from nemo_rl_mcore.output import write_line

_NAMED_SAMPLES = 4


class MismatchError(RunStoppedError):
    """The engine and training disagree by more than policy.generation.mismatch allows."""


@dataclass(frozen=True)
class Mismatch:
    """The disagreement of a rollout: means over its trained tokens, and the mean over each response's [B].

    token_mult_prob_error is exp|g - p|, gen_kl_error estimates the divergence of training from generation. A response
    without trained tokens agrees perfectly.
    """

    token_mult_prob_error: float
    gen_kl_error: float
    per_sequence: Tensor

    def metrics(self, threshold: float | None) -> dict[str, float]:
        """What a step reports; the largest value is 1 where nothing is trained on."""
        metrics = {
            "mismatch/token_mult_prob_error": self.token_mult_prob_error,
            "mismatch/gen_kl_error": self.gen_kl_error,
            "mismatch/max_seq_mult_prob_error": float(self.per_sequence.max()),
        }
        if threshold is not None:
            metrics["mismatch/seqs_above_threshold"] = float(self.above(threshold).float().mean())
        return metrics

    def above(self, threshold: float) -> Tensor:
        """Which responses disagree by more [B]; one that is not a number does."""
        return ~(self.per_sequence <= threshold)


def measure_mismatch(batch: BatchedDataDict, kl_type: KLType = "k3") -> Mismatch:
    """Compare generation_logprobs with prev_logprobs where token_mask and sample_mask are set."""
    trained = (batch["token_mask"] * batch["sample_mask"].unsqueeze(1))[:, 1:] > 0
    generated = batch["generation_logprobs"][:, 1:].double()
    computed = batch["prev_logprobs"][:, 1:].double()
    # Columns that do not count may hold anything, and infinity times zero is not zero.
    error = torch.exp((generated - computed).abs()).masked_fill(~trained, 0.0)
    divergence = kl_estimate(generated, computed, kl_type).masked_fill(~trained, 0.0)
    tokens = trained.sum(1)
    per_sequence = torch.where(tokens > 0, error.sum(1) / tokens.clamp(min=1), 1.0)
    total = int(tokens.sum())
    return Mismatch(
        token_mult_prob_error=float(error.sum()) / total if total else 1.0,
        gen_kl_error=float(divergence.sum()) / max(total, 1),
        per_sequence=per_sequence,
    )


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
            batch["sample_mask"] = batch["sample_mask"] * ~above
        case "warn":
            write_line(sys.stderr, text)
    return metrics


def _describe(step: int, batch: BatchedDataDict, found: Mismatch, above: Tensor, threshold: float) -> str:
    rows = [row for row, differs in enumerate(above) if differs]
    prompts: list[int] = batch["prompt_index"].tolist()
    samples: list[int] = batch["sample_index"].tolist()
    named = [
        f"prompt {prompts[row]} sample {samples[row]}: {float(found.per_sequence[row]):.4g}"
        for row in rows[:_NAMED_SAMPLES]
    ]
    more = ", ..." if len(rows) > _NAMED_SAMPLES else ""
    return (
        f"step {step}: training and generation disagree about {len(rows)} of {len(above)} responses by more than "
        f"policy.generation.mismatch.threshold: {threshold} ({', '.join(named)}{more})"
    )
