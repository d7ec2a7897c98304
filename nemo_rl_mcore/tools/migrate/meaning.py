"""Rows, rewards and validations: NeMo RL's keys whose value, or whose absence, means something else here."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast, get_args

import yaml
from pydantic_core import PydanticUndefined

from nemo_rl_mcore.config.base import Tree, join_path
from nemo_rl_mcore.config.data import DataConfig, EnvConfig
from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.config.source import TEXT_FILES
from nemo_rl_mcore.recipe.of_nemo_rl import inner_sections
from nemo_rl_mcore.recipe.schema import field_at
from nemo_rl_mcore.tools.migrate.draft import Draft, Kind

_VLLM = "policy.generation.vllm_cfg"

# Defaults

_OF_LOOPS: Mapping[str, Mapping[str, object]] = yaml.safe_load(
    Path(__file__).with_name("defaults.yaml").read_text(encoding="utf-8")
)
_OF_DISTILLATION: Mapping[str, object] = {"kl_type": "mixed", "mixed_kl_weight": 0.5}
"""Of loss/loss_functions.py."""
_GROUPS = 32
"""Of async_rl, in single_controller_utils/config.py: min_groups_for_streaming_train and max_inflight_prompts."""


def write_defaults(draft: Draft) -> None:
    """Write what NeMo RL takes where the recipe says nothing, and this package would take something else."""
    loop, why = draft.algorithm, "NeMo RL's default, where a recipe leaves it out"
    given = {f"{loop}.{key}": value for key, value in _OF_LOOPS[loop].items()}
    if loop == "distillation" and draft.has("loss_fn"):
        given |= {f"loss_fn.{key}": value for key, value in _OF_DISTILLATION.items()}
    for path, value in given.items():
        field = field_at(path, RUN_CONFIGS[loop])
        if not draft.has(path) and value != (PydanticUndefined if field is None else field.default):
            draft.change(path, value, why)
    if loop != "grpo" or not draft.section("async_rl"):
        return
    # There a step is no more than its groups, so that a larger number is all of them, which is our default.
    groups = draft.number("grpo.num_prompts_per_step")
    if (groups is None or groups > _GROUPS) and not draft.has("async_rl.min_groups_for_streaming_train"):
        draft.change("async_rl.min_groups_for_streaming_train", _GROUPS, why)
    if not draft.has("async_rl.max_inflight_prompts"):
        draft.change("async_rl.max_inflight_prompts", _GROUPS, why)


# Rows

_SHOWN = ("add_bos", "add_eos", "add_generation_prompt")
_TASKS = get_args(DataConfig.model_fields["dataset_name"].annotation)
"""Of this package, which no recipe of NeMo RL names."""
_HELD_OUT = ("OpenMathInstruct-2", "tulu3_sft_mixture", "open_assistant")
"""Data sets of which NeMo RL holds 5 % out where a recipe says nothing; of all others it holds out nothing."""
_READ_BY = {
    "repeat": ("AIME2024", "AIME2025", "AIME2026", "NemoGymDataset"),
    "max_samples": ("Nemotron-Cascade-2-SFT-Math",),
}
"""Keys of a source that few of NeMo RL's data sets read; the others take them and do nothing."""


def sources_of(draft: Draft) -> list[tuple[str, Tree]]:
    """Return each section of data that names or completes a source, with its path; of a list with its place."""
    return [
        (join_path(path, place), source)
        for path in ("data.default", "data.train", "data.validation")
        for place, source in inner_sections(draft.get(path))
    ]


def use_chat_template(draft: Draft) -> None:
    """NeMo RL always applies a template, and one that shows the text alone where the key is null."""
    template = "policy.tokenizer.chat_template"
    given, as_text = draft.get(template), False
    if draft.has(template) and given is None:
        as_text = True
        draft.pop(template)
    elif given == "default":
        draft.drop(template)
    elif isinstance(given, str) and given.endswith(".jinja"):
        draft.refuse(template, given, "write the text of that file")
    why = "chat_template: null shows the text alone" if as_text else "NeMo RL applies the chat template"
    draft.change("data.apply_chat_template", not as_text, why)
    parsed = "NeMo RL parses special tokens in rows and in what environments say"
    draft.change("data.special_tokens_in_content", "parse", parsed)


