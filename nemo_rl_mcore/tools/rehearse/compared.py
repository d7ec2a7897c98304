"""Comparisons of a rehearsal: what is close enough, and what there is nothing to compare of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.tools.rehearse import tolerances
from nemo_rl_mcore.tools.rehearse.one_rank import Tensors, difference
from nemo_rl_mcore.tools.rehearse.recorded import TrainCall

_MOVED = 50
"""Tolerances that a step has to move some weight by, if what it trains is to be compared."""


class Refused(Exception):
    """A reason why something is not proven: the recipe has no such thing, or it cannot be compared."""


class Found(Exception):
    """A difference where there must be none."""


def require_movement(before: Tensors, after: Tensors, tolerance: float) -> None:
    """Raise Refused for a step after which most weights would pass for those before it."""
    moved = difference(before, after)
    if moved < _MOVED * tolerance:
        raise Refused(f"the step moved no weight by more than {moved:.1e}, which is too little to compare")


def require_several_ranks(ranks: int) -> None:
    """Refuse to compare the one rank of a recipe with itself."""
    if ranks == 1:
        raise Refused("the recipe has one rank")


def require_comparable_balance(config: RunConfig) -> None:
    """Raise Refused for a model whose loss depends on which rows share a microbatch."""
    model = config.policy.model
    if model.load_balancing_loss and model.moe_router_load_balancing_type == "aux_loss":
        raise Refused(
            "aux_loss balances a microbatch, and one rank has others (seq_aux_loss can be compared)"
        )


def require_same_results(calls: Sequence[TrainCall], results: Sequence[Mapping[str, Any]]) -> None:
    """Compare loss and gradient norm of each call with those of one rank; raises Found."""
    for call, result in zip(calls, results, strict=True):
        for name in ("global_loss", "grad_norm"):
            require_close(name, call.result[name], result[name])


def within(left: Tensors, right: Tensors, tolerance: float) -> str:
    """Compare all weights of two models; raises Found."""
    found = difference(left, right)
    if found > tolerance:
        raise Found(f"a weight differs by {found:.2g}, and {tolerance:g} is allowed")
    return f"weights within {found:.1e} of {tolerance:g}"


def require_equal(left: Tensors, right: Tensors, what: str) -> None:
    """Compare all weights of two models bit by bit; raises Found, naming one."""
    if difference(left, right):
        names = [name for name in left if name not in right or not left[name].equal(right[name])]
        raise Found(f"{what}: {names[0] if names else 'names'} differs, of {len(names)}")


def require_close(name: str, expected: Any, found: Any, where: str = "on one rank") -> None:
    """Compare the numbers of a metric, within what metrics may differ by; raises Found."""
    for left, right in zip(expected.flatten().tolist(), found.flatten().tolist(), strict=True):
        allowed = tolerances.METRICS
        if not math.isclose(left, right, rel_tol=allowed["rel"], abs_tol=allowed["abs"]):
            raise Found(f"{name} is {left:.6g}, and {right:.6g} {where}")
