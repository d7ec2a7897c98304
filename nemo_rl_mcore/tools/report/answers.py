"""Which answers of a run the page shows: of some steps, and of each of these some answers."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_mcore.driver.observability.rollouts import ROLLOUTS_FOLDER, VALIDATION_FOLDER, read_rollouts

_STEPS = 12
_ANSWERS = 24
_LONGEST_TEXT = 20_000
_MOST_TOKENS = 2000
"""Of an answer that is shown token by token: each takes some 60 bytes of the page, and an element of the browser's."""
_MOST_BYTES = 256 << 20
"""Of the answers of a step, unpacked: in memory they take several times as much."""
_NAME = re.compile(r"step_(\d+)\.jsonl\.gz")
_ALWAYS = ("prompt", "response")
_TEXTS = (*_ALWAYS, "answer")


def steps_shown(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the steps of a run with answers, {step, kind, total, answers}, and what could not be read, in words.

    At most 12 training steps and 12 validations, the first and the last among them, and at most 24 answers of each:
    those with their tokens first, then the lowest and the highest rewards.
    """
    shown: list[dict[str, Any]] = []
    unread: list[str] = []
    rollouts = folder / ROLLOUTS_FOLDER
    for kind, of_kind in (("training", rollouts), ("validation", rollouts / VALIDATION_FOLDER)):
        for step, path in _spread(_files(of_kind), _STEPS):
            try:
                total, some = _answers_of(path)
            except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
                unread.append(f"{path} cannot be read: {error}")
                continue
            shown.append({"step": step, "kind": kind, "total": total, "answers": some})
    return shown, unread


def _answers_of(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return how many a file has, and those that are shown; raises ValueError where the page could not show them."""
    answers: list[Any] = [*read_rollouts(path, _MOST_BYTES)]
    for line, answer in enumerate(answers, 1):
        if not (isinstance(answer, dict) and all(isinstance(answer.get(name), str) for name in _ALWAYS)):
            raise ValueError(f"line {line} is no answer")
    try:
        some = [_shortened(answer) for answer in some_of(answers)]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"turns or tokens of an answer are none: {error!r}") from error
    json.dumps(some, allow_nan=False)
    return len(answers), some


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
    """Return the same, with texts, turns and tokens that a page can hold."""
    cut = {name: _cut(answer[name]) for name in _TEXTS if isinstance(answer.get(name), str)}
    return {**answer, **cut, "turns": _some_turns(answer), "tokens": _first_tokens(answer)}


def _cut(text: str, most: int = _LONGEST_TEXT) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most} more characters)"


def _some_turns(answer: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the first turns, which share the room of one text."""
    turns, left = answer.get("turns"), _LONGEST_TEXT
    if not turns:
        return None
    some: list[dict[str, Any]] = []
    for place, turn in enumerate(turns):
        if left <= 0:
            return [*some, {"role": f"{len(turns) - place} more turns", "content": "…"}]
        some.append({**turn, "content": _cut(turn["content"], left)})
        left -= len(turn["content"])
    return some


def _first_tokens(answer: dict[str, Any]) -> dict[str, Any] | None:
    """Return the first tokens, and how many `more` there are."""
    tokens = answer.get("tokens")
    if not tokens:
        return None
    if (
        len(
            {
                len(column)
                for column in (tokens["text"], tokens["turn"], *tokens.values())
                if column is not None
            }
        )
        > 1
    ):
        raise ValueError("the columns of an answer's tokens have several lengths")
    first = {name: column and column[:_MOST_TOKENS] for name, column in tokens.items()}
    return {**first, "more": max(0, len(tokens["text"]) - _MOST_TOKENS)}
