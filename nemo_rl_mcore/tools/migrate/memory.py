"""What leaves the GPUs of training while engines answer on them; in NeMo RL gradients, optimizer and weights do."""

from nemo_rl_mcore.tools.migrate.draft import Draft, Kind, Note

_OFFLOAD = "policy.offload"
_COMPARE = "policy.generation.compare_at_start"


def compare_no_rounded_weights(draft: Draft) -> None:
    """Leave out comparisons with engines that round what they are sent, as NeMo RL has none."""
    section, generation = draft.section("policy.generation.vllm_cfg"), "policy.generation"
    rounds = section.get("precision") == "fp8", section.get("kv_cache_dtype") not in (None, "auto")
    if draft.get(f"{generation}.backend") != "vllm" or not any(rounds):
        return
    why = "engines hold and compute in fp8 what is sent in bfloat16"
    if rounds[0]:
        draft.change(f"{generation}.verify_refit", False, why)
    draft.change(_COMPARE, False, why)
    if rounds[1]:
        what = (
            "vLLM's scales of the cache are 1, for all layers; NeMo RL measures them again with the weights"
        )
        draft.notes.append(Note(Kind.WARNED, "policy.generation.vllm_cfg.kv_cache_dtype", what))


def offload_beside_engines(draft: Draft) -> None:
    """Offload what NeMo RL does where engines share the ranks' GPUs."""
    loop = draft.algorithm
    own_gpus = draft.get("policy.generation.colocated.enabled") is False
    asynchronous = draft.section(f"{loop}.async_{loop}").get("enabled") or draft.section("async_rl")
    if own_gpus or asynchronous or draft.get("policy.generation.backend") != "vllm" or draft.has(_OFFLOAD):
        return
    if loop in ("sft", "dpo") and draft.get(f"{loop}.max_val_samples") == 0:
        return  # no engine answers
    if loop == "ppo":
        what = "what trains stays on the GPU while engines answer there; NeMo RL takes it off"
        draft.notes.append(Note(Kind.WARNED, _OFFLOAD, what))
        return
    draft.change(_OFFLOAD, "all", "NeMo RL takes all off the GPU while engines answer there")
    if not draft.has(_COMPARE):
        draft.change(_COMPARE, False, f"NeMo RL has no such comparison, and {_OFFLOAD}: all no room for it")
