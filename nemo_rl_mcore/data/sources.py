"""From a recipe to its prompts: an embedded task, sources of rows, or a class of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import cast

from nemo_rl_mcore.config.algorithm import RolloutConfig
from nemo_rl_mcore.config.base import ConfigError
from nemo_rl_mcore.config.custom_code import build, custom_code
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import SourceDefaults
from nemo_rl_mcore.data.datasets import DigitTaskSource, Prompt, PromptSource
from nemo_rl_mcore.data.epochs import EpochSource
from nemo_rl_mcore.data.examples import read_run_examples, read_set
from nemo_rl_mcore.data.limits import Limits
from nemo_rl_mcore.data.preference import GivenPairs, PreferenceSource, WrongAnswerPairs
from nemo_rl_mcore.data.prompt_texts import PromptTexts, read_texts
from nemo_rl_mcore.data.row_counts import count_problems, require_enough_left
from nemo_rl_mcore.data.special_tokens import run_token_problems, special_token_problems
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.errors import CustomCodeError, RefusedError


def open_prompts(config: RunConfig, tokenizer: Tokenizer) -> PromptSource:
    """Return the prompts of a run; ValueError, or ConfigError which is one, for files or a class that do not serve."""
    match config.data.dataset_name:
        case "files":
            return _open_files(config, tokenizer)
        case "custom":
            return _open_class(config, tokenizer)
        case task:
            prompts = DigitTaskSource(task, config.data.num_digits, config.seed, _count_keys(config))
            return _in_texts(prompts, config, tokenizer) if config.data.shown_in_texts else prompts


def _count_keys(config: RunConfig) -> tuple[str, str]:
    """Return what says how many prompts a step of the algorithm takes, and a validation."""
    name = config.algorithm
    if isinstance(config.loop, RolloutConfig):
        return f"{name}.num_prompts_per_step", f"{name}.max_val_samples"
    return "policy.train_global_batch_size", f"{name}.max_val_samples or {name}.val_batches"


def _in_texts(prompts: PromptSource, config: RunConfig, tokenizer: Tokenizer) -> PromptSource:
    texts, wrong = read_texts(config.data.default or SourceDefaults())
    if wrong:
        raise ConfigError([problem.below("data.default") for problem in wrong])
    shown = _ShownInTexts(prompts, texts, Limits(config, tokenizer))
    shown.train_batch(1, 1)  # all prompts of a task are as long: one that has no room is told now
    return shown


@dataclass(frozen=True)
class _ShownInTexts(PromptSource):
    """The prompts of an embedded task between the texts of the recipe, and in the chat template."""

    prompts: PromptSource
    texts: PromptTexts
    limits: Limits

    def train_batch(self, step: int, count: int) -> list[Prompt]:
        """See `PromptSource.train_batch`."""
        return [*map(self._shown, self.prompts.train_batch(step, count))]

    def validation(self, count: int | None) -> list[Prompt]:
        """See `PromptSource.validation`."""
        return [*map(self._shown, self.prompts.validation(count))]

    def _shown(self, prompt: Prompt) -> Prompt:
        shown = self.texts.shown(prompt.text, chat=self.limits.config.data.apply_chat_template)
        text, context = (shown, ()) if isinstance(shown, str) else ("", shown)
        frame = self.texts.frame(chat=self.limits.config.data.apply_chat_template)
        whole = self.limits.rendered(replace(prompt, text=text, context=context), frame)
        if (excess := self.limits.excess(whole, sampled=True)) is not None:
            raise RefusedError(
                f"data.dataset_name: {self.limits.config.data.dataset_name}: {excess}", code="row-length"
            )
        return whole


def open_pairs(config: RunConfig, prompts: PromptSource, tokenizer: Tokenizer) -> PreferenceSource:
    """Return the given pairs of a DPO run."""
    kind = WrongAnswerPairs if config.data.embedded else GivenPairs
    return kind(prompts, tokenizer)


def _open_class(config: RunConfig, tokenizer: Tokenizer) -> PromptSource:
    path, key = config.data.type, "data.type"
    assert path is not None
    arguments = {"seed": config.seed, **(config.data.args or {})}
    source = cast("PromptSource", build(path, key, arguments, needs=("train_batch", "validation")))
    return _OwnSource(source, f"{key}: {path}", Limits(config, tokenizer))


@dataclass(frozen=True)
class _OwnSource(PromptSource):
    """A class of the user's own, held to what a `PromptSource` promises, and its prompts to the limits of a row."""

    source: PromptSource
    name: str
    limits: Limits

    def train_batch(self, step: int, count: int) -> list[Prompt]:
        """See `PromptSource.train_batch`."""
        call = f"train_batch({step}, {count})"
        with custom_code(f"{self.name}: {call}"):
            given = list(self.source.train_batch(step, count))
        return self._checked(given, call, count, sampled=self.limits.config.row_kind is RowKind.PROMPTS)

    def validation(self, count: int | None) -> list[Prompt]:
        """See `PromptSource.validation`."""
        assert count is not None  # the rules ask a number of a class
        call = f"validation({count})"
        with custom_code(f"{self.name}: {call}"):
            given = list(self.source.validation(count))
        return self._checked(given, call, count, sampled=True)

    def _checked(self, prompts: Sequence[object], call: str, count: int, *, sampled: bool) -> list[Prompt]:
        whole = [self._prompt(prompt, call) for prompt in prompts]
        different = len({prompt.index for prompt in whole})
        if len(whole) != count or different != count:
            raise CustomCodeError(
                f"{self.name}: {call} gave {len(whole)} prompts with {different} different indices, not {count}",
                code="prompt-indices",
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


def _open_files(config: RunConfig, tokenizer: Tokenizer) -> PromptSource:
    limits = Limits(config, tokenizer)
    if any(source.streaming for source in config.train_sources.values()):
        from nemo_rl_mcore.data.streams import open_streamed

        return open_streamed(limits)
    examples, problems = read_run_examples(config)
    if not problems:
        problems = [*count_problems(config, examples.train, examples.held_out)]
        problems += run_token_problems(config, examples, tokenizer.special_tokens)
    if problems:
        raise ConfigError(problems)
    train = [*limits.fitting(examples.train, sampled=config.row_kind is RowKind.PROMPTS)]
    held_out = [*limits.fitting(examples.held_out, sampled=config.loop.validates)]
    require_enough_left(config, train, held_out)
    return EpochSource(
        train,
        held_out,
        config.seed,
        config.prompts_per_step,
        config.source_weights,
        config.data.shuffle,
    )


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
    return [*Limits(config, tokenizer, RowKind.PROMPTS).fitting(examples, sampled=True)]
