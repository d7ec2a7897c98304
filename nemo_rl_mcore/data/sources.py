"""From a recipe to its prompts: an embedded task, sources of rows, or a class of the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import batched, count, islice
from numbers import Integral
from typing import cast

from nemo_rl_mcore.config.algorithm import RolloutConfig
from nemo_rl_mcore.config.base import ConfigError, Problem
from nemo_rl_mcore.config.custom_code import build, custom_code
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import SourceConfig, SourceDefaults
from nemo_rl_mcore.data.answers import PreferenceSource, WrongAnswerPairs, answer_row, pair_rows
from nemo_rl_mcore.data.chat import with_template
from nemo_rl_mcore.data.datasets import DigitTaskSource, EpochSource, Prompt, PromptSource
from nemo_rl_mcore.data.examples import (
    TOKENS_KEY,
    TOKENS_REMEDY,
    count_problems,
    first_token,
    held_out_problems,
    read_examples,
    read_held_out,
    read_set,
    read_texts,
    special_token_problems,
)
from nemo_rl_mcore.data.messages import literal_spans
from nemo_rl_mcore.data.rows import RowError, RowReader, read_stream, refused
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.errors import CustomCodeError, RefusedError, code_of

_CHARACTERS = 256
"""More than a token of any vocabulary stands for in running text: what has more is not encoded to be counted."""


@dataclass(frozen=True)
class RowLimits:
    """The limits of a run's rows; `kind` is that of other rows than those that are trained on."""

    config: RunConfig
    tokenizer: Tokenizer
    kind: RowKind | None = None

    def fitting(self, prompts: Iterable[Prompt], *, sampled: bool) -> Iterator[Prompt]:
        """Yield the rows that fit; `sampled` says that the policy answers their prompts.

        Raises ValueError for a row that cannot be encoded and, unless `data.overlong` is drop, for one too long.
        """
        for prompt in prompts:
            try:
                shown = self.rendered(prompt)
                excess = self.excess(shown, sampled=sampled)
            except ValueError as error:
                raise RefusedError(f"{prompt.place}: {error}", code=code_of(error)) from error
            if excess is None:
                yield shown
            elif self.config.data.overlong == "error":
                what = f"{prompt.place}: {excess}, shorten the row, or set data.overlong: drop"
                raise RefusedError(what, code="row-length")

    def rendered(self, prompt: Prompt) -> Prompt:
        """Return the prompt in the chat template, where one is asked for, with the places of what is not to be parsed.

        Raises ValueError where the recipe does not say what a special token of a row is.
        """
        data, tokens, kind = (
            self.config.data,
            self.tokenizer.special_tokens,
            self.kind or self.config.row_kind,
        )
        if data.special_tokens_in_content is None and (token := first_token(prompt, tokens, kind)):
            what = f"it holds the special token {token!r}; {TOKENS_REMEDY.format(TOKENS_KEY)}"
            raise RefusedError(what, code="special-token")
        if data.apply_chat_template:
            return with_template(prompt, self.tokenizer)
        literal, opening = literal_spans(prompt.text, tokens, prompt.frame), self.tokenizer.opening
        if prompt.text.startswith(opening) and not (literal and literal[0][0] == 0):
            return replace(prompt, literal=literal)
        shifted = tuple((start + len(opening), end + len(opening)) for start, end in literal)
        return replace(prompt, text=opening + prompt.text, literal=shifted)

    def whole(self, prompt: Prompt, *, sampled: bool, told: str = "") -> Prompt:
        """Return the prompt as `rendered` does; ValueError, which begins with `told`, for one that is too long."""
        shown = self.rendered(prompt)
        if (excess := self.excess(shown, sampled=sampled)) is not None:
            raise RefusedError(f"{told}{excess}", code="row-length")
        return shown

    def excess(self, prompt: Prompt, *, sampled: bool) -> str | None:
        """Return what is too long, and the key to raise; None where the row fits."""
        longest_prompt, longest = self.config.max_prompt_length, self.config.policy.max_total_sequence_length
        more = "has {} characters, more than the {} tokens that are allowed can be: raise"
        if sampled and (characters := len(prompt.text)) > _CHARACTERS * longest_prompt:
            return f"the prompt {more.format(characters, longest_prompt)} data.max_input_seq_length"
        if sampled and (length := len(self.tokenizer.encode(prompt.text, prompt.literal))) > longest_prompt:
            return (
                f"the prompt has {length} tokens, and {longest_prompt} are allowed: raise data.max_input_seq_length, "
                "or policy.max_total_sequence_length where it is null"
            )
        if (kind := self.kind or self.config.row_kind) is RowKind.PROMPTS:
            return None
        texts = [
            prompt.text,
            *(turn.content for turn in prompt.context),
            prompt.imitated,
            prompt.rejected or "",
        ]
        if (characters := max(map(len, texts))) > _CHARACTERS * longest:
            return f"the row {more.format(characters, longest)} policy.max_total_sequence_length"
        pairs = pair_rows(prompt, self.tokenizer) if kind is RowKind.PAIRS else ()
        length = max(len(row.ids) for row in pairs or (answer_row(prompt, self.tokenizer),))
        if length > longest:
            return f"the row has {length} tokens: raise policy.max_total_sequence_length: {longest}"
        return None


