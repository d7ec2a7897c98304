"""Which answers of a run the page shows: of some steps, and of each of these some answers."""

from __future__ import annotations

import gzip
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_mcore.observability.rollouts import ROLLOUTS_FOLDER, VALIDATION_FOLDER, read_rollouts

_STEPS = 12
_ANSWERS = 24
_LONGEST_TEXT = 20_000
_NAME = re.compile(r"step_(\d+)\.jsonl\.gz")
_TEXTS = ("prompt", "answer", "response")


def steps_shown(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Steps of a run with answers, {step, kind, total, answers}, and what could not be read, in words.

    At most 12 training steps and 12 validations, the first and the last among them, and at most 24 answers of each:
    those with their tokens first, then the lowest and the highest rewards.
    """
    shown: list[dict[str, Any]] = []
    unread: list[str] = []
    rollouts = folder / ROLLOUTS_FOLDER
    for kind, of_kind in (("training", rollouts), ("validation", rollouts / VALIDATION_FOLDER)):
        for step, path in _spread(_files(of_kind), _STEPS):
            try:
                answers = [*read_rollouts(path)]
            except (OSError, EOFError, ValueError, gzip.BadGzipFile) as error:
                unread.append(f"{path} cannot be read: {error}")
                continue
            some = [_shortened(answer) for answer in some_of(answers)]
            shown.append({"step": step, "kind": kind, "total": len(answers), "answers": some})
    return shown, unread


def some_of(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most 24 answers, in their order."""
    by_reward = sorted(range(len(answers)), key=lambda place: _reward(answers[place]))
    with_tokens = [place for place, answer in enumerate(answers) if answer.get("tokens")]
    # From both ends in turn.
    extremes = [place for pair in zip(by_reward, reversed(by_reward), strict=True) for place in pair]
    chosen = list(dict.fromkeys([*with_tokens, *extremes]))[:_ANSWERS]
    return [answers[place] for place in sorted(chosen)]


def _reward(answer: dict[str, Any]) -> float:
    reward = answer.get("reward")
    return reward if isinstance(reward, int | float) else 0.0


def _files(folder: Path) -> list[tuple[int, Path]]:
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step_*"))
    return sorted((int(match[1]), path) for match, path in found if match)


def _spread[Item](items: Sequence[Item], most: int) -> list[Item]:
    if len(items) <= most:
        return [*items]
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _shortened(answer: dict[str, Any]) -> dict[str, Any]:
    """The same, with texts that a page can hold."""
    cut = {
        name: f"{text[:_LONGEST_TEXT]}… ({len(text) - _LONGEST_TEXT} more characters)"
        for name in _TEXTS
        if isinstance(text := answer.get(name), str) and len(text) > _LONGEST_TEXT
    }
    return {**answer, **cut}
