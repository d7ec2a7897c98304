"""What the fused kernel costs beside the unfused path and what others offer, at the sizes of real models."""

from __future__ import annotations

from collections.abc import Mapping

import fused_linear_logprobs as benchmark
from report import Report

OWN = ("fused", "fused+main_grad", "fused, auto", "fused, full cache", benchmark.HALF_MASKED, "unfused")
PEERS = ("liger", "cce", "trl")
# Tokens, vocabulary and hidden sizes.
SIZES = {"cuda": (16_384, 152_064, (2048, 4096, 8192)), "cpu": (256, 2048, (64,))}


def run(report: Report, device: str) -> None:
    """Time and peak memory of forward and backward; peers come last, where breaking the device harms no one."""
    tokens, vocabulary, hidden_sizes = SIZES[device]
    table = f"bf16, V {vocabulary}, {tokens} tokens"
    sizes = [benchmark.Problem(tokens, hidden, vocabulary, "bfloat16", device) for hidden in hidden_sizes]
    fused: dict[int, Mapping[str, float]] = {}
    ceilings: dict[int, float] = {}
    for size in sizes:
        with report.attempt("speed of the matrix products", f"H {size.hidden}"):
            products = benchmark.measure_products("four products", size)
            ceilings[size.hidden] = _operations(size) / products["both"]
    for method in (*OWN, *PEERS):
        if not benchmark.importable(method):
            report.figure("left out", {"": method, "why": "not installed"})
            continue
        for size in sizes:
            cost = _cost(report, method, size)
            if cost is not None:
                base = fused.setdefault(size.hidden, cost)
                report.figure(table, cost_row(method, size, cost, base, ceilings.get(size.hidden)))


def _cost(report: Report, method: str, size: benchmark.Problem) -> Mapping[str, float] | None:
    case = f"{method}, H {size.hidden}"
    report.doing(f"cost of {case}")
    try:
        cost = benchmark.measure(method, size)
    except Exception as error:  # noqa: BLE001 - the others are measured all the same
        if method in OWN:
            report.failed("cost is measured", case, f"{type(error).__name__}: {error}")
        else:
            report.figure("left out", {"": case, "why": type(error).__name__})
        return None
    if method in OWN:
        report.compared("cost is measured", case, 0.0, 0.0)
    return cost


def cost_row(
    method: str,
    size: benchmark.Problem,
    cost: Mapping[str, float],
    fused: Mapping[str, float],
    ceiling: float | None,
) -> dict[str, str | float | None]:
    """A line of the table; ratios are to the fused kernel. Half masked does half of the work, and has no rate."""
    rate = _operations(size) / cost["both"]
    return {
        "": f"H {size.hidden}, {method}",
        "forward ms": 1e3 * cost["forward"],
        "forward + backward ms": 1e3 * cost["both"],
        "peak GB": cost["peak"] / 1e9,
        "time ratio": cost["both"] / fused["both"],
        "memory ratio": cost["peak"] / fused["peak"],
        "share of the products' speed": rate / ceiling
        if ceiling and method != benchmark.HALF_MASKED
        else None,
    }


def _operations(size: benchmark.Problem) -> int:
    return 8 * size.tokens * size.hidden * size.vocab
