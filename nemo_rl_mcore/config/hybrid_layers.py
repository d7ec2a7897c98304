"""The layers of a hybrid model, one character each: what they may be, and what they need."""

from collections.abc import Iterator
from typing import Protocol

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.errors import quoted, shortened

MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
_KINDS = (MAMBA, ATTENTION, MLP, EXPERTS)
_PATTERN = "hybrid_layer_pattern"


class _Model(Protocol):
    """What of a model its pattern is judged by; `config/model.py` says what each is."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hybrid_layer_pattern(self) -> str | None: ...
    @property
    def num_moe_experts(self) -> int | None: ...
    @property
    def mamba_num_heads(self) -> int | None: ...
    @property
    def mamba_num_groups(self) -> int: ...


def pattern_problems(model: _Model) -> Iterator[Problem]:
    """Yield kinds of layers that do not exist, a wrong number of them, and sizes that they lack or do not divide."""
    pattern = model.hybrid_layer_pattern
    if pattern is None:
        return
    if foreign := sorted(set(pattern) - {*_KINDS}):
        yield Problem(
            "not-supported",
            _PATTERN,
            f"{quoted(foreign)} are no layers that are built",
            f"known: {' '.join(_KINDS)}",
        )
    if len(pattern) != model.num_layers:
        yield Problem(
            "contradicts",
            "num_layers",
            f"{model.num_layers} contradicts the {len(pattern)} layers of {_PATTERN}: each character is one",
            f"set it to {len(pattern)}",
            (_PATTERN,),
        )
    if (EXPERTS in pattern) != (model.num_moe_experts is not None):
        yield Problem(
            "contradicts",
            "num_moe_experts",
            f"{model.num_moe_experts} contradicts {_PATTERN}: {shortened(pattern)}",
            f"set it where the pattern has an {EXPERTS}, and only there",
            (_PATTERN,),
        )
    yield from _mamba_problems(model, pattern)


def _mamba_problems(model: _Model, pattern: str) -> Iterator[Problem]:
    heads, groups = model.mamba_num_heads, model.mamba_num_groups
    if MAMBA in pattern and heads is None:
        yield Problem(
            "missing", "mamba_num_heads", f"missing with {MAMBA} in {_PATTERN}", "set it", (_PATTERN,)
        )
    if MAMBA in pattern and heads is not None and heads % groups:
        yield Problem(
            "not-divisible",
            "mamba_num_heads",
            f"{heads} is not divisible by mamba_num_groups: {groups}",
            "make it a multiple",
            ("mamba_num_groups",),
        )
