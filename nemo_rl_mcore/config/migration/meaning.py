"""Keys whose value, or whose absence, means something else here."""

import re
from typing import cast, get_args

from nemo_rl_mcore.config.base import Tree
from nemo_rl_mcore.config.data import DataConfig, EnvConfig
from nemo_rl_mcore.config.migration.draft import Draft, Kind, Note
from nemo_rl_mcore.config.source import TEXT_FILES

_TOTAL = "policy.max_total_sequence_length"
_NEW = "policy.generation.max_new_tokens"
_PROMPT = "data.max_input_seq_length"
_LONGEST_PROMPT = 1024
_SAMPLED_IN_VALIDATION = 256
_ALL_BATCHES = 8
_TASKS = get_args(DataConfig.model_fields["dataset_name"].annotation)
"""Of this package, which no recipe of NeMo RL names."""
_SAMPLING = ("grpo", "ppo", "distillation")


def use_chat_template(draft: Draft) -> None:
    """NeMo RL always applies a template, and one that shows the text alone where the key is null."""
    template = "policy.tokenizer.chat_template"
    as_text = draft.has(template) and draft.get(template) is None
    if as_text:
        draft.pop(template)
    why = "chat_template: null shows the text alone" if as_text else "NeMo RL applies the chat template"
    draft.change("data.apply_chat_template", not as_text, why)
    parsed = "NeMo RL parses special tokens in rows and in what environments say"
    draft.change("data.special_tokens_in_content", "parse", parsed)


