"""A recipe's prompts: an embedded task, sources of rows, or a user's class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from numbers import Integral
from typing import cast

from nemo_rl_mcore.config.algorithm import RolloutConfig
from nemo_rl_mcore.config.base import ConfigError, Problem
from nemo_rl_mcore.config.custom_code import build, custom_code
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import SourceDefaults
from nemo_rl_mcore.data.answers import answer_row, pair_rows
from nemo_rl_mcore.data.chat import with_template
from nemo_rl_mcore.data.datasets import DigitTaskSource, EpochSource, Prompt, PromptSource
from nemo_rl_mcore.data.examples import (
    TOKENS_KEY,
    TOKENS_REMEDY,
    count_problems,
    first_token,
    read_examples,
    read_set,
    read_texts,
    special_token_problems,
)
from nemo_rl_mcore.data.messages import literal_spans
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.errors import CustomCodeError, RefusedError, code_of

_CHARACTERS = 256
"""A token stands for fewer characters than this in running text: texts above the product are not even encoded."""
_TOO_LONG = "row-length"


@dataclass(frozen=True)
class RowLimits:
    """A run's limits for rows; kind: replaces the recipe's kind, for rows that are not trained on."""

    config: RunConfig
    tokenizer: Tokenizer
    kind: RowKind | None = None

    def fitting(self, prompts: Iterable[Prompt], *, sampled: bool) -> Iterator[Prompt]:
        """Yield the rows within the limits; raises ValueError for others, unless `data.overlong` drops long ones."""
        for prompt in prompts:
            try:
                shown = self.whole(prompt, sampled=sampled)
            except ValueError as error:
                too_long = code_of(error) == _TOO_LONG
                if too_long and self.config.data.overlong == "drop":
                    continue
                remedy = ", shorten the row, or set data.overlong: drop" if too_long else ""
                raise RefusedError(f"{prompt.place}: {error}{remedy}", code=code_of(error)) from error
            yield shown

    def whole(self, prompt: Prompt, *, sampled: bool) -> Prompt:
        """Render a prompt; raises ValueError if it is too long or names an environment that has no section.

        sampled: the policy answers it.
        """
        shown, given = self.rendered(prompt), self.config.env.given
        if len(given) < 2:
            shown = replace(shown, env_name="")
        elif shown.env_name not in given:
            what = f"env_name {shown.env_name!r} is no section of env; it has {', '.join(given)}"
            raise RefusedError(what, code="unknown-environment")
        longest_prompt, longest = self.config.max_prompt_length, self.config.policy.max_total_sequence_length
        more = "has {} characters, more than the {} tokens that are allowed can be: raise"
        if sampled:
            if (characters := len(shown.text)) > _CHARACTERS * longest_prompt:
                what = f"the prompt {more.format(characters, longest_prompt)} data.max_input_seq_length"
                raise RefusedError(what, code=_TOO_LONG)
            if (length := len(self.tokenizer.encode(shown.text, shown.literal))) > longest_prompt:
                what = f"the prompt has {length} tokens, and {longest_prompt} are allowed: raise"
                remedy = "data.max_input_seq_length, or policy.max_total_sequence_length where it is null"
                raise RefusedError(f"{what} {remedy}", code=_TOO_LONG)
        if (kind := self.kind or self.config.row_kind) is RowKind.PROMPTS:
            return shown
        turns = [turn.content for turn in shown.context]
        characters = max(map(len, [shown.text, *turns, shown.imitated, shown.rejected or ""]))
        if characters > _CHARACTERS * longest:
            what = f"the row {more.format(characters, longest)} policy.max_total_sequence_length"
            raise RefusedError(what, code=_TOO_LONG)
        pairs = pair_rows(shown, self.tokenizer) if kind is RowKind.PAIRS else ()
        length = max(len(row.ids) for row in pairs or (answer_row(shown, self.tokenizer),))
        if length > longest:
            what = f"the row has {length} tokens: raise policy.max_total_sequence_length: {longest}"
            raise RefusedError(what, code=_TOO_LONG)
        return shown

    def rendered(self, prompt: Prompt) -> Prompt:
        """Apply the chat template, if any, and mark special tokens that stay text; raises ValueError if undecided."""
        data, tokens = self.config.data, self.tokenizer.special_tokens
        kind = self.kind or self.config.row_kind
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


@dataclass(frozen=True)
class OwnSource(PromptSource):
    """A user's class, checked against `PromptSource`; its prompts get the same limits and template as rows of files."""

    source: PromptSource
    limits: RowLimits

    def train_batch(self, step: int, count: int) -> list[Prompt]:
        sampled = self.limits.config.row_kind is RowKind.PROMPTS
        return self._drawn("train_batch", step, count, sampled=sampled)

    def validation(self, count: int | None) -> list[Prompt]:
        assert count is not None  # a rule demands a number for a class
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
    """Return a run's prompts; raises ValueError (ConfigError among them) for unusable files or an unusable class."""
    data, limits = config.data, RowLimits(config, tokenizer)
    if data.dataset_name == "files":
        return _open_files(limits)
    if data.dataset_name == "custom":
        assert data.type is not None
        arguments = {"seed": config.seed, **(data.args or {})}
        own = build(data.type, "data.type", arguments, needs=("train_batch", "validation"))
        return OwnSource(cast("PromptSource", own), limits)
    # The keys that set the numbers of prompts in a step and in a validation.
    name, key = config.algorithm, "policy.train_global_batch_size"
    keys = key, f"{name}.max_val_samples or {name}.val_batches"
    if isinstance(config.loop, RolloutConfig):
        keys = f"{name}.num_prompts_per_step", f"{name}.max_val_samples"
    if not data.apply_chat_template and data.default is None:
        return DigitTaskSource(data.dataset_name, data.num_digits, config.seed, keys)
    texts, wrong = read_texts(data.default or SourceDefaults())
    if wrong:
        raise ConfigError([problem.below("data.default") for problem in wrong])

    def show(prompt: Prompt) -> Prompt:
        try:
            return limits.whole(texts.shown(prompt, chat=data.apply_chat_template), sampled=True)
        except ValueError as error:
            what = f"data.dataset_name: {data.dataset_name}: {error}"
            raise RefusedError(what, code=code_of(error)) from error

    task = DigitTaskSource(data.dataset_name, data.num_digits, config.seed, keys, show)
    # All prompts are equally long: a prompt that is too long is refused before the run starts.
    task.train_batch(1, 1)
    return task


def _open_files(limits: RowLimits) -> PromptSource:
    config, sources = limits.config, limits.config.train_sources
    chat, kind = config.data.apply_chat_template, config.row_kind
    examples, problems = read_examples(sources, config.validation_sources, kind, chat=chat)
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
    return EpochSource(
        train, held_out, config.seed, config.prompts_per_step, config.source_weights, config.data.shuffle
    )


def open_sets(config: RunConfig, tokenizer: Tokenizer) -> dict[str, list[Prompt]]:
    """Return each eval set's prompts; raises ConfigError, or ValueError, for unusable rows."""
    assert config.eval is not None
    kind, sets = RowKind.PROMPTS, dict[str, list[Prompt]]()
    for name, source in config.eval.sets.items():
        path, chat = f"eval.sets.{name}", config.data.apply_chat_template
        rows, _, problems = read_set(path, source, kind, chat=chat, name=source.name)
        problems = problems or [*special_token_problems(config, {path: rows}, tokenizer.special_tokens, kind)]
        if problems:
            raise ConfigError(problems)
        sets[name] = [*RowLimits(config, tokenizer, kind).fitting(rows, sampled=True)]
        if not sets[name]:
            raise ValueError(f"data.overlong: drop leaves no row of {path}")
    return sets
