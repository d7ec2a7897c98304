"""Mathematical answers, compared by `math-verify`: 1 for an equal expression, 0 for any other response."""

# math-verify leaves parameters of its functions untyped.
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_mcore.data.datasets import Prompt


@dataclass(frozen=True)
class MathEnvironment:
    """Score = whether the last expression of the response equals the answer.

    The answer is LaTeX or a plain expression; of the response, an expression in a box counts before any other.
    timeout_s: seconds to read an expression, and to compare two, after which the response is wrong. It is kept by a
    signal, so that scores are computed in the main thread.
    """

    timeout_s: int

    def __post_init__(self) -> None:
        _library()

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], finished: Sequence[bool]
    ) -> list[float]:
        """1 or 0 for each response, in their order."""
        read, equal, boxed = _library()
        scores: list[float] = []
        for prompt, response in zip(prompts, responses, strict=True):
            wanted = read(f"\\boxed{{{prompt.answer}}}", boxed, parsing_timeout=self.timeout_s)
            given = read(response, parsing_timeout=self.timeout_s)
            scores.append(float(equal(wanted, given, timeout_seconds=self.timeout_s)))
        return scores


def _library() -> tuple[Callable[..., Any], Callable[..., Any], list[Any]]:
    """`parse`, `verify` and how answers are parsed; ValueError when the package is not there."""
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise ValueError(
            f"env.math: needs the Python package math_verify ({error}); install the extra math, or set env.math: null"
        ) from error
    return parse, verify, [LatexExtractionConfig()]
