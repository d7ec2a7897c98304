"""Keys of NeMo RL that are read there under another name, or only where something is on that is off."""

from nemo_rl_mcore.config.base import value_at
from nemo_rl_mcore.config.policy import PACKING_ALGORITHMS
from nemo_rl_mcore.config.vllm_kwargs import is_passed_on
from nemo_rl_mcore.recipe.validate import with_pretrained_model
from nemo_rl_mcore.tools.migrate.draft import Draft, Kind, Note
from nemo_rl_mcore.tools.migrate.meaning import sources_of

_MEGATRON = "policy.megatron_cfg"
_DDP = "policy.megatron_cfg.distributed_data_parallel_config"
_KWARGS = "policy.generation.vllm_kwargs"
_OWN_NAMES = ("max_num_seqs", "kv_cache_memory_bytes")
"""Arguments of vLLM that are keys of vllm_cfg here."""
_OTHER_TRANSPORTS = ("nixl", "nccl_reshard", "vllm_s3_sparse", "vllm_zmq_sparse")
_SHORTHANDS = ("normalize_rewards", "use_leave_one_out_baseline")


def leave_out_idle(draft: Draft) -> None:
    """Drop what nothing reads there: how packing that is off packs, the deadline of checkpoints that are not saved."""
    packing = "policy.sequence_packing"
    if not draft.get(f"{packing}.enabled") and draft.get(f"{packing}.algorithm") not in PACKING_ALGORITHMS:
        _drop(draft, f"{packing}.algorithm")
    if (
        not draft.get("checkpointing.enabled")
        and draft.get("checkpointing.checkpoint_must_save_by") is not None
    ):
        _drop(draft, "checkpointing.checkpoint_must_save_by")
    for name in ("policy", "value"):
        tensor_parallel = draft.number(f"{name}.megatron_cfg.tensor_model_parallel_size") or 1
        if tensor_parallel == 1 and draft.get(f"{name}.megatron_cfg.sequence_parallel") is True:
            path = f"{name}.megatron_cfg.sequence_parallel"
            draft.change(path, False, "one tensor-parallel rank has no sequence to share")


_READ_BY = {
    "repeat": ("AIME2024", "AIME2025", "AIME2026", "NemoGymDataset"),
    "max_samples": ("Nemotron-Cascade-2-SFT-Math",),
}
"""Keys of a source that few of NeMo RL's data sets read; the others take them and do nothing."""


def leave_out_unread_of_sources(draft: Draft) -> None:
    """Drop keys of a source that the class of its data set does not read there."""
    for place, source in sources_of(draft):
        for key, sets in _READ_BY.items():
            if key in source and source.get("dataset_name") not in sets:
                source.pop(key)
                draft.dropped.append(f"{place}.{key}")


def read_estimator(draft: Draft) -> None:
    """Take the estimator's word for what GRPO's section repeats: NeMo RL computes advantages by it alone."""
    for key in _SHORTHANDS:
        path, own = f"grpo.{key}", draft.get(f"grpo.adv_estimator.{key}")
        own = True if own is None else own  # the default of both
        if not draft.has(path) or draft.get(path) == own:
            continue
        draft.set(f"grpo.adv_estimator.{key}", own)
        draft.change(
            path, own, "NeMo RL computes advantages by adv_estimator, and reads no other key for them"
        )


def mask_mismatch(draft: Draft) -> None:
    """Move the threshold of a response's log-probabilities to the key that measures the same here."""
    path, own = f"{draft.algorithm}.seq_logprob_error_threshold", "policy.generation.mismatch"
    threshold = draft.get(path)
    if threshold is None or draft.get(f"{own}.threshold") is not None:
        return
    draft.pop(path)
    if _trains_on_older_answers(draft):
        why = "with answers of older weights a mask would act on their age"
        draft.refuse(path, threshold, f"{why}; {own}.action: warn tells of it")
        return
    draft.set(own, {"threshold": threshold, "action": "mask"})
    draft.origins[f"{own}.threshold"] = path
    draft.notes.append(Note(Kind.RENAMED, path, f"{own}: the same measure, and the same mask"))


def _trains_on_older_answers(draft: Draft) -> bool:
    """Return whether the weights that answer may be older than those that train."""
    section = f"{draft.algorithm}.async_{draft.algorithm}"
    ages = [draft.get(f"{section}.max_trajectory_age_steps")] if draft.get(f"{section}.enabled") else []
    if draft.get("async_rl") is not None:
        ages.append(draft.get("async_rl.sampler.max_lookahead_versions"))
    return any(age != 0 for age in ages)


def overlap_as_can_be(draft: Draft) -> None:
    """Gather weights when they are needed where gradients are not reduced beside the backward pass: speed alone."""
    path = f"{_DDP}.overlap_param_gather"
    fused = draft.get("policy.megatron_cfg.use_fused_linear_logprobs")
    if draft.get(path) is True and not draft.get(f"{_DDP}.overlap_grad_reduce") and not fused:
        draft.change(path, False, "it costs speed; here it needs overlap_grad_reduce: true")


