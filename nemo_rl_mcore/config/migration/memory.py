"""What leaves the GPUs of training while engines answer on them; in NeMo RL gradients, optimizer and weights do."""

from nemo_rl_mcore.config.migration.draft import Draft, Kind, Note

_OFFLOAD = "policy.offload"
_COMPARE = "policy.generation.compare_at_start"


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
