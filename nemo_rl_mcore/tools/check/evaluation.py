"""A recipe as an evaluation reads it: its section eval says how answers are drawn, and where they go."""

from collections.abc import Iterator
from pathlib import Path

from nemo_rl_mcore.config.base import ConfigError, Problem
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.data.examples import read_set
from nemo_rl_mcore.data.rows import is_fetched
from nemo_rl_mcore.data.special_tokens import special_token_problems
from nemo_rl_mcore.data.tokenizer_folder import special_tokens_of
from nemo_rl_mcore.driver.data_files import answer_problems, template_problems
from nemo_rl_mcore.tools.check.packages import import_problems

_SCORING = "env."


def as_evaluated(config: RunConfig) -> RunConfig:
    """Return the configuration whose sampling, lengths and folder are those of its section eval.

    A temperature of 0, which asks for greedy answers, leaves that of the recipe. Raises ConfigError.
    """
    if problems := [*_problems(config)]:
        raise ConfigError(problems)
    section, policy = config.eval, config.policy
    assert section is not None
    new_tokens = _max_new_tokens(config)
    sampling = {
        "max_new_tokens": new_tokens,
        "temperature": section.temperature or policy.generation.temperature,
        "top_p": section.top_p,
        "top_k": section.top_k,
    }
    generation = policy.generation.model_copy(update=sampling)
    reserved = 1 if policy.generation.fit_to_sequence else new_tokens
    longest = policy.max_total_sequence_length - reserved
    folder = section.save_path or str(Path(config.logger.log_dir) / "eval")
    changed = {
        "policy": policy.model_copy(update={"generation": generation}),
        "data": config.data.model_copy(update={"max_input_seq_length": longest}),
        "logger": config.logger.model_copy(update={"log_dir": folder}),
    }
    return config.model_copy(update=changed)


def _max_new_tokens(config: RunConfig) -> int:
    asked = None if config.eval is None else config.eval.max_new_tokens
    return asked or config.policy.generation.max_new_tokens


def _problems(config: RunConfig) -> Iterator[Problem]:
    if config.eval is None:
        yield Problem(
            "missing", "eval", "missing", "say what to evaluate on: eval.sets: {NAME: {data_path: FILE}}"
        )
        return
    if config.warm_start is not None:
        yield Problem(
            "incompatible",
            "warm_start",
            "is not run to evaluate",
            "name the weights: --checkpoint DIR, or --hf DIR",
        )
    if config.env.endpoint is not None:
        yield Problem(
            "incompatible",
            "env.endpoint",
            "is of episodes that agents play, and eval asks for one answer to each prompt",
            "a validation of the run plays them; or override env.endpoint=null",
        )
    longest = config.policy.max_total_sequence_length
    if _max_new_tokens(config) >= longest and not config.policy.generation.fit_to_sequence:
        yield Problem(
            "too-large",
            "eval.max_new_tokens",
            f"{_max_new_tokens(config)} leaves no room for a prompt in policy.max_total_sequence_length: {longest}",
            "lower it, or raise max_total_sequence_length",
            ("policy.max_total_sequence_length",),
        )
    yield from template_problems(config)
    for name, source in config.eval.sets.items():
        if not is_fetched(source):
            rows, wrong = read_set(f"eval.sets.{name}", source, chat=config.data.apply_chat_template)
            yield from wrong
            yield from answer_problems(config, rows[: config.eval.max_samples])
            tokens = special_tokens_of(config.policy.tokenizer.name)
            yield from special_token_problems(config, f"eval.sets.{name}", rows, tokens, RowKind.PROMPTS)
    paths = config.import_paths
    yield from import_problems({key: path for key, path in paths.items() if key.startswith(_SCORING)})
