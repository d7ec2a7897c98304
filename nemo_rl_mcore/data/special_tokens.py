"""Rows that spell special tokens: the recipe says what is meant before they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.examples import Example, Examples
from nemo_rl_mcore.data.literal_text import contents, framed_content, pattern_of
from nemo_rl_mcore.data.messages import with_strings

KEY = "data.special_tokens_in_content"
REMEDY = "set {} to text, its characters, or to parse, the control token, as NeMo RL reads it"


def run_token_problems(config: RunConfig, examples: Examples, tokens: Sequence[str]) -> Iterator[Problem]:
    """Yield `special_token_problems` of the rows of a run."""
    for path, rows in (("data.train", examples.train), ("data.validation", examples.held_out)):
        yield from special_token_problems(config, path, rows, tokens, config.row_kind)


def special_token_problems(
    config: RunConfig, path: str, rows: Sequence[Example], tokens: Sequence[str], kind: RowKind
) -> Iterator[Problem]:
    """Yield how many rows of a part of the data spell a special token, where the recipe does not say what it is."""
    if config.data.special_tokens_in_content is not None:
        return
    found = [(row.place, token) for row in rows if (token := first_token(row, row.frame, tokens, kind))]
    if found:
        place, token = found[0]
        count = f"{len(found)} of {len(rows)} rows of {path} hold a special token"
        yield Problem("missing", KEY, f"null, and {count}, first {place}: {token!r}", REMEDY.format("it"))


def first_token(
    row: Example | Prompt, frame: tuple[int, int], tokens: Sequence[str], kind: RowKind
) -> str | None:
    """Find the first special token that what is read of a row spells."""
    if not tokens:
        return None
    find = pattern_of(tuple(tokens)).search
    return next((found[0] for text in _texts(row, frame, kind) if (found := find(text))), None)


def _texts(row: Example | Prompt, frame: tuple[int, int], kind: RowKind) -> Iterator[str]:
    context = row.context or (row.text if isinstance(row, Prompt) else "")
    yield from [framed_content(context, frame)[1]] if isinstance(context, str) else contents(context)
    said, extras = list[str](), row.extras
    with_strings([*extras.tools], lambda text: said.append(text) or text)
    yield from said
    if kind is not RowKind.PROMPTS:
        yield row.answer if row.solution is None else row.solution
        yield from contents(filter(None, (extras.answer, extras.rejected)))
    if kind is RowKind.PAIRS and row.rejected is not None:
        yield row.rejected