def show_given_answers(draft: Draft) -> None:
    """Train on what NeMo RL does of a given answer: all that the chat template adds for its turn.

    data/llm_message_utils.py, get_formatted_message_log: what opens the answer is the prompt's with
    add_generation_prompt, which SFT reads of the recipe, as the two others; DPO has their defaults. Neither reads the
    prompt of a system.
    """
    for key in _SHOWN if draft.algorithm != "sft" else ():
        draft.drop(f"data.{key}")
    if draft.algorithm not in ("sft", "dpo"):
        return
    for place, source in sources_of(draft):
        if source.pop("system_prompt_file", None) is not None:
            draft.dropped.append(f"{place}.system_prompt_file")
    bos, eos, opened = (draft.get(f"data.{key}") for key in _SHOWN)
    if bos is None:
        draft.change("data.add_bos", True, "NeMo RL begins a row with the begin of sequence, if there is one")
    if not draft.get("data.apply_chat_template"):
        return  # text alone ends with the end of sequence in both
    if eos is None:
        draft.change("data.add_eos", True, "NeMo RL ends a row with the end of sequence")
    if isinstance(opened, bool):
        draft.pop("data.add_generation_prompt")
        draft.note(Kind.RENAMED, "data.add_generation_prompt", "data.imitated")
    if opened is None or isinstance(opened, bool):
        why = f"NeMo RL trains on {'' if opened else 'what opens it and '}what is after its end of sequence"
        draft.change("data.imitated", "to_turn_end" if opened else "turn", why)


def name_sources(draft: Draft) -> None:
    """Move what older recipes say of all sources in `data` itself, and what a source calls otherwise here."""
    for key in (*TEXT_FILES, "processor"):
        value = draft.pop(f"data.{key}")
        if value is not None and not draft.has(f"data.default.{key}"):
            draft.set(f"data.default.{key}", value)
    if (shared := draft.section("data.default").pop("dataset_name", None)) is not None:
        for place, source in sources_of(draft):
            if place != "data.default" and source.get("dataset_name") is None:
                source["dataset_name"] = shared
    name = draft.get("data.dataset_name")
    if isinstance(name, str) and name not in _TASKS and not draft.has("data.train"):
        draft.pop("data.dataset_name")
        draft.change("data.train.dataset_name", name, "a data set is named in data.train")


def show_held_out_as_there(draft: Draft) -> None:
    """Give a validation the texts of data.default, and not of data.train, as NeMo RL does."""
    train, held_out = draft.section("data.train"), draft.section("data.validation")
    for key in TEXT_FILES if train and held_out else ():
        if key in train and key not in held_out:
            path, default = f"data.validation.{key}", draft.get(f"data.default.{key}")
            draft.change(path, default, "a validation takes data.default's there, and not data.train's")


def hold_out_as_there(draft: Draft) -> None:
    """Hold out no rows where NeMo RL does not; a validation that has none then is none."""
    if draft.get("data.validation") or draft.get("data.default.split_validation_size") is not None:
        return
    train = [(place, source) for place, source in sources_of(draft) if place.startswith("data.train")]
    for place, source in train:
        if source.get("split_validation_size") is None and source.get("dataset_name") not in _HELD_OUT:
            source["split_validation_size"] = 0
            draft.note(Kind.CHANGED, f"{place}.split_validation_size", "0; NeMo RL holds no rows out")
    held_out = any(source.get("split_validation_size") != 0 for _, source in train)
    for key, off in (("val_period", 0), ("val_at_start", False), ("val_at_end", False)):
        path = f"{draft.algorithm}.{key}"
        if train and not held_out and draft.get(path):
            draft.change(path, off, "no rows are held out")


