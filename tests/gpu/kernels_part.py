"""The fused kernels against float64: the two Triton passes alone, the functions made of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from plain_ops import linear_logprobs, plain_linear_logprobs_at, plain_linear_topk_logprobs
from report import Report
from torch import Tensor

from nemo_rl_mcore.ops import _softmax as _elementwise
from nemo_rl_mcore.ops._softmax import RowBackward
from nemo_rl_mcore.ops.linear_logprobs import LinearLogprobsOptions, fused_linear_logprobs
from nemo_rl_mcore.ops.linear_logprobs_at import linear_logprobs_at
from nemo_rl_mcore.ops.linear_topk import linear_topk_logprobs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SCALE = 0.7

# What is allowed, by dtype and, where they round differently, by device.
# Of log-sum-exp, target's logit and entropy, relative to 1 + their size.
STATISTICS = 2e-6
# Of the logits' gradient, relative to 1 + its size; half a unit of bfloat16, which the interpreter cuts off whole.
GRADIENT = {"cuda": {"float32": 2e-5, "bfloat16": 3e-3}, "cpu": {"float32": 2e-5, "bfloat16": 6e-3}}
VALUES = 2e-5  # log-probabilities and entropies out of float32 logits, whatever the inputs are
VALUES_OF_ROUNDED_LOGITS = 4e-2  # CPU alone: it writes the logits of bfloat16 products in bfloat16
# Of the functions' gradients: the norm of the difference over the norm.
GRADIENTS = {"cuda": {"float32": 2e-6, "bfloat16": 5e-3}, "cpu": {"float32": 2e-6, "bfloat16": 1e-2}}


@dataclass(frozen=True)
class Sizes:
    """Of a problem for the functions: tokens, hidden size, vocabulary, of which the last rows are padding."""

    tokens: int
    hidden: int
    vocab: int
    padding: int = 10


SIZES = {"cuda": Sizes(300, 64, 3000), "cpu": Sizes(24, 16, 200)}


def run(report: Report, device: str) -> None:
    if device == "cpu" and np.lib.NumpyVersion(np.__version__) >= "2.5.0":
        report.figure(
            "left out", {"": "Triton's passes", "why": "its interpreter reads no scalars of numpy 2.5"}
        )
    else:
        with report.attempt("Triton", "import"):
            from nemo_rl_mcore.ops import _triton_kernels as kernels

            check_passes(report, kernels, device)
            with _passes_of(kernels, device):
                check_functions(report, device, "Triton")
    with _passes_of(None, device):
        check_functions(report, device, "eager")


# The two passes


def check_passes(report: Report, kernels: Any, device: str) -> None:
    narrow = [(1, 1.0), (63, 3.0), (64, 40.0), (200, 3.0), (200, 40.0)]
    wide = [(5000, 40.0), *([(152_064, 3.0)] if device == "cuda" else [])]
    own_block = kernels._BLOCK
    for block, cases in ((64, narrow), (own_block, wide)):
        kernels._BLOCK = block
        for (width, spread), dtype, entropy in itertools.product(cases, DTYPES, (False, True)):
            case = f"{width} wide, spread {spread:g}, {'entropy' if entropy else 'plain'}, block {block}"
            _check_pass(report, kernels, _slice(width, spread, dtype, device), dtype, entropy, case)
    kernels._BLOCK = own_block
    report.check("Triton statistics", "no rows", 0.0, lambda: _of_no_rows(kernels, device))
    if device == "cuda":
        last = "the last rows of more than 2^31 logits"
        report.check("Triton statistics", last, STATISTICS, lambda: _of_far_rows(kernels)[0])
        report.check(
            "Triton gradient, bfloat16", last, GRADIENT["cuda"]["bfloat16"], lambda: _of_far_rows(kernels)[1]
        )


def _slice(width: int, spread: float, dtype: str, device: str) -> tuple[Tensor, Tensor]:
    """Logits [6, width], which are a part of wider rows, and targets, of which the last three lie elsewhere."""
    noise = torch.Generator().manual_seed(width)
    wide = torch.randn(6, width + 3, generator=noise).mul(spread).to(device, DTYPES[dtype])
    target = torch.tensor([0, width - 1, width // 2, -1, width, width + 70], device=device)
    return wide[:, :width], target


def _check_pass(
    report: Report, kernels: Any, problem: tuple[Tensor, Tensor], dtype: str, entropy: bool, case: str
) -> None:
    logits, target = problem
    expected, rounding = exact_statistics(logits, target), GRADIENT[logits.device.type][dtype]

    def statistics() -> float:
        found = kernels.slice_statistics(logits, target, entropy, SCALE)
        return _relative_to_one(found, expected[: 2 + entropy])

    def gradient(in_place: bool) -> float:
        grad = torch.linspace(-1, 2, 6, device=logits.device)
        # A log-sum-exp as if other slices held a tenth of the mass.
        rows = RowBackward(expected[0] + 0.1, grad)
        if entropy:
            rows = RowBackward(rows.lse_N, grad, expected[2].float(), grad.flip(0))
        read = logits.clone()
        out = read if in_place else torch.empty_like(read)
        wanted = exact_gradient(logits, target, rows)
        return _relative_to_one(kernels.logits_gradient(read, target, rows, out, SCALE), wanted)

    report.check(f"Triton statistics, {dtype}", case, STATISTICS, statistics)
    for in_place in (False, True):
        where = f"{case}, {'in place' if in_place else 'apart'}"
        report.check(f"Triton gradient, {dtype}", where, rounding, lambda p=in_place: gradient(p))


def exact_statistics(logits: Tensor, target: Tensor) -> Tensor:
    """Log-sum-exp, the target's logit (0 where it lies elsewhere) and entropy [3, N] in float64."""
    z = logits.double() * SCALE
    held = (target >= 0) & (target < z.shape[1])
    at_target = z.gather(1, target.clamp(0, z.shape[1] - 1).unsqueeze(1)).squeeze(1)
    log_p = z.log_softmax(1)
    return torch.stack([z.logsumexp(1), torch.where(held, at_target, 0.0), -(log_p.exp() * log_p).sum(1)])


