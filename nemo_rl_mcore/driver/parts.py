"""What a run needs beside its ranks: tokenizer, prompts, environment, opened and judged before any rank starts.

What it rests on besides its recipe, rows and code of the user's own, is kept as digests, by their keys. Code is a
function's source, with that of whatever of the user's own it names, and the values that it holds.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from nemo_rl_mcore.config import PolicyConfig, RunConfig
from nemo_rl_mcore.config.base import ConfigError
from nemo_rl_mcore.config.custom_code import imported, is_library
from nemo_rl_mcore.config.data import DataConfig, RowKind
from nemo_rl_mcore.config.source import TEXT_FILES
from nemo_rl_mcore.data.chat import make_observer, require_append_only
from nemo_rl_mcore.data.datasets import EpochSource, Prompt, PromptSource
from nemo_rl_mcore.data.examples import last_step
from nemo_rl_mcore.data.hub import end_ids, fetch_tokenizer, fetched_folder, too_large
from nemo_rl_mcore.data.sources import RowLimits, open_prompts
from nemo_rl_mcore.data.tokenizer import (
    CHAR_TOKENIZER_NAME,
    ChatTemplate,
    Tokenizer,
    load_tokenizer,
)
from nemo_rl_mcore.driver.algorithms.advantages import check_estimator
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.rollouts.player import ONE_ANSWER, EpisodeForm
from nemo_rl_mcore.environment.functions import RewardFunctions, require_columns
from nemo_rl_mcore.environment.interface import Environment
from nemo_rl_mcore.environment.registry import make_environment, math_environment
from nemo_rl_mcore.errors import RunStoppedError, code_of
from nemo_rl_mcore.losses import check_losses


@dataclass(frozen=True)
class Parts:
    """What a run needs beside its ranks; it is all there before they start. `config` ends when the data set does.

    ended_by: the paths of the keys that say so.
    """

    config: RunConfig
    tokenizer: Tokenizer
    prompts: PromptSource
    environment: Environment
    ended_by: tuple[str, ...]
    form: EpisodeForm = ONE_ANSWER


def open_parts(config: RunConfig) -> Parts:
    tokenizer = tokenizer_of(config.policy, config.data)
    turns, own = config.max_rollout_turns, config.env.custom
    try:
        check_losses(config)
        check_estimator(config)
        form = ONE_ANSWER
        if config.env.endpoint is not None:
            form = replace(ONE_ANSWER, turns=turns)
        elif turns > 1:
            policy, chat = config.policy, config.data.apply_chat_template
            if chat and config.algorithm == "ppo":  # a critic has no use for a template that rewrites turns
                require_append_only(tokenizer, policy.tokenizer.name)
            observer = make_observer(tokenizer, chat=chat)
            form = EpisodeForm(turns, policy.max_total_sequence_length, policy.reserved_tokens, observer)
        environment = make_environment(config.env)
        takes_turns = config.env.endpoint is not None or hasattr(environment, "step")
        if own is not None and turns > 1 and not takes_turns:
            raise ValueError(
                f"{config.algorithm}.max_rollout_turns: {turns} does nothing with env.custom.type: {own.type}, which "
                "scores the first answer and has no `step`; set it to 1"
            )
        if isinstance(environment, RewardFunctions) and not config.data.type:
            # The columns that are kept of each source whose prompts are answered; of an embedded task none.
            sources = config.validation_sources
            if config.row_kind is RowKind.PROMPTS:
                sources = config.train_sources | sources
            columns = {path: source.columns for path, source in sources.items()}
            require_columns(environment, columns or {"data.train": ()})
        prompts = hold_to_golds(config, open_prompts(config, tokenizer))
    except ValueError as error:
        raise RunStoppedError(str(error), code=code_of(error)) from error
    ended_by: tuple[str, ...] = (f"{config.algorithm}.max_num_steps",)
    if isinstance(prompts, EpochSource):
        steps, ended_by = last_step(config, len(prompts.train))
        loop = config.loop.model_copy(update={"max_num_steps": steps})
        config = config.model_copy(update={config.algorithm: loop})
    return Parts(with_inputs(config), tokenizer, prompts, environment, ended_by, form)


def tokenizer_of(policy: PolicyConfig, data: DataConfig | None = None) -> Tokenizer:
    """Fetch the tokenizer from the hub where it comes from there, with the weights: ranks have less time to start.

    data: how it shows rows. Raises RunStoppedError, also as `open_tokenizer`.
    """
    try:
        if policy.model_name is not None:
            fetched_folder(policy.model_name)
        if policy.tokenizer.name not in (policy.model_name, CHAR_TOKENIZER_NAME):
            fetch_tokenizer(policy.tokenizer.name)
    except ValueError as error:
        raise RunStoppedError(str(error), code=code_of(error)) from error
    return open_tokenizer(policy, data)


def open_tokenizer(policy: PolicyConfig, data: DataConfig | None = None) -> Tokenizer:
    """Load the tokenizer of files that are here; only now is it known which tokens a directory adds while it loads.

    Raises RunStoppedError, caused by the ConfigError of a tokenizer with more tokens than the model has rows.
    """
    given = policy.tokenizer
    template = ChatTemplate(given.chat_template, given.chat_template_kwargs or {})
    if data is not None:
        shown = {"add_bos": data.add_bos, "add_eos": data.add_eos, "imitated": data.imitated}
        template = replace(template, **shown)
    parses = data is not None and data.parses_content
    try:
        tokenizer = load_tokenizer(
            given.name,
            parse_content=parses,
            template=template,
            ends=end_ids(policy.model_name, given.name),
            stops=policy.generation.stop_token_ids or (),
        )
        rows = policy.model.vocab_size
        if tokenizer.vocab_size > rows:
            without = range(rows, tokenizer.vocab_size)[:_NAMED]
            lacking = [tokenizer.text_of([token]) for token in without]
            raise ConfigError([too_large(policy, tokenizer.vocab_size, lacking)])
    except ValueError as error:
        raise RunStoppedError(str(error), code=code_of(error)) from error
    return tokenizer


def first_prompt(config: RunConfig, rows: Sequence[Prompt], tokenizer: Tokenizer) -> str | None:
    sampled = config.row_kind is RowKind.PROMPTS
    try:
        shown = RowLimits(config, tokenizer).fitting(rows, sampled=sampled)
        return next((prompt.text for prompt in shown), None)
    except ValueError as error:
        raise RunStoppedError(str(error), code=code_of(error)) from error


_NAMED = 3
"""Tokens without a row, at most."""


def stop_ids_of(config: RunConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*tokenizer.ends, *(config.policy.generation.stop_token_ids or ()))))


_BLOCK = 1 << 20
_BLOCKS = 256
"""Of a larger file no more are read, spread evenly: the start of a run does not wait for a whole disk."""
_DIGITS = 12
_PLAIN = (str, bytes, int, float, complex, type(None))


def with_inputs(config: RunConfig) -> RunConfig:
    """Return a recipe with the digests of what a run of it reads now; its code is importable.

    Of rows, prompts and agents the files that are on this machine; of a folder those that are neither hidden nor
    another user's.
    """
    named: dict[str, Iterable[str]] = {}
    for key, source in (config.train_sources | config.validation_sources).items():
        named[f"{key}.data_path"] = [file for path in source.paths for file in sorted(glob(path)) or [path]]
        named |= {f"{key}.{name}": [path] for name in TEXT_FILES if (path := getattr(source, name))}
    if config.env.endpoint is not None:
        named["env.endpoint.command"] = config.env.endpoint.command[1:]
    found: dict[str, str] = {}
    for key, paths in named.items():
        files: list[Path] = []
        for path in map(Path, paths):
            inside = sorted(path.rglob("[!.]*")) if path.is_dir() else []
            files += [path] if path.is_file() else []
            for one in inside:
                hidden = any(part.startswith(".") for part in one.relative_to(path).parts)
                if one.is_file() and os.access(one, os.R_OK) and not hidden:
                    files.append(one)
        if files:
            found[key] = _digest("content", _content(files))
    for key, path in config.import_paths.items():
        code = (part.encode("utf-8", "replace") for part in _code(imported(path, key), {}))
        found[key] = _digest("code", code)
    return config.model_copy(update={"input_digests": found})


def _digest(what: str, parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8) + part)
    return f"{what} {total.hexdigest()[:_DIGITS]}"


def _content(paths: Iterable[Path]) -> Iterator[bytes]:
    for path in paths:
        size = path.stat().st_size
        blocks = -(-size // _BLOCK)
        yield size.to_bytes(8)
        with path.open("rb") as file:
            for block in (*range(0, blocks, max(1, -(-blocks // _BLOCKS))), max(0, blocks - 1)):
                file.seek(block * _BLOCK)
                yield file.read(_BLOCK)


def _code(value: object, seen: dict[int, object]) -> Iterator[str]:
    """Yield what decides what a value does; of what is neither plain nor the user's own, nothing."""
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, set | frozenset):
        yield from sorted("".join(_code(one, seen)) for one in cast("set[object]", value))
    elif id(value) not in seen:
        seen[id(value)] = value  # held, so that no other object has its id
        for one in _made_of(value):
            yield from _code(one, seen)


