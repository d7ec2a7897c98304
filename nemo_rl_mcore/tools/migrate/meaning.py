"""NeMo RL's keys of rows, answers, rewards and validation whose meaning, or absence, differs here."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast, get_args

import yaml
from pydantic_core import PydanticUndefined

from nemo_rl_mcore.config.base import Tree, join_path
from nemo_rl_mcore.config.data import ENVIRONMENTS, DataConfig, EnvConfig
from nemo_rl_mcore.config.generation import NOT_PASSED_ON
from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.config.source import TEXT_FILES
from nemo_rl_mcore.recipe.of_nemo_rl import inner_sections
from nemo_rl_mcore.recipe.schema import field_at
from nemo_rl_mcore.tools.migrate.draft import KEYS, Draft, Kind

# Defaults

_OF_LOOPS: Mapping[str, Mapping[str, object]] = yaml.safe_load(
    Path(__file__).with_name("defaults.yaml").read_text(encoding="utf-8")
)
_OF_DISTILLATION: Mapping[str, object] = {"kl_type": "mixed", "mixed_kl_weight": 0.5}
"""NeMo RL's defaults, in loss/loss_functions.py."""
_GROUPS = 32
"""Default of async_rl's min_groups_for_streaming_train and max_inflight_prompts (single_controller_utils/config.py)."""


def write_defaults(draft: Draft) -> None:
    """Write NeMo RL's defaults for missing keys whose default differs here."""
    loop, why = draft.algorithm, "NeMo RL's default for a missing key"
    given = {f"{loop}.{key}": value for key, value in _OF_LOOPS[loop].items()}
    if loop == "distillation" and draft.has("loss_fn"):
        given |= {f"loss_fn.{key}": value for key, value in _OF_DISTILLATION.items()}
    for path, value in given.items():
        field = field_at(path, RUN_CONFIGS[loop])
        if value != (PydanticUndefined if field is None else field.default):
            draft.fill(path, value, why)
    if loop == "grpo" and draft.section("async_rl"):
        # NeMo RL caps the number at the step's groups; all of them is our default.
        groups = draft.number("grpo.num_prompts_per_step")
        if groups is None or groups > _GROUPS:
            draft.fill("async_rl.min_groups_for_streaming_train", _GROUPS, why)
        draft.fill("async_rl.max_inflight_prompts", _GROUPS, why)


# Rows

_SHOWN = ("add_bos", "add_eos", "add_generation_prompt")
_TASKS = get_args(DataConfig.model_fields["dataset_name"].annotation)
"""This package's tasks, which no NeMo RL recipe names."""


def sources_of(draft: Draft) -> list[tuple[str, Tree]]:
    """Return the path and section of each source and of data.default; paths of list items end in their index."""
    return [
        (join_path(path, place), source)
        for path in ("data.default", "data.train", "data.validation")
        for place, source in inner_sections(draft.get(path))
    ]


def use_chat_template(draft: Draft) -> None:
    """Apply a template like NeMo RL: always, and with a null key one that shows only the text."""
    template = "policy.tokenizer.chat_template"
    given = draft.get(template)
    as_text = draft.has(template) and given is None
    if as_text:
        draft.pop(template)
    elif given == "default":
        draft.drop(template)
    elif isinstance(given, str) and given.endswith(".jinja"):
        draft.refuse(template, given, "replace the path with the file's text")
    why = "chat_template: null means plain text" if as_text else "NeMo RL applies the chat template"
    draft.change("data.apply_chat_template", not as_text, why)
    parsed = "NeMo RL parses special tokens in rows and in environments' replies"
    draft.change("data.special_tokens_in_content", "parse", parsed)