class StreamSource(PromptSource):
    """Rows that are read as they are needed: shuffled within a buffer, or not, and never counted.

    A step takes the next rows, and a resumed run passes over those before. At its end the stream starts over, shuffled
    in another order; rows that fill no step are left over, so that none holds a row twice. What has been read is not
    kept: a step before the last one is read again from the start.
    """

    def __init__(
        self, limits: RowLimits, path: str, source: SourceConfig, held_out: Sequence[Prompt]
    ) -> None:
        self.held_out = held_out
        self._config, self._path, self._source = limits.config, path, source
        self._drops = limits.config.data.overlong == "drop"
        self._fitting = partial(limits.fitting, sampled=limits.config.row_kind is RowKind.PROMPTS)
        self._steps, self._next, self._last = self._batches(), 1, list[Prompt]()

    def train_batch(self, step: int, count: int) -> list[Prompt]:
        if step + 1 != self._next or not self._last:
            if step < self._next:
                self._steps, self._next = self._batches(), 1
            batch = next(islice(self._steps, step - self._next, None))
            self._next = step + 1
            self._last = [*(batch if self._drops else self._fitting(batch))]
        if count > len(self._last):
            raise RefusedError(
                f"{count} rows of a step are more than the {len(self._last)} that a stream gives it",
                code="too-few-rows",
            )
        return self._last[:count]

    def validation(self, count: int | None) -> list[Prompt]:
        return list(self.held_out[:count])

    def _batches(self) -> Iterator[Sequence[Prompt]]:
        """Yield the rows of each step; skipped rows are encoded only where that decides which are left out."""
        per_step = self._config.prompts_per_step
        for epoch in count():
            rows, whole = self._rows(epoch), 0
            for batch in batched(self._fitting(rows) if self._drops else rows, per_step):
                if len(batch) == per_step:
                    whole += 1
                    yield batch
            if not whole:
                what = f"a pass over the stream has fewer rows than the {per_step} of a step"
                raise refused("too-few-rows", self._path, what, "lower the rows of a step, or add rows")

    def _rows(self, epoch: int) -> Iterator[Prompt]:
        """Yield the rows of a pass; the index of each is its place in the stream as it lies there."""
        config, chat = self._config, self._config.data.apply_chat_template
        reader = RowReader(self._source, config.row_kind, chat=chat)
        seed = config.seed + (epoch << 31) if config.data.shuffle else None
        texts, wrong = read_texts(self._source)
        try:
            if wrong:
                raise ConfigError(wrong)
            for index, row in read_stream(self._source, seed):
                try:
                    read = reader.read(row)
                except RowError as error:
                    raise refused("wrong-row", "data_path", f"{row.place}: {error}") from error
                if read is None:
                    continue
                if read.unscored and config.row_kind is RowKind.PROMPTS:
                    raise refused("wrong-row", "answer", f"{row.place}: {read.unscored}")
                yield replace(texts.shown(read, chat=chat), index=index)
        except ConfigError as error:
            raise ConfigError(problem.below(self._path) for problem in error.problems) from error


@dataclass(frozen=True)
class OwnSource(PromptSource):
    """What a class of the user's own draws, held to what a `PromptSource` promises, and shown as rows of files are."""

    source: PromptSource
    limits: RowLimits

    def train_batch(self, step: int, count: int) -> list[Prompt]:
        return self._drawn("train_batch", step, count, sampled=self.limits.config.row_kind is RowKind.PROMPTS)

    def validation(self, count: int | None) -> list[Prompt]:
        assert count is not None  # the rules ask a number of a class
        return self._drawn("validation", count, sampled=True)

    def _drawn(self, method: str, *numbers: int, sampled: bool) -> list[Prompt]:
        call = f"data.type: {self.limits.config.data.type}: {method}({', '.join(map(str, numbers))})"
        with custom_code(call):
            given: list[object] = list(getattr(self.source, method)(*numbers))
        for one in given:
            if not isinstance(one, Prompt):
                raise CustomCodeError(f"{call} gave a {type(one).__name__} for a Prompt: {one!r:.80}")
            for name, kind in (("index", Integral), ("text", str), ("answer", str)):
                if not isinstance(value := getattr(one, name), kind):
                    what = f"{call} gave a Prompt whose {name} is {value!r:.80}, no {kind.__name__}"
                    raise CustomCodeError(what)
        prompts = cast("list[Prompt]", given)
        different, count = len({prompt.index for prompt in prompts}), numbers[-1]
        if not len(prompts) == different == count:
            what = f"{call} gave {len(prompts)} prompts with {different} different indices, not {count}"
            raise CustomCodeError(what, code="prompt-indices")
        shown = list[Prompt]()
        for prompt in prompts:
            try:
                shown.append(self.limits.whole(replace(prompt, frame=(0, 0)), sampled=sampled))
            except ValueError as error:
                raise CustomCodeError(f"{call}: prompt {prompt.index}: {error}") from error
        return shown


