"""Rows as what is shown and what is answered, checked without torch; each mistake is named by its place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import SourceConfig, names_of
from nemo_rl_mcore.data.datasets import shuffled
from nemo_rl_mcore.data.messages import NO_EXTRAS, Context, Extras
from nemo_rl_mcore.data.prompt_texts import PromptTexts, read_texts
from nemo_rl_mcore.data.row import Row, SourceError
from nemo_rl_mcore.data.row_readers import ColumnError, Read, RowError, RowReader
from nemo_rl_mcore.data.rows import read_rows

_SHOWN_ROWS = 5
"""Bad rows of a source that are told one by one."""
_REMEDY = 'say where it stands with answer: {after: "####"}, {boxed: true}, {regex: ...} or {key: ...}, or mend the row'


@dataclass(frozen=True)
class Example:
    """A row: what the model is shown, and the answer to score against; `place` is its file and line, or its number.

    solution: what is imitated, where that is more than the answer. imitate_all: every assistant turn of the context is
    to be imitated, not the answer alone. source: the name of its source. frame: of a context that is text, see
    `Message.frame`. columns: for reward functions.
    """

    place: str
    index: int
    context: Context
    answer: str
    rejected: str | None = None
    imitate_all: bool = False
    solution: str | None = None
    source: str = ""
    frame: tuple[int, int] = (0, 0)
    columns: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)
    extras: Extras = NO_EXTRAS


@dataclass(frozen=True)
class Examples:
    """The rows to train on, and those held out; of several sources one after the other, or in turns."""

    train: list[Example]
    held_out: list[Example]


Sources = Mapping[str, SourceConfig]
"""Sources by their path in the recipe."""


def read_examples(
    train: Sources, validation: Sources, kind: RowKind, *, chat: bool
) -> tuple[Examples, list[Problem]]:
    """Read all rows; without sources to validate with each of the others holds out a share.

    What is wrong comes as problems, with paths of the recipe. An index is unique among the rows that are trained on,
    and among those held out.
    """
    trained, problems, first = list[Example](), list[Problem](), 0
    shares = list[list[Example]]()
    for name, path, source in _named(train):
        found = _read(name, path, source, kind, chat=chat, first=first)
        problems += found.problems
        first += found.rows
        share = 0.0 if validation else source.split_validation_size
        held = [share > 0 and fraction < share for fraction in found.fractions]
        kept = [one for one, out in zip(found.examples, held, strict=True) if not out]
        shares.append([one for one, out in zip(found.examples, held, strict=True) if out])
        problems += found.unanswered(shares[-1] + (kept if kind is RowKind.PROMPTS else []))
        trained += kept
    held_out = in_turns(shares)
    if validation:
        held_out, more = read_held_out(validation, kind, chat=chat)
        problems += more
    return Examples(trained, held_out), problems


def read_held_out(validation: Sources, kind: RowKind, *, chat: bool) -> tuple[list[Example], list[Problem]]:
    """Read the rows of sources to validate with, those of several in turns."""
    problems, shares, first = list[Problem](), list[list[Example]](), 0
    for name, path, source in _named(validation):
        found = _read(name, path, source, kind, chat=chat, first=first)
        problems += [*found.problems, *found.unanswered(found.examples)]
        first += found.rows
        shares.append(found.examples)
    return in_turns(shares), problems


def read_run_examples(config: RunConfig) -> tuple[Examples, list[Problem]]:
    """Read the rows of a run, see `read_examples`."""
    return read_examples(
        config.train_sources,
        config.validation_sources,
        config.row_kind,
        chat=config.data.apply_chat_template,
    )


def read_set(path: str, source: SourceConfig, *, chat: bool) -> tuple[list[Example], list[Problem]]:
    """Return the rows of one source whose prompts are answered."""
    found = _read(source.name, path, source, RowKind.PROMPTS, chat=chat, first=0)
    return found.examples, [*found.problems, *found.unanswered(found.examples)]


def in_turns[Item](lists: Sequence[Sequence[Item]]) -> list[Item]:
    """Return the first of each list, then the second of each: the first n hold as many of each as there are."""
    longest = max((len(one) for one in lists), default=0)
    return [one[place] for place in range(longest) for one in lists if place < len(one)]


def hash_fraction(context: Context) -> float:
    """Return a number in [0, 1) from a prompt's text alone: equal prompts stand on the same side of a split."""
    text = context if isinstance(context, str) else repr(context)
    digest = hashlib.sha256(f"held-out:{text}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _named(sources: Sources) -> Iterator[tuple[str, str, SourceConfig]]:
    names = names_of(sources) if len(sources) > 1 else dict.fromkeys(sources, "")
    yield from ((names[path], path, source) for path, source in sources.items())


@dataclass
class _Found:
    """What reading a source gives: examples, each with a number that says whether it is held out.

    rows: their number, from which on those of the next source are counted.
    """

    path: str
    examples: list[Example]
    fractions: list[float]
    unscored: dict[str, str]
    problems: list[Problem]
    rows: int = 0

    def take_again(self, times: int) -> None:
        """Append the rows as often, each time with indices of their own, which is what sampling draws its noise by."""
        once = [*self.examples]
        for time in range(1, times + 1):
            self.examples += [replace(one, index=one.index + time * self.rows) for one in once]
        self.fractions *= times + 1
        self.rows *= times + 1

    def unanswered(self, examples: Sequence[Example]) -> Iterator[Problem]:
        """Yield rows that are scored and state no answer to score against."""
        places = dict.fromkeys(one.place for one in examples if one.place in self.unscored)
        wrong = [self.unscored[place] for place in places]
        yield from _first(f"{self.path}.answer", wrong, _REMEDY)


def _read(name: str, path: str, source: SourceConfig, kind: RowKind, *, chat: bool, first: int) -> _Found:
    texts, wrong = read_texts(source)
    found = _Found(path, [], [], {}, [problem.below(path) for problem in wrong])
    try:
        rows = _drawn(read_rows(source), source.max_samples)
    except SourceError as error:
        found.problems.append(error.problem.below(path))
        return found
    bad, missing, reader = list[str](), list[ColumnError](), RowReader(source, kind, chat=chat)
    for row in rows:
        try:
            read = reader.read(row)
        except ColumnError as error:
            if not row.of_lines:  # a column is missing in all rows alike
                found.problems.append(
                    Problem("wrong-row", f"{path}.{error.setting}", str(error), "name one of those")
                )
                return found
            missing.append(error)
            bad.append(f"{row.place}: {error}")
        except RowError as error:
            bad.append(f"{row.place}: {error}")
        else:
            if read is not None:
                _keep(found, read, row, texts, name, first, chat=chat)
    if (
        1 < len(missing) == len(bad) and not found.rows
    ):  # no line has the column: the key is wrong, not the lines
        found.problems.append(
            Problem("wrong-row", f"{path}.{missing[0].setting}", bad[0], "name one of those")
        )
    else:
        found.problems += _first(f"{path}.data_path", bad)
    found.take_again(source.repeat - 1)
    return found


def _drawn(rows: Sequence[Row], count: int | None) -> Sequence[Row]:
    """Return as many rows drawn at random, in their order; all where there are no more."""
    if count is None or count >= len(rows):
        return rows
    return [rows[place] for place in sorted(islice(shuffled(len(rows), "max_samples"), count))]


def _keep(
    found: _Found, read: Read, row: Row, texts: PromptTexts, name: str, first: int, *, chat: bool
) -> None:
    found.examples.append(example_of(read, texts, row.place, first + found.rows, name, chat=chat))
    found.fractions.append(hash_fraction(read.context))
    if read.unscored:
        found.unscored[row.place] = f"{row.place}: {read.unscored}"
    found.rows += 1


def example_of(read: Read, texts: PromptTexts, place: str, index: int, name: str, *, chat: bool) -> Example:
    """Return what was read of a row as an example, with its texts."""
    shown, frame = texts.shown(read.context, chat=chat), texts.frame(chat=chat)
    plain = Example(place, index, shown, read.answer, read.rejected, read.imitate_all, None, name, frame)
    return replace(plain, solution=read.solution, columns=read.columns, extras=read.extras)


def _first(key: str, wrong: Sequence[str], remedy: str = "") -> Iterator[Problem]:
    for text in wrong[:_SHOWN_ROWS]:
        yield Problem("wrong-row", key, text, remedy)
    if (rest := len(wrong) - _SHOWN_ROWS) > 0:
        yield Problem("wrong-row", key, f"{rest} more rows are wrong")
