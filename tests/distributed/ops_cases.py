"""Cases of the kernels of log-probabilities on tensor-parallel ranks, each against a float64 oracle of one rank."""

from __future__ import annotations

import itertools
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from plain_filters import filtered_logprobs
from plain_ops import linear_logprobs, plain_linear_logprobs_at, plain_linear_topk_logprobs, plain_logits

from nemo_rl_mcore.ops import _softmax
from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions, fused_linear_logprobs
from nemo_rl_mcore.ops.linear_logprobs_at import linear_logprobs_at
from nemo_rl_mcore.ops.linear_topk import linear_topk_logprobs
from nemo_rl_mcore.ops.vocab_parallel import vocab_parallel_logprobs
from nemo_rl_mcore.rank import rendezvous

RANKS, SEQ, BATCH, HIDDEN, VOCAB = 4, 8, 3, 6, 32
TOKENS = SEQ * BATCH
# 23 real words: of four shards of 8 the third is partly and the last wholly padding.
REAL_VOCAB = 23
MASKS = {
    "none": None,
    "uneven": torch.arange(TOKENS).view(SEQ, BATCH) % 5 < torch.arange(SEQ).view(SEQ, 1),
    "one-shard": (torch.arange(TOKENS).view(SEQ, BATCH) >= 4) & (torch.arange(TOKENS).view(SEQ, BATCH) < 6),
    "empty": torch.zeros(SEQ, BATCH),
}
# Of shards of 16 and 8 both sides of every border, and the ends of the real vocabulary.
BORDER_IDS = (7, 8, 15, 16, 0, REAL_VOCAB - 1)
GIVEN_IDS = ("at", "topk")
"""The paths of several ids a token, which have tails as well."""
UNFUSED = ("unfused", "filtered")
FILTERS: dict[str, Any] = {"top_k": 9, "top_p": 0.9}


@dataclass(frozen=True)
class Case:
    """path: fused; frozen, without a weight gradient; main_grad, accumulated there; unfused; filtered; at ids; topk.

    k: ids of each token.
    """

    path: str
    tp: int
    sequence_parallel: bool
    mask: str
    with_entropy: bool
    dtype: str = "float32"
    vocab_size: int | None = REAL_VOCAB
    k: int = 1

    @property
    def name(self):
        sequence = "sp" if self.sequence_parallel else "replicated"
        outputs = f"k{self.k}" if self.path in GIVEN_IDS else "entropy" if self.with_entropy else "plain"
        vocab = "padded" if self.vocab_size else "full"
        return f"{self.path}-tp{self.tp}-{sequence}-{self.mask}-{outputs}-{self.dtype}-{vocab}"


def cases():
    """Yield the cases; of several ids one, a few, more than a shard holds, and the whole vocabulary."""
    both = (False, True)
    yield from (Case("fused", *one) for one in itertools.product((1, 2, 4), both, MASKS, both))
    for path, mask in itertools.product(("frozen", "main_grad"), MASKS):
        yield from (
            Case(path, tp, sp, mask, False) for tp, sp in ((1, False), *itertools.product((2, 4), both))
        )
    for path in ("unfused", "filtered"):
        yield from (Case(path, tp, False, *one) for tp, *one in itertools.product((1, 2, 4), MASKS, both))
    for path, tp, sp, mask, k in itertools.product(GIVEN_IDS, (1, 2, 4), both, MASKS, (1, 5, 12, REAL_VOCAB)):
        yield Case(path, tp, sp, mask, False, k=k)
    for (path, few, many), tp, sp in itertools.product(
        (("fused", 1, 1), ("at", 5, 12), ("topk", 5, 12)), (2, 4), both
    ):
        with_entropy = path not in GIVEN_IDS
        yield Case(path, tp, sp, "uneven", with_entropy, "bfloat16", k=few)
        yield Case(path, tp, sp, "uneven", with_entropy, "float64", None, many)