def open_prompts(config: RunConfig, tokenizer: Tokenizer) -> PromptSource:
    """Return the prompts of a run; ValueError, or ConfigError which is one, for files or a class that do not serve."""
    data, limits = config.data, RowLimits(config, tokenizer)
    if data.dataset_name == "files":
        return _open_files(limits)
    if data.dataset_name == "custom":
        assert data.type is not None
        arguments = {"seed": config.seed, **(data.args or {})}
        own = build(data.type, "data.type", arguments, needs=("train_batch", "validation"))
        return OwnSource(cast("PromptSource", own), limits)
    # What says how many prompts a step of the algorithm takes, and a validation.
    name, key = config.algorithm, "policy.train_global_batch_size"
    keys = key, f"{name}.max_val_samples or {name}.val_batches"
    if isinstance(config.loop, RolloutConfig):
        keys = f"{name}.num_prompts_per_step", f"{name}.max_val_samples"
    if not data.shown_in_texts:
        return DigitTaskSource(data.dataset_name, data.num_digits, config.seed, keys)
    texts, wrong = read_texts(data.default or SourceDefaults())
    if wrong:
        raise ConfigError([problem.below("data.default") for problem in wrong])

    def show(prompt: Prompt) -> Prompt:
        told = f"data.dataset_name: {data.dataset_name}: "
        return limits.whole(texts.shown(prompt, chat=data.apply_chat_template), sampled=True, told=told)

    task = DigitTaskSource(data.dataset_name, data.num_digits, config.seed, keys, show)
    task.train_batch(1, 1)  # all prompts of a task are as long: one that has no room is told now
    return task


def open_pairs(config: RunConfig, prompts: PromptSource, tokenizer: Tokenizer) -> PreferenceSource:
    kind = WrongAnswerPairs if config.data.embedded else PreferenceSource
    return kind(prompts, tokenizer)


def _open_files(limits: RowLimits) -> PromptSource:
    config = limits.config
    chat, kind = config.data.apply_chat_template, config.row_kind
    if any(source.streaming for source in config.train_sources.values()):
        rows, problems = read_held_out(config.validation_sources, kind, chat=chat)
        if problems:
            raise ConfigError(problems)
        held_out = [*limits.fitting(rows, sampled=config.loop.validates)]
        if problems := [*held_out_problems(config, held_out)]:
            raise ConfigError(problems)
        ((path, source),) = config.train_sources.items()
        stream = StreamSource(limits, path, source, held_out)
        stream.train_batch(1, config.prompts_per_step)  # what is wrong is told before the ranks start
        return stream
    examples, problems = read_examples(config.train_sources, config.validation_sources, kind, chat=chat)
    if not problems:
        problems = [*count_problems(config, examples.train, examples.held_out)]
        parts = {"data.train": examples.train, "data.validation": examples.held_out}
        problems += special_token_problems(config, parts, limits.tokenizer.special_tokens, kind)
    if problems:
        raise ConfigError(problems)
    train = [*limits.fitting(examples.train, sampled=kind is RowKind.PROMPTS)]
    held_out = [*limits.fitting(examples.held_out, sampled=config.loop.validates)]
    if problems := [*count_problems(config, train, held_out)]:
        why = "data.overlong: drop leaves too few rows"
        raise ConfigError(
            Problem("too-few-rows", one.path, f"{why}: {one.what}", one.remedy) for one in problems
        )
    weights, shuffle = config.source_weights, config.data.shuffle
    return EpochSource(train, held_out, config.seed, config.prompts_per_step, weights, shuffle)


def open_sets(config: RunConfig, tokenizer: Tokenizer) -> dict[str, list[Prompt]]:
    """Return the prompts of the sets of eval.sets; see `open_set`."""
    assert config.eval is not None
    sets = {name: open_set(config, name, tokenizer) for name in config.eval.sets}
    for name, prompts in sets.items():
        if not prompts:
            raise ValueError(f"data.overlong: drop leaves no row of eval.sets.{name}")
    return sets


def open_set(config: RunConfig, name: str, tokenizer: Tokenizer) -> list[Prompt]:
    """Return the prompts of a set of eval.sets; ConfigError, or ValueError, for rows that do not serve."""
    assert config.eval is not None
    path, kind, chat = f"eval.sets.{name}", RowKind.PROMPTS, config.data.apply_chat_template
    rows, problems = read_set(path, config.eval.sets[name], chat=chat)
    problems = problems or [*special_token_problems(config, {path: rows}, tokenizer.special_tokens, kind)]
    if problems:
        raise ConfigError(problems)
    return [*RowLimits(config, tokenizer, kind).fitting(rows, sampled=True)]
