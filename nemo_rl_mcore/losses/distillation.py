"""Distillation: a divergence between teacher and student at the teacher's k most probable ids.

Forward and reverse KL, their mixture (https://arxiv.org/abs/2306.13649 surveys them) and the generalised
Jensen-Shannon divergence beta * KL(t || m) + (1 - beta) * KL(s || m) with m = beta * t + (1 - beta) * s.

All probabilities are under the full vocabulary. With the tail as one more outcome both sides are distributions, and
each outcome contributes p log(p / q) - p + q, which is never negative and adds up to the divergence: its value needs no
clamp. Shapes: [B,S-1,k] in the next-token frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from nemo_rl_mcore.config import checked
from nemo_rl_mcore.config.loss import DistillationLossConfig
from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.losses.base import (
    Count,
    DistillationOutputs,
    LossFunction,
    LossInputType,
    LossSums,
    LossType,
    Masks,
    MetricKind,
    MetricSum,
    TokenOutputs,
    TopKLogprobs,
)
from nemo_rl_mcore.losses.clipped_pg import ClippedPGLossFn


def kl_terms(first: Tensor, second: Tensor, *, complete: bool) -> Tensor:
    """KL(first || second) of each outcome: p log(p / q), and - p + q if each side's outcomes add up to 1 (complete)."""
    p, q = torch.exp(first), torch.exp(second)
    possible = torch.isfinite(first)
    r = torch.where(possible, second - torch.where(possible, first, 0.0), 0.0)
    if not complete:
        return -p * r
    # The two branches are equal; the first keeps its digits where p and q are near, the second cannot overflow.
    near = p * (torch.expm1(r.clamp(max=1.0)) - r)
    return torch.where(possible, torch.where(r < 1, near, q - p * (1 + r)), q)


def divergence(cfg: DistillationLossConfig, teacher: Tensor, student: Tensor) -> Tensor:
    """Return each outcome's contribution to the configured divergence, from log-probabilities."""
    kl = partial(kl_terms, complete=cfg.tail_mass)
    match cfg.kl_type:
        case "forward":
            return kl(teacher, student)
        case "reverse":
            return kl(student, teacher)
        case "mixed":
            weight = cfg.mixed_kl_weight
            return weight * kl(teacher, student) + (1 - weight) * kl(student, teacher)
        case "jsd":
            beta = cfg.jsd_beta  # the teacher's share of the mixture
            log_beta, log_rest = torch.log(teacher.new_tensor([beta, 1 - beta])).unbind()
            mixture = torch.logaddexp(teacher + log_beta, student + log_rest)
            return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


class DistillationLossFn(LossFunction):
    """The mean divergence over the valid tokens, and optionally the policy-gradient loss beside it."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.DISTILLATION

    def __init__(
        self, cfg: DistillationLossConfig | Mapping[str, object], use_fused_linear_logprobs: bool = False
    ) -> None:
        self.cfg = checked(DistillationLossConfig, cfg)
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        self._policy_gradient = ClippedPGLossFn(self.cfg.rl) if self.cfg.rl_weight else None
        if self._policy_gradient is not None:
            self.needs_tokens = True
            self.needs_entropy = self._policy_gradient.needs_entropy
            self.own_columns = self._policy_gradient.columns

    def __call__(
        self,
        student_topk_logprobs: Tensor,
        teacher_topk_logprobs: Tensor,
        data: BatchedDataDict,
        global_valid_seqs: Count,
        global_valid_toks: Count,
        next_token_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the result of `divide`, for log-probabilities [B,S-1,k] at the teacher's ids.

        next_token_logprobs, entropy: [B,S-1], which `rl_weight` needs.
        """
        tokens = None if next_token_logprobs is None else TokenOutputs(next_token_logprobs, entropy)
        outputs = DistillationOutputs(
            TopKLogprobs(student_topk_logprobs), TopKLogprobs(teacher_topk_logprobs), tokens
        )
        return self.divide(self.sums(outputs, data), global_valid_seqs, global_valid_toks)

    def sums(self, outputs: DistillationOutputs, data: BatchedDataDict) -> LossSums:
        masks = Masks.of(data, outputs.student.logprobs.dtype)
        student, teacher = outputs.student.logprobs, outputs.teacher.logprobs
        if student.shape != teacher.shape or student.shape[:-1] != masks.valid.shape:
            raise RefusedError(
                f"student {list(student.shape)} and teacher {list(teacher.shape)} are not log-probabilities at the "
                f"same ids of the {list(masks.valid.shape)} next tokens",
                code="teacher-shape",
            )
        covered = torch.exp(teacher).sum(dim=-1)
        student = self._outcomes(outputs.student, outputs.teacher, masks)
        teacher = self._outcomes(outputs.teacher, outputs.student, masks)
        loss = kl = masks.token_sum(divergence(self.cfg, teacher, student).sum(dim=-1))
        metrics = {
            "kl": MetricSum(kl.detach(), MetricKind.TOKENS),
            "teacher_topk_mass": masks.token_metric(covered.detach()),
            "num_valid_samples": MetricSum(masks.sequences.sum(), MetricKind.NONE),
        }
        if self._policy_gradient is not None:
            if outputs.tokens is None:
                raise ValueError(
                    f"rl_weight: {self.cfg.rl_weight} needs the log-probabilities of the tokens themselves"
                )
            rl = self._policy_gradient.sums(outputs.tokens, data)
            loss = kl + self.cfg.rl_weight * rl.loss
            metrics = {**rl.metrics, **metrics, "rl_loss": rl.metrics["loss"]}
        return LossSums(loss, {**metrics, "loss": MetricSum(loss.detach(), MetricKind.TOKENS)})

    def _outcomes(self, side: TopKLogprobs, other: TopKLogprobs, masks: Masks) -> Tensor:
        """Return log-probabilities [B,S-1,k or k+1], equal to 0 where no token counts; the tail is the last one."""
        counts = masks.valid.unsqueeze(-1) != 0
        logprobs = torch.where(counts, side.logprobs, 0.0)
        if not self.cfg.tail_mass:
            return logprobs
        tail = side.tail_logmass
        if tail is None:
            # One minus the k probabilities, whose rounding errors leave a smaller rest unknown: it counts as that much.
            unknown = torch.finfo(logprobs.dtype).eps
            tail = torch.log((1 - torch.exp(logprobs).sum(dim=-1)).clamp(min=unknown))
            if other.tail_logmass is not None:
                # A softmax gives every id some probability: an empty tail means that k is the whole vocabulary.
                tail = tail.masked_fill(other.tail_logmass == -torch.inf, -torch.inf)
        return torch.cat([logprobs, torch.where(counts, tail.unsqueeze(-1), 0.0)], dim=-1)
