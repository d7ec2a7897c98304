"""Sources of rows as prompts, checked without torch; each mistake is a problem that names its place."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from string import Formatter

from nemo_rl_mcore.config.base import ConfigError, Problem
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import SourceConfig, SourceDefaults, names_of
from nemo_rl_mcore.data.datasets import Prompt, shuffled
from nemo_rl_mcore.data.messages import Message, contents, pattern_of
from nemo_rl_mcore.data.rows import RowError, RowReader, read_rows

_SHOWN_ROWS = 5
"""Bad rows of a source that are reported one by one."""
_UNSCORED = (
    'say where it stands with answer: {after: "####"}, {boxed: true}, {regex: ...} or {key: ...}, '
    "or correct the row"
)
TOKENS_KEY = "data.special_tokens_in_content"
TOKENS_REMEDY = "set {} to text, its characters, or to parse, the control token, as NeMo RL reads it"


@dataclass(frozen=True)
class PromptTexts:
    """Texts before and behind a prompt, and the system prompt; None where there is none."""

    before: str = ""
    behind: str = ""
    system: str | None = None

    def shown(self, prompt: Prompt, *, chat: bool) -> Prompt:
        """Return the prompt with its texts; in a conversation the first user message gets the text, as in NeMo RL.

        A conversation that begins with a system's message keeps that one.
        """
        before, behind = frame = len(self.before), len(self.behind)
        system = None if self.system is None else Message("system", self.system, (len(self.system), 0))
        if not prompt.context:
            text = f"{self.before}{prompt.text}{self.behind}"
            if system is None:
                return replace(prompt, text=text, frame=frame)
            if chat:
                return replace(prompt, text="", context=(system, Message("user", text, frame)))
            frame = (before + len(system.content) + 1, behind)
            return replace(prompt, text=f"{system.content}\n{text}", frame=frame)
        messages = list(prompt.context)
        asked = next((place for place, message in enumerate(messages) if message.role == "user"), None)
        if asked is not None:
            content = f"{self.before}{messages[asked].content}{self.behind}"
            messages[asked] = replace(messages[asked], content=content, frame=frame)
        if system is not None and messages[0].role != "system":
            messages.insert(0, system)
        return replace(prompt, context=tuple(messages))


def read_texts(source: SourceDefaults) -> tuple[PromptTexts, list[Problem]]:
    """Return a source's texts and the problems with their files, by paths relative to the source.

    A text with a problem is left out: rows can be read without it. It has one place for the prompt, and nothing else in
    it is ever evaluated.
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
    system = texts.get("system_prompt_file")
    try:
        parts = [*Formatter().parse(texts.get("prompt_file", "{}"))]
        fields = [place for place, part in enumerate(parts) if part[1] is not None]
        if any(parts[place][1:] != ("", "", None) for place in fields):
            raise ValueError("it holds braces with something in them")
        if len(fields) != 1:
            raise ValueError(f"it has {len(fields)} places for the prompt")
    except ValueError as error:  # the parser's, of a brace alone, among them
        remedy = r"write {} once, where the prompt stands, and double all other braces, as in \boxed{{}}"
        problems.append(Problem("not-allowed", "prompt_file", f"{source.prompt_file!r}: {error}", remedy))
        return PromptTexts(system=system), problems
    literals = [text for text, *_ in parts]
    place = fields[0] + 1
    return PromptTexts("".join(literals[:place]), "".join(literals[place:]), system), problems


@dataclass(frozen=True)
class Examples:
    """Rows to train on, source after source, and rows held out, of all sources in turns."""

    train: list[Prompt]
    held_out: list[Prompt]


def read_examples(
    train: Mapping[str, SourceConfig], validation: Mapping[str, SourceConfig], kind: RowKind, *, chat: bool
) -> tuple[Examples, list[Problem]]:
    """Read all rows of sources, by their path in the recipe; without `validation` each of `train` holds out a share.

    An index is unique among the rows to train on, and among those held out.
    """
    examples, problems = Examples([], []), list[Problem]()
    for sources, is_held_out in ((train, False), (validation, True)):
        names, first, apart = names_of(sources), 0, list[list[Prompt]]()
        for path, source in sources.items():
            share = 1.0 if is_held_out else 0.0 if validation else source.split_validation_size
            name = names[path] if len(sources) > 1 else ""
            kept, held_out, wrong = read_set(
                path, source, kind, chat=chat, name=name, first=first, share=share
            )
            first += len(kept) + len(held_out)
            examples.train.extend(kept)
            apart.append(held_out)
            problems += wrong
        examples.held_out.extend(filter(None, chain(*zip_longest(*apart))))
    return examples, problems


