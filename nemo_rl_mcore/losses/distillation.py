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
from typing import Protocol

import torch
from torch import Tensor

from nemo_rl_mcore.config import checked
from nemo_rl_mcore.config.loss import DistillationLossConfig
from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict
from nemo_rl_mcore.data.columns import Column
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


class Divergence(Protocol):
    """The contribution of each outcome, from the log-probabilities of teacher and student."""

    def __call__(self, teacher: Tensor, student: Tensor, /, *, complete: bool) -> Tensor:
        """Return one number an outcome; `complete` says that the outcomes of each side add up to 1."""
        ...


def kl_terms(first: Tensor, second: Tensor, /, *, complete: bool) -> Tensor:
    """KL(first || second): p log(p / q), which of complete distributions is also p log(p / q) - p + q."""
    p, q = torch.exp(first), torch.exp(second)
    possible = torch.isfinite(first)
    r = torch.where(possible, second - torch.where(possible, first, 0.0), 0.0)
    if not complete:
        return -p * r
    # The two branches are equal; the first keeps its digits where p and q are near, the second cannot overflow.
    near = p * (torch.expm1(r.clamp(max=1.0)) - r)
    return torch.where(possible, torch.where(r < 1, near, q - p * (1 + r)), q)


def reverse_kl_terms(teacher: Tensor, student: Tensor, /, *, complete: bool) -> Tensor:
    """KL(student || teacher)."""
    return kl_terms(student, teacher, complete=complete)


def mixed_kl_terms(teacher: Tensor, student: Tensor, /, *, complete: bool, weight: float) -> Tensor:
    """Return `weight` of forward and the rest of reverse KL."""
    forward = kl_terms(teacher, student, complete=complete)
    return weight * forward + (1 - weight) * kl_terms(student, teacher, complete=complete)


def jsd_terms(teacher: Tensor, student: Tensor, /, *, complete: bool, beta: float) -> Tensor:
    """Jensen-Shannon divergence, `beta` being the teacher's share of the mixture."""
    log_beta, log_rest = torch.log(teacher.new_tensor([beta, 1 - beta])).unbind()
    mixture = torch.logaddexp(teacher + log_beta, student + log_rest)
    forward = kl_terms(teacher, mixture, complete=complete)
    return beta * forward + (1 - beta) * kl_terms(student, mixture, complete=complete)


def divergence(cfg: DistillationLossConfig) -> Divergence:
    """Return the divergence of a configuration."""
    match cfg.kl_type:
        case "forward":
            return kl_terms
        case "reverse":
            return reverse_kl_terms
        case "mixed":
            return partial(mixed_kl_terms, weight=cfg.mixed_kl_weight)
        case "jsd":
            return partial(jsd_terms, beta=cfg.jsd_beta)