def inputs(case):
    """The same on every rank: hidden states, weight, and ids [S, B, K], of which the first lie on borders of shards.

    Of several ids the logits stay small: a backward may sum them in another order than the forward, for it has other
    rows.
    """
    vocab, dtype = case.vocab_size or VOCAB, getattr(torch, case.dtype)
    noise = torch.Generator().manual_seed(11)
    hidden = torch.randn(SEQ, BATCH, HIDDEN, generator=noise).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=noise)
    if case.path not in GIVEN_IDS:
        targets = torch.randint(0, vocab, (SEQ, BATCH), generator=noise)
        targets.view(-1)[:6] = torch.tensor([0, 7, 8, 15, 16, vocab - 1])
        return hidden, weight.to(dtype), targets
    ids = torch.rand(SEQ, BATCH, vocab, generator=noise).argsort(-1)
    ids[0, 0] = torch.tensor([*BORDER_IDS, *(i for i in range(vocab) if i not in BORDER_IDS)])
    return hidden, (weight / 2).to(dtype), ids[..., : case.k].contiguous()


def loss(outputs):
    """A weighting of all outputs but an infinite tail, in which a third of the tokens has no gradient."""
    total = torch.zeros((), dtype=outputs["logprobs"].dtype)
    for phase, output in enumerate(outputs.values()):
        wave = torch.sin(torch.arange(output.numel(), dtype=output.dtype) + phase).view_as(output)
        live = (torch.arange(TOKENS) % 3 != 1).view(SEQ, BATCH, *[1] * (output.dim() - 2))
        total = total + torch.where(live & output.isfinite(), wave * output, 0.0).sum()
    return total


def results(case, group, hidden, weight, ids):
    """Outputs and gradients of a path on the ranks of a group; without one those of its oracle."""
    keys = {"temperature": 0.7, "mask": MASKS[case.mask]}
    if case.path not in GIVEN_IDS:
        keys["with_entropy"] = case.with_entropy
    plain = LinearLogprobsOptions(vocab_size=case.vocab_size)
    if group is not None:
        keys |= {"tp_group": group, "sequence_parallel": case.sequence_parallel}
        plain = LinearLogprobsOptions(
            chunk_size=5,
            vocab_size=case.vocab_size,
            accumulate_main_grad=case.path == "main_grad",
            cache_bytes=(1 << 20) * (case.path == "main_grad"),
        )
    if case.path == "topk":
        function = plain_linear_topk_logprobs if group is None else linear_topk_logprobs
        found = function(hidden, weight, case.k, options=plain, **keys)
        # Rounding of 16-bit logits orders close ids otherwise.
        exact = () if case.dtype == "bfloat16" else ("indices",)
        names = ("logprobs", "tail_logmass", "logits", "logsumexp", *exact)
        return {name: getattr(found, name) for name in names}
    hidden, weight = hidden.clone().requires_grad_(), weight.clone()
    weight.requires_grad_(group is None or case.path != "frozen")
    weight.main_grad = torch.zeros_like(weight)
    if case.path == "at":
        function = plain_linear_logprobs_at if group is None else linear_logprobs_at
        of_ids = function(hidden, weight, ids, with_tail=True, options=plain, **keys)._asdict()
        outputs = {name: value for name, value in of_ids.items() if value is not None}
    else:
        filters = FILTERS if case.path == "filtered" else {}
        if group is not None and case.path in UNFUSED:
            del keys["sequence_parallel"]
            keys |= filters | {"vocab_size": case.vocab_size}
            # Five rows of 16 columns a block, which two ranks do not share evenly.
            with patch.object(_softmax, "_CPU_BLOCK", 80 if filters else _softmax._CPU_BLOCK):
                found = vocab_parallel_logprobs(hidden @ weight.t(), ids, **keys)
        elif filters:
            kept = torch.ones_like(ids) if keys["mask"] is None else keys["mask"]
            found = filtered_logprobs(plain_logits(hidden, weight, 1.0, plain), ids, 0.7, **filters)
            found = tuple(torch.where(kept != 0, one, 0.0) for one in found)
            found = found if case.with_entropy else found[0]
        else:
            function = linear_logprobs if group is None else fused_linear_logprobs
            found = function(hidden, weight, ids, options=plain, **keys)
        outputs = dict(zip(("logprobs", "entropy"), found if case.with_entropy else (found,), strict=False))
    loss(outputs).backward()
    found = {name: x.detach() for name, x in outputs.items()} | {"hidden_grad": hidden.grad}
    if group is not None and case.path in UNFUSED:
        # The output layer's own backward sums the hidden gradient over ranks; here that is done by hand.
        dist.all_reduce(hidden.grad, group=group)
    if weight.requires_grad:
        found["weight_grad"] = (
            weight.main_grad if group is not None and case.path == "main_grad" else weight.grad
        )
    return found