def send_weights(draft: Draft) -> None:
    """Let weights travel as the layout says: NeMo RL's other ways, whole or as differences, bring the same bits."""
    path = "policy.generation.refit_transport"
    given = draft.get(path)
    if given in _OTHER_TRANSPORTS:
        draft.pop(path)
        what = f"{given} is not here; the same weights travel by NCCL or CUDA IPC, as the layout says"
        draft.notes.append(Note(Kind.WARNED, path, what))


_PREDICTION = ("mtp_num_layers", "mtp_loss_scaling_factor", "mtp_use_repeated_layer", "mtp_detach_heads")


def read_prediction_layers(draft: Draft) -> None:
    """Move prediction layers and their factor to the model; where there are none, nothing reads the rest."""
    layers = f"{_MEGATRON}.{_PREDICTION[0]}"
    if not draft.has(layers):
        return  # the model's own, if it has any
    number = draft.get(layers)
    if number is None or number == 0:
        for key in _PREDICTION:
            _drop(draft, f"{_MEGATRON}.{key}")
    elif draft.number(layers) is not None and _knows_the_model(draft):
        for key in _PREDICTION[:2]:
            path, own = f"{_MEGATRON}.{key}", f"policy.model.{key}"
            if draft.has(path) and draft.get(own) is None:
                draft.set(own, draft.pop(path))
                draft.origins[own] = path
                draft.notes.append(Note(Kind.RENAMED, path, own))


def _knows_the_model(draft: Draft) -> bool:
    """Return whether the sizes of the model are known, without which no key of it has a place."""
    filled, _ = with_pretrained_model(draft.tree)
    return value_at(filled, "policy.model.num_layers") is not None


def read_logprobs(draft: Draft) -> None:
    """Drop the mode of log-probabilities where both are the same: nothing divides or filters what is sampled."""
    path, generation = "policy.generation.vllm_cfg.logprobs_mode", draft.section("policy.generation")
    plain = generation.get("temperature") == 1.0 and generation.get("top_p") in (None, 1.0)
    if draft.get(path) == "raw_logprobs" and plain and generation.get("top_k") in (None, -1):
        _drop(draft, path)


def validate_at_once(draft: Draft) -> None:
    """Drop a null batch of validations, with which there is one of all rows: answers do not depend on it."""
    path = f"{draft.algorithm}.val_batch_size"
    if draft.has(path) and draft.get(path) is None:
        _drop(draft, path)


def draw_without_end(draft: Draft) -> None:
    """Let an asynchronous PPO go on to max_num_steps: NeMo RL's begins the rows again, and counts no passes."""
    path = "ppo.max_num_epochs"
    if draft.get("ppo.async_ppo.enabled") is True and draft.get(path) is not None:
        draft.change(path, None, "NeMo RL's asynchronous PPO counts no passes; max_num_steps ends the run")


def answer_one_by_one(draft: Draft) -> None:
    """Let vLLM answer group by group where another engine of an asynchronous run does."""
    loop, path = draft.algorithm, "policy.generation.vllm_cfg.async_engine"
    asked = draft.section(f"{loop}.async_{loop}").get("enabled") or draft.section("async_rl")
    if asked and draft.get("policy.generation.backend") == "vllm" and not draft.get(path):
        draft.change(path, True, "asynchronous rollouts are asked group by group")


def pass_on_vllm_kwargs(draft: Draft) -> None:
    """Split vLLM's arguments: those with a key of their own here, those that are passed on, and the rest, refused."""
    for name, value in [*draft.section(_KWARGS).items()]:
        path = f"{_KWARGS}.{name}"
        if name in _OWN_NAMES:
            draft.pop(path)
            draft.set(f"policy.generation.vllm_cfg.{name}", value)
            draft.origins[f"policy.generation.vllm_cfg.{name}"] = path
            draft.notes.append(Note(Kind.RENAMED, path, f"policy.generation.vllm_cfg.{name}"))
        elif not is_passed_on(name):
            draft.pop(path)
            draft.refuse(path, value, "remove it; it gives other answers, or is set elsewhere")
    if draft.has(_KWARGS) and not draft.section(_KWARGS):
        draft.pop(_KWARGS)


def _drop(draft: Draft, path: str) -> None:
    if draft.has(path):
        draft.pop(path)
        draft.dropped.append(path)


STEPS = (
    leave_out_idle,
    leave_out_unread_of_sources,
    read_estimator,
    mask_mismatch,
    overlap_as_can_be,
    send_weights,
    read_prediction_layers,
    read_logprobs,
    validate_at_once,
    draw_without_end,
    answer_one_by_one,
    pass_on_vllm_kwargs,
)
