"""Tensor-parallel cases of the log-probability kernels on four gloo ranks, each against a one-rank oracle.

Run as a script with the path of a JSON file to write: per case the worst error over ranks of every quantity,
and what is sent. The ranks are forked after torch is imported, so the import is paid once; groups of 1, 2 and
4 ranks share the four processes.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from plain_ops import linear_logprobs
from torch import Tensor

from nemo_rl_mcore.ops.linear_logprobs import (
    LinearLogprobsOptions,
    fused_linear_logprobs,
)
from nemo_rl_mcore.ops.vocab_parallel import vocab_parallel_logprobs

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


@dataclass(frozen=True)
class Case:
    path: str
    tp: int
    sequence_parallel: bool
    mask: str
    with_entropy: bool
    dtype: str = "float32"
    vocab_size: int | None = REAL_VOCAB

    @property
    def name(self) -> str:
        sequence = "sp" if self.sequence_parallel else "replicated"
        entropy = "entropy" if self.with_entropy else "plain"
        vocab = "padded" if self.vocab_size else "full"
        return f"{self.path}-tp{self.tp}-{sequence}-{self.mask}-{entropy}-{self.dtype}-{vocab}"


def cases() -> list[Case]:
    grid = itertools.product((1, 2, 4), (False, True), MASKS, (False, True))
    fused = [Case("fused", *choice) for choice in grid]
    fused += [Case("fused", tp, sp, "uneven", True, "bfloat16") for tp in (2, 4) for sp in (False, True)]
    fused += [Case("fused", tp, sp, "uneven", True, "float64", None) for tp in (2, 4) for sp in (False, True)]
    # "frozen": no weight gradient; "main_grad": accumulated there, with all logits cached.
    layouts = [(1, False), (2, False), (2, True), (4, False), (4, True)]
    for path, mask in itertools.product(("frozen", "main_grad"), MASKS):
        fused += [Case(path, tp, sp, mask, False) for tp, sp in layouts]
    unfused = [
        Case("unfused", tp, False, mask, entropy)
        for tp, mask, entropy in itertools.product((1, 2, 4), MASKS, (False, True))
    ]
    return fused + unfused


def inputs(dtype: torch.dtype, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same on every rank. The first targets lie on both sides of every shard border."""
    noise = torch.Generator().manual_seed(11)
    hidden = torch.randn(SEQ, BATCH, HIDDEN, generator=noise).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=noise).to(dtype)
    targets = torch.randint(0, vocab, (SEQ, BATCH), generator=noise)
    targets.view(-1)[:6] = torch.tensor([0, 7, 8, 15, 16, vocab - 1])
    return hidden, weight, targets


def loss(outputs: tuple[Tensor, ...]) -> Tensor:
    """A weighting of all outputs in which a third of the tokens has no gradient."""
    total = torch.zeros((), dtype=outputs[0].dtype)
    for output, factor in zip(outputs, (1.0, -0.4), strict=False):
        step = torch.arange(TOKENS, dtype=output.dtype).view(SEQ, BATCH)
        total = total + (torch.where(step % 3 == 1, 0.0, torch.sin(step) * factor) * output).sum()
    return total


def oracle(case: Case, hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Tensor]:
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    options = LinearLogprobsOptions(vocab_size=case.vocab_size)
    out = linear_logprobs(
        hidden,
        weight,
        targets,
        temperature=0.7,
        mask=MASKS[case.mask],
        with_entropy=case.with_entropy,
        options=options,
    )
    return collect(out, hidden, weight)


def collect(out: Tensor | tuple[Tensor, Tensor], hidden: Tensor, weight: Tensor) -> dict[str, Tensor]:
    outputs = out if isinstance(out, tuple) else (out,)
    names = ("logprobs", "entropy")[: len(outputs)]
    grads = torch.autograd.grad(loss(outputs), (hidden, weight))
    results = dict(zip(names, (x.detach() for x in outputs), strict=True))
    return results | {"hidden_grad": grads[0], "weight_grad": grads[1]}


def fused(case: Case, group, hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Tensor]:
    main_grad = case.path == "main_grad"
    hidden.requires_grad_()
    weight.requires_grad_(case.path != "frozen")
    weight.main_grad = torch.zeros_like(weight)
    out = fused_linear_logprobs(
        hidden,
        weight,
        targets,
        tp_group=group,
        sequence_parallel=case.sequence_parallel,
        temperature=0.7,
        mask=MASKS[case.mask],
        with_entropy=case.with_entropy,
        options=LinearLogprobsOptions(
            chunk_size=5,
            vocab_size=case.vocab_size,
            accumulate_main_grad=main_grad,
            cache_bytes=1 << 20 if main_grad else 0,
        ),
    )
    if case.path == "fused":
        return collect(out, hidden, weight)
    loss((out,)).backward()
    results = {"logprobs": out.detach(), "hidden_grad": hidden.grad}
    return results | {"weight_grad": weight.main_grad} if main_grad else results


