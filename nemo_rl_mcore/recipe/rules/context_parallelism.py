"""What does not go with context parallelism: all of it stands here."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem, has_no_effect
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.recipe.rules.feature import Rules
from nemo_rl_mcore.recipe.rules.fused_logprobs import FUSED, Guardrail

CONTEXT = "megatron_cfg.context_parallel_size"
_FUSED_SHARED = "megatron_cfg.fused_linear_logprobs_context_parallel"
_COMMUNICATION = "megatron_cfg.cp_comm_type"


def fused_guardrail(policy: PolicyConfig) -> Guardrail:
    """Say how context parallelism stands with the fused log-probabilities, where they are on."""
    megatron = policy.megatron_cfg
    return Guardrail(
        CONTEXT,
        str(megatron.context_parallel_size),
        megatron.context_parallel_size == 1 or megatron.fused_linear_logprobs_context_parallel,
        "the fused path reads whole sequences unless shared ones are allowed",
        "1",
        allowed_by=(_FUSED_SHARED,),
    )


def _fused(policy: PolicyConfig) -> Iterator[Problem]:
    if policy.megatron_cfg.use_fused_linear_logprobs:
        yield from fused_guardrail(policy).problems()


def _nothing_to_allow(policy: PolicyConfig) -> Iterator[Problem]:
    megatron = policy.megatron_cfg
    needed = {
        CONTEXT: (megatron.context_parallel_size > 1, "1"),
        FUSED: (megatron.use_fused_linear_logprobs, "false"),
    }
    off = {key: value for key, (on, value) in needed.items() if not on}
    if megatron.fused_linear_logprobs_context_parallel and off:
        because = f"with {' and '.join(f'policy.{key}: {value}' for key, value in off.items())}"
        yield has_no_effect(_FUSED_SHARED, True, because, *off)


def _prediction_layers(policy: PolicyConfig) -> Iterator[Problem]:
    if policy.model.mtp_num_layers:
        yield from _refused(
            policy,
            "model.mtp_num_layers",
            policy.model.mtp_num_layers,
            "null",
            "a rank lacks the tokens after its own",
        )


def _overlapped_experts(policy: PolicyConfig) -> Iterator[Problem]:
    if policy.megatron_cfg.overlap_moe_expert_parallel_comm:
        reason = "its schedule has been run with whole sequences alone"
        yield from _refused(policy, "megatron_cfg.overlap_moe_expert_parallel_comm", "true", "false", reason)


def _communication(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield a way to exchange that needs as many heads as ranks, and one of ranks that share nothing."""
    megatron, model = policy.megatron_cfg, policy.model
    size, kind = megatron.context_parallel_size, megatron.cp_comm_type
    if size == 1 and kind != "p2p":
        yield has_no_effect(_COMMUNICATION, kind, f"with policy.{CONTEXT}: 1", CONTEXT)
    shards = size * megatron.tensor_model_parallel_size
    if size > 1 and kind == "a2a" and model.query_groups % shards:
        yield Problem(
            "not-divisible",
            _COMMUNICATION,
            f"a2a gives each rank whole heads, and {model.query_groups} groups of them are not divisible by {shards} "
            "ranks (tensor and context parallel)",
            "set it to p2p or all_gather",
            (CONTEXT, "megatron_cfg.tensor_model_parallel_size"),
        )


def _refused(policy: PolicyConfig, other: str, value: object, remedy: str, reason: str) -> Iterator[Problem]:
    size = policy.megatron_cfg.context_parallel_size
    if size > 1:
        yield Problem(
            "incompatible",
            CONTEXT,
            f"{size} does not go with policy.{other}: {value} ({reason})",
            f"set policy.{CONTEXT}: 1, or policy.{other}: {remedy}",
            (other,),
        )


def _layers_on_gpus(config: RunConfig) -> Iterator[Problem]:
    megatron = config.policy.megatron_cfg
    if (
        megatron.context_parallel_size > 1
        and not config.cluster.on_cpu
        and megatron.transformer_impl == "local"
    ):
        yield Problem(
            "requires",
            f"policy.{CONTEXT}",
            f"{megatron.context_parallel_size} needs Transformer Engine's attention on GPUs, and transformer_impl is "
            "local",
            "set transformer_impl: auto or transformer_engine, or context_parallel_size: 1",
            ("policy.megatron_cfg.transformer_impl",),
        )


def _sinks_on_gpus(config: RunConfig) -> Iterator[Problem]:
    """Yield ways to exchange for which Transformer Engine's attention has no sinks."""
    megatron, model = config.policy.megatron_cfg, config.policy.model
    shares = megatron.context_parallel_size > 1 and not config.cluster.on_cpu
    if shares and model.softmax_type != "vanilla" and megatron.cp_comm_type != "a2a":
        yield Problem(
            "requires",
            f"policy.{_COMMUNICATION}",
            f"{megatron.cp_comm_type} does not go with policy.model.softmax_type: {model.softmax_type} on GPUs, where "
            "sinks need whole heads on each rank",
            "set it to a2a, or context_parallel_size: 1",
            (f"policy.{CONTEXT}", "policy.model.softmax_type"),
        )


RULES = Rules(
    of_models=(_prediction_layers,),
    of_policies=(_fused, _nothing_to_allow, _overlapped_experts, _communication),
    of_runs=(_layers_on_gpus, _sinks_on_gpus),
)
