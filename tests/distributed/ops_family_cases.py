"""Tensor-parallel cases of the top-k functions on four gloo ranks, each against a one-rank float64 oracle.

Run as a script with the path of a JSON file to write: per rank and case the error of every quantity, and what is
sent.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from forked_ranks import recorded_collectives, write_reports
from ops_cases import BATCH, HIDDEN, MASKS, REAL_VOCAB, SEQ, TOKENS, VOCAB, error
from plain_ops import plain_linear_logprobs_at, plain_linear_topk_logprobs
from torch import Tensor

from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions
from nemo_rl_mcore.ops.linear_logprobs_at import linear_logprobs_at
from nemo_rl_mcore.ops.linear_topk import TopK, linear_topk_logprobs

OUTPUTS = ("logprobs", "tail_logmass", "entropy")
# Of shards of 16 and 8 both sides of every border, and the ends of the real vocabulary.
BORDER_IDS = (7, 8, 15, 16, 0, REAL_VOCAB - 1)


@dataclass(frozen=True)
class Case:
    function: str
    tp: int
    sequence_parallel: bool
    mask: str
    k: int
    dtype: str = "float32"
    vocab_size: int | None = REAL_VOCAB

    @property
    def name(self) -> str:
        sequence = "sp" if self.sequence_parallel else "replicated"
        vocab = "padded" if self.vocab_size else "full"
        return f"{self.function}-tp{self.tp}-{sequence}-{self.mask}-k{self.k}-{self.dtype}-{vocab}"


def cases() -> list[Case]:
    """With k of one id, a few, more than a shard holds, and the whole vocabulary."""
    functions, tps, sequence_parallel = ("at", "topk"), (1, 2, 4), (False, True)
    grid = itertools.product(functions, tps, sequence_parallel, MASKS, (1, 5, 12, REAL_VOCAB))
    layouts = list(itertools.product(functions, (2, 4), sequence_parallel))
    return [
        *(Case(*choice) for choice in grid),
        *(Case(*layout, "uneven", 5, "bfloat16") for layout in layouts),
        *(Case(*layout, "uneven", 12, "float64", None) for layout in layouts),
    ]


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """The same on every rank. The first token's ids lie on the borders of the shards.

    The logits stay small: a backward may sum them in another order than the forward, for it has other rows.
    """
    noise = torch.Generator().manual_seed(11)
    hidden = torch.randn(SEQ, BATCH, HIDDEN, generator=noise).to(getattr(torch, case.dtype))
    weight = (torch.randn(VOCAB, HIDDEN, generator=noise) / 2).to(hidden.dtype)
    ids = torch.rand(SEQ, BATCH, case.vocab_size or VOCAB, generator=noise).argsort(-1)
    others = [i for i in range(case.vocab_size or VOCAB) if i not in BORDER_IDS]
    ids[0, 0] = torch.tensor([*BORDER_IDS, *others])
    return hidden, weight, ids[..., : case.k].contiguous()


def loss(outputs: dict[str, Tensor]) -> Tensor:
    """A weighting of all outputs but an infinite tail, in which a third of the tokens has no gradient."""
    total = torch.zeros((), dtype=outputs["logprobs"].dtype)
    for phase, output in enumerate(outputs.values()):
        wave = torch.sin(torch.arange(output.numel(), dtype=output.dtype) + phase).view_as(output)
        live = (torch.arange(TOKENS) % 3 != 1).view(SEQ, BATCH, *[1] * (output.dim() - 2))
        total = total + torch.where(live & output.isfinite(), wave * output, 0.0).sum()
    return total


def at(function, case: Case, hidden: Tensor, weight: Tensor, ids: Tensor, **kwargs) -> dict[str, Tensor]:
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = function(*leaves, ids, with_tail=True, **kwargs)
    outputs = dict(zip(OUTPUTS, out, strict=True))
    grads = torch.autograd.grad(loss(outputs), leaves)
    results = {name: x.detach() for name, x in outputs.items()}
    return results | {"hidden_grad": grads[0], "weight_grad": grads[1]}


def topk(function, case: Case, hidden: Tensor, weight: Tensor, ids: Tensor, **kwargs) -> dict[str, Tensor]:
    out: TopK = function(hidden, weight, case.k, **kwargs)
    # Rounding of 16-bit logits orders close ids otherwise.
    exact = () if case.dtype == "bfloat16" else ("indices",)
    return {name: getattr(out, name) for name in (*OUTPUTS, "logits", "logsumexp", *exact)}


FUNCTIONS = {
    "at": (at, linear_logprobs_at, plain_linear_logprobs_at),
    "topk": (topk, linear_topk_logprobs, plain_linear_topk_logprobs),
}


def run_case(case: Case, group) -> dict[str, float]:
    rank, tp = dist.get_rank(group), case.tp
    collect, function, plain = FUNCTIONS[case.function]
    hidden, weight, ids = inputs(case)
    common = {"temperature": 0.7, "mask": MASKS[case.mask], "with_entropy": True}
    padding = LinearLogprobsOptions(vocab_size=case.vocab_size)
    expected = collect(plain, case, hidden.double(), weight.double(), ids, options=padding, **common)
    own_vocab = slice(rank * VOCAB // tp, (rank + 1) * VOCAB // tp)
    own_tokens = slice(rank * SEQ // tp, (rank + 1) * SEQ // tp) if case.sequence_parallel else slice(None)
    for name, part in (("hidden_grad", own_tokens), ("weight_grad", own_vocab)):
        if name in expected:
            expected[name] = expected[name][part]
    actual = collect(
        function,
        case,
        hidden[own_tokens],
        weight[own_vocab],
        ids,
        tp_group=group,
        sequence_parallel=case.sequence_parallel,
        options=LinearLogprobsOptions(chunk_size=5, vocab_size=case.vocab_size),
        **common,
    )
    return errors(case, group, actual, expected)


def errors(case: Case, group, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, reference in expected.items():
        same_infinity = actual[name].isinf() & (actual[name] == reference)
        found[name] = error(
            actual[name].masked_fill(same_infinity, 0),
            reference.masked_fill(same_infinity, 0).double(),
            "grad" in name,
        )
    mask = torch.ones(SEQ, BATCH) if (m := MASKS[case.mask]) is None else m
    replicated = [name for name in actual if "grad" not in name]
    found["masked"] = sum(float(actual[name][mask == 0].abs().sum()) for name in replicated)
    for name in replicated:
        copies = [torch.empty_like(actual[name]) for _ in range(case.tp)]
        dist.all_gather(copies, actual[name].contiguous(), group=group)
        found[f"{name} differs"] = float(any(not torch.equal(copy, copies[0]) for copy in copies))
    return found


def collectives(group) -> dict[str, list]:
    """What each function sends on two ranks, with its backward if it has one."""
    seen: dict[str, list] = {}
    rank = dist.get_rank(group)
    for name, sequence_parallel, with_entropy in itertools.product(FUNCTIONS, (False, True), (False, True)):
        case = Case(name, 2, sequence_parallel, "none", 5, vocab_size=None)
        hidden, weight, ids = inputs(case)
        tokens = slice(rank * SEQ // 2, (rank + 1) * SEQ // 2) if sequence_parallel else slice(None)
        layout = {"tp_group": group, "sequence_parallel": sequence_parallel, "with_entropy": with_entropy}
        shard = [x.clone().requires_grad_() for x in (hidden[tokens], weight[rank * 16 : rank * 16 + 16])]
        with recorded_collectives() as sent:
            if name == "at":
                linear_logprobs_at(*shard, ids, with_tail=True, **layout).logprobs.sum().backward()
            else:
                linear_topk_logprobs(*shard, case.k, **layout)
        place = "sp" if sequence_parallel else "replicated"
        seen[f"{name}-{place}-{'entropy' if with_entropy else 'plain'}"] = sent
    return seen


def report(groups) -> dict:
    return {
        "errors": {case.name: run_case(case, groups[case.tp]) for case in cases()},
        "collectives": collectives(groups[2]),
    }


if __name__ == "__main__":
    write_reports(report, sys.argv[1])
