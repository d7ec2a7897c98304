"""A run's parts besides its ranks (tokenizer, prompts, environment), opened and checked before any rank starts.

Inputs besides the recipe (rows and the user's own code) are stored as digests by key. A function's digest covers the
function's source, all of the user's code that the source names, and the values that the function holds.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from nemo_rl_mcore.config import ClippedPGLossConfig, PolicyConfig, RunConfig
from nemo_rl_mcore.config.base import ConfigError
from nemo_rl_mcore.config.custom_code import LIBRARIES, imported
from nemo_rl_mcore.config.data import DataConfig, RowKind
from nemo_rl_mcore.config.source import TEXT_FILES
from nemo_rl_mcore.data.chat import make_observer, require_append_only
from nemo_rl_mcore.data.datasets import EpochSource, Prompt, PromptSource
from nemo_rl_mcore.data.examples import last_step
from nemo_rl_mcore.data.hub import end_ids, fetch_tokenizer, fetched_folder, too_large
from nemo_rl_mcore.data.sources import RowLimits, open_prompts
from nemo_rl_mcore.data.tokenizer import CHAR_TOKENIZER_NAME, ChatTemplate, Tokenizer, load_tokenizer
from nemo_rl_mcore.driver.algorithms.advantages import estimator_of
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.rollouts.player import ONE_ANSWER, EpisodeForm
from nemo_rl_mcore.environment.functions import RewardFunctions, require_columns
from nemo_rl_mcore.environment.interface import Environment
from nemo_rl_mcore.environment.registry import make_environment, math_environment
from nemo_rl_mcore.errors import RunStoppedError, code_of
from nemo_rl_mcore.losses import check_losses


@dataclass(frozen=True)
class Parts:
    """A run's parts besides its ranks, opened before they start. config: the recipe, limited to the data set's end.

    environments: by the rows' `env_name`. ended_by: the paths of the keys that determine this end.
    """

    config: RunConfig
    tokenizer: Tokenizer
    prompts: PromptSource
    environments: Mapping[str, Environment]
    ended_by: tuple[str, ...]
    form: EpisodeForm = ONE_ANSWER


@contextmanager
def run_stopping() -> Generator[None]:
    """Convert a ValueError, a user mistake, to the RunStoppedError that ends the run."""
    try:
        yield
    except ValueError as error:
        raise RunStoppedError(str(error), code=code_of(error)) from error


def open_parts(config: RunConfig) -> Parts:
    tokenizer = tokenizer_of(config.policy, config.data)
    turns, own = config.max_rollout_turns, config.env.custom
    with run_stopping():
        check_losses(config)
        if f"{config.algorithm}.adv_estimator.type" in config.import_paths:
            estimator_of(config, ClippedPGLossConfig())  # raises ValueError for a faulty class
        form = ONE_ANSWER
        if config.env.endpoint is not None:
            form = replace(ONE_ANSWER, turns=turns)
        elif turns > 1:
            policy, chat = config.policy, config.data.apply_chat_template
            if chat and config.algorithm == "ppo":  # a critic cannot evaluate turns that a template rewrites
                require_append_only(tokenizer, policy.tokenizer.name)
            observer = make_observer(tokenizer, chat=chat)
            form = EpisodeForm(turns, policy.max_total_sequence_length, policy.reserved_tokens, observer)
        environments = {name: make_environment(section) for name, section in config.env.by_name.items()}
        custom = next((one for name, one in environments.items() if name in ("", "custom")), None)
        takes_turns = config.env.endpoint is not None or hasattr(custom, "step")
        if own is not None and turns > 1 and not takes_turns:
            raise ValueError(
                f"{config.algorithm}.max_rollout_turns: {turns} does nothing with env.custom.type: {own.type}, which "
                "scores the first answer and has no `step`; set it to 1"
            )
        # The kept columns of each source whose prompts are answered; an embedded task has none.
        sources = config.validation_sources
        if config.row_kind is RowKind.PROMPTS:
            sources = config.train_sources | sources
        for name, environment in environments.items():
            if isinstance(environment, RewardFunctions) and not config.data.type:
                own_rows = {path: one for path, one in sources.items() if name in ("", one.env_name)}
                columns = {path: source.columns for path, source in own_rows.items()}
                require_columns(environment, columns or {"data.train": ()})
        prompts = hold_to_golds(config, open_prompts(config, tokenizer))
    ended_by: tuple[str, ...] = (f"{config.algorithm}.max_num_steps",)
    if isinstance(prompts, EpochSource):
        steps, ended_by = last_step(config, len(prompts.train))
        loop = config.loop.model_copy(update={"max_num_steps": steps})
        config = config.model_copy(update={config.algorithm: loop})
    return Parts(with_inputs(config), tokenizer, prompts, environments, ended_by, form)


def tokenizer_of(policy: PolicyConfig, data: DataConfig | None = None) -> Tokenizer:
    """Fetch the weights and the tokenizer from the hub, since ranks have less time to start, and load the tokenizer.

    data: determines the row format. Raises RunStoppedError, as `open_tokenizer` does.
    """
    with run_stopping():
        if policy.model_name is not None:
            fetched_folder(policy.model_name)
        name = policy.tokenizer.name
        if name not in (policy.model_name, CHAR_TOKENIZER_NAME):
            fetch_tokenizer(name)
    return open_tokenizer(policy, data)


def open_tokenizer(policy: PolicyConfig, data: DataConfig | None = None) -> Tokenizer:
    """Load the tokenizer from local files, including any tokens that its directory adds.

    Raises RunStoppedError, from a ConfigError if the tokenizer has more tokens than the model has rows.
    """
    given = policy.tokenizer
    template = ChatTemplate(given.chat_template, given.chat_template_kwargs or {})
    if data is not None:
        shown = {"add_bos": data.add_bos, "add_eos": data.add_eos, "imitated": data.imitated}
        template = replace(template, **shown)
    with run_stopping():
        tokenizer = load_tokenizer(
            given.name,
            parse_content=data is not None and data.special_tokens_in_content == "parse",
            template=template,
            ends=end_ids(policy.model_name, given.name),
            stops=policy.generation.stop_token_ids or (),
        )
        rows = policy.model.vocab_size
        if tokenizer.vocab_size > rows:
            without = range(rows, tokenizer.vocab_size)[:_NAMED]
            lacking = [tokenizer.text_of([token]) for token in without]
            raise ConfigError([too_large(policy, tokenizer.vocab_size, lacking)])
    return tokenizer


def first_prompt(config: RunConfig, rows: Sequence[Prompt], tokenizer: Tokenizer) -> str | None:
    with run_stopping():
        shown = RowLimits(config, tokenizer).fitting(rows, sampled=config.row_kind is RowKind.PROMPTS)
        return next((prompt.text for prompt in shown), None)


_NAMED = 3
"""Maximum number of tokens without a row that a message names."""


def stop_ids_of(config: RunConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*tokenizer.ends, *(config.policy.generation.stop_token_ids or ()))))


_BLOCK = 1 << 20
_BLOCKS = 256
"""Number of evenly spread blocks read from a larger file, so that a run starts without reading a whole disk."""
_DIGITS = 12
_PLAIN = (str, bytes, int, float, complex, type(None))


def with_inputs(config: RunConfig) -> RunConfig:
    """Return a recipe with digests of its current inputs; the user's code must be importable.

    Rows, prompts and agents are digested as local files; in a folder, only visible, readable files.
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
            if path.is_file():
                files.append(path)
            for one in sorted(path.rglob("[!.]*")):
                hidden = any(part.startswith(".") for part in one.relative_to(path).parts)
                if one.is_file() and os.access(one, os.R_OK) and not hidden:
                    files.append(one)
        if files:
            found[key] = f"content {_digest(part for file in files for part in _content(file))}"
    for key, path in config.import_paths.items():
        code = _digest(part.encode("utf-8", "replace") for part in _code(imported(path, key), {}))
        found[key] = f"code {code}"
    return config.model_copy(update={"input_digests": found})


