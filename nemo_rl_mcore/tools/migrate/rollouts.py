"""Who answers, and when: NeMo RL's keys of engines and of asynchronous runs that mean something else here."""

from nemo_rl_mcore.config.generation import is_passed_on
from nemo_rl_mcore.tools.migrate.draft import Draft, Kind

_GENERATION = "policy.generation"
_BACKEND = f"{_GENERATION}.backend"
_VLLM = f"{_GENERATION}.vllm_cfg"
_TOTAL = "policy.max_total_sequence_length"
_NEW = f"{_GENERATION}.max_new_tokens"

# Engines

_SAMPLED_IN_VALIDATION = 256
_LAYOUTS: dict[str, dict[str, str]] = {
    "sglang": {"tp_size": "tensor_parallel_size"},
    "trtllm": {
        key: key
        for key in ("tensor_parallel_size", "max_model_len", "gpu_memory_utilization", "async_engine")
    },
}
"""Keys of the sections of other engines, and what they are in vllm_cfg."""


def use_engine(draft: Draft) -> None:
    """Name an engine, also of SFT and DPO, which ask for answers only where max_val_samples says so."""
    given = draft.get(_BACKEND)
    if not draft.section(_GENERATION):
        total = draft.number(_TOTAL) or _SAMPLED_IN_VALIDATION
        new = min(_SAMPLED_IN_VALIDATION, max(1, total // 4))
        draft.change(_NEW, new, "an engine is named also where no answer is asked for")
    elif given == "megatron":
        draft.change(_BACKEND, "embedded", "the training model itself decodes")
    elif given not in ("vllm", "embedded"):
        draft.change(_BACKEND, "vllm", f"the engine {given} is none of this package")
        for theirs, ours in _LAYOUTS.get(str(given), {}).items():
            value, path = draft.get(f"{_GENERATION}.{given}_cfg.{theirs}"), f"{_VLLM}.{ours}"
            if value is not None and value != draft.get(path):
                draft.change(path, value, f"as {given}_cfg.{theirs} says")


def fit_lengths(draft: Draft) -> None:
    """Let a response have what its prompt leaves, as max_model_len does in NeMo RL; here a whole one is reserved.

    Without a bound of prompts, theirs may be as long as a sequence.
    """
    total, new, prompt = draft.number(_TOTAL), draft.number(_NEW), draft.number("data.max_input_seq_length")
    if total is None or new is None:
        return
    draft.change("data.overlong", "drop", "NeMo RL leaves rows that are too long out of the loss")
    if (total if prompt is None else prompt) + new > total:
        why = "a response ends where the sequence is full; here max_new_tokens are reserved"
        draft.change(f"{_GENERATION}.fit_to_sequence", True, why)


def send_weights(draft: Draft) -> None:
    """Let weights travel as the layout says: NeMo RL's other ways, whole or as differences, bring the same bits."""
    path = f"{_GENERATION}.refit_transport"
    given = draft.get(path)
    if given in ("nixl", "nccl_reshard", "vllm_s3_sparse", "vllm_zmq_sparse"):
        draft.pop(path)
        what = f"{given} is not here; the same weights travel by NCCL or CUDA IPC, as the layout says"
        draft.note(Kind.WARNED, path, what)


def compare_no_rounded_weights(draft: Draft) -> None:
    """Leave out comparisons with engines that round what they are sent, as NeMo RL has none."""
    section = draft.section(_VLLM)
    weights, cache = section.get("precision") == "fp8", section.get("kv_cache_dtype") not in (None, "auto")
    if draft.get(_BACKEND) != "vllm" or not (weights or cache):
        return
    why = "engines hold and compute in fp8 what is sent in bfloat16"
    if weights:
        draft.change(f"{_GENERATION}.verify_refit", False, why)
    draft.change(f"{_GENERATION}.compare_at_start", False, why)
    if cache:
        what = (
            "vLLM's scales of the cache are 1, for all layers; NeMo RL measures them again with the weights"
        )
        draft.note(Kind.WARNED, f"{_VLLM}.kv_cache_dtype", what)


def read_logprobs(draft: Draft) -> None:
    """Drop the mode of log-probabilities where both are the same: nothing divides or filters what is sampled."""
    generation = draft.section(_GENERATION)
    plain = generation.get("temperature") == 1.0 and generation.get("top_p") in (None, 1.0)
    plain = plain and generation.get("top_k") in (None, -1)
    if plain and draft.get(f"{_VLLM}.logprobs_mode") == "raw_logprobs":
        draft.drop(f"{_VLLM}.logprobs_mode")


def pass_on_vllm_kwargs(draft: Draft) -> None:
    """Split vLLM's arguments: those with a key of their own here, those that are passed on, and the rest, refused."""
    kwargs = f"{_GENERATION}.vllm_kwargs"
    for name in ("max_num_seqs", "kv_cache_memory_bytes"):
        if draft.has(f"{_VLLM}.{name}"):
            draft.rename(f"{_VLLM}.{name}", f"{kwargs}.{name}")
    for name, value in [*draft.section(kwargs).items()]:
        if not is_passed_on(name):
            draft.refuse(f"{kwargs}.{name}", value, "remove it; it gives other answers, or is set elsewhere")
    if draft.has(kwargs) and not draft.section(kwargs):
        draft.pop(kwargs)


# Asynchronous runs


def mask_mismatch(draft: Draft) -> None:
    """Move the threshold of a response's log-probabilities to the key that measures the same here."""
    loop, own = draft.algorithm, f"{_GENERATION}.mismatch"
    path = f"{loop}.seq_logprob_error_threshold"
    threshold = draft.get(path)
    if threshold is None or draft.get(f"{own}.threshold") is not None:
        return
    section = draft.section(f"{loop}.async_{loop}")
    ages = [section.get("max_trajectory_age_steps")] if section.get("enabled") else []
    if draft.get("async_rl") is not None:
        ages.append(draft.get("async_rl.sampler.max_lookahead_versions"))
    if any(age != 0 for age in ages):
        why = "with answers of older weights a mask would act on their age"
        draft.refuse(path, threshold, f"{why}; {own}.action: warn tells of it")
        return
    draft.set(own, {"threshold": threshold, "action": "mask"})
    draft.rename(path, f"{own}.threshold", f"{own}: the same measure, and the same mask")


def update_between_answers(draft: Draft) -> None:
    """Say that engines take new weights between answers, where NeMo RL's default does and ours does not."""
    section = f"{draft.algorithm}.async_{draft.algorithm}"
    key = f"{section}.in_flight_weight_updates"
    if draft.section(section).get("enabled") and not draft.has(key) and draft.get("async_rl") is None:
        draft.change(key, False, "NeMo RL waits for the answers in flight unless a recipe says otherwise")


def draw_without_end(draft: Draft) -> None:
    """Let an asynchronous PPO go on to max_num_steps: NeMo RL's begins the rows again, and counts no passes."""
    if draft.get("ppo.async_ppo.enabled") is True and draft.get("ppo.max_num_epochs") is not None:
        why = "NeMo RL's asynchronous PPO counts no passes; max_num_steps ends the run"
        draft.change("ppo.max_num_epochs", None, why)


def answer_one_by_one(draft: Draft) -> None:
    """Let vLLM answer group by group where another engine of an asynchronous run does."""
    loop, path = draft.algorithm, f"{_VLLM}.async_engine"
    asked = draft.section(f"{loop}.async_{loop}").get("enabled") or draft.section("async_rl")
    if asked and draft.get(_BACKEND) == "vllm" and not draft.get(path):
        draft.change(path, True, "asynchronous rollouts are asked group by group")


# NeMo RL's single controller: answers that fail or grow old, and runs that stand still

_FAILURE = "async_rl.rollout_failure"
_WATCHDOG = "async_rl.stall_watchdog"
_SAMPLER = "async_rl.sampler"
_OWN = "grpo.async_grpo"
_ATTEMPTS, _STALL_S = 5, 600.0
"""NeMo RL's defaults."""


def try_again(draft: Draft) -> None:
    """Count attempts as failures in a row; prompts that are given up on, so that a step shrinks, are not known here."""
    section = draft.section(_FAILURE)
    if draft.algorithm != "grpo" or not section:
        return
    if any(section.get(key) for key in ("max_skipped_prompts", "max_consecutive_dropped_prompts")):
        return  # refused by the table
    attempts = section.get("max_infra_attempts_per_prompt", _ATTEMPTS)
    timeout = draft.get(f"{_FAILURE}.native.generation_timeout_s")
    draft.pop(_FAILURE)
    if isinstance(attempts, int) and attempts > 0 and not draft.has(f"{_OWN}.max_generation_failures"):
        why = f"{attempts} attempts to each prompt there; here failures in a row, over all prompts"
        draft.change(f"{_OWN}.max_generation_failures", attempts - 1, why)
    if timeout is not None and not draft.has(f"{_OWN}.rollout_timeout_s"):
        draft.change(f"{_OWN}.rollout_timeout_s", timeout, f"as {_FAILURE}.native.generation_timeout_s says")
    draft.note(Kind.RENAMED, _FAILURE, f"{_OWN}.max_generation_failures")


def watch_stalls(draft: Draft) -> None:
    """End a stalled run where NeMo RL does; a warning of one is written nowhere here."""
    section = draft.section(_WATCHDOG)
    if draft.algorithm != "grpo" or not section:
        return
    draft.pop(_WATCHDOG)
    if section.get("stall_action", "warn") == "warn":
        what = f"a stall is not warned of; {_OWN}.stall_timeout_s ends the run"
        draft.note(Kind.WARNED, _WATCHDOG, what)
    elif not draft.has(f"{_OWN}.stall_timeout_s"):
        stall = section.get("stall_timeout_s", _STALL_S)
        draft.change(f"{_OWN}.stall_timeout_s", stall, f"as {_WATCHDOG}.stall_timeout_s says")


def train_within_the_window(draft: Draft) -> None:
    """Take answers as they are completed where NeMo RL samples more than it trains on, and discards what is too old.

    Within the window both take whatever is there; here no more is asked for than can be trained on in time.
    """
    if draft.algorithm != "grpo" or not draft.section(_SAMPLER):
        return
    name = draft.get(f"{_SAMPLER}.name")
    if name != "custom":
        unread = "max_staleness_versions" if name in (None, "in_order") else "max_lookahead_versions"
        draft.drop(f"{_SAMPLER}.{unread}")
    if name != "windowed" or draft.get(f"{_SAMPLER}.sample_freshest_first") is True:
        return  # the latter is refused with the sampler
    draft.set(f"{_SAMPLER}.name", "ready_first")
    draft.drop(f"{_SAMPLER}.sample_freshest_first")
    draft.drop("async_rl.max_buffered_rollouts")
    what = "windowed -> as_completed; answers train as they come there too, and those that are too old are discarded"
    draft.note(Kind.CHANGED, f"{_OWN}.order", f"{what}; here no more are asked for than train in time")


STEPS = (
    use_engine,
    fit_lengths,
    update_between_answers,
    mask_mismatch,
    send_weights,
    read_logprobs,
    draw_without_end,
    answer_one_by_one,
    pass_on_vllm_kwargs,
    try_again,
    watch_stalls,
    train_within_the_window,
    compare_no_rounded_weights,
)
