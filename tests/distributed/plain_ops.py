"""The kernels' plain twins on a single rank, over all the logits: differentiable tensor arithmetic to compare with."""

import torch

from nemo_rl_mcore.ops._head import LinearLogprobsOptions
from nemo_rl_mcore.ops._softmax import accumulation_dtype
from nemo_rl_mcore.ops.linear_logprobs_at import IndexedLogprobs
from nemo_rl_mcore.ops.linear_topk import TopK

_DEFAULT_OPTIONS = LinearLogprobsOptions()


def plain_logits(hidden_SBH, weight_VH, temperature, options):
    """Return all the logits [S, B, V], as the plain twins take them."""
    logits_SBV = hidden_SBH @ weight_VH[: options.vocab_size].t()
    return logits_SBV.to(accumulation_dtype(hidden_SBH.dtype)) * (options.logit_scale / temperature)


def plain_linear_logprobs_at(
    hidden_SBH,
    weight_VH,
    indices_SBK,
    *,
    temperature=1.0,
    mask=None,
    with_tail=False,
    options=_DEFAULT_OPTIONS,
):
    logits_SBV = plain_logits(hidden_SBH, weight_VH, temperature, options)
    kept_SB = torch.ones_like(indices_SBK[..., 0], dtype=torch.bool) if mask is None else mask != 0
    index_SBK = torch.where(kept_SB.unsqueeze(-1), indices_SBK, 0)
    logp_SBV = torch.log_softmax(logits_SBV, -1)
    logprobs_SBK = torch.where(kept_SB.unsqueeze(-1), logp_SBV.gather(-1, index_SBK), 0.0)
    tail_SB = None
    if with_tail:
        rest_SBV = logp_SBV.scatter(-1, index_SBK, float("-inf"))
        tail_SB = torch.where(kept_SB, rest_SBV.logsumexp(-1), 0.0)
    return IndexedLogprobs(logprobs_SBK, tail_SB)


def linear_logprobs(
    hidden_SBH,
    weight_VH,
    targets_SB,
    *,
    temperature=1.0,
    mask=None,
    with_entropy=False,
    options=_DEFAULT_OPTIONS,
):
    """Return the plain twin of `fused_linear_logprobs`."""
    keys = {"temperature": temperature, "mask": mask, "options": options}
    found = plain_linear_logprobs_at(hidden_SBH, weight_VH, targets_SB.unsqueeze(-1), **keys)
    logprobs_SB = found.logprobs.squeeze(-1)
    if not with_entropy:
        return logprobs_SB
    logp_SBV = torch.log_softmax(plain_logits(hidden_SBH, weight_VH, temperature, options), -1)
    entropy_SB = -(logp_SBV.exp() * logp_SBV).sum(-1)
    return logprobs_SB, entropy_SB if mask is None else torch.where(mask != 0, entropy_SB, 0.0)


def plain_linear_topk_logprobs(
    hidden_SBH, weight_VH, k, *, temperature=1.0, mask=None, options=_DEFAULT_OPTIONS
):
    """Return the plain twin of `linear_topk_logprobs` on a single rank: sort and log_softmax over all the logits."""
    logits_SBV = plain_logits(hidden_SBH, weight_VH, temperature, options)
    sorted_SBV, order_SBV = logits_SBV.sort(-1, descending=True)
    logp_SBV = torch.log_softmax(sorted_SBV, -1)
    dropped_SB = torch.zeros_like(logits_SBV[..., 0], dtype=torch.bool) if mask is None else mask == 0
    return TopK(
        logits=sorted_SBV[..., :k].masked_fill(dropped_SB.unsqueeze(-1), 0.0),
        indices=order_SBV[..., :k].masked_fill(dropped_SB.unsqueeze(-1), 0),
        logsumexp=sorted_SBV.logsumexp(-1).masked_fill(dropped_SB, 0.0),
        tail_logmass=logp_SBV[..., k:].logsumexp(-1).masked_fill(dropped_SB, 0.0),
    )
