"""From a recipe to its prompts: an embedded task, JSONL files, or a class of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import cast

from nemo_rl_mcore.config.algorithm import RolloutConfig
from nemo_rl_mcore.config.base import ConfigError
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.master import RunConfig
from nemo_rl_mcore.custom_code import build, custom_code
from nemo_rl_mcore.data.answers import answer_row
from nemo_rl_mcore.data.chat import with_template
from nemo_rl_mcore.data.datasets import DigitTaskSource, Prompt, PromptSource
from nemo_rl_mcore.data.epochs import EpochSource
from nemo_rl_mcore.data.jsonl import Example, read_examples, read_sets
from nemo_rl_mcore.data.preference import (
    GivenPairs,
    PreferenceSource,
    WrongAnswerPairs,
    given_pair,
    pair_rows,
)
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.errors import CustomCodeError


def open_prompts(config: RunConfig, tokenizer: Tokenizer) -> PromptSource:
    """The prompts of a run; ValueError, or ConfigError which is one, for files or a class that do not serve."""
    match config.data.dataset_name:
        case "files":
            return _open_files(config, tokenizer)
        case "custom":
            return _open_class(config, tokenizer)
        case task:
            return DigitTaskSource(task, config.data.num_digits, config.seed, _count_keys(config))


def open_sets(config: RunConfig, tokenizer: Tokenizer) -> dict[str, list[Prompt]]:
    """The prompts of each set of `eval`; ValueError, or ConfigError which is one, for files that do not serve."""
    assert config.eval is not None
    examples, problems = read_sets(config.eval, chat=config.data.apply_chat_template)
    if problems:
        raise ConfigError(problems)
    limits = _Limits(config, tokenizer)
    prompts = {name: limits.fitting(rows, sampled=True) for name, rows in examples.items()}
    for name, fitting in prompts.items():
        if not fitting:
            raise ValueError(f"data.overlong: drop leaves no row of eval.sets.{name}")
    return prompts


def _count_keys(config: RunConfig) -> tuple[str, str]:
    """What says how many prompts a step of the algorithm takes, and a validation."""
    name = config.algorithm
    if isinstance(config.loop, RolloutConfig):
        return f"{name}.num_prompts_per_step", f"{name}.max_val_samples"
    return "policy.train_global_batch_size", f"{name}.max_val_samples or {name}.val_batches"


def open_pairs(config: RunConfig, prompts: PromptSource, tokenizer: Tokenizer) -> PreferenceSource:
    """The given pairs of a DPO run."""
    kind = WrongAnswerPairs if config.data.embedded else GivenPairs
    return kind(prompts, tokenizer)


def _open_class(config: RunConfig, tokenizer: Tokenizer) -> PromptSource:
    path, key = config.data.type, "data.type"
    assert path is not None
    arguments = {"seed": config.seed, **(config.data.args or {})}
    source = cast("PromptSource", build(path, key, arguments, needs=("train_batch", "validation")))
    return _OwnSource(source, f"{key}: {path}", _Limits(config, tokenizer))


@dataclass(frozen=True)
class _OwnSource:
    """A class of the user's own, held to what a `PromptSource` promises, and its prompts to the limits of a row."""

    source: PromptSource
    name: str
    limits: _Limits

    def train_batch(self, step: int, count: int) -> list[Prompt]:
        """See `PromptSource.train_batch`."""
        call = f"train_batch({step}, {count})"
        with custom_code(f"{self.name}: {call}"):
            given = list(self.source.train_batch(step, count))
        return self._checked(given, call, count, sampled=self.limits.config.row_kind is RowKind.PROMPTS)

    def validation(self, count: int) -> list[Prompt]:
        """See `PromptSource.validation`."""
        call = f"validation({count})"
        with custom_code(f"{self.name}: {call}"):
            given = list(self.source.validation(count))
        return self._checked(given, call, count, sampled=True)

    def _checked(self, prompts: Sequence[object], call: str, count: int, *, sampled: bool) -> list[Prompt]:
        whole = [self._prompt(prompt, call) for prompt in prompts]
        different = len({prompt.index for prompt in whole})
        if len(whole) != count or different != count:
            raise CustomCodeError(
                f"{self.name}: {call} gave {len(whole)} prompts with {different} different indices, not {count}"
            )
        return [self._fitting(prompt, call, sampled=sampled) for prompt in whole]

    def _prompt(self, given: object, call: str) -> Prompt:
        if not isinstance(given, Prompt):
            raise CustomCodeError(
                f"{self.name}: {call} gave a {type(given).__name__} for a Prompt: {given!r:.80}"
            )
        for name, kind in (("index", Integral), ("text", str), ("answer", str)):
            if not isinstance(value := getattr(given, name), kind):
                raise CustomCodeError(
                    f"{self.name}: {call} gave a Prompt whose {name} is {value!r:.80}, no {kind.__name__}"
                )
        return given

    def _fitting(self, prompt: Prompt, call: str, *, sampled: bool) -> Prompt:
        where = f"{self.name}: {call}: prompt {prompt.index}"
        try:
            prompt = self.limits.rendered(prompt)
            excess = self.limits.excess(prompt, sampled=sampled)
        except ValueError as error:
            raise CustomCodeError(f"{where}: {error}") from error
        if excess is not None:
            raise CustomCodeError(f"{where}: {excess}")
        return prompt


