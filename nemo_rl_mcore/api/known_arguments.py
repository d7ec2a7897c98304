"""Arguments that an algorithm does not have: each is reported with the one that was meant, and with all else."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator
from functools import wraps
from inspect import signature

from nemo_rl_mcore.config.base import ConfigError, Problem
from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.recipe.schema import fields

SAME_IN_TRL = {
    "eval_dataset": "validation",
    "learning_rate": "lr",
    "max_completion_length": "max_new_tokens",
    "max_steps": "steps",
    "model_name_or_path": "model",
    "num_generations": "generations",
    "num_train_epochs": "epochs",
    "output_dir": "out",
    "reward_funcs": "reward",
    "teacher_model": "teacher",
    "train_dataset": "train",
}
"""Arguments of TRL, and those that take the same value here."""
OTHERS = {
    "args": "recipe",
    "batch_size": "prompts_per_step",
    "beta": "reference_policy_kl_penalty",
    "bf16": "policy.precision",
    "eval_steps": "val_period",
    "epsilon": "loss_fn.ratio_clip_min",
    "epsilon_high": "loss_fn.ratio_clip_max",
    "gradient_accumulation_steps": "policy.train_micro_batch_size",
    "lr_scheduler_type": "policy.megatron_cfg.scheduler.lr_decay_style",
    "max_grad_norm": "policy.megatron_cfg.optimizer.clip_grad",
    "max_prompt_length": "data.max_input_seq_length",
    "per_device_train_batch_size": "prompts_per_step",
    "processing_class": "policy.tokenizer.name",
    "prompts_per_step": "batch_size",
    "report_to": "logger",
    "save_steps": "checkpointing.save_period",
    "temperature": "policy.generation.temperature",
    "tokenizer": "policy.tokenizer.name",
    "top_k": "policy.generation.top_k",
    "top_p": "policy.generation.top_p",
    "use_vllm": "policy.generation.backend",
    "warmup_steps": "policy.megatron_cfg.scheduler.lr_warmup_iters",
}
"""Other arguments, and what is nearest to them here: an argument, or a key of a recipe."""


def reports_unknown[**P](begin: Callable[P, None]) -> Callable[P, None]:
    """Have a constructor report unknown arguments as ConfigError, with what is wrong with all others."""
    known = [*signature(begin).parameters][1:]

    @wraps(begin)
    def checked(*args: P.args, **given: P.kwargs) -> None:
        problems = [*_problems(type(args[0]).__name__.lower(), given, known)]
        if problems:
            for name, meant in SAME_IN_TRL.items():
                if name in given and meant in known:
                    given.setdefault(meant, given[name])
            for name in {*given} - {*known}:
                del given[name]
        try:
            begin(*args, **given)
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from None
        except TypeError as error:  # a required argument is missing, too
            raise (ConfigError(problems) if problems else error) from None
        if problems:
            raise ConfigError(problems)

    return checked


def _problems(algorithm: str, given: Collection[str], known: Collection[str]) -> Iterator[Problem]:
    for name in given:
        if name not in known:
            yield Problem(
                "unknown-key", name, f"no argument of {algorithm.upper()}", _remedy(algorithm, name, known)
            )


def _remedy(algorithm: str, name: str, known: Collection[str]) -> str:
    meant = SAME_IN_TRL.get(name) or OTHERS.get(name, name)
    if "prompts_per_step" in (name, meant) and "batch_size" in known:
        meant = "batch_size"
    if meant in known:
        return f"did you mean {meant}?"
    keys = [path for path in fields(RUN_CONFIGS[algorithm]) if path == meant or path.endswith(f".{meant}")]
    if keys:
        return f"it is a key of the recipe: {' or '.join(keys)}; give it in recipe={{...}} or overrides=[...]"
    if near := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {near[0]}?"
    return f"arguments are {', '.join(known)}; all else is a key of the recipe"