def read_set(
    path: str,
    source: SourceConfig,
    kind: RowKind,
    *,
    chat: bool,
    name: str = "",
    first: int = 0,
    share: float = 0.0,
) -> tuple[list[Prompt], list[Prompt], list[Problem]]:
    """Return a source's rows, the share of them that is held out, and problems with paths of the recipe.

    path: of the source. name: set in its rows. first: their first index.
    """
    once, problems = _read(path, source, kind, chat=chat)
    kept, held_out = list[Prompt](), list[Prompt]()
    # Each time with indices of their own, which the sampling noise is keyed by.
    for index, (row, fraction) in enumerate(once * source.repeat, start=first):
        (kept if fraction >= share else held_out).append(replace(row, index=index, source=name))
    scored = held_out + (kept if kind is RowKind.PROMPTS else [])
    unscored = dict.fromkeys(f"{row.place}: {row.unscored}" for row in scored if row.unscored)
    return kept, held_out, [*problems, *_wrong_rows(f"{path}.answer", [*unscored], _UNSCORED)]


def _read(
    path: str, source: SourceConfig, kind: RowKind, *, chat: bool
) -> tuple[list[tuple[Prompt, float]], list[Problem]]:
    """Return rows, each with the fraction of its question before that gets its texts."""
    texts, wrong = read_texts(source)
    problems = [problem.below(path) for problem in wrong]
    try:
        rows = read_rows(source)
    except ConfigError as error:
        return [], [*problems, *(problem.below(path) for problem in error.problems)]
    if source.max_samples is not None and source.max_samples < len(rows):
        drawn = islice(shuffled(len(rows), "max_samples"), source.max_samples)
        rows = [rows[place] for place in sorted(drawn)]
    once, bad, missing = list[tuple[Prompt, float]](), list[str](), list[str]()
    reader = RowReader(source, kind, chat=chat)
    for row in rows:
        try:
            read = reader.read(row)
        except RowError as error:
            bad.append(f"{row.place}: {error}")
            if error.setting:
                missing.append(f"{path}.{error.setting}")
                if not row.of_lines:  # a column is missing in all rows alike
                    return [], [*problems, Problem("wrong-row", missing[0], str(error), "name one of those")]
            continue
        if read is not None:
            question = repr(read.context) if read.context else read.text
            once.append((texts.shown(read, chat=chat), hash_fraction(question)))
    if 1 < len(missing) == len(bad) and not once:  # no line has the column: the key is wrong, not the lines
        return once, [*problems, Problem("wrong-row", missing[0], bad[0], "name one of those")]
    return once, [*problems, *_wrong_rows(f"{path}.data_path", bad)]


def _wrong_rows(key: str, wrong: Sequence[str], remedy: str = "") -> Iterator[Problem]:
    for text in wrong[:_SHOWN_ROWS]:
        yield Problem("wrong-row", key, text, remedy)
    if (rest := len(wrong) - _SHOWN_ROWS) > 0:
        yield Problem("wrong-row", key, f"{rest} more rows are wrong")


def hash_fraction(asked: str) -> float:
    """Return a number in [0, 1) from a prompt's text alone: equal prompts stand on the same side of a split."""
    digest = hashlib.sha256(f"held-out:{asked}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


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
        rows = Counter(row.source for row in train)
        for path, name in names_of(config.train_sources).items():
            share = round(needed * weights[name] / sum(weights.values()))
            if share > rows[name]:
                of_step = f"its share of the {needed} rows of a step is {share}"
                what = f"{of_step}, more than the {rows[name]} rows of {name!r}"
                yield Problem("too-few-rows", f"{path}.weight", what, f"lower it, lower {key}, or add rows")
    if not config.loop.validates or held_out:
        return
    keys = [] if config.loop.max_val_samples == 0 else ["max_val_samples"]
    keys += [] if config.val_loss_samples == 0 else ["val_batches"]
    for key in keys:
        what = "a validation takes one row or more, and 0 are held out"
        remedy = "give data.validation or a larger data.train.split_validation_size, or turn validation off"
        yield Problem("too-few-rows", f"{config.algorithm}.{key}", what, remedy)


def special_token_problems(
    config: RunConfig, parts: Mapping[str, Sequence[Prompt]], tokens: Sequence[str], kind: RowKind
) -> Iterator[Problem]:
    """Yield the number of rows of each part of the data that spell a special token, if the recipe leaves that open."""
    for path, rows in parts.items() if config.data.special_tokens_in_content is None else ():
        found = [(row.place, token) for row in rows if (token := first_token(row, tokens, kind))]
        if found:
            place, token = found[0]
            count = f"{len(found)} of {len(rows)} rows of {path} hold a special token"
            what = f"null, and {count}, first {place}: {token!r}"
            yield Problem("missing", TOKENS_KEY, what, TOKENS_REMEDY.format("it"))


def first_token(row: Prompt, tokens: Sequence[str], kind: RowKind) -> str | None:
    """Find the first special token that a row's content spells, before the row is rendered."""
    if not tokens:
        return None
    start, end = row.frame[0], len(row.text) - row.frame[1]
    texts = contents(row.context, row.tools) + ([] if row.context else [row.text[start:end]])
    if kind is not RowKind.PROMPTS:
        texts += [row.imitated, *contents(filter(None, (row.answer_message, row.rejected_message)))]
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