def read_sources(draft: Draft) -> None:
    """Drop keys of a source that the class of its data set does not read there; keep pairs that are ties.

    NeMo RL keeps pairs of which neither answer is better: both are the first, and count in the loss.
    """
    for place, source in sources_of(draft):
        name = source.get("dataset_name")
        if draft.algorithm == "dpo" and name == "HelpSteer3" and "ties" not in source:
            source["ties"] = "keep"
            draft.note(Kind.CHANGED, f"{place}.ties", "keep; NeMo RL takes ties as pairs of one answer")
        for key in [key for key, sets in _READ_BY.items() if key in source and name not in sets]:
            source.pop(key)
            draft.dropped.append(f"{place}.{key}")


# Validations and checkpoints

_ALL_BATCHES = -1
_ROWS = {"AIME2024": 30, "AIME2026": 30}
"""Data sets that a usual max_val_samples is more than."""
_OF_SFT_AND_DPO = re.compile(r"val:(val_loss|validation-.*_loss)")


def validate_as_there(draft: Draft) -> None:
    """Sample the answers of a validation, which here are the likeliest; of SFT and DPO there are none in NeMo RL.

    A null batch of validations is one of all rows, on which answers do not depend. Each number of batches below 1 is
    all held-out rows.
    """
    loop = draft.algorithm
    if (draft.number(f"{loop}.val_period") or 0) < 0:
        draft.change(f"{loop}.val_period", 0, "there is no validation")
    batches = draft.number(f"{loop}.val_batches")
    if batches is not None and batches < 1 and batches != _ALL_BATCHES:
        draft.change(f"{loop}.val_batches", _ALL_BATCHES, "all held-out rows")
    validates = any(draft.get(f"{loop}.val_{key}") for key in ("period", "at_start", "at_end"))
    if loop in ("sft", "dpo"):
        if not draft.has(f"{loop}.max_val_samples"):
            why = (
                "NeMo RL takes the loss of held-out rows alone; a number asks for answers to as many prompts"
            )
            draft.change(f"{loop}.max_val_samples", 0, why)
    elif validates or (draft.number(f"{loop}.val_num_generations_per_prompt") or 1) > 1:
        draft.change(f"{loop}.val_greedy", False, "NeMo RL's validation samples as training does")
    if validates and loop not in ("sft", "dpo"):
        _count_held_out(draft)
    if draft.get(f"{loop}.val_batch_size") is None:
        draft.drop(f"{loop}.val_batch_size")