def unfused(case: Case, group, hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The output layer's own backward sums the hidden gradient over ranks; here that is done by hand."""
    hidden.requires_grad_()
    weight.requires_grad_()
    out = vocab_parallel_logprobs(
        hidden @ weight.t(),
        targets,
        tp_group=group,
        temperature=0.7,
        mask=MASKS[case.mask],
        with_entropy=case.with_entropy,
        vocab_size=case.vocab_size,
    )
    results = collect(out, hidden, weight)
    dist.all_reduce(results["hidden_grad"], group=group)
    return results


def run_case(case: Case, group) -> dict[str, float]:
    rank, tp = dist.get_rank(group), case.tp
    hidden, weight, targets = inputs(getattr(torch, case.dtype), case.vocab_size or VOCAB)
    expected = oracle(case, hidden, weight, targets)
    own_vocab = slice(rank * VOCAB // tp, (rank + 1) * VOCAB // tp)
    own_tokens = slice(rank * SEQ // tp, (rank + 1) * SEQ // tp) if case.sequence_parallel else slice(None)
    expected["hidden_grad"] = expected["hidden_grad"][own_tokens]
    expected["weight_grad"] = expected["weight_grad"][own_vocab]
    if case.path == "frozen":
        del expected["weight_grad"]
    function = unfused if case.path == "unfused" else fused
    actual = function(case, group, hidden[own_tokens].clone(), weight[own_vocab].clone(), targets)
    mask = torch.ones(SEQ, BATCH) if (m := MASKS[case.mask]) is None else m
    errors = {name: error(actual[name], expected[name], "grad" in name) for name in expected}
    errors["masked"] = float(actual["logprobs"][mask == 0].abs().sum())
    copies = [torch.empty_like(actual["logprobs"]) for _ in range(tp)]
    dist.all_gather(copies, actual["logprobs"].contiguous(), group=group)
    errors["replicas_differ"] = float(any(not torch.equal(copy, copies[0]) for copy in copies))
    return errors


def error(actual: Tensor, expected: Tensor, relative: bool) -> float:
    """Largest absolute error; for gradients in units of their root mean square, unless that is zero."""
    worst = float((actual.double() - expected).abs().max())
    size = float(expected.square().mean().sqrt())
    return worst / size if relative and size > 0 else worst


def collectives(group) -> dict[str, list]:
    """What a forward and a backward on two ranks send: kind and number of elements."""
    sent: list[tuple[str, int]] = []
    originals = {
        name: getattr(dist, name) for name in ("all_gather_single", "reduce_scatter_single", "all_reduce")
    }

    def spy(name: str):
        def call(*tensors: Tensor, **kwargs):
            sent.append((name, tensors[-1].numel()))
            return originals[name](*tensors, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, spy(name))
    seen: dict[str, list] = {}
    rank = dist.get_rank(group)
    for sequence_parallel, with_entropy in itertools.product((False, True), repeat=2):
        hidden, weight, targets = inputs(torch.float32, VOCAB)
        tokens = slice(rank * SEQ // 2, (rank + 1) * SEQ // 2) if sequence_parallel else slice(None)
        case = Case("fused", 2, sequence_parallel, "none", with_entropy, vocab_size=None)
        fused(case, group, hidden[tokens].clone(), weight[rank * 16 : rank * 16 + 16].clone(), targets)
        seen[f"{'sp' if sequence_parallel else 'replicated'}-{'entropy' if with_entropy else 'plain'}"] = (
            list(sent)
        )
        sent.clear()
    for name, original in originals.items():
        setattr(dist, name, original)
    return seen


def serve(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    groups = {}
    for tp in (1, 2, 4):
        for first in range(0, RANKS, tp):
            members = list(range(first, first + tp))
            group = dist.new_group(members)
            if rank in members:
                groups[tp] = group
    results = {case.name: run_case(case, groups[case.tp]) for case in cases()}
    report = {"errors": results, "collectives": collectives(groups[2])}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def main(destination: str) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=serve, args=(rank, folder), daemon=True) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=120)
        if any(process.exitcode != 0 for process in processes):
            raise SystemExit(f"exit codes {[process.exitcode for process in processes]}")
        reports = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    every_rank = [report["errors"] for report in reports]
    worst = {
        case: {name: max(errors[case][name] for errors in every_rank) for name in every_rank[0][case]}
        for case in every_rank[0]
    }
    Path(destination).write_text(json.dumps({"errors": worst, "collectives": reports[0]["collectives"]}))


if __name__ == "__main__":
    main(sys.argv[1])
