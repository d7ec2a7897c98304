"""Keys whose value, or whose absence, means something else here."""

import re
from typing import cast, get_args

from nemo_rl_mcore.config.base import Tree
from nemo_rl_mcore.config.data import DataConfig, EnvConfig
from nemo_rl_mcore.config.source import TEXT_FILES
from nemo_rl_mcore.tools.migrate.draft import Draft, Kind, Note

_TOTAL = "policy.max_total_sequence_length"
_NEW = "policy.generation.max_new_tokens"
_PROMPT = "data.max_input_seq_length"
_FIT = "policy.generation.fit_to_sequence"
_SAMPLED_IN_VALIDATION = 256
_ALL_BATCHES = -1
_TASKS = get_args(DataConfig.model_fields["dataset_name"].annotation)
"""Of this package, which no recipe of NeMo RL names."""
_SAMPLING = ("grpo", "ppo", "distillation")


def use_chat_template(draft: Draft) -> None:
    """NeMo RL always applies a template, and one that shows the text alone where the key is null."""
    template = "policy.tokenizer.chat_template"
    as_text = draft.has(template) and draft.get(template) is None
    given = draft.get(template)
    if as_text or given == "default":
        draft.pop(template)
        draft.dropped += [] if as_text else [template]
    elif isinstance(given, str) and given.endswith(".jinja"):
        draft.pop(template)
        draft.refuse(template, given, "write the text of that file")
    why = "chat_template: null shows the text alone" if as_text else "NeMo RL applies the chat template"
    draft.change("data.apply_chat_template", not as_text, why)
    parsed = "NeMo RL parses special tokens in rows and in what environments say"
    draft.change("data.special_tokens_in_content", "parse", parsed)


_SHOWN = ("add_bos", "add_eos", "add_generation_prompt")


def _leave_out_of_given_answers(draft: Draft) -> None:
    """Drop what only SFT reads there, and the prompt of a system, which SFT and DPO do not."""
    for key in _SHOWN if draft.algorithm != "sft" else ():
        if draft.has(f"data.{key}"):
            draft.pop(f"data.{key}")
            draft.dropped.append(f"data.{key}")
    for place, source in sources_of(draft) if draft.algorithm in ("sft", "dpo") else ():
        if source.pop("system_prompt_file", None) is not None:
            draft.dropped.append(f"{place}.system_prompt_file")


def show_given_answers(draft: Draft) -> None:
    """Train on what NeMo RL does of a given answer: all that the chat template adds for its turn.

    data/llm_message_utils.py, get_formatted_message_log: what opens the answer is the prompt's with
    add_generation_prompt, which SFT reads of the recipe, as the two others; DPO has their defaults.
    """
    _leave_out_of_given_answers(draft)
    if draft.algorithm not in ("sft", "dpo"):
        return
    given = {key: draft.get(f"data.{key}") for key in _SHOWN}
    if given.get("add_bos") is None:
        draft.change("data.add_bos", True, "NeMo RL begins a row with the begin of sequence, if there is one")
    if not draft.get("data.apply_chat_template"):
        return  # text alone ends with the end of sequence in both
    if given.get("add_eos") is None:
        draft.change("data.add_eos", True, "NeMo RL ends a row with the end of sequence")
    opened = given.get("add_generation_prompt")
    if opened is None or isinstance(opened, bool):
        if opened is not None:
            draft.pop("data.add_generation_prompt")
            draft.notes.append(Note(Kind.RENAMED, "data.add_generation_prompt", "data.imitated"))
        imitated = "to_turn_end" if opened else "turn"
        opening = "" if opened else "what opens it and "
        draft.change(
            "data.imitated", imitated, f"NeMo RL trains on {opening}what is after its end of sequence"
        )