class DistillationLossFn(LossFunction):
    """The mean divergence over the valid tokens, and optionally the policy-gradient loss beside it."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.DISTILLATION

    def __init__(
        self, cfg: DistillationLossConfig | Mapping[str, object], use_fused_linear_logprobs: bool = False
    ) -> None:
        self.cfg = checked(DistillationLossConfig, cfg)
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        self._divergence = divergence(self.cfg)
        self._policy_gradient = ClippedPGLossFn(self.cfg.rl) if self.cfg.rl_weight else None

    @property
    def columns(self) -> tuple[Column, ...]:
        """Return what the teacher said and, for a policy-gradient part, what that reads."""
        of_tokens = () if self._policy_gradient is None else self._policy_gradient.columns
        return (*super().columns, *of_tokens)

    @property
    def needs_entropy(self) -> bool:
        """Return whether the policy-gradient part has an entropy bonus."""
        return self._policy_gradient is not None and self._policy_gradient.needs_entropy

    @property
    def needs_tokens(self) -> bool:
        """Return whether there is a policy-gradient part."""
        return self._policy_gradient is not None

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
        """Return what `divide` returns.

        student_topk_logprobs, teacher_topk_logprobs: [B,S-1,k] at the teacher's ids, under the full vocabulary.
        next_token_logprobs, entropy: [B,S-1], which `rl_weight` needs.
        """
        tokens = None if next_token_logprobs is None else TokenOutputs(next_token_logprobs, entropy)
        outputs = DistillationOutputs(
            TopKLogprobs(student_topk_logprobs), TopKLogprobs(teacher_topk_logprobs), tokens
        )
        return self.divide(self.sums(outputs, data), global_valid_seqs, global_valid_toks)

    def sums(self, outputs: DistillationOutputs, data: BatchedDataDict) -> LossSums:
        """Return the un-normalised loss and metrics; ValueError when the batch lacks what they need."""
        masks = Masks.of(data, outputs.student.logprobs.dtype)
        student, teacher = _outcomes(outputs, masks, with_tail=self.cfg.tail_mass)
        terms = self._divergence(teacher, student, complete=self.cfg.tail_mass)
        kl = masks.token_sum(terms.sum(dim=-1))
        covered = torch.exp(outputs.teacher.logprobs).sum(dim=-1)
        metrics = {
            "kl": MetricSum(kl.detach(), MetricKind.TOKENS),
            "teacher_topk_mass": MetricSum(masks.token_sum(covered.detach()), MetricKind.TOKENS),
            "num_valid_samples": MetricSum(masks.sequences.sum(), MetricKind.NONE),
        }
        loss = kl
        if self._policy_gradient is not None:
            if outputs.tokens is None:
                raise ValueError(
                    f"rl_weight: {self.cfg.rl_weight} needs the log-probabilities of the tokens themselves"
                )
            rl = self._policy_gradient.sums(outputs.tokens, data)
            loss = kl + self.cfg.rl_weight * rl.loss
            metrics = {**rl.metrics, **metrics, "rl_loss": rl.metrics["loss"]}
        return LossSums(loss, {**metrics, "loss": MetricSum(loss.detach(), MetricKind.TOKENS)})


def _outcomes(outputs: DistillationOutputs, masks: Masks, *, with_tail: bool) -> tuple[Tensor, Tensor]:
    """Return student and teacher log-probabilities [B,S-1,k or k+1], equal to 0 where no token counts."""
    student, teacher = outputs.student.logprobs, outputs.teacher.logprobs
    if student.shape != teacher.shape or student.shape[:-1] != masks.valid.shape:
        raise RefusedError(
            f"student {list(student.shape)} and teacher {list(teacher.shape)} are not log-probabilities at the same "
            f"ids of the {list(masks.valid.shape)} next tokens",
            code="teacher-shape",
        )
    return (
        _kept(outputs.student, outputs.teacher, masks, with_tail),
        _kept(outputs.teacher, outputs.student, masks, with_tail),
    )


def _kept(side: TopKLogprobs, other: TopKLogprobs, masks: Masks, with_tail: bool) -> Tensor:
    counts = masks.valid.unsqueeze(-1) != 0
    logprobs = torch.where(counts, side.logprobs, 0.0)
    if not with_tail:
        return logprobs
    tail = _rest(logprobs, other.tail_logmass) if side.tail_logmass is None else side.tail_logmass
    return torch.cat([logprobs, torch.where(counts, tail.unsqueeze(-1), 0.0)], dim=-1)


def _rest(logprobs: Tensor, other_tail: Tensor | None) -> Tensor:
    """Return [B,S-1] the log of one minus the sum of k probabilities; nothing where the k ids are all there are."""
    # They carry rounding errors, so that a smaller rest is not known: it counts as that much.
    unknown = torch.finfo(logprobs.dtype).eps
    rest = torch.log((1 - torch.exp(logprobs).sum(dim=-1)).clamp(min=unknown))
    if other_tail is None:
        return rest
    # A softmax leaves no id without probability: a tail of none is that of the whole vocabulary.
    return rest.masked_fill(other_tail == -torch.inf, -torch.inf)