_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    re.Pattern: ("pattern", "flags"),
    partial: ("func", "args", "keywords"),
    MethodType: ("__func__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset"),
    CodeType: ("co_code", "co_names", "co_consts"),
}


def _made_of(value: Any) -> Iterable[object]:
    for kind, names in _ATTRIBUTES.items():
        if isinstance(value, kind):
            return [getattr(value, name) for name in names]
    if isinstance(value, dict):
        return [part for pair in cast("dict[object, object]", value).items() for part in pair]
    if isinstance(value, list | tuple):
        return cast("Iterable[object]", value)
    if isinstance(value, FunctionType):
        return () if is_library(value.__code__.co_filename) else _of_function(value)
    if isinstance(value, ModuleType):
        file = value.__file__ or "<frozen"
        return () if is_library(file) else (Path(file).read_bytes(),)
    kind = cast("type", value if isinstance(value, type) else value.__class__)
    module_file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    own = kind.__module__ == "__main__" or not is_library(module_file or "<frozen")
    if isinstance(value, type):  # without what Python notes of it, such as its line
        named = vars(kind).items()
        members = {name: one for name, one in named if not name.startswith("__") or callable(one)}
        return (kind.__qualname__, kind.__bases__, members) if own else ()
    held: dict[str, object] = getattr(value, "__dict__", {})
    return (kind, held) if own else (held.get("__wrapped__"),)  # a library's, made around a function