def use_engine(draft: Draft) -> None:
    """Name an engine, also of SFT and DPO, which ask for answers only where max_val_samples says so."""
    backend = "policy.generation.backend"
    if not draft.section("policy.generation"):
        total = draft.number(_TOTAL) or _SAMPLED_IN_VALIDATION
        new = min(_SAMPLED_IN_VALIDATION, max(1, total // 4))
        draft.change(_NEW, new, "an engine is named also where no answer is asked for")
    elif draft.get(backend) == "megatron":
        draft.change(backend, "embedded", "the training model itself decodes")
    elif draft.get(backend) not in ("vllm", "embedded"):
        given = draft.get(backend)
        draft.change(backend, "vllm", f"the engine {given} is none of this package")
        _keep_layout(draft, str(given))


_LAYOUTS: dict[str, dict[str, str]] = {
    "sglang": {"tp_size": "tensor_parallel_size"},
    "trtllm": {
        key: key
        for key in ("tensor_parallel_size", "max_model_len", "gpu_memory_utilization", "async_engine")
    },
}
"""Keys of the sections of other engines, and what they are in vllm_cfg."""


def _keep_layout(draft: Draft, engine: str) -> None:
    for theirs, ours in _LAYOUTS.get(engine, {}).items():
        given, path = (
            draft.get(f"policy.generation.{engine}_cfg.{theirs}"),
            f"policy.generation.vllm_cfg.{ours}",
        )
        if given is not None and given != draft.get(path):
            draft.change(path, given, f"as {engine}_cfg.{theirs} says")


def validate_as_there(draft: Draft) -> None:
    """Sample the answers of a validation, which here are the likeliest; of SFT and DPO there are none in NeMo RL."""
    loop = draft.algorithm
    if (draft.number(f"{loop}.val_period") or 0) < 0:
        draft.change(f"{loop}.val_period", 0, "there is no validation")
    validates = any(draft.get(f"{loop}.val_{key}") for key in ("period", "at_start", "at_end"))
    if loop not in _SAMPLING:
        if not draft.has(f"{loop}.max_val_samples"):
            why = (
                "NeMo RL takes the loss of held-out rows alone; a number asks for answers to as many prompts"
            )
            draft.change(f"{loop}.max_val_samples", 0, why)
        return
    if validates or (draft.number(f"{loop}.val_num_generations_per_prompt") or 1) > 1:
        draft.change(f"{loop}.val_greedy", False, "NeMo RL's validation samples as training does")
    if validates:
        _count_held_out(draft)
        _share_out_held_out(draft)


def _share_out_held_out(draft: Draft) -> None:
    several, path = draft.get("data.validation"), f"{draft.algorithm}.max_val_samples"
    if isinstance(several, list) and len(cast("list[object]", several)) > 1:
        what = "as many rows of each source; NeMo RL takes one source after the other, and the last may have none"
        draft.notes.append(Note(Kind.CHANGED, path, what))
        draft.comments.setdefault(path, f"{what[:1].upper()}{what[1:]}.")


_ROWS = {"AIME2024": 30, "AIME2026": 30}
"""Data sets that a usual max_val_samples is more than."""


def _count_held_out(draft: Draft) -> None:
    """Take the whole batches that NeMo RL takes: max_val_samples // val_batch_size, and of a distillation rounded up.

    Its validation ends where the rows do, too.
    """
    path = f"{draft.algorithm}.max_val_samples"
    rows, batch = draft.number(path), draft.number(f"{draft.algorithm}.val_batch_size")
    if not rows or not batch or batch < 0:
        return
    batches = -(-rows // batch) if draft.algorithm == "distillation" else rows // batch
    source = draft.section("data.validation")
    times = source.get("repeat", 1)
    there = _ROWS.get(str(source.get("dataset_name")), 0) * (times if isinstance(times, int) else 0)
    if 0 < there <= batches * batch:
        draft.change(path, None, f"all of the {there} rows, as NeMo RL takes no more than there are")
    elif batches and batches * batch != rows:
        draft.change(path, batches * batch, f"NeMo RL takes whole batches of val_batch_size: {batch}")


def fit_lengths(draft: Draft) -> None:
    """Let a response have what its prompt leaves, as max_model_len does in NeMo RL; here a whole one is reserved.

    Without a bound of prompts, theirs may be as long as a sequence.
    """
    total, new, prompt = draft.number(_TOTAL), draft.number(_NEW), draft.number(_PROMPT)
    if total is None or new is None:
        return
    draft.change("data.overlong", "drop", "NeMo RL leaves rows that are too long out of the loss")
    if (total if prompt is None else prompt) + new > total:
        draft.change(
            _FIT, True, "a response ends where the sequence is full; here max_new_tokens are reserved"
        )


def name_sources(draft: Draft) -> None:
    """Move what older recipes say of all sources in `data` itself, and what a source calls otherwise here."""
    for key in (*TEXT_FILES, "processor"):
        if draft.has(f"data.{key}"):
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


_HELD_OUT = ("OpenMathInstruct-2", "tulu3_sft_mixture", "open_assistant")
"""Data sets of which NeMo RL holds 5 % out where a recipe says nothing; of all others it holds out nothing."""


def hold_out_as_there(draft: Draft) -> None:
    """Hold out no rows where NeMo RL does not; a validation that has none then is none."""
    if draft.get("data.validation") or draft.get("data.default.split_validation_size") is not None:
        return
    train = [(place, source) for place, source in sources_of(draft) if place.startswith("data.train")]
    for place, source in train:
        if source.get("split_validation_size") is None and source.get("dataset_name") not in _HELD_OUT:
            source["split_validation_size"] = 0
            draft.notes.append(
                Note(Kind.CHANGED, f"{place}.split_validation_size", "0; NeMo RL holds no rows out")
            )
    held_out = any(source.get("split_validation_size") != 0 for _, source in train)
    for key, off in (("val_period", 0), ("val_at_start", False), ("val_at_end", False)):
        path = f"{draft.algorithm}.{key}"
        if train and not held_out and draft.get(path):
            draft.change(path, off, "no rows are held out")


def keep_ties(draft: Draft) -> None:
    """Keep pairs of which neither answer is better, as NeMo RL does: both are the first, and count in the loss."""
    for place, source in sources_of(draft):
        if draft.algorithm == "dpo" and source.get("dataset_name") == "HelpSteer3" and "ties" not in source:
            source["ties"] = "keep"
            draft.notes.append(
                Note(Kind.CHANGED, f"{place}.ties", "keep; NeMo RL takes ties as pairs of one answer")
            )


def sources_of(draft: Draft) -> list[tuple[str, Tree]]:
    """Return each section of data that names or completes a source, with its path; of a list with its place."""
    found: list[tuple[str, object]] = []
    for path in ("data.default", "data.train", "data.validation"):
        given = draft.get(path)
        many = enumerate(cast("list[object]", given)) if isinstance(given, list) else None
        found += [(f"{path}.{place}", one) for place, one in many] if many else [(path, given)]
    return [(path, cast("Tree", one)) for path, one in found if isinstance(one, dict)]


def use_environment(draft: Draft) -> None:
    """Leave out environments that no source names, and say where a response states its answer."""
    named = {str(source["env_name"]) for _, source in sources_of(draft) if source.get("env_name")}
    for name, section in [*draft.section("env").items()]:
        if name in EnvConfig.model_fields:
            continue
        draft.pop(f"env.{name}")
        if name in named:
            draft.refuse(f"env.{name}", section, "env has math, and custom for a class of your own")
        else:
            draft.dropped.append(f"env.{name}")
    if draft.has("env.math"):
        draft.change("env.math.unparsable", "zero", "NeMo RL scores 0 against an answer that nobody can read")
    if draft.get("env.math.math_verify_impl") == "dapo_math_verify":
        draft.pop("env.math.math_verify_impl")
        draft.notes.append(Note(Kind.RENAMED, "env.math.math_verify_impl", "env.math.response"))
        draft.change(
            "env.math.response.regex",
            r"(?i)Answer\s*:\s*([^\n]+)",
            "dapo_math_verify compares the text after the last `Answer:`; here math-verify compares its value",
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
    """Write the one number that is all held-out rows here; in NeMo RL each below 1 is."""
    path = f"{draft.algorithm}.val_batches"
    batches = draft.number(path)
    if batches is not None and batches < 1 and batches != _ALL_BATCHES:
        draft.change(path, _ALL_BATCHES, "all held-out rows")


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


def update_between_answers(draft: Draft) -> None:
    """Say that engines take new weights between answers, where NeMo RL's default does and ours does not."""
    section = f"{draft.algorithm}.async_{draft.algorithm}"
    key = f"{section}.in_flight_weight_updates"
    if draft.section(section).get("enabled") and not draft.has(key) and draft.get("async_rl") is None:
        draft.change(key, False, "NeMo RL waits for the answers in flight unless a recipe says otherwise")


STEPS = (
    use_chat_template,
    show_given_answers,
    use_engine,
    fit_lengths,
    name_sources,
    show_held_out_as_there,
    hold_out_as_there,
    keep_ties,
    validate_as_there,
    use_environment,
    rank_checkpoints,
    count_validation_batches,
    distill,
    update_between_answers,
)