def show_given_answers(draft: Draft) -> None:
    """Train on the same part of a given answer as NeMo RL: everything that the chat template adds for its turn.

    See get_formatted_message_log in data/llm_message_utils.py. With add_generation_prompt, the turn's opening belongs
    to the prompt. SFT reads this key and the other two of _SHOWN; DPO has their defaults. Neither reads the system
    prompt.
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
        draft.change(
            "data.add_bos",
            True,
            "NeMo RL begins a row with the begin-of-sequence token, if the tokenizer has one",
        )
    if not draft.get("data.apply_chat_template"):
        return  # plain text ends with the end of sequence in both packages
    if eos is None:
        draft.change("data.add_eos", True, "NeMo RL ends a row with the end-of-sequence token")
    if isinstance(opened, bool):
        draft.pop("data.add_generation_prompt")
        draft.note(Kind.RENAMED, "data.add_generation_prompt", "data.imitated")
    if opened is None or isinstance(opened, bool):
        opening = "" if opened else "the turn's opening and "
        why = f"NeMo RL also trains on {opening}the text after its end of sequence"
        draft.change("data.imitated", "to_turn_end" if opened else "turn", why)


def name_sources(draft: Draft) -> None:
    """Move older recipes' keys for all sources out of `data`; validation takes its texts from data.default."""
    for key in (*TEXT_FILES, "processor"):
        value = draft.pop(f"data.{key}")
        if value is not None and not draft.has(f"data.default.{key}"):
            draft.set(f"data.default.{key}", value)
    if (shared := draft.section("data.default").pop("dataset_name", None)) is not None:
        for place, source in sources_of(draft):
            if place != "data.default" and source.get("dataset_name") is None:
                source["dataset_name"] = shared
    name = draft.get("data.dataset_name")
    if isinstance(name, str) and name not in _TASKS:
        draft.drop("data.dataset_name")
        if not draft.has("data.train"):  # which NeMo RL reads first
            draft.change("data.train.dataset_name", name, "data sets are named in data.train")
    train, held_out = draft.section("data.train"), draft.section("data.validation")
    for key in TEXT_FILES if train and held_out else ():
        if key in train:
            why = "NeMo RL's validation takes it from data.default, not from data.train"
            draft.fill(f"data.validation.{key}", draft.get(f"data.default.{key}"), why)


def hold_out_rows(draft: Draft) -> None:
    """Hold out rows only where NeMo RL does; without any, turn validation off."""
    if draft.get("data.validation") or draft.get("data.default.split_validation_size") is not None:
        return
    train = [(place, source) for place, source in sources_of(draft) if place.startswith("data.train")]
    for place, source in train:
        if source.get("split_validation_size") is None and source.get("dataset_name") not in KEYS["held_out"]:
            source["split_validation_size"] = 0
            draft.note(Kind.CHANGED, f"{place}.split_validation_size", "0; NeMo RL holds out no rows")
    held_out = any(source.get("split_validation_size") != 0 for _, source in train)
    for key, off in (("val_period", 0), ("val_at_start", False), ("val_at_end", False)):
        path = f"{draft.algorithm}.{key}"
        if train and not held_out and draft.get(path):
            draft.change(path, off, "no rows are held out")


def read_sources(draft: Draft) -> None:
    """Drop keys that NeMo RL does not read for the source's data set; keep ties, which count in its loss."""
    for place, source in sources_of(draft):
        name = source.get("dataset_name")
        if draft.algorithm == "dpo" and name == "HelpSteer3" and "ties" not in source:
            source["ties"] = "keep"
            draft.note(
                Kind.CHANGED, f"{place}.ties", "keep; NeMo RL trains on ties as pairs with equal answers"
            )
        for key, sets in KEYS["read_by"].items():
            if name not in sets:
                draft.drop(f"{place}.{key}")


def find_text_files(draft: Draft, recipes: Iterable[Path]) -> None:
    """Find the prompt files that a recipe names.

    NeMo RL resolves their paths from the working directory, usually its repository's root. They are looked up there,
    then in the folders above the recipe and its `defaults:`.
    """
    folders = [Path(), *dict.fromkeys(folder for recipe in recipes for folder in recipe.absolute().parents)]
    for place, source in sources_of(draft):
        for key in TEXT_FILES:
            name, path = source.get(key), f"{place}.{key}"
            if not isinstance(name, str) or not name:
                continue
            # Unlike Path.is_file, this accepts names that are too long or contain a NUL.
            found = next((folder / name for folder in folders if os.path.isfile(folder / name)), None)
            if found is None:
                advice = "write the file's path, or copy it into the working directory"
                draft.note(Kind.OPEN, path, f"{name} was not found; {advice}")
            else:
                source[key] = str(found.absolute())
                draft.files[path] = found.absolute()


# Validations and checkpoints

_ALL_BATCHES = -1
_OF_SFT_AND_DPO = re.compile(r"val:(val_loss|validation-.*_loss)")