def _count_held_out(draft: Draft) -> None:
    """Take the whole batches that NeMo RL takes: max_val_samples // val_batch_size, and of a distillation rounded up.

    Its validation ends where the rows do, too.
    """
    path, several = f"{draft.algorithm}.max_val_samples", draft.get("data.validation")
    rows, batch = draft.number(path), draft.number(f"{draft.algorithm}.val_batch_size")
    if rows and batch and batch > 0:
        batches = -(-rows // batch) if draft.algorithm == "distillation" else rows // batch
        source = draft.section("data.validation")
        times = source.get("repeat", 1)
        there = _ROWS.get(str(source.get("dataset_name")), 0) * (times if isinstance(times, int) else 0)
        if 0 < there <= batches * batch:
            draft.change(path, None, f"all of the {there} rows, as NeMo RL takes no more than there are")
        elif batches and batches * batch != rows:
            draft.change(path, batches * batch, f"NeMo RL takes whole batches of val_batch_size: {batch}")
    if isinstance(several, list) and len(cast("list[object]", several)) > 1:
        what = "as many rows of each source; NeMo RL takes one source after the other, and the last may have none"
        draft.note(Kind.CHANGED, path, what)


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


# Rewards and losses


def use_environment(draft: Draft) -> None:
    """Leave out environments that no source names, and say where a response states its answer."""
    named = {str(source["env_name"]) for _, source in sources_of(draft) if source.get("env_name")}
    for name, section in [*draft.section("env").items()]:
        if name in named and name not in EnvConfig.model_fields:
            draft.refuse(f"env.{name}", section, "env has math, and custom for a class of your own")
        elif name not in EnvConfig.model_fields:
            draft.drop(f"env.{name}")
    if draft.has("env.math"):
        draft.change("env.math.unparsable", "zero", "NeMo RL scores 0 against an answer that nobody can read")
    if draft.get("env.math.math_verify_impl") == "dapo_math_verify":
        draft.pop("env.math.math_verify_impl")
        draft.note(Kind.RENAMED, "env.math.math_verify_impl", "env.math.response")
        there = "dapo_math_verify compares the text after the last `Answer:`"
        why = f"{there}; here math-verify compares its value"
        draft.change("env.math.response.regex", r"(?i)Answer\s*:\s*([^\n]+)", why)


_GYM = "env.nemo_gym"
_CALLS = 1000
"""More than an agent of a recipe makes; its own bounds, and the length of a sequence, end a session before."""
_LONGEST_S = 7200
_PARSERS = {"hermes": "hermes", "qwen3_coder": "qwen3.5"}
"""vLLM's names of how calls of tools are written, and those of env.endpoint.tool_parser."""


def use_nemo_gym(draft: Draft) -> None:
    """Keep Gym's own configuration where a recipe uses it, and say what its agents need here."""
    if not draft.section(_GYM):
        return
    if draft.get("env.should_use_nemo_gym") is False:
        draft.drop(_GYM)
        return
    for path in (f"{_VLLM}.expose_http_server", "env.math"):
        if draft.pop(path) is not None:
            draft.dropped.append(path)
    if draft.algorithm == "grpo":
        why = "calls of the model in a session, which NeMo RL leaves to the agent"
        draft.change("grpo.max_rollout_turns", _CALLS, why)
    draft.change("env.endpoint.timeout_s", _LONGEST_S, "NeMo RL waits for an agent as long as it takes")
    path, tool_parser = f"{_VLLM}.http_server_serving_chat_kwargs.tool_parser", "env.endpoint.tool_parser"
    parser = draft.get(path)
    if parser is None:
        draft.change(tool_parser, "none", "no parser of tools is named")
    elif (own := _PARSERS.get(str(parser))) is not None:
        draft.change(tool_parser, own, f"the form that vLLM calls {parser}")
    else:
        draft.refuse(path, parser, f"{tool_parser} reads those of {', '.join(_PARSERS)}")
    if draft.get("env.should_mask_flagged_samples") is not False:
        why = "samples that NeMo Gym masks are dropped, as many as there are"
        draft.change("env.pool.max_drop_rate", 1.0, why)


def read_estimator(draft: Draft) -> None:
    """Take the estimator's word for what GRPO's section repeats: NeMo RL computes advantages by it alone."""
    for key in ("normalize_rewards", "use_leave_one_out_baseline"):
        path, own = f"grpo.{key}", draft.get(f"grpo.adv_estimator.{key}")
        own = True if own is None else own  # the default of both
        if draft.has(path) and draft.get(path) != own:
            draft.set(f"grpo.adv_estimator.{key}", own)
            why = "NeMo RL computes advantages by adv_estimator, and reads no other key for them"
            draft.change(path, own, why)


def distill(draft: Draft) -> None:
    """Say that the divergence is of other distributions."""
    if draft.algorithm == "distillation" and not draft.has("loss_fn.tail_mass"):
        why = (
            "NeMo RL makes the top k a distribution of its own; here the rest of the vocabulary is an outcome"
        )
        draft.change("loss_fn.tail_mass", True, why)


STEPS = (
    write_defaults,
    use_nemo_gym,
    use_chat_template,
    show_given_answers,
    name_sources,
    show_held_out_as_there,
    hold_out_as_there,
    validate_as_there,
    read_sources,
    use_environment,
    rank_checkpoints,
    read_estimator,
    distill,
)
