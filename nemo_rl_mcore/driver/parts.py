"""What a run needs beside its ranks: tokenizer, prompts, environment, opened and judged before any rank starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nemo_rl_mcore.config import PolicyConfig, RunConfig
from nemo_rl_mcore.config.base import ConfigError
from nemo_rl_mcore.config.data import DataConfig, RowKind
from nemo_rl_mcore.data.datasets import PromptSource
from nemo_rl_mcore.data.ends import end_ids
from nemo_rl_mcore.data.epochs import EpochSource
from nemo_rl_mcore.data.hub import fetch_tokenizer, fetched_folder
from nemo_rl_mcore.data.limits import Limits
from nemo_rl_mcore.data.observations import make_observer, require_append_only
from nemo_rl_mcore.data.sources import open_prompts
from nemo_rl_mcore.data.tokenizer import (
    CHAR_TOKENIZER_NAME,
    ChatTemplate,
    GivenAnswers,
    Tokenizer,
    load_tokenizer,
)
from nemo_rl_mcore.data.tokenizer_folder import too_large
from nemo_rl_mcore.driver.algorithms.custom_estimator import check_estimator
from nemo_rl_mcore.driver.data_files import DataPlan, last_step
from nemo_rl_mcore.driver.golds import hold_to_golds, require_golds_run_first
from nemo_rl_mcore.driver.inputs import with_inputs
from nemo_rl_mcore.driver.rollouts.episodes import ONE_ANSWER, EpisodeForm
from nemo_rl_mcore.environment.functions import RewardFunctions, require_columns
from nemo_rl_mcore.environment.interface import Environment
from nemo_rl_mcore.environment.registry import make_environment
from nemo_rl_mcore.errors import RunStoppedError, code_of
from nemo_rl_mcore.losses import check_losses


@dataclass(frozen=True)
class Parts:
    """What a run needs beside its ranks; it is all there before they start. `config` ends when the data set does.

    ended_by: the paths of the keys that say so.
    name: of a run for whose weights another one waits, such as warm_start.
    """

    config: RunConfig
    tokenizer: Tokenizer
    prompts: PromptSource
    environment: Environment
    ended_by: tuple[str, ...]
    form: EpisodeForm = ONE_ANSWER
    name: str = ""


def open_parts(config: RunConfig) -> Parts:
    """Open tokenizer, prompts and environment; RunStoppedError for what does not serve."""
    tokenizer = tokenizer_of(config.policy, config.data)
    try:
        check_losses(config)
        check_estimator(config)
        form = _form(config, tokenizer)
        environment = make_environment(config.env)
        _require_turns(config, environment)
        if isinstance(environment, RewardFunctions) and not config.data.type:
            require_columns(environment, _columns(config))
        prompts = hold_to_golds(config, open_prompts(config, tokenizer))
        require_golds_run_first(config)
    except ValueError as error:
        raise RunStoppedError(str(error), code=code_of(error)) from error
    ended_by: tuple[str, ...] = (f"{config.algorithm}.max_num_steps",)
    if isinstance(prompts, EpochSource):
        steps, ended_by = last_step(config, len(prompts.train))
        loop = config.loop.model_copy(update={"max_num_steps": steps})
        config = config.model_copy(update={config.algorithm: loop})
    return Parts(with_inputs(config), tokenizer, prompts, environment, ended_by, form)


def _columns(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """Return the columns that are kept of each source whose prompts are answered; of an embedded task none."""
    trained = config.train_sources if config.row_kind is RowKind.PROMPTS else {}
    sources = trained | config.validation_sources
    return {path: source.columns for path, source in sources.items()} or {"data.train": ()}


def _require_turns(config: RunConfig, environment: Environment) -> None:
    """Raise ValueError for a class of the user's own that scores one answer where there may be several."""
    turns, own = config.max_rollout_turns, config.env.custom
    if config.env.endpoint is None and own is not None and turns > 1 and not hasattr(environment, "step"):
        raise ValueError(
            f"{config.algorithm}.max_rollout_turns: {turns} does nothing with env.custom.type: {own.type}, which "
            "scores the first answer and has no `step`; set it to 1"
        )


def _form(config: RunConfig, tokenizer: Tokenizer) -> EpisodeForm:
    """Return what the recipe's episodes are like; ValueError for a critic with a template that rewrites turns."""
    policy, chat = config.policy, config.data.apply_chat_template
    if config.env.endpoint is not None:
        return replace(ONE_ANSWER, turns=config.max_rollout_turns)
    if config.max_rollout_turns == 1:
        return ONE_ANSWER
    if chat and config.algorithm == "ppo":
        require_append_only(tokenizer, policy.tokenizer.name)
    return EpisodeForm(
        config.max_rollout_turns,
        policy.max_total_sequence_length,
        policy.reserved_tokens,
        make_observer(tokenizer, chat=chat),
    )


def tokenizer_of(policy: PolicyConfig, data: DataConfig | None = None) -> Tokenizer:
    """Load the tokenizer; only now is it known which tokens a Hugging Face directory adds while it loads.

    data: how it shows rows. Its files may come from the hub with the weights, which are fetched here: the
    ranks have less time to start. Raises RunStoppedError.
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
    """Load the tokenizer of files that are here; see `tokenizer_of`.

    Raises RunStoppedError, caused by the ConfigError of a tokenizer with more tokens than the model has rows.
    """
    given = policy.tokenizer
    template = ChatTemplate(given.chat_template, given.chat_template_kwargs or {})
    if data is not None:
        answers = GivenAnswers(data.add_eos, data.imitated)
        template = replace(template, add_bos=data.add_bos, answers=answers)
    parses = data is not None and data.parses_content
    try:
        tokenizer = load_tokenizer(
            given.name,
            parse_content=parses,
            template=template,
            ends=end_ids(policy.model_name, given.name),
            stops=policy.generation.stop_token_ids or (),
        )
        _require_room(policy, tokenizer)
    except ValueError as error:
        raise RunStoppedError(str(error), code=code_of(error)) from error
    return tokenizer


def first_prompt(config: RunConfig, data: DataPlan | None, tokenizer: Tokenizer) -> str | None:
    """Return the first prompt of the rows as the model is shown it; RunStoppedError for one that does not fit."""
    sampled = config.row_kind is RowKind.PROMPTS
    try:
        shown = Limits(config, tokenizer).fitting(data.first if data else (), sampled=sampled)
        return next((prompt.text for prompt in shown), None)
    except ValueError as error:
        raise RunStoppedError(str(error), code=code_of(error)) from error


def _require_room(policy: PolicyConfig, tokenizer: Tokenizer) -> None:
    """Raise ConfigError for a tokenizer with more tokens than the model has rows of embeddings."""
    rows = policy.model.vocab_size
    if tokenizer.vocab_size > rows:
        without = range(rows, tokenizer.vocab_size)[:_NAMED]
        lacking = [tokenizer.text_of([token]) for token in without]
        raise ConfigError([too_large(policy, tokenizer.vocab_size, lacking)])


_NAMED = 3
"""Tokens without a row, at most."""


def stop_ids_of(config: RunConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token ids that end a response: those of the files, then those of the recipe."""
    return tuple(dict.fromkeys((*tokenizer.ends, *(config.policy.generation.stop_token_ids or ()))))