def set_validation(draft: Draft) -> None:
    """Have validation sample like NeMo RL's (ours is greedy by default); for SFT and DPO it generates nothing.

    A null val_batch_size means all rows, and does not affect answers; val_batches below 1 means all held-out rows.
    """
    loop = draft.algorithm
    if (draft.number(f"{loop}.val_period") or 0) < 0:
        draft.change(f"{loop}.val_period", 0, "a negative period means no validation")
    batches = draft.number(f"{loop}.val_batches")
    if batches is not None and batches < 1 and batches != _ALL_BATCHES:
        draft.change(f"{loop}.val_batches", _ALL_BATCHES, "all held-out rows")
    if loop in ("sft", "dpo"):
        why = "NeMo RL computes only the loss of held-out rows; a number also generates that many answers"
        draft.fill(f"{loop}.max_val_samples", 0, why)
    elif _validates(draft) or (draft.number(f"{loop}.val_num_generations_per_prompt") or 1) > 1:
        draft.change(f"{loop}.val_greedy", False, "NeMo RL's validation samples like training")
    if draft.get(f"{loop}.val_batch_size") is None:
        draft.drop(f"{loop}.val_batch_size")


def _validates(draft: Draft) -> bool:
    return any(draft.get(f"{draft.algorithm}.val_{key}") for key in ("period", "at_start", "at_end"))


