"""Rows as what is shown and what is answered, checked without torch; each mistake is named by its place."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from string import Formatter

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.shares import Shares
from nemo_rl_mcore.config.source import SourceConfig, SourceDefaults, names_of
from nemo_rl_mcore.data.datasets import Prompt, shuffled
from nemo_rl_mcore.data.messages import Message, contents, pattern_of
from nemo_rl_mcore.data.row_readers import ColumnError, RowError, RowReader
from nemo_rl_mcore.data.rows import SourceError, read_rows

_SHOWN_ROWS = 5
"""Bad rows of a source that are told one by one."""
_REMEDY = 'say where it stands with answer: {after: "####"}, {boxed: true}, {regex: ...} or {key: ...}, or mend the row'


@dataclass(frozen=True)
class PromptTexts:
    """The text with a {} in the place of the prompt, and the system prompt; null where there is none."""

    around: str | None = None
    system: str | None = None

    def shown(self, prompt: Prompt, *, chat: bool) -> Prompt:
        """Return the prompt with its texts; in a conversation the first user message gets the text, as in NeMo RL.

        A conversation that begins with a system's message keeps that one.
        """
        lengths, place = [0, 0], 0  # characters that the text has before and behind the prompt
        for text, name, *_ in Formatter().parse(self.around or ""):
            lengths[place] += len(text)
            place = 1 if name is not None else place
        before, behind = lengths
        system = None if self.system is None else Message("system", self.system, (len(self.system), 0))
        if not prompt.context:
            text = prompt.text if self.around is None else self.around.format(prompt.text)
            if system is None:
                return replace(prompt, text=text, frame=(before, behind))
            if chat:
                user = Message("user", text, (before, behind))
                return replace(prompt, text="", context=(system, user))
            frame = (before + len(system.content) + 1, behind)
            return replace(prompt, text=f"{system.content}\n{text}", frame=frame)
        messages = list(prompt.context)
        asked = [place for place, message in enumerate(messages) if message.role == "user"]
        if self.around is not None and asked:
            message = messages[asked[0]]
            content = self.around.format(message.content)
            messages[asked[0]] = replace(message, content=content, frame=(before, behind))
        if system is not None and messages[0].role != "system":
            messages.insert(0, system)
        return replace(prompt, context=tuple(messages))


def read_texts(source: SourceDefaults) -> tuple[PromptTexts, list[Problem]]:
    """Return the texts of a source; problems with their files name paths relative to the source.

    A text with a problem is left out: rows can be read without it, and nothing in it is evaluated.
    """
    texts, problems = dict[str, str](), list[Problem]()
    files = {"prompt_file": source.prompt_file, "system_prompt_file": source.system_prompt_file}
    for key, path in files.items():
        try:
            if path is not None:
                texts[key] = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no text in UTF-8"
            remedy = f"name a file beside the recipe or in {Path.cwd()}"
            problems.append(Problem("not-readable", key, f"{path!r} cannot be read: {reason}", remedy))
    around = texts.get("prompt_file")
    if around is not None:
        # One place for the prompt and words around it: no other field is ever evaluated.
        wrong = ""
        try:
            fields = [field[1:] for field in Formatter().parse(around) if field[1] is not None]
            if any(field != ("", "", None) for field in fields):
                wrong = "holds braces with something in them"
            elif len(fields) != 1:
                wrong = f"has {len(fields)} places for the prompt"
        except ValueError as error:
            wrong = f"holds a brace alone ({error})"
        if wrong:
            remedy = r"write {} once, where the prompt stands, and double all other braces, as in \boxed{{}}"
            problems.append(Problem("not-allowed", "prompt_file", f"{source.prompt_file!r} {wrong}", remedy))
            around = None
    return PromptTexts(around, texts.get("system_prompt_file")), problems


@dataclass(frozen=True)
class Examples:
    """The rows to train on, and those held out; of several sources one after the other, or in turns."""

    train: list[Prompt]
    held_out: list[Prompt]


Sources = Mapping[str, SourceConfig]
"""Sources by their path in the recipe."""


def read_run_examples(config: RunConfig) -> tuple[Examples, list[Problem]]:
    """Read the rows of a run, see `read_examples`."""
    train, validation = config.train_sources, config.validation_sources
    return read_examples(train, validation, config.row_kind, chat=config.data.apply_chat_template)


def read_examples(
    train: Sources, validation: Sources, kind: RowKind, *, chat: bool
) -> tuple[Examples, list[Problem]]:
    """Read all rows; without sources to validate with each of the others holds out a share.

    What is wrong comes as problems, with paths of the recipe. An index is unique among the rows that are trained on,
    and among those held out.
    """
    trained, problems, shares = list[Prompt](), list[Problem](), list[list[Prompt]]()
    for path, rows, wrong in _read_all(train, kind, chat=chat):
        share = 0.0 if validation else train[path].split_validation_size
        fractions = [hash_fraction(asked) for _, asked in rows]
        kept = [row for (row, _), fraction in zip(rows, fractions, strict=True) if fraction >= share]
        shares.append([row for (row, _), fraction in zip(rows, fractions, strict=True) if fraction < share])
        scored = shares[-1] + (kept if kind is RowKind.PROMPTS else [])
        problems += [*wrong, *_unanswered(path, scored)]
        trained += kept
    held_out = in_turns(shares)
    if validation:
        held_out, more = read_held_out(validation, kind, chat=chat)
        problems += more
    return Examples(trained, held_out), problems


def read_held_out(validation: Sources, kind: RowKind, *, chat: bool) -> tuple[list[Prompt], list[Problem]]:
    """Read the rows of sources to validate with, those of several in turns."""
    problems, shares = list[Problem](), list[list[Prompt]]()
    for path, rows, wrong in _read_all(validation, kind, chat=chat):
        shares.append([row for row, _ in rows])
        problems += [*wrong, *_unanswered(path, shares[-1])]
    return in_turns(shares), problems


def read_set(path: str, source: SourceConfig, *, chat: bool) -> tuple[list[Prompt], list[Problem]]:
    """Return the rows of one source whose prompts are answered."""
    found, problems = _read(source.name, path, source, RowKind.PROMPTS, chat=chat, first=0)
    rows = [row for row, _ in found]
    return rows, [*problems, *_unanswered(path, rows)]


def in_turns[Item](lists: Sequence[Sequence[Item]]) -> list[Item]:
    """Return the first of each list, then the second of each: the first n hold as many of each as there are."""
    longest = max((len(one) for one in lists), default=0)
    return [one[place] for place in range(longest) for one in lists if place < len(one)]


def hash_fraction(asked: str) -> float:
    """Return a number in [0, 1) from a prompt's text alone: equal prompts stand on the same side of a split."""
    digest = hashlib.sha256(f"held-out:{asked}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


_Read = list[tuple[Prompt, str]]
"""Rows, each with what it asks before it gets its texts."""


def _read_all(sources: Sources, kind: RowKind, *, chat: bool) -> Iterator[tuple[str, _Read, list[Problem]]]:
    """Yield the path, the rows and the problems of each source."""
    names, first = names_of(sources) if len(sources) > 1 else dict.fromkeys(sources, ""), 0
    for path, source in sources.items():
        rows, problems = _read(names[path], path, source, kind, chat=chat, first=first)
        yield path, rows, problems
        first += len(rows)


def _read(
    name: str, path: str, source: SourceConfig, kind: RowKind, *, chat: bool, first: int
) -> tuple[_Read, list[Problem]]:
    texts, wrong = read_texts(source)
    problems = [problem.below(path) for problem in wrong]
    try:
        rows = read_rows(source)
    except SourceError as error:
        return [], [*problems, error.problem.below(path)]
    if source.max_samples is not None and source.max_samples < len(rows):
        drawn = islice(shuffled(len(rows), "max_samples"), source.max_samples)
        rows = [rows[place] for place in sorted(drawn)]
    once, bad, missing, reader = _Read(), list[str](), list[str](), RowReader(source, kind, chat=chat)
    for row in rows:
        try:
            read = reader.read(row)
        except RowError as error:
            bad.append(f"{row.place}: {error}")
            if isinstance(error, ColumnError):
                missing.append(f"{path}.{error.setting}")
                if not row.of_lines:  # a column is missing in all rows alike
                    return [], [*problems, Problem("wrong-row", missing[0], str(error), "name one of those")]
            continue
        if read is not None:
            shown = replace(texts.shown(read, chat=chat), index=first + len(once), source=name)
            once.append((shown, repr(read.context) if read.context else read.text))
    if 1 < len(missing) == len(bad) and not once:  # no line has the column: the key is wrong, not the lines
        problems.append(Problem("wrong-row", missing[0], bad[0], "name one of those"))
    else:
        problems += _first(f"{path}.data_path", bad)
    # Each time with indices of their own, which is what sampling draws its noise by.
    return [
        (replace(row, index=row.index + time * len(once)), asked)
        for time in range(source.repeat)
        for row, asked in once
    ], problems


def _unanswered(path: str, rows: Sequence[Prompt]) -> Iterator[Problem]:
    """Yield rows that are scored and state no answer to score against."""
    wrong = dict.fromkeys(f"{row.place}: {row.unscored}" for row in rows if row.unscored)
    yield from _first(f"{path}.answer", [*wrong], _REMEDY)


def _first(key: str, wrong: Sequence[str], remedy: str = "") -> Iterator[Problem]:
    for text in wrong[:_SHOWN_ROWS]:
        yield Problem("wrong-row", key, text, remedy)
    if (rest := len(wrong) - _SHOWN_ROWS) > 0:
        yield Problem("wrong-row", key, f"{rest} more rows are wrong")


def count_problems(
    config: RunConfig, train: Sequence[Prompt], held_out: Sequence[Prompt]
) -> Iterator[Problem]:
    """Yield steps and validations that take more rows than there are, of all sources or of one with its weight."""
    key, needed = config.prompts_key, config.prompts_per_step
    if needed > len(train):
        given = f"the {len(train)} of data.train ({len(held_out)} are for validation)"
        what = f"the {needed} rows of a step are more than {given}"
        yield Problem("too-few-rows", key, what, "lower it, or add rows")
    elif (weights := config.source_weights) is not None:
        shares, rows = Shares(weights), Counter(row.source for row in train)
        for source, path in enumerate(names_of(config.train_sources)):
            name = shares.names[source]
            share = shares.most(source, needed, config.prompts_per_step)
            if share > rows[name]:
                of_step = f"its share of the {needed} rows of a step is {share}"
                what = f"{of_step}, more than the {rows[name]} rows of {name!r}"
                yield Problem("too-few-rows", f"{path}.weight", what, f"lower it, lower {key}, or add rows")
    yield from held_out_problems(config, held_out)


def held_out_problems(config: RunConfig, held_out: Sequence[Prompt]) -> Iterator[Problem]:
    """Yield validations without a row."""
    if not config.loop.validates:
        return
    asked = config.loop.max_val_samples
    needed = (
        ("max_val_samples", 1 if asked is None else min(asked, 1)),
        ("val_batches", 0 if config.given_rows is None else 1),
    )
    for key, rows in needed:
        if rows > len(held_out):
            what = f"a validation takes one row or more, and {len(held_out)} are held out"
            more = "give data.validation or a larger data.train.split_validation_size"
            yield Problem(
                "too-few-rows", f"{config.algorithm}.{key}", what, f"{more}, or turn validation off"
            )


TOKENS_KEY = "data.special_tokens_in_content"
TOKENS_REMEDY = "set {} to text, its characters, or to parse, the control token, as NeMo RL reads it"


def run_token_problems(config: RunConfig, examples: Examples, tokens: Sequence[str]) -> Iterator[Problem]:
    """Yield `special_token_problems` of the rows of a run."""
    for path, rows in (("data.train", examples.train), ("data.validation", examples.held_out)):
        yield from special_token_problems(config, path, rows, tokens, config.row_kind)


def special_token_problems(
    config: RunConfig, path: str, rows: Sequence[Prompt], tokens: Sequence[str], kind: RowKind
) -> Iterator[Problem]:
    """Yield how many rows of a part of the data spell a special token, where the recipe does not say what it is."""
    if config.data.special_tokens_in_content is not None:
        return
    found = [(row.place, token) for row in rows if (token := first_token(row, tokens, kind))]
    if found:
        place, token = found[0]
        count = f"{len(found)} of {len(rows)} rows of {path} hold a special token"
        what = f"null, and {count}, first {place}: {token!r}"
        yield Problem("missing", TOKENS_KEY, what, TOKENS_REMEDY.format("it"))


def first_token(row: Prompt, tokens: Sequence[str], kind: RowKind) -> str | None:
    """Find the first special token that what is read of a row, which is not rendered yet, spells."""
    if not tokens:
        return None
    start, end = row.frame[0], len(row.text) - row.frame[1]
    texts = contents(row.context, row.extras.tools) + ([] if row.context else [row.text[start:end]])
    if kind is not RowKind.PROMPTS:
        texts += [row.imitated, *contents(filter(None, (row.extras.answer, row.extras.rejected)))]
    if kind is RowKind.PAIRS and row.rejected is not None:
        texts.append(row.rejected)
    find = pattern_of(tuple(tokens)).search
    return next((found[0] for text in texts if (found := find(text))), None)


def last_step(config: RunConfig, rows: int) -> tuple[int, tuple[str, ...]]:
    """Return the step after which max_num_steps or max_num_epochs ends the run, and the paths of those that do.

    Rows of the last pass that fill no step are left over.
    """
    loop, name = config.loop, config.algorithm
    bounds = {f"{name}.max_num_steps": loop.max_num_steps}
    if loop.max_num_epochs is not None:
        bounds[f"{name}.max_num_epochs"] = loop.max_num_epochs * rows // config.prompts_per_step
    last = min(bounds.values())
    return last, tuple(path for path, bound in bounds.items() if bound == last)