def run_case(case, group):
    """The error of every quantity, what stands at masked tokens, and whether replicas differ."""
    rank, tp = dist.get_rank(group), case.tp
    hidden, weight, ids = inputs(case)
    expected = results(case, None, hidden.double(), weight.double(), ids)
    own_vocab = slice(rank * VOCAB // tp, (rank + 1) * VOCAB // tp)
    own_tokens = slice(rank * SEQ // tp, (rank + 1) * SEQ // tp) if case.sequence_parallel else slice(None)
    actual = results(case, group, hidden[own_tokens], weight[own_vocab], ids)
    for name, part in (("hidden_grad", own_tokens), ("weight_grad", own_vocab)):
        if name in actual:
            expected[name] = expected[name][part]
    found = {}
    for name in actual:
        same_infinity = actual[name].isinf() & (actual[name] == expected[name])
        one, other = (x.masked_fill(same_infinity, 0).double() for x in (actual[name], expected[name]))
        size = float(other.square().mean().sqrt())
        # Of gradients in units of their root mean square, unless that is zero.
        found[name] = float((one - other).abs().max()) / (size if "grad" in name and size > 0 else 1)
    dropped = torch.zeros(SEQ, BATCH) if (mask := MASKS[case.mask]) is None else mask == 0
    replicated = [name for name in actual if "grad" not in name]
    found["masked"] = sum(float(actual[name][dropped.bool()].abs().sum()) for name in replicated)
    for name in replicated:
        copies = [torch.empty_like(actual[name]) for _ in range(tp)]
        dist.all_gather(copies, actual[name].contiguous(), group=group)
        found[f"{name} differs"] = float(any(not torch.equal(copy, copies[0]) for copy in copies))
    return found


@contextmanager
def recorded_collectives():
    """The kind of each collective that is sent inside, and its number of elements."""
    sent = []

    def spy(name, original):
        def call(*tensors, **kwargs):
            sent.append((name, tensors[-1].numel()))
            return original(*tensors, **kwargs)

        return patch.object(dist, name, call)

    with ExitStack() as patches:
        for name in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
            patches.enter_context(spy(name, getattr(dist, name)))
        yield sent


def collectives(group):
    """What each function sends on two ranks, with its backward if it has one."""
    seen, rank = {}, dist.get_rank(group)
    entropies = (("fused", False), ("fused", True), *((path, False) for path in GIVEN_IDS))
    for (path, entropy), sp in itertools.product(entropies, (False, True)):
        case = Case(path, 2, sp, "none", entropy, vocab_size=None, k=5)
        hidden, weight, ids = inputs(case)
        tokens = slice(rank * SEQ // 2, (rank + 1) * SEQ // 2) if sp else slice(None)
        with recorded_collectives() as sent:
            results(case, group, hidden[tokens], weight[rank * 16 : rank * 16 + 16], ids)
        seen[f"{path}-{'sp' if sp else 'replicated'}-{'entropy' if entropy else 'plain'}"] = sent
    return seen


def report():
    """On one of four ranks, of which groups of 1, 2 and 4 compute the cases: errors by case, and what is sent."""
    rendezvous.join()
    every = [dist.new_group([*range(first, first + tp)]) for tp in (1, 2, 4) for first in range(0, RANKS, tp)]
    own = {
        dist.get_world_size(group): group for group in every if group is not dist.GroupMember.NON_GROUP_MEMBER
    }
    found = {case.name: run_case(case, own[case.tp]) for case in cases()}, collectives(own[2])
    for group in own.values():
        dist.destroy_process_group(group)
    return found