def count_validation_rows(draft: Draft) -> None:
    """Take whole batches like NeMo RL: max_val_samples // val_batch_size, rounded up for distillation."""
    if draft.algorithm in ("sft", "dpo") or not _validates(draft):
        return
    path, several = f"{draft.algorithm}.max_val_samples", draft.get("data.validation")
    rows, batch = draft.number(path), draft.number(f"{draft.algorithm}.val_batch_size")
    if rows and batch and batch > 0:
        batches = -(-rows // batch) if draft.algorithm == "distillation" else rows // batch
        source = draft.section("data.validation")
        times = source.get("repeat", 1)
        there = KEYS["rows"].get(str(source.get("dataset_name")), 0) * (
            times if isinstance(times, int) else 0
        )
        if 0 < there <= batches * batch:
            draft.change(path, None, f"all {there} rows; NeMo RL takes no more than there are")
        elif batches and batches * batch != rows:
            draft.change(path, batches * batch, f"NeMo RL takes whole batches of val_batch_size: {batch}")
    if isinstance(several, list) and len(cast("list[object]", several)) > 1:
        what = (
            "equally many rows of each source; NeMo RL takes one source after another, maybe none of the last"
        )
        draft.note(Kind.CHANGED, path, what)


def rank_checkpoints(draft: Draft) -> None:
    """Give the metric its name here, and save only at steps that measure it."""
    name, saving = "checkpointing.metric_name", "checkpointing.save_period"
    metric, period = draft.get(name), draft.number(f"{draft.algorithm}.val_period")
    if isinstance(metric, str) and _OF_SFT_AND_DPO.fullmatch(metric):
        draft.change(name, "val:loss", "the validation loss's name here")
    every = draft.number(saving) if draft.get("checkpointing.enabled") else None
    if not isinstance(metric, str) or not metric.startswith("val:") or period is None or every is None:
        return
    if not period:
        draft.change(name, None, "no validation measures it")
    elif every % period:
        why = f"checkpoints ranked by {metric} are saved after a validation, every {period} steps"
        draft.change(saving, -(-every // period) * period, why)


# Rewards and losses


def use_environment(draft: Draft) -> None:
    """Leave out environments that no source names, and define how a response states its answer."""
    if draft.algorithm in ("sft", "dpo"):  # where NeMo RL starts no environment
        for place, _ in sources_of(draft):
            draft.drop(f"{place}.env_name")
    named = {str(source["env_name"]) for _, source in sources_of(draft) if source.get("env_name")}
    for name, section in [*draft.section("env").items()]:
        if name in named and name not in EnvConfig.model_fields:
            draft.refuse(f"env.{name}", section, "use env.math, or env.custom for a class of your own")
        elif name not in EnvConfig.model_fields or (named and name not in named and name in ENVIRONMENTS):
            draft.drop(f"env.{name}")
    if draft.has("env.math"):
        draft.change("env.math.unparsable", "zero", "NeMo RL scores 0 if the reference answer is unreadable")
    if draft.get("env.math.math_verify_impl") == "dapo_math_verify":
        draft.pop("env.math.math_verify_impl")
        draft.note(Kind.RENAMED, "env.math.math_verify_impl", "env.math.response")
        there = "dapo_math_verify compares the text after the last `Answer:`"
        why = f"{there}; here math-verify compares its value"
        draft.change("env.math.response.regex", r"(?i)Answer\s*:\s*([^\n]+)", why)


_GYM = "env.nemo_gym"
_CALLS = 1000
"""More than any recipe's agent makes: its own limits, or the sequence length, end a session first."""
_LONGEST_S = 7200


def use_nemo_gym(draft: Draft) -> None:
    """Keep NeMo Gym's own configuration if the recipe uses it, and set the keys that its agents need here."""
    if not draft.section(_GYM):
        return
    if draft.get("env.should_use_nemo_gym") is False:
        draft.drop(_GYM)
        return
    for path in (f"{_VLLM}.expose_http_server", "env.math"):
        if draft.pop(path) is not None:
            draft.dropped.append(path)
    if draft.algorithm == "grpo":
        why = "model calls per session; NeMo RL leaves the number to the agent"
        draft.change("grpo.max_rollout_turns", _CALLS, why)
    draft.change("env.endpoint.timeout_s", _LONGEST_S, "NeMo RL waits for an agent without limit")
    path, tool_parser = f"{_VLLM}.http_server_serving_chat_kwargs.tool_parser", "env.endpoint.tool_parser"
    parser = draft.get(path)
    if parser is None:
        draft.change(tool_parser, "none", "the recipe names no tool parser")
    elif (own := KEYS["tool_parsers"].get(str(parser))) is not None:
        draft.change(tool_parser, own, f"the format that vLLM calls {parser}")
    else:
        draft.refuse(path, parser, f"{tool_parser} supports {', '.join(KEYS['tool_parsers'])}")
    if draft.get("env.should_mask_flagged_samples") is not False:
        draft.change("env.pool.max_drop_rate", 1.0, "samples that NeMo Gym masks are dropped, however many")


def read_losses(draft: Draft) -> None:
    """Drop GRPO's copies of the estimator's keys, which NeMo RL does not read; set distillation's tail mass."""
    for key in ("normalize_rewards", "use_leave_one_out_baseline"):
        path, own = f"grpo.{key}", draft.get(f"grpo.adv_estimator.{key}")
        own = True if own is None else own  # the default of both
        if draft.has(path) and draft.get(path) != own:
            draft.pop(path)
            draft.note(Kind.CHANGED, path, "left out; NeMo RL reads only adv_estimator")
        draft.drop(path)
    if draft.algorithm == "distillation":
        why = "NeMo RL renormalizes the top k; here the rest of the vocabulary is one more outcome"
        draft.fill("loss_fn.tail_mass", True, why)


# Engines

_GENERATION = "policy.generation"
_BACKEND = f"{_GENERATION}.backend"
_VLLM = f"{_GENERATION}.vllm_cfg"
_TOTAL = "policy.max_total_sequence_length"
_NEW = f"{_GENERATION}.max_new_tokens"
_SAMPLED_IN_VALIDATION = 256


def use_engine(draft: Draft) -> None:
    """Set an engine, even for SFT and DPO, which need one only for max_val_samples."""
    given = draft.get(_BACKEND)
    if not draft.section(_GENERATION):
        total = draft.number(_TOTAL) or _SAMPLED_IN_VALIDATION
        new = min(_SAMPLED_IN_VALIDATION, max(1, total // 4))
        draft.change(_NEW, new, "required even if nothing is generated")
    elif given == "megatron":
        draft.change(_BACKEND, "embedded", "the training model itself decodes")
    elif given not in ("vllm", "embedded"):
        draft.change(_BACKEND, "vllm", f"this package has no engine {given}")
        for theirs, ours in KEYS["engines"].get(str(given), {}).items():
            value, path = draft.get(f"{_GENERATION}.{given}_cfg.{theirs}"), f"{_VLLM}.{ours}"
            if value is not None and value != draft.get(path):
                draft.change(path, value, f"from {given}_cfg.{theirs}")


def fit_lengths(draft: Draft) -> None:
    """Give a response the tokens that its prompt leaves, like NeMo RL; by default, max_new_tokens are reserved."""
    total, new, prompt = draft.number(_TOTAL), draft.number(_NEW), draft.number("data.max_input_seq_length")
    if total is None or new is None:
        return
    draft.change("data.overlong", "drop", "NeMo RL excludes rows that are too long from the loss")
    if (total if prompt is None else prompt) + new > total:
        why = (
            "NeMo RL's responses end where the sequence is full; by default, max_new_tokens are reserved here"
        )
        draft.change(f"{_GENERATION}.fit_to_sequence", True, why)


def send_weights(draft: Draft) -> None:
    """Let the layout choose the transport: NeMo RL's others, even those that send differences, deliver the same bits.

    logprobs_mode is dropped if both modes give the same numbers: without temperature and filters.
    """
    path, mode = f"{_GENERATION}.refit_transport", f"{_VLLM}.logprobs_mode"
    given, generation = draft.get(path), draft.section(_GENERATION)
    if given in ("nixl", "nccl_reshard", "vllm_s3_sparse", "vllm_zmq_sparse"):
        draft.pop(path)
        what = f"{given} is not available here; NCCL or CUDA IPC, by layout, sends the same weights"
        draft.note(Kind.WARNED, path, what)
    plain = generation.get("temperature") == 1.0 and generation.get("top_p") in (None, 1.0)
    if plain and generation.get("top_k") in (None, -1) and draft.get(mode) == "raw_logprobs":
        draft.drop(mode)


def compare_no_rounded_weights(draft: Draft) -> None:
    """Turn off comparisons with engines that round their weights; NeMo RL has none."""
    section = draft.section(_VLLM)
    weights, cache = section.get("precision") == "fp8", section.get("kv_cache_dtype") not in (None, "auto")
    if draft.get(_BACKEND) != "vllm" or not (weights or cache):
        return
    why = "engines compute in fp8 with weights sent in bfloat16"
    if weights and draft.get(f"{_VLLM}.is_mx"):
        draft.change(f"{_VLLM}.precision", "mxfp8", "is_mx: true, one scale per 32 numbers")
        draft.drop(f"{_VLLM}.is_mx")
    if weights:
        draft.change(f"{_GENERATION}.verify_refit", False, why)
    draft.change(f"{_GENERATION}.compare_at_start", False, why)
    if cache:
        what = "the cache's scales are 1 in all layers; NeMo RL measures them at each refit"
        draft.note(Kind.WARNED, f"{_VLLM}.kv_cache_dtype", what)


def pass_on_vllm_kwargs(draft: Draft) -> None:
    """Sort vLLM's arguments: some have their own keys here, some are passed on, the rest are refused."""
    kwargs = f"{_GENERATION}.vllm_kwargs"
    for name in ("max_num_seqs", "kv_cache_memory_bytes"):
        if draft.has(f"{_VLLM}.{name}"):
            draft.rename(f"{_VLLM}.{name}", f"{kwargs}.{name}")
    if draft.get(f"{kwargs}.tokenizer") in (
        draft.get("policy.tokenizer.name"),
        draft.get("policy.model_name"),
    ):
        draft.drop(f"{kwargs}.tokenizer")
    for name, value in [*draft.section(kwargs).items()]:
        if name == "speculative_config":
            draft.pop(f"{kwargs}.{name}")
            if value is None:
                continue
            what = "slower; engines sample one token at a time, from the same distribution"
            draft.note(Kind.WARNED, f"{kwargs}.{name}", what)
        elif name in NOT_PASSED_ON:
            draft.refuse(f"{kwargs}.{name}", value, "remove it; it changes answers, or another key sets it")
    if draft.has(kwargs) and not draft.section(kwargs):
        draft.pop(kwargs)


# Asynchronous runs


def update_between_answers(draft: Draft) -> None:
    """Update weights between answers, NeMo RL's default."""
    section = f"{draft.algorithm}.async_{draft.algorithm}"
    if draft.section(section).get("enabled") and draft.get("async_rl") is None:
        why = "NeMo RL by default waits for the answers in flight"
        draft.fill(f"{section}.in_flight_weight_updates", False, why)


def mask_mismatch(draft: Draft) -> None:
    """Move the threshold on a response's log-probability error to our key with the same measure."""
    loop, own, action = draft.algorithm, f"{_GENERATION}.mismatch_threshold", f"{_GENERATION}.mismatch_action"
    path = f"{loop}.seq_logprob_error_threshold"
    threshold = draft.get(path)
    if threshold is None or draft.get(own) is not None:
        return
    draft.set(own, threshold)
    draft.set(action, "mask")
    draft.rename(path, own, f"{own}, with {action}: mask")


def answer_without_end(draft: Draft) -> None:
    """Let asynchronous PPO run to max_num_steps, like NeMo RL's; have vLLM answer group by group."""
    if draft.get("ppo.async_ppo.enabled") is True and draft.get("ppo.max_num_epochs") is not None:
        why = "NeMo RL's asynchronous PPO counts no passes; max_num_steps ends the run"
        draft.change("ppo.max_num_epochs", None, why)
    path = f"{_VLLM}.async_engine"
    if draft.asynchronous and draft.get(_BACKEND) == "vllm" and not draft.get(path):
        draft.change(path, True, "asynchronous rollouts are requested group by group")


# NeMo RL's single controller: failed or outdated answers, and stalled runs

_FAILURE = "async_rl.rollout_failure"
_WATCHDOG = "async_rl.stall_watchdog"
_SAMPLER = "async_rl.sampler"
_OWN = "grpo.async_grpo"
_ATTEMPTS, _STALL_S = 5, 600.0
"""NeMo RL's defaults."""


def outlast_failures(draft: Draft) -> None:
    """Limit failures in a row instead of attempts per prompt; end a stalled run if NeMo RL would, but never warn."""
    failure, watchdog = draft.section(_FAILURE), draft.section(_WATCHDOG)
    # The table refuses keys that give prompts up.
    given_up = any(failure.get(key) for key in ("max_skipped_prompts", "max_consecutive_dropped_prompts"))
    if draft.algorithm == "grpo" and failure and not given_up:
        attempts = failure.get("max_infra_attempts_per_prompt", _ATTEMPTS)
        timeout = draft.get(f"{_FAILURE}.native.generation_timeout_s")
        draft.pop(_FAILURE)
        if isinstance(attempts, int) and attempts > 0:
            why = f"NeMo RL makes {attempts} attempts per prompt; here failures in a row count, over all prompts"
            draft.fill(f"{_OWN}.max_generation_failures", attempts - 1, why)
        if timeout is not None:
            why = f"from {_FAILURE}.native.generation_timeout_s"
            draft.fill(f"{_OWN}.rollout_timeout_s", timeout, why)
        draft.note(Kind.RENAMED, _FAILURE, f"{_OWN}.max_generation_failures")
    if draft.algorithm == "grpo" and watchdog:
        draft.pop(_WATCHDOG)
        if watchdog.get("stall_action", "warn") == "warn":
            what = f"stalls are not reported; {_OWN}.stall_timeout_s ends the run"
            draft.note(Kind.WARNED, _WATCHDOG, what)
        else:
            stall = watchdog.get("stall_timeout_s", _STALL_S)
            draft.fill(f"{_OWN}.stall_timeout_s", stall, f"from {_WATCHDOG}.stall_timeout_s")


def train_within_the_window(draft: Draft) -> None:
    """Train on answers as they complete where NeMo RL samples more than it trains on and discards old ones.

    Both take any answer within the window; here no more are requested than can train in time.
    """
    if draft.algorithm != "grpo" or not draft.section(_SAMPLER):
        return
    name = draft.get(f"{_SAMPLER}.name")
    if name != "custom":
        unread = "max_staleness_versions" if name in (None, "in_order") else "max_lookahead_versions"
        draft.drop(f"{_SAMPLER}.{unread}")
    if name != "windowed" or draft.get(f"{_SAMPLER}.sample_freshest_first") is True:
        return  # sample_freshest_first is refused with its sampler
    draft.set(f"{_SAMPLER}.name", "ready_first")
    draft.drop(f"{_SAMPLER}.sample_freshest_first")
    draft.drop("async_rl.max_buffered_rollouts")
    what = "windowed -> as_completed; NeMo RL also trains on answers as they complete, and discards old ones"
    draft.note(Kind.CHANGED, f"{_OWN}.order", f"{what}; here no more are requested than can train in time")


STEPS = (
    write_defaults,
    use_nemo_gym,
    use_chat_template,
    show_given_answers,
    name_sources,
    hold_out_rows,
    set_validation,
    count_validation_rows,
    read_sources,
    use_environment,
    rank_checkpoints,
    read_losses,
    use_engine,
    fit_lengths,
    update_between_answers,
    mask_mismatch,
    send_weights,
    answer_without_end,
    pass_on_vllm_kwargs,
    outlast_failures,
    train_within_the_window,
    compare_no_rounded_weights,
)
