"""Which combinations of features there are, which of them are refused, and a selection in which all of them meet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, product

from meeting_recipes import (
    ALGORITHMS,
    ASYNCHRONY,
    CONTEXT,
    FACTORS,
    FUSED,
    FUSED_PACKED,
    FUSED_SHARED,
    LAYOUTS,
    LOSSES_OF_THEIR_OWN,
    Algorithm,
    Case,
    asynchrony_key,
    correction_key,
)

from nemo_rl_mcore.config.base import Problem


@dataclass(frozen=True)
class Refusal:
    """Values that do not go together, the problem that is told, and why they do not.

    code, path: of the problem. related: other keys that it must name. In a key {asynchrony} and {correction} stand for
    those of the algorithm.
    """

    values: Case
    code: str
    path: str
    reason: str
    related: tuple[str, ...] = ()

    def is_told_by(self, problems: Iterable[Problem], algorithm: Algorithm) -> bool:
        """Say whether it is one of the problems of a recipe of the algorithm."""

        def of_algorithm(key: str) -> str:
            return key.format(asynchrony=asynchrony_key(algorithm), correction=correction_key(algorithm))

        path, related = of_algorithm(self.path), {*map(of_algorithm, self.related)}
        return any(
            (problem.code, problem.path) == (self.code, path) and related <= {*problem.related}
            for problem in problems
        )


PACKING_KEY = "policy.sequence_packing.enabled"
ASYNCHRONOUS = tuple(ASYNCHRONY)[1:]
OFF_POLICY = {
    "dpo offline": "dpo.num_generations_per_prompt",
    "distillation off policy": "distillation.on_policy",
}
"""Algorithms that are given their answers, and the key that says so."""


CHUNKS, AGE = "{asynchrony}.min_groups_for_streaming_train", "{asynchrony}.max_trajectory_age_steps"


def _refused_of(name: str) -> Iterator[Refusal]:
    """Yield what an algorithm refuses of asynchrony."""
    chunks = {"algorithm": name, "asynchrony": "in chunks"}
    needs_all = "it needs all groups of a step"
    for asynchrony in ASYNCHRONOUS:
        values, sampled = {"algorithm": name, "asynchrony": asynchrony}, "nothing is sampled"
        if name == "sft":
            yield Refusal(values, "unknown-key", "{asynchrony}.enabled", sampled)
        elif name in OFF_POLICY:
            yield Refusal(values, "requires", "{asynchrony}.enabled", sampled, (OFF_POLICY[name],))
    if name == "reinforce_plus_plus":
        yield Refusal(chunks, "incompatible", CHUNKS, needs_all, ("grpo.adv_estimator.name",))
    elif ALGORITHMS[name].shipped.algorithm != "grpo":
        yield Refusal(chunks, "incompatible", CHUNKS, needs_all, ("{asynchrony}.enabled",))
    if name not in LOSSES_OF_THEIR_OWN:
        for asynchrony in ("ahead", "as completed"):
            values = {"algorithm": name, "asynchrony": asynchrony, "correction": False}
            yield Refusal(values, "missing", "{correction}", "older weights have drawn", (AGE,))


# All that may be refused; any other refusal is a failure.
REFUSED = (
    Refusal(
        {"layout": "cp2", "fused": "fused"},
        "incompatible",
        FUSED,
        "the fused path reads whole sequences unless shared ones are allowed",
        (CONTEXT, FUSED_SHARED),
    ),
    Refusal(
        {"batching": "packed", "fused": "fused"},
        "incompatible",
        FUSED,
        "the fused path reads padded rows unless packed ones are allowed",
        (PACKING_KEY, FUSED_PACKED),
    ),
    *(
        Refusal(
            {"filters": True, "fused": fused},
            "incompatible",
            FUSED,
            "the fused path never has all logits of a token",
            ("policy.generation.top_k",),
        )
        for fused in ("fused", "fused allowed")
    ),
    Refusal(
        {"filters": True, "algorithm": "distillation with rewards"},
        "not-supported",
        "loss_fn.rl_weight",
        "the student's log-probabilities are of the whole vocabulary",
        ("policy.generation.top_p",),
    ),
    *(
        Refusal(
            {"algorithm": name, "kl": False},
            "not-allowed",
            "dpo.reference_policy_kl_penalty",
            "DPO's loss is of nothing without the reference",
        )
        for name, algorithm in ALGORITHMS.items()
        if algorithm.recipe.name.startswith("dpo")
    ),
    Refusal(
        {"algorithm": "sft", "offload": "grads_optimizer"},
        "incompatible",
        "policy.offload",
        "nothing is read before it trains",
    ),
    Refusal(
        {"algorithm": "sft", "kl": True},
        "unknown-key",
        "loss_fn.reference_policy_kl_penalty",
        "the likelihood has no KL term",
    ),
    *(
        Refusal(
            {"algorithm": name, "correction": True},
            "unknown-key",
            "{correction}",
            "the loss has no weights of its tokens",
        )
        for name in ("sft", "dpo", "dpo offline")
    ),
    *(
        Refusal(
            {"algorithm": name, "player": "agents"},
            "incompatible",
            "env.endpoint",
            "a session may fork into several rows",
        )
        for name, algorithm in ALGORITHMS.items()
        if algorithm.shipped.algorithm != "grpo"
    ),
    *(
        # Implied by those of each algorithm that agents may play.
        Refusal(
            {"player": "agents", "asynchrony": asynchrony, "correction": False},
            "missing",
            "{correction}",
            "older weights have drawn",
            (AGE,),
        )
        for asynchrony in ("ahead", "as completed")
    ),
    *(rule for name in ALGORITHMS for rule in _refused_of(name)),
    *(
        Refusal(
            {"asynchrony": asynchrony, "offload": "grads_optimizer"},
            "incompatible",
            "policy.offload",
            "the ranks read between the chunks of a step",
            ("{asynchrony}.enabled",),
        )
        for asynchrony in ASYNCHRONOUS
    ),
    Refusal(
        {"asynchrony": "in chunks", "updates": "two"},
        "incompatible",
        CHUNKS,
        "a chunk would belong to two updates",
        ("policy.train_global_batch_size",),
    ),
    Refusal(
        {"asynchrony": "in chunks", "correction": False},
        "missing",
        "{correction}",
        "older weights have drawn",
        (AGE,),
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
    """Combinations, few of them, in which every meeting that may be loaded occurs, and each refused one once.

    So does each refusal that needs more values than meet.
    """
    missing = {values: None for values in meetings(strength) if refusal_of(dict(values)) is None}
    refused = [dict(values) for values in meetings(strength) if values not in missing]
    refused += [rule.values for rule in REFUSED if len(rule.values) > strength]
    chosen = [_filled(values, {}, strength) for values in refused]
    while missing:
        case = _filled(dict(next(iter(missing))), missing, strength)
        chosen.append(case)
        for values in met_by(case, strength):
            missing.pop(values, None)
    # Ranks of one layout keep their groups from one combination to the next. Refused ones come last: a value is new in
    # one that runs, see tests/thinning.py.
    return sorted(
        chosen, key=lambda case: (refusal_of(case) is not None, LAYOUTS[case["layout"]][0], case["layout"])
    )


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