def _digest(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8) + part)
    return total.hexdigest()[:_DIGITS]


def _content(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    blocks = -(-size // _BLOCK)
    yield size.to_bytes(8)
    with path.open("rb") as file:
        for block in (*range(0, blocks, max(1, -(-blocks // _BLOCKS))), max(0, blocks - 1)):
            file.seek(block * _BLOCK)
            yield file.read(_BLOCK)


def _code(value: object, seen: dict[int, object]) -> Iterator[str]:
    """Yield a value's source and contents, if they are plain or the user's own."""
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, set | frozenset):
        yield from sorted("".join(_code(one, seen)) for one in cast("set[object]", value))
    elif id(value) not in seen:
        seen[id(value)] = value  # kept alive, so that no other object gets its id
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
        return () if value.__code__.co_filename.startswith(LIBRARIES) else _of_function(value)
    if isinstance(value, ModuleType):
        file = value.__file__ or "<frozen"
        return () if file.startswith(LIBRARIES) else (Path(file).read_bytes(),)
    kind = cast("type", value if isinstance(value, type) else value.__class__)
    module_file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    own = kind.__module__ == "__main__" or not (module_file or "<frozen").startswith(LIBRARIES)
    if isinstance(value, type):  # without Python's own attributes, such as the line number
        named = vars(kind).items()
        members = {name: one for name, one in named if not name.startswith("__") or callable(one)}
        return (kind.__qualname__, kind.__bases__, members) if own else ()
    held: dict[str, object] = getattr(value, "__dict__", {})
    return (kind, held) if own else (held.get("__wrapped__"),)  # a library's wrapper around a function


def _of_function(function: FunctionType) -> Iterator[object]:
    """Yield a function's source (or else its code), defaults, enclosed values and referenced globals."""
    source: object = function.__code__
    if function.__name__ != "<lambda>":  # a lambda's lines may hold other code
        with suppress(OSError, TypeError):
            source = inspect.getsource(function)
    yield source
    yield function.__defaults__
    yield function.__kwdefaults__
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            yield cell.cell_contents
    codes = [function.__code__]
    while codes:
        code, *codes = codes
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)
        codes = [*(one for one in code.co_consts if isinstance(one, CodeType)), *codes]


_LOOKED_AT = 1000
"""Maximum number of answers parsed before a run, some milliseconds each, if unparsable ones score 0."""


def hold_to_golds(config: RunConfig, source: PromptSource) -> PromptSource:
    """Drop and count rows whose answers env.math cannot parse, or report such answers; return the source.

    For an endless source, only the first step and the validation are checked here; later answers are checked when
    scored. Raises ConfigError for a refused answer.
    """
    math = config.env.math
    if math is None:
        return source
    scored = list[Prompt]()  # the prompts that the policy answers
    if config.row_kind is RowKind.PROMPTS:
        ends = isinstance(source, EpochSource)
        scored += source.train if ends else source.train_batch(1, config.prompts_per_step)
    if config.loop.validates:
        scored += source.validation(config.loop.max_val_samples)
    scored = [prompt for prompt in scored if prompt.env_name in ("", "math")]
    if math.unparsable == "refuse":
        math_environment(math).require_answers(scored)
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

    def readable(row: Prompt) -> bool:
        return row.env_name not in ("", "math") or row.answer not in wrong

    return replace(
        source,
        train=[row for row in source.train if kept or readable(row)],
        held_out=[*filter(readable, source.held_out)],
    )
