"""Rows of data as prompts, read and checked without torch; each mistake becomes a problem with its place."""

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
"""Number of a source's bad rows to list; the rest are only counted."""
_UNSCORED = (
    'say where it stands with answer: {after: "####"}, {boxed: true}, {regex: ...} or {key: ...}, '
    "or correct the row"
)
TOKENS_KEY = "data.special_tokens_in_content"
TOKENS_REMEDY = "set {} to text, its characters, or to parse, the control token, as NeMo RL reads it"


@dataclass(frozen=True)
class PromptTexts:
    """The texts around a prompt, and the system prompt, if any."""

    before: str = ""
    behind: str = ""
    system: str | None = None

    def shown(self, prompt: Prompt, *, chat: bool) -> Prompt:
        """Add the texts (in a conversation, to the first user message), and the system prompt if there is none."""
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
    """Return a source's texts, and problems with its files, whose paths are relative to the source.

    A text with a problem is left out, and rows are read without it. A prompt file is a format string with one {} for
    the prompt; no other field is allowed.
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
    """Training rows, one source after another, and held-out rows, taken from each source in turn."""

    train: list[Prompt]
    held_out: list[Prompt]


def read_examples(
    train: Mapping[str, SourceConfig], validation: Mapping[str, SourceConfig], kind: RowKind, *, chat: bool
) -> tuple[Examples, list[Problem]]:
    """Read all rows of the sources, keyed by recipe path; without `validation`, each `train` source holds out a share.

    Indices are unique among the training rows, and among the held-out rows.
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
    """Return a source's training rows, its held-out rows (a `share` of all), and problems with their recipe paths.

    path: the source's path in the recipe. name: `source` of each row. first: index of the first row.
    """
    texts, wrong = read_texts(source)
    problems = [problem.below(path) for problem in wrong]
    try:
        rows = read_rows(source)
    except ConfigError as error:
        return [], [], [*problems, *(problem.below(path) for problem in error.problems)]
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
                if not row.of_lines:  # the column is missing in all rows
                    problems.append(Problem("wrong-row", missing[0], str(error), "name one of those"))
                    return [], [], problems
            continue
        if read is not None:
            # A hash of the question, without the texts, decides: equal questions are held out together.
            question = f"held-out:{repr(read.context) if read.context else read.text}"
            digest = hashlib.sha256(question.encode(errors="surrogatepass")).digest()
            once.append((texts.shown(read, chat=chat), int.from_bytes(digest[:6], "big") / 2**48))
    if 1 < len(missing) == len(bad) and not once:  # no line has the column: the key is wrong, not the lines
        problems.append(Problem("wrong-row", missing[0], bad[0], "name one of those"))
    else:
        problems += _wrong_rows(f"{path}.data_path", bad)
    kept, held_out = list[Prompt](), list[Prompt]()
    # Each repeat has its own indices, which key the sampling noise.
    for index, (row, fraction) in enumerate(once * source.repeat, start=first):
        (kept if fraction >= share else held_out).append(
            replace(row, index=index, source=name, env_name=source.env_name or "")
        )
    scored = held_out + (kept if kind is RowKind.PROMPTS else [])
    unscored = dict.fromkeys(f"{row.place}: {row.unscored}" for row in scored if row.unscored)
    return kept, held_out, [*problems, *_wrong_rows(f"{path}.answer", [*unscored], _UNSCORED)]


def _wrong_rows(key: str, wrong: Sequence[str], remedy: str = "") -> Iterator[Problem]:
    for text in wrong[:_SHOWN_ROWS]:
        yield Problem("wrong-row", key, text, remedy)
    if (rest := len(wrong) - _SHOWN_ROWS) > 0:
        yield Problem("wrong-row", key, f"{rest} more rows are wrong")


def count_problems(
    config: RunConfig, train: Sequence[Prompt], held_out: Sequence[Prompt]
) -> Iterator[Problem]:
    """Yield a problem for a step, a source's weighted share of it, or a validation that takes more rows than exist."""
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
    """Yield each part's number of rows with a special token, if the recipe does not set special_tokens_in_content."""
    for path, rows in parts.items() if config.data.special_tokens_in_content is None else ():
        found = [(row.place, token) for row in rows if (token := first_token(row, tokens, kind))]
        if found:
            place, token = found[0]
            count = f"{len(found)} of {len(rows)} rows of {path} hold a special token"
            what = f"null, and {count}, first {place}: {token!r}"
            yield Problem("missing", TOKENS_KEY, what, TOKENS_REMEDY.format("it"))


def first_token(row: Prompt, tokens: Sequence[str], kind: RowKind) -> str | None:
    """Return the first special token in a row's content, before the row is rendered."""
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
    """Return the run's last step, and the paths of the keys that set it: max_num_steps, max_num_epochs or both."""
    loop, name = config.loop, config.algorithm
    bounds = {f"{name}.max_num_steps": loop.max_num_steps}
    if loop.max_num_epochs is not None:
        bounds[f"{name}.max_num_epochs"] = loop.max_num_epochs * rows // config.prompts_per_step
    last = min(bounds.values())
    return last, tuple(path for path, bound in bounds.items() if bound == last)
