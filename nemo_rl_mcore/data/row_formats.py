"""Rows of other formats in the columns of a pair: NeMo RL's completions with ranks, HelpSteer3's preferences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from nemo_rl_mcore.errors import RefusedError


@dataclass(frozen=True)
class RankedAnswers:
    """A prompt with a better and a worse answer; `tied` says that neither is better."""

    context: object
    chosen: object
    rejected: object
    tied: bool = False


def ranked_answers(row: Mapping[str, object]) -> RankedAnswers | None:
    """The answers of a row whose columns say which is better; None for any other row."""
    if {"context", "response1", "response2", "overall_preference"} <= row.keys():
        first, second, preference = (row[key] for key in ("response1", "response2", "overall_preference"))
        if not isinstance(preference, int | float):
            raise ValueError(f"overall_preference is {preference!r:.40}, and must be a number")
        better, worse = (second, first) if preference > 0 else (first, second)
        return RankedAnswers(row["context"], better, worse, tied=preference == 0)
    if {"context", "completions"} <= row.keys():
        return _by_rank(row)
    return None


def _by_rank(row: Mapping[str, object]) -> RankedAnswers:
    given = row["completions"]
    answers = [_as_answer(one) for one in cast("list[object]", given)] if isinstance(given, list) else []
    if len(answers) != 2 or None in answers:
        raise RefusedError(
            "completions are not two of a rank, which is a number, and a completion", code="completions"
        )
    first, second = sorted(filter(None, answers), key=lambda one: cast("int", one["rank"]))
    tied = first["rank"] == second["rank"]
    return RankedAnswers(row["context"], first["completion"], second["completion"], tied)


def _as_answer(given: object) -> Mapping[str, object] | None:
    """A completion with its rank; None for anything else."""
    one = cast("Mapping[str, object]", given if isinstance(given, Mapping) else {})
    return one if "completion" in one and isinstance(one.get("rank"), int | float) else None