def _open_files(config: RunConfig, tokenizer: Tokenizer) -> EpochSource:
    examples, problems = read_examples(config.data, config.row_kind)
    if problems:
        raise ConfigError(problem.below("data") for problem in problems)
    limits = _Limits(config, tokenizer)
    train = limits.fitting(examples.train, sampled=config.row_kind is RowKind.PROMPTS)
    held_out = limits.fitting(examples.held_out, sampled=config.loop.validates)
    if len(train) < config.prompts_per_step:
        raise ValueError(
            f"data.overlong: drop leaves {len(train)} rows to train on, and a step takes {config.prompts_per_step}"
        )
    return EpochSource(train, held_out, config.seed, config.prompts_per_step)


@dataclass(frozen=True)
class _Limits:
    """Rows as prompts, without those that have too many tokens."""

    config: RunConfig
    tokenizer: Tokenizer

    def fitting(self, examples: Sequence[Example], *, sampled: bool) -> list[Prompt]:
        """The rows that fit; `sampled` says that the policy answers their prompts.

        Raises ValueError for a row that cannot be encoded and, unless `data.overlong` is drop, for one too long.
        """
        kept: list[Prompt] = []
        for example in examples:
            try:
                prompt = self._prompt(example)
                excess = self.excess(prompt, sampled=sampled)
            except ValueError as error:
                raise ValueError(f"{example.place}: {error}") from error
            if excess is None:
                kept.append(prompt)
            elif self.config.data.overlong == "error":
                raise ValueError(f"{example.place}: {excess}, shorten the row, or set data.overlong: drop")
        return kept

    def _prompt(self, example: Example) -> Prompt:
        text, context = (example.context, ()) if isinstance(example.context, str) else ("", example.context)
        prompt = Prompt(
            example.index,
            text,
            example.answer,
            example.rejected,
            context,
            example.imitate_all,
            example.place,
        )
        return self.rendered(prompt)

    def rendered(self, prompt: Prompt) -> Prompt:
        """The prompt in the chat template, where one is asked for."""
        return with_template(prompt, self.tokenizer) if self.config.data.apply_chat_template else prompt

    def excess(self, prompt: Prompt, *, sampled: bool) -> str | None:
        """What is too long, and the key to raise; None where the row fits."""
        longest_prompt, longest = self.config.max_prompt_length, self.config.policy.max_total_sequence_length
        if sampled and (length := len(self.tokenizer.encode(prompt.text))) > longest_prompt:
            return (
                f"the prompt has {length} tokens, and {longest_prompt} are allowed: raise data.max_input_seq_length, "
                "or policy.max_total_sequence_length where it is null"
            )
        if self.config.row_kind is RowKind.PROMPTS:
            return None
        if self.config.row_kind is RowKind.PAIRS:
            rows = pair_rows(given_pair(prompt), self.tokenizer)
        else:
            rows = (answer_row(prompt, self.tokenizer),)
        length = max(len(row.ids) for row in rows)
        if length > longest:
            return f"the row has {length} tokens: raise policy.max_total_sequence_length: {longest}"
        return None
