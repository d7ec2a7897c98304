"""From a recipe to its prompts: an embedded task, sources of rows, or a class of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import batched, count, islice
from numbers import Integral
from typing import cast

from nemo_rl_mcore.config.algorithm import RolloutConfig
from nemo_rl_mcore.config.base import Code, ConfigError, Problem
from nemo_rl_mcore.config.custom_code import build, custom_code
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import SourceConfig, SourceDefaults
from nemo_rl_mcore.data.answers import (
    PreferenceSource,
    WrongAnswerPairs,
    answer_row,
    pair_rows,
)
from nemo_rl_mcore.data.chat import with_template
from nemo_rl_mcore.data.datasets import DigitTaskSource, EpochSource, Prompt, PromptSource
from nemo_rl_mcore.data.examples import (
    TOKENS_KEY,
    TOKENS_REMEDY,
    PromptTexts,
    count_problems,
    first_token,
    held_out_problems,
    read_held_out,
    read_run_examples,
    read_set,
    read_texts,
    run_token_problems,
    special_token_problems,
)
from nemo_rl_mcore.data.messages import literal_spans
from nemo_rl_mcore.data.row_readers import RowError, RowReader
from nemo_rl_mcore.data.rows import SourceError, read_stream
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.errors import CustomCodeError, RefusedError, code_of

_NO_TEXTS = PromptTexts()
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

    def excess(self, prompt: Prompt, *, sampled: bool) -> str | None:
        """Return what is too long, and the key to raise; None where the row fits."""
        longest_prompt, longest = self.config.max_prompt_length, self.config.policy.max_total_sequence_length
        if sampled and (excess := _too_many(len(prompt.text), longest_prompt)):
            return f"the prompt {excess}: raise data.max_input_seq_length"
        if sampled and (length := len(self.tokenizer.encode(prompt.text, prompt.literal))) > longest_prompt:
            return (
                f"the prompt has {length} tokens, and {longest_prompt} are allowed: raise data.max_input_seq_length, "
                "or policy.max_total_sequence_length where it is null"
            )
        kind = self.kind or self.config.row_kind
        if kind is RowKind.PROMPTS:
            return None
        texts = [prompt.text or "", *(turn.content for turn in prompt.context), prompt.imitated]
        if excess := _too_many(max(map(len, [*texts, prompt.rejected or ""])), longest):
            return f"the row {excess}: raise policy.max_total_sequence_length"
        rows = (
            pair_rows(prompt, self.tokenizer)
            if kind is RowKind.PAIRS
            else (answer_row(prompt, self.tokenizer),)
        )
        length = max(len(row.ids) for row in rows)
        if length > longest:
            return f"the row has {length} tokens: raise policy.max_total_sequence_length: {longest}"
        return None


def _too_many(characters: int, tokens: int) -> str | None:
    if characters <= _CHARACTERS * tokens:
        return None
    return f"has {characters} characters, more than the {tokens} tokens that are allowed can be"


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
        self._limits, self._path, self._source = limits, path, source
        self._drops = limits.config.data.overlong == "drop"
        self._fitting = partial(limits.fitting, sampled=limits.config.row_kind is RowKind.PROMPTS)
        self._steps, self._next, self._last = self._batches(), 1, list[Prompt]()

    def train_batch(self, step: int, count: int) -> list[Prompt]:
        """See `PromptSource.train_batch`; ConfigError for rows that do not serve."""
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
        """Give the first rows of data.validation, all where they are fewer."""
        return list(self.held_out[:count])

    def _batches(self) -> Iterator[Sequence[Prompt]]:
        """Yield the rows of each step; skipped rows are encoded only where that decides which are left out."""
        per_step = self._limits.config.prompts_per_step
        for epoch in count():
            rows, whole = self._rows(epoch), 0
            for batch in batched(self._fitting(rows) if self._drops else rows, per_step):
                if len(batch) == per_step:
                    whole += 1
                    yield batch
            if not whole:
                what = f"a pass over the stream has fewer rows than the {per_step} of a step"
                remedy = "lower the rows of a step, or add rows"
                raise self._error("too-few-rows", "", what, remedy)

    def _rows(self, epoch: int) -> Iterator[Prompt]:
        """Yield the rows of a pass; the index of each is its place in the stream as it lies there."""
        config, chat = self._limits.config, self._limits.config.data.apply_chat_template
        texts, wrong = read_texts(self._source)
        if wrong:
            raise ConfigError(problem.below(self._path) for problem in wrong)
        reader = RowReader(self._source, config.row_kind, chat=chat)
        seed = config.seed + (epoch << 31) if config.data.shuffle else None
        try:
            for index, row in read_stream(self._source, seed):
                try:
                    read = reader.read(row)
                except RowError as error:
                    raise self._error("wrong-row", ".data_path", f"{row.place}: {error}") from error
                if read is None:
                    continue
                if read.unscored and config.row_kind is RowKind.PROMPTS:
                    raise self._error("wrong-row", ".answer", f"{row.place}: {read.unscored}")
                yield replace(texts.shown(read, chat=chat), index=index)
        except SourceError as error:
            raise ConfigError([error.problem.below(self._path)]) from error

    def _error(self, code: Code, key: str, what: str, remedy: str = "") -> ConfigError:
        return ConfigError([Problem(code, self._path + key, what, remedy)])


def open_prompts(config: RunConfig, tokenizer: Tokenizer) -> PromptSource:
    """Return the prompts of a run; ValueError, or ConfigError which is one, for files or a class that do not serve."""
    data, limits = config.data, RowLimits(config, tokenizer)
    if data.dataset_name == "files":
        return _open_files(limits)
    if data.dataset_name == "custom":
        assert data.type is not None
        arguments = {"seed": config.seed, **(data.args or {})}
        own = build(data.type, "data.type", arguments, needs=("train_batch", "validation"))
        return DrawnSource(cast("PromptSource", own), limits, custom=f"data.type: {data.type}")
    # What says how many prompts a step of the algorithm takes, and a validation.
    keys = (
        "policy.train_global_batch_size",
        f"{config.algorithm}.max_val_samples or {config.algorithm}.val_batches",
    )
    if isinstance(config.loop, RolloutConfig):
        keys = f"{config.algorithm}.num_prompts_per_step", f"{config.algorithm}.max_val_samples"
    task = DigitTaskSource(data.dataset_name, data.num_digits, config.seed, keys)
    if not data.shown_in_texts:
        return task
    texts, wrong = read_texts(data.default or SourceDefaults())
    if wrong:
        raise ConfigError([problem.below("data.default") for problem in wrong])
    shown = DrawnSource(task, limits, texts)
    shown.train_batch(1, 1)  # all prompts of a task are as long: one that has no room is told now
    return shown


@dataclass(frozen=True)
class DrawnSource(PromptSource):
    """Prompts that an embedded task, or a class of the user's own, draws; they are shown as rows of files are.

    custom: the key and the path of a class, which is held to what a `PromptSource` promises.
    """

    source: PromptSource
    limits: RowLimits
    texts: PromptTexts = _NO_TEXTS
    custom: str = ""

    def train_batch(self, step: int, count: int) -> list[Prompt]:
        sampled = not self.custom or self.limits.config.row_kind is RowKind.PROMPTS
        draw = partial(self.source.train_batch, step, count)
        return self._drawn(f"train_batch({step}, {count})", draw, count, sampled=sampled)

    def validation(self, count: int | None) -> list[Prompt]:
        assert count is not None  # the rules ask a number of an embedded task and of a class
        draw = partial(self.source.validation, count)
        return self._drawn(f"validation({count})", draw, count, sampled=True)

    def _drawn(
        self, call: str, draw: Callable[[], Sequence[object]], count: int, *, sampled: bool
    ) -> list[Prompt]:
        if not self.custom:
            return [self._shown(prompt, sampled=sampled) for prompt in cast("Sequence[Prompt]", draw())]
        call = f"{self.custom}: {call}"
        with custom_code(call):
            given = list(draw())
        for one in given:
            if not isinstance(one, Prompt):
                raise CustomCodeError(f"{call} gave a {type(one).__name__} for a Prompt: {one!r:.80}")
            for name, kind in (("index", Integral), ("text", str), ("answer", str)):
                if not isinstance(value := getattr(one, name), kind):
                    raise CustomCodeError(
                        f"{call} gave a Prompt whose {name} is {value!r:.80}, no {kind.__name__}"
                    )
        prompts = cast("Sequence[Prompt]", given)
        different = len({prompt.index for prompt in prompts})
        if len(prompts) != count or different != count:
            raise CustomCodeError(
                f"{call} gave {len(prompts)} prompts with {different} different indices, not {count}",
                code="prompt-indices",
            )
        shown = list[Prompt]()
        for prompt in prompts:
            try:
                shown.append(self._shown(prompt, sampled=sampled))
            except ValueError as error:
                raise CustomCodeError(f"{call}: prompt {prompt.index}: {error}") from error
        return shown

    def _shown(self, prompt: Prompt, *, sampled: bool) -> Prompt:
        shown = self.texts.shown(prompt, chat=self.limits.config.data.apply_chat_template)
        whole = self.limits.rendered(shown)
        if (excess := self.limits.excess(whole, sampled=sampled)) is not None:
            whose = "" if self.custom else f"data.dataset_name: {self.limits.config.data.dataset_name}: "
            raise RefusedError(f"{whose}{excess}", code="row-length")
        return whole


def open_pairs(config: RunConfig, prompts: PromptSource, tokenizer: Tokenizer) -> PreferenceSource:
    """Return the given pairs of a DPO run."""
    kind = WrongAnswerPairs if config.data.embedded else PreferenceSource
    return kind(prompts, tokenizer)


def _open_files(limits: RowLimits) -> PromptSource:
    config = limits.config
    if any(source.streaming for source in config.train_sources.values()):
        chat = config.data.apply_chat_template
        rows, problems = read_held_out(config.validation_sources, config.row_kind, chat=chat)
        if problems:
            raise ConfigError(problems)
        held_out = [*limits.fitting(rows, sampled=config.loop.validates)]
        if problems := [*held_out_problems(config, held_out)]:
            raise ConfigError(problems)
        ((path, source),) = config.train_sources.items()
        stream = StreamSource(limits, path, source, held_out)
        stream.train_batch(1, config.prompts_per_step)  # what is wrong is told before the ranks start
        return stream
    examples, problems = read_run_examples(config)
    if not problems:
        problems = [*count_problems(config, examples.train, examples.held_out)]
        problems += run_token_problems(config, examples, limits.tokenizer.special_tokens)
    if problems:
        raise ConfigError(problems)
    train = [*limits.fitting(examples.train, sampled=config.row_kind is RowKind.PROMPTS)]
    held_out = [*limits.fitting(examples.held_out, sampled=config.loop.validates)]
    if problems := [*count_problems(config, train, held_out)]:
        why = "data.overlong: drop leaves too few rows"
        raise ConfigError(
            Problem("too-few-rows", one.path, f"{why}: {one.what}", one.remedy) for one in problems
        )
    weights, shuffle = config.source_weights, config.data.shuffle
    return EpochSource(train, held_out, config.seed, config.prompts_per_step, weights, shuffle)


def open_sets(config: RunConfig, tokenizer: Tokenizer) -> dict[str, list[Prompt]]:
    """Return the prompts of the sets of eval.sets, max_samples at most; see `open_set`."""
    assert config.eval is not None
    sets = {name: open_set(config, name, tokenizer)[: config.eval.max_samples] for name in config.eval.sets}
    for name, prompts in sets.items():
        if not prompts:
            raise ValueError(f"data.overlong: drop leaves no row of eval.sets.{name}")
    return sets


def open_set(config: RunConfig, name: str, tokenizer: Tokenizer) -> list[Prompt]:
    """Return the prompts of a set of eval.sets; ConfigError, or ValueError, for rows that do not serve."""
    assert config.eval is not None
    chat = config.data.apply_chat_template
    examples, problems = read_set(f"eval.sets.{name}", config.eval.sets[name], chat=chat)
    tokens, kind = tokenizer.special_tokens, RowKind.PROMPTS
    problems = problems or [*special_token_problems(config, f"eval.sets.{name}", examples, tokens, kind)]
    if problems:
        raise ConfigError(problems)
    return [*RowLimits(config, tokenizer, RowKind.PROMPTS).fitting(examples, sampled=True)]