def _of_function(function: FunctionType) -> Iterator[object]:
    """Yield its source, or its code where it has none alone; its defaults; what it encloses; the globals it names."""
    source: object = function.__code__
    if function.__name__ != "<lambda>":  # whose lines may hold anything else
        with suppress(OSError, TypeError):
            source = inspect.getsource(function)
    yield source
    yield function.__defaults__
    yield function.__kwdefaults__
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty one
            yield cell.cell_contents
    codes = [function.__code__]
    while codes:
        code, *codes = codes
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)
        codes = [*(one for one in code.co_consts if isinstance(one, CodeType)), *codes]


_LOOKED_AT = 1000
"""Answers that are read before a run that gives the others 0, some milliseconds each; a recipe may have a million."""


def hold_to_golds(config: RunConfig, source: PromptSource) -> PromptSource:
    """Give the source of what env.math can score against: without rows to drop, which are counted; zeros are told.

    A source that does not end is asked for its first step and its validation; later answers are held to the same
    when they are scored. Raises ConfigError for an answer that is refused.
    """
    math = config.env.math
    if math is None:
        return source
    scored = list[Prompt]()  # what the policy answers
    if config.row_kind is RowKind.PROMPTS:
        ends = isinstance(source, EpochSource)
        scored += source.train if ends else source.train_batch(1, config.prompts_per_step)
    if config.loop.validates:
        scored += source.validation(config.loop.max_val_samples)
    if math.unparsable == "refuse":
        require_answers(config, scored)
        return source
    zeros = math.unparsable == "zero"
    if not zeros and not isinstance(source, EpochSource):
        return source
    looked_at = scored[:_LOOKED_AT] if zeros else scored
    wrong = math_environment(math).wrong_answers(looked_at)
    if count := sum(prompt.answer in wrong for prompt in looked_at):
        shown = ", ".join(repr(answer[:40]) for answer in [*wrong][:3])
        what = "each response to them scores 0" if zeros else "those rows are left out"
        write_line(
            sys.stderr,
            f"env.math.unparsable: nothing can equal the answers of {count} of {len(looked_at)} rows ({shown}); {what}",
        )
    if not isinstance(source, EpochSource) or zeros:
        return source
    kept = config.row_kind is not RowKind.PROMPTS
    return replace(
        source,
        train=[row for row in source.train if kept or row.answer not in wrong],
        held_out=[row for row in source.held_out if row.answer not in wrong],
    )


def require_answers(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError for answers of the prompts that env.math cannot score against, unless the recipe takes them."""
    if config.env.math is not None and config.env.math.unparsable == "refuse":
        math_environment(config.env.math).require_answers(prompts)