def exact_gradient(logits: Tensor, target: Tensor, rows: RowBackward) -> Tensor:
    grad = rows.grad_logprob_N.double().unsqueeze(1)
    log_p = logits.double() * SCALE - rows.lse_N.double().unsqueeze(1)
    factor = grad
    if rows.entropy_N is not None and rows.grad_entropy_N is not None:
        offset = log_p + rows.entropy_N.double().unsqueeze(1)
        factor = grad + rows.grad_entropy_N.double().unsqueeze(1) * offset
    one_hot = target.unsqueeze(1) == torch.arange(logits.shape[1], device=logits.device)
    return torch.where(one_hot, grad, 0.0) - log_p.exp() * factor


def _of_no_rows(kernels: Any, device: str) -> float:
    none = torch.empty(0, 5, device=device), torch.empty(0, dtype=torch.long, device=device)
    return float(kernels.slice_statistics(*none, True, 1.0).shape != (3, 0))


def _of_far_rows(kernels: Any) -> tuple[float, float]:
    """Rows that lie beyond the offsets of 32 bits: the differences of their statistics and of their gradient."""
    rows, width = 15_000, 152_064
    logits = torch.empty(rows, width, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.arange(rows, device="cuda")
    expected = exact_statistics(logits[-6:], target[-6:])
    found = kernels.slice_statistics(logits, target, True, SCALE)
    backward = RowBackward(found[0], torch.linspace(-1, 2, rows, device="cuda"))
    wanted = exact_gradient(logits[-6:], target[-6:], backward.at(slice(-6, None)))
    statistics = _relative_to_one(found[:, -6:], expected)
    gradient = kernels.logits_gradient(logits, target, backward, logits, SCALE)
    return statistics, _relative_to_one(gradient[-6:], wanted)


def _relative_to_one(found: Tensor, expected: Tensor) -> float:
    return float(((found.double() - expected).abs() / (1 + expected.abs())).max())


# The functions that are made of them


@contextmanager
def _passes_of(kernels: Any, device: str) -> Iterator[None]:
    """Let the functions use these kernels, or the eager passes for None; on CUDA they choose the kernels themselves."""
    chosen = _elementwise._kernels_for
    if kernels is None:
        _elementwise._kernels_for = lambda logits: None
    elif device == "cpu":
        _elementwise._kernels_for = lambda logits: (
            kernels if logits.stride(1) == 1 and logits.dtype != torch.float64 else None
        )
    else:
        assert chosen(torch.empty(1, 1, device=device)) is kernels
    try:
        yield
    finally:
        _elementwise._kernels_for = chosen


def check_functions(report: Report, device: str, passes: str) -> None:
    for dtype in DTYPES:
        values = VALUES_OF_ROUNDED_LOGITS if (device, dtype) == ("cpu", "bfloat16") else VALUES
        tolerances = values, GRADIENTS[device][dtype]
        for chunk, frozen, entropy in itertools.product((None, 10), (False, True), (False, True)):
            options = {"chunk_size": chunk and SIZES[device].tokens // 3}
            ways = ("chunks" if chunk else "one chunk", "frozen" if frozen else "trained")
            case = ", ".join((*ways, "entropy" if entropy else "plain"))
            with report.attempt(f"fused, {passes}, {dtype}: values", case):
                found = fused_differences(device, dtype, frozen, entropy, options)
                _note(report, f"fused, {passes}, {dtype}", case, found, tolerances)
        for case, options in {
            "logits cached": {"cache_bytes": 1 << 30},
            "into main_grad": {"accumulate_main_grad": True},
        }.items():
            with report.attempt(f"fused, {passes}, {dtype}: values", case):
                found = fused_differences(device, dtype, False, False, options)
                _note(report, f"fused, {passes}, {dtype}", case, found, tolerances)
        with report.attempt(f"at given ids, {passes}, {dtype}: values", "tail and entropy"):
            found = indexed_differences(device, dtype)
            _note(report, f"at given ids, {passes}, {dtype}", "tail and entropy", found, tolerances)
        report.check(f"top-k, {passes}, {dtype}", "8 ids", values, lambda d=dtype: topk_difference(device, d))


def _note(
    report: Report, group: str, case: str, found: tuple[float, float], tolerances: tuple[float, float]
) -> None:
    for kind, difference, tolerance in zip(("values", "gradients"), found, tolerances, strict=True):
        report.compared(f"{group}: {kind}", case, difference, tolerance)


def problem(device: str, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [S, 1, H] and weight [V, H], rounded to the dtype, and targets [S, 1]."""
    sizes, noise = SIZES[device], torch.Generator().manual_seed(0)
    hidden = torch.randn(sizes.tokens, 1, sizes.hidden, generator=noise)
    weight = torch.randn(sizes.vocab, sizes.hidden, generator=noise) / 4
    targets = torch.randint(0, sizes.vocab - sizes.padding, (sizes.tokens, 1), generator=noise)
    return hidden.to(device, DTYPES[dtype]), weight.to(device, DTYPES[dtype]), targets.to(device)


def fused_differences(
    device: str, dtype: str, frozen: bool, entropy: bool, options: dict[str, Any]
) -> tuple[float, float]:
    """Of `fused_linear_logprobs` from its plain twin in float64: the largest of a value, and of a gradient's norm."""
    inputs = problem(device, dtype)
    settings = _options(device, **options)
    plain = _options(device)

    def call(function: Any, hidden: Tensor, weight: Tensor, options: LinearLogprobsOptions) -> list[Tensor]:
        weight.requires_grad_(not frozen)
        if options.accumulate_main_grad:
            weight.main_grad = torch.zeros(weight.shape, device=weight.device)  # type: ignore[attr-defined]
        out = function(hidden, weight, inputs[2], temperature=0.7, with_entropy=entropy, options=options)
        return [*out] if entropy else [out]

    expected = _values_and_gradients(lambda h, w: call(linear_logprobs, h, w, plain), inputs, torch.float64)
    found = _values_and_gradients(
        lambda h, w: call(fused_linear_logprobs, h, w, settings), inputs, DTYPES[dtype]
    )
    return _differences(found, expected)


def indexed_differences(device: str, dtype: str) -> tuple[float, float]:
    inputs = problem(device, dtype)
    ids = inputs[2].unsqueeze(-1) + torch.arange(4, device=device) * 7
    ids = ids % (SIZES[device].vocab - SIZES[device].padding)
    keywords = {"with_tail": True, "temperature": 0.7, "options": _options(device)}
    expected = _values_and_gradients(
        lambda h, w: [*plain_linear_logprobs_at(h, w, ids, **keywords)], inputs, torch.float64
    )
    found = _values_and_gradients(
        lambda h, w: [*linear_logprobs_at(h, w, ids, **keywords)], inputs, DTYPES[dtype]
    )
    return _differences(found, expected)


def topk_difference(device: str, dtype: str) -> float:
    """Of the log-probabilities of `linear_topk_logprobs` and its tail; near ties may swap ids."""
    hidden, weight, _ = problem(device, dtype)
    keywords = {"temperature": 0.7, "options": _options(device)}
    found = linear_topk_logprobs(hidden, weight, 8, **keywords)
    expected = plain_linear_topk_logprobs(hidden.double(), weight.double(), 8, **keywords)
    names = ("logprobs", "tail_logmass")
    return max(float((getattr(found, n).double() - getattr(expected, n)).abs().max()) for n in names)


def _options(device: str, **options: Any) -> LinearLogprobsOptions:
    real = SIZES[device].vocab - SIZES[device].padding
    return LinearLogprobsOptions(vocab_size=real, logit_scale=0.8, **options)


def _values_and_gradients(
    function: Callable[[Tensor, Tensor], list[Tensor]],
    inputs: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype,
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs and the gradients of hidden states and weight, if it has one; some tokens get no gradient."""
    hidden, weight = (x.to(dtype).requires_grad_() for x in inputs[:2])
    outputs = function(hidden, weight)
    wave = torch.sin(torch.arange(inputs[2].numel(), device=hidden.device)).view_as(inputs[2])
    wave = torch.where(wave > 0.9, 0.0, wave)
    sum((x * wave.view(*wave.shape, *[1] * (x.dim() - 2))).sum() for x in outputs).backward()
    of_weight = getattr(weight, "main_grad", weight.grad)
    gradients = [x for x in (hidden.grad, of_weight) if x is not None]
    return [x.detach().double() for x in outputs], [x.double() for x in gradients]


def _differences(
    found: tuple[list[Tensor], list[Tensor]], expected: tuple[list[Tensor], list[Tensor]]
) -> tuple[float, float]:
    values = max(float((a - b).abs().max()) for a, b in zip(found[0], expected[0], strict=True))
    norms = [float((a - b).norm() / b.norm()) for a, b in zip(found[1], expected[1], strict=True)]
    return values, max(norms)