def use_engine(draft: Draft) -> None:
    """Name an engine, which a validation needs too, though NeMo RL samples nothing in SFT and DPO."""
    backend = "policy.generation.backend"
    if not draft.section("policy.generation"):
        total = draft.number(_TOTAL) or _SAMPLED_IN_VALIDATION
        new = min(_SAMPLED_IN_VALIDATION, max(1, total // 4))
        draft.change(_NEW, new, "a validation answers held-out prompts besides taking their loss")
    elif draft.get(backend) == "megatron":
        draft.change(backend, "embedded", "the training model itself decodes")
    elif draft.get(backend) not in ("vllm", "embedded"):
        given = draft.get(backend)
        draft.change(backend, "vllm", f"the engine {given} is none of this package")


def validate_greedily(draft: Draft) -> None:
    """Say that a validation samples nothing, where it samples in NeMo RL."""
    path = f"{draft.algorithm}.val_period"
    if draft.algorithm in _SAMPLING and draft.number(path):
        why = "a validation takes the likeliest tokens; NeMo RL's samples as training does"
        draft.notes.append(Note(Kind.CHANGED, path, why))
        draft.comments[path] = why[:1].upper() + why[1:] + "."


def fit_lengths(draft: Draft) -> None:
    """Give prompt and response a bound each: together they fill a sequence, and neither is cut to fit.

    In NeMo RL both may be as long as a sequence, and a response ends where the sequence is full.
    """
    total, new, prompt = draft.number(_TOTAL), draft.number(_NEW), draft.number(_PROMPT)
    if total is None or new is None:
        return
    draft.change("data.overlong", "drop", "NeMo RL leaves rows that are too long out of the loss")
    if draft.algorithm not in _SAMPLING:
        if prompt is not None and prompt + new > total:
            why = f"what an answer of a validation leaves; a row to train on has all of {_TOTAL}"
            draft.change(_PROMPT, total - new, why)
        return
    if (prompt or 1) + new <= total:
        return
    if prompt is None or prompt >= total:
        prompt = min(_LONGEST_PROMPT, max(1, total // 2)) if new >= total else total - new
        draft.change(_PROMPT, prompt, f"prompts and responses share the {total} tokens, each with a bound")
    if prompt + new > total:
        draft.change(_NEW, total - prompt, f"what a prompt of {prompt} tokens leaves of {total}")


def name_sources(draft: Draft) -> None:
    """Move what older recipes say of all sources in `data` itself, and what a source calls otherwise here."""
    for key in (*TEXT_FILES, "processor"):
        if draft.has(f"data.{key}"):
            value = draft.pop(f"data.{key}")
            if value is not None and not draft.has(f"data.default.{key}"):
                draft.set(f"data.default.{key}", value)
    name = draft.get("data.dataset_name")
    if isinstance(name, str) and name not in _TASKS and not draft.has("data.train"):
        draft.pop("data.dataset_name")
        draft.change("data.train.dataset_name", name, "a data set is named in data.train")
    for place, source in _sources(draft):
        for key in TEXT_FILES:
            if source.get(key):
                path = f"{place}.{key}"
                draft.comments[path] = (
                    "Copy this file: its path starts at this recipe, or where a command starts."
                )
                draft.notes.append(Note(Kind.FILES, path, str(source[key])))


def _sources(draft: Draft) -> list[tuple[str, Tree]]:
    found: list[tuple[str, Tree]] = []
    for name in ("default", "train", "validation"):
        given = draft.get(f"data.{name}")
        many = cast("list[object]", given) if isinstance(given, list) else [given]
        found += [(f"data.{name}", cast("Tree", one)) for one in many if isinstance(one, dict)]
    return found


def use_environment(draft: Draft) -> None:
    """Leave out environments that no source names, and say where a response states its answer."""
    named = {str(source["env_name"]) for _, source in _sources(draft) if source.get("env_name")}
    for name, section in [*draft.section("env").items()]:
        if name in EnvConfig.model_fields:
            continue
        draft.pop(f"env.{name}")
        if name in named:
            draft.refuse(f"env.{name}", section, "env has math, and custom for a class of your own")
        else:
            draft.dropped.append(f"env.{name}")
    if draft.get("env.math.math_verify_impl") == "dapo_math_verify":
        draft.pop("env.math.math_verify_impl")
        draft.notes.append(Note(Kind.RENAMED, "env.math.math_verify_impl", "env.math.response"))
        draft.change(
            "env.math.response.regex",
            r"(?i)Answer\s*:\s*([^\n]+)",
            "dapo_math_verify compares the text behind the last `Answer:`; here math-verify compares its value",
        )


_OF_SFT_AND_DPO = re.compile(r"val:(val_loss|validation-.*_loss)")


def rank_checkpoints(draft: Draft) -> None:
    """Name the metric as it is logged here, and save where there is one."""
    metric, period = draft.get("checkpointing.metric_name"), draft.number(f"{draft.algorithm}.val_period")
    if isinstance(metric, str) and _OF_SFT_AND_DPO.fullmatch(metric):
        draft.change("checkpointing.metric_name", "val:loss", "the name of the loss of a validation here")
    if not isinstance(metric, str) or not metric.startswith("val:") or period is None:
        return
    every = draft.number("checkpointing.save_period")
    if not draft.get("checkpointing.enabled") or every is None:
        return
    if not period:
        draft.change("checkpointing.metric_name", None, "no validation measures it")
    elif every % period:
        rounded = -(-every // period) * period
        why = f"checkpoints ranked by {metric} are saved where there is a validation, each {period} steps"
        draft.change("checkpointing.save_period", rounded, why)


def count_validation_batches(draft: Draft) -> None:
    """-1 takes every held-out row in NeMo RL."""
    path = f"{draft.algorithm}.val_batches"
    batches = draft.number(path)
    if batches is not None and batches < 1:
        draft.change(path, _ALL_BATCHES, "a validation takes a number of batches")


def distill(draft: Draft) -> None:
    """Say that the divergence is of other distributions; the output weight is read outside of the forward pass."""
    if draft.algorithm == "distillation" and not draft.has("loss_fn.tail_mass"):
        why = (
            "NeMo RL makes the top k a distribution of its own; here the rest of the vocabulary is an outcome"
        )
        draft.change("loss_fn.tail_mass", True, why)
    path = "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather"
    if draft.algorithm == "distillation" and draft.get(path):
        draft.change(path, False, "it costs speed; a distillation reads the output weight itself")


STEPS = (
    use_chat_template,
    use_engine,
    validate_greedily,
    fit_lengths,
    name_sources,
    use_environment,
    rank_checkpoints,
    count_validation_batches,
    distill,
)
