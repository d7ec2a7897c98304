"""Which combinations of features there are, which of them are refused, and a selection in which all of them meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product

from meeting_recipes import ALGORITHMS, FACTORS, FUSED, FUSED_PACKED, LAYOUTS, Case


@dataclass(frozen=True)
class Refusal:
    """Values that do not go together, what the refusal must name, and why they do not."""

    values: Case
    names: tuple[str, ...]
    reason: str


PACKING_KEY = "policy.sequence_packing.enabled"
# All that may be refused; any other refusal is a failure.
REFUSED = (
    Refusal(
        {"batching": "packed", "fused": "fused"},
        (FUSED, PACKING_KEY, FUSED_PACKED),
        "the fused path reads padded rows unless packed ones are allowed",
    ),
    *(
        Refusal(
            {"algorithm": name, "kl": False},
            ("dpo.reference_policy_kl_penalty",),
            "DPO's loss is of nothing without the reference",
        )
        for name, algorithm in ALGORITHMS.items()
        if algorithm.recipe.name.startswith("dpo")
    ),
    Refusal(
        {"algorithm": "sft", "offload": "grads_optimizer"},
        ("policy.offload",),
        "nothing is read before it trains",
    ),
    Refusal(
        {"algorithm": "sft", "kl": True},
        ("loss_fn.reference_policy_kl_penalty",),
        "the likelihood has no KL term",
    ),
)

Values = tuple[tuple[str, object], ...]


def refusal_of(case: Case) -> Refusal | None:
    """Why the configuration may not be loaded; None if it must be."""
    return next((rule for rule in REFUSED if rule.values.items() <= case.items()), None)


def meetings(strength: int) -> Iterator[Values]:
    """Every choice of values for so many factors."""
    for names in combinations(FACTORS, strength):
        for values in product(*(FACTORS[name] for name in names)):
            yield tuple(zip(names, values, strict=True))


def met_by(case: Case, strength: int) -> set[Values]:
    """The meetings that a combination covers. One that goes no further than a foreign checkpoint covers that alone."""
    met = set(combinations(case.items(), strength))
    return {one for one in met if ("state", "foreign") in one} if case["state"] == "foreign" else met


def selection(strength: int) -> list[Case]:
    """Combinations, few of them, in which every meeting that may be loaded occurs, and each refused one once."""
    missing = {values: None for values in meetings(strength) if refusal_of(dict(values)) is None}
    chosen = [_filled(dict(values), {}, strength) for values in meetings(strength) if values not in missing]
    while missing:
        case = _filled(dict(next(iter(missing))), missing, strength)
        chosen.append(case)
        for values in met_by(case, strength):
            missing.pop(values, None)
    # Ranks of one layout keep their groups from one combination to the next.
    return sorted(chosen, key=lambda case: (LAYOUTS[case["layout"]][0], case["layout"]))


def _filled(given: Case, missing: dict[Values, None], strength: int) -> Case:
    """Give the other factors the values with which most missing meetings occur; the plainest of equal ones."""
    refused = refusal_of(given)
    case: Case = dict(given)
    for name, values in FACTORS.items():
        if name in given:
            continue
        allowed = [
            value for value in values if value != "foreign" and refusal_of(case | {name: value}) == refused
        ]
        case[name] = max(allowed, key=lambda value: len(missing.keys() & _with(case, name, value, strength)))
    return {name: case[name] for name in FACTORS}


def _with(case: Case, name: str, value: object, strength: int) -> set[Values]:
    """The meetings of a value with what a combination has so far."""
    order = list(FACTORS)
    return {
        tuple(sorted((*others, (name, value)), key=lambda item: order.index(item[0])))
        for others in combinations(case.items(), strength - 1)
    }
