"""What the parallel layout asks of the machines, and of the model's sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from nemo_rl_mcore.config.base import Rule, Rules
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.config.policy import PolicyConfig

if TYPE_CHECKING:
    from nemo_rl_mcore.config.run_config import RunConfig

TENSOR = "megatron_cfg.tensor_model_parallel_size"
PIPELINE = "megatron_cfg.pipeline_model_parallel_size"
VIRTUAL = "megatron_cfg.virtual_pipeline_model_parallel_size"
CONTEXT = "megatron_cfg.context_parallel_size"
EXPERT = "megatron_cfg.expert_model_parallel_size"
EXPERT_TENSOR = "megatron_cfg.expert_tensor_parallel_size"
SEQUENCE = "megatron_cfg.sequence_parallel"
OVERLAP = "megatron_cfg.overlap_moe_expert_parallel_comm"
OF_THE_LAYOUT = (
    *("cluster.num_nodes", "cluster.gpus_per_node", "cluster.cpu_workers_per_node"),
    *(f"policy.{key}" for key in (TENSOR, PIPELINE, CONTEXT)),
)
_COMMUNICATION = "megatron_cfg.cp_comm_type"
_PREDICTION_LAYERS = "model.mtp_num_layers"


def _tensor_cuts(policy: PolicyConfig) -> Iterator[Rule[PolicyConfig]]:
    """Yield sizes that the ranks cannot share evenly; of loaded weights they are given, and the layout must change."""
    tensor, sizes = policy.megatron_cfg.tensor_model_parallel_size, dict(_tensor_parallel_sizes(policy.model))
    uneven = {key: size for key, size in sizes.items() if size % tensor}
    if uneven and policy.weights:
        yield _too_many_ranks(TENSOR, tensor, uneven, policy.weights, fits=math.gcd(*sizes.values()))
        return
    for key, size in uneven.items():
        fix = f"set it to {-(-size // tensor) * tensor}, or lower tensor_model_parallel_size"
        related = (TENSOR, "model.num_attention_heads", "model.hidden_size")
        yield Rule("not-divisible", f"model.{key}", True, related, fix)


def _tensor_parallel_sizes(model: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yield what the tensor-parallel ranks share; each expert is whole on its rank."""
    yield "num_attention_heads", model.num_attention_heads
    if model.num_query_groups is not None:
        yield "num_query_groups", model.num_query_groups
    if model.has_dense_layers:
        yield "ffn_hidden_size", model.ffn_size
    if model.multi_latent_attention:
        # What makes latents is cut by its outputs.
        yield from (
            (key, getattr(model, key) or 0) for key in ("q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim")
        )
    if model.has_mamba:
        yield "mamba_num_heads", model.mamba_num_heads or 0
        yield "mamba_num_groups", model.mamba_num_groups
    if model.num_moe_experts is not None and model.moe_shared_expert_intermediate_size:
        yield "moe_shared_expert_intermediate_size", model.moe_shared_expert_intermediate_size


def _too_many_ranks(
    layout: str, ranks: int, uneven: dict[str, int], weights: str, *, fits: int
) -> Rule[PolicyConfig]:
    """Return a layout that loaded weights do not allow; it has to divide `fits`."""
    largest = max(number for number in range(1, ranks) if fits % number == 0)
    sizes = " and ".join(f"{key}: {size}" for key, size in uneven.items())
    return Rule(
        "not-divisible", layout, True, (weights,), f"set it to {largest}", f"the weights have {sizes}"
    )


def _stage_cuts(policy: PolicyConfig) -> Iterator[Rule[PolicyConfig]]:
    """Yield stages that do not share the layers evenly, as far as the recipe does not share them itself."""
    model, megatron, weights = policy.model, policy.megatron_cfg, policy.weights
    if megatron.own_stages:
        yield from _own_stages(policy, weights or "model.num_layers")
    elif model.num_layers % megatron.layer_divisor and weights:
        why = f"the weights have num_layers: {model.num_layers}"
        yield Rule("not-divisible", PIPELINE, True, (VIRTUAL, weights), "use fewer stages", why)
    elif model.num_layers % megatron.layer_divisor:
        fix = f"set num_layers to a multiple of {megatron.layer_divisor}, or use fewer stages"
        yield Rule("not-divisible", "model.num_layers", True, (PIPELINE, VIRTUAL), fix)


def _own_stages(policy: PolicyConfig, source: str) -> Iterator[Rule[PolicyConfig]]:
    """Yield first and last stages that leave no even shares to those in between; source: what says the layers."""
    megatron, own = policy.megatron_cfg, policy.megatron_cfg.own_stages
    first, *others = (f"megatron_cfg.{key}" for key in own)
    if megatron.pipeline_model_parallel_size == 1:
        yield Rule("requires", first, True, (PIPELINE,), "remove it")
        return
    both = megatron.virtual_pipeline_model_parallel_size is not None
    yield Rule("incompatible", first, both, (VIRTUAL,), {first: None, VIRTUAL: None})
    like, rest = megatron.pipeline_model_parallel_size - len(own), policy.model.num_layers - sum(own.values())
    yield Rule(
        "not-divisible",
        first,
        (rest < like or rest % like) if like else rest,
        (*others, PIPELINE, source),
        "leave an equal number of layers, at least one, to each of the other stages",
        f"{rest} of {policy.model.num_layers} layers are left to {like} stages",
    )


def _expert_cuts(policy: PolicyConfig) -> Iterator[Rule[PolicyConfig]]:
    experts, ranks = policy.model.num_moe_experts or 0, policy.megatron_cfg.expert_model_parallel_size
    if experts % ranks and policy.weights:
        yield _too_many_ranks(EXPERT, ranks, {"num_moe_experts": experts}, policy.weights, fits=experts)
    elif experts % ranks:
        fix = f"set it to {-(-experts // ranks) * ranks}, or lower expert_model_parallel_size"
        yield Rule("not-divisible", "model.num_moe_experts", True, (EXPERT,), fix)


def _nothing_to_share(policy: PolicyConfig) -> Iterator[Rule[PolicyConfig]]:
    """Yield a key that allows what the recipe does not do."""
    megatron = policy.megatron_cfg
    needed = {
        CONTEXT: megatron.context_parallel_size > 1,
        "megatron_cfg.use_fused_linear_logprobs": megatron.use_fused_linear_logprobs,
    }
    off = tuple(key for key, on in needed.items() if not on)
    allows = megatron.fused_linear_logprobs_context_parallel
    yield Rule(
        "has-no-effect", "megatron_cfg.fused_linear_logprobs_context_parallel", allows and bool(off), off
    )


def _layout(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield ranks that do not make whole copies of the model, or whole groups of experts."""
    megatron, world = config.policy.megatron_cfg, config.cluster.world_size
    needed = megatron.model_parallel_size
    if world % needed:
        yield Rule(
            "not-divisible",
            f"cluster.{'cpu_workers_per_node' if config.cluster.on_cpu else 'gpus_per_node'}",
            True,
            OF_THE_LAYOUT,
            f"make the number of ranks a multiple of {needed}, or lower the parallel sizes",
            says=f"{world} ranks do not make whole copies of the model of {needed} ranks each (tensor * pipeline * "
            "context parallel size)",
        )
        return
    expert = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    of_a_stage = world // megatron.pipeline_model_parallel_size
    yield Rule(
        "not-divisible",
        f"policy.{EXPERT}",
        of_a_stage % expert,
        (*OF_THE_LAYOUT, f"policy.{EXPERT_TENSOR}"),
        "lower it",
        says=f"expert model * expert tensor parallel size = {expert} does not divide the {of_a_stage} ranks of a "
        "pipeline stage",
    )


_NO_OVERLAP: tuple[tuple[str, Callable[[PolicyConfig], object], str], ...] = (
    # Megatron's plan of a dense model leaves out the final norm.
    ("model.num_moe_experts", lambda own: own.model.num_moe_experts is None, "it needs a model with experts"),
    (
        EXPERT,
        lambda own: (
            own.model.num_moe_experts is not None and own.megatron_cfg.expert_model_parallel_size == 1
        ),
        "it needs experts on more than one rank",
    ),
    (
        "megatron_cfg.activation_checkpointing",
        lambda own: own.megatron_cfg.activation_checkpointing,
        "its schedule does not recompute activations",
    ),
    (
        VIRTUAL,
        lambda own: (
            own.megatron_cfg.pipeline_model_parallel_size > 1
            and own.megatron_cfg.virtual_pipeline_model_parallel_size is None
        ),
        "its schedule needs an interleaved pipeline",
    ),
    (
        "model.moe_aux_loss_coeff",
        lambda own: own.model.load_balancing_loss,
        "its schedule does not pass the padding mask to routers",
    ),
    (
        _PREDICTION_LAYERS,
        lambda own: own.model.mtp_num_layers,
        "not tested with prediction layers",
    ),
)

MODEL_RULES: Rules[PolicyConfig] = (
    Rule(
        "requires",
        SEQUENCE,
        lambda own: own.megatron_cfg.sequence_parallel and own.megatron_cfg.tensor_model_parallel_size == 1,
        (TENSOR,),
        "set sequence_parallel: false, or raise tensor_model_parallel_size",
    ),
    _tensor_cuts,
    _stage_cuts,
    Rule(
        "requires",
        VIRTUAL,
        lambda own: (
            own.megatron_cfg.virtual_pipeline_model_parallel_size is not None
            and own.megatron_cfg.pipeline_model_parallel_size == 1
        ),
        (PIPELINE,),
        {VIRTUAL: None},
    ),
    _expert_cuts,
    Rule(
        "not-supported",
        EXPERT_TENSOR,
        lambda own: (
            own.model.num_moe_experts is not None and own.megatron_cfg.expert_tensor_parallel_size > 1
        ),
        fix={EXPERT_TENSOR: 1},
        why="only whole experts are distributed, by expert_model_parallel_size",
    ),
    Rule(
        "incompatible",
        CONTEXT,
        lambda own: own.megatron_cfg.context_parallel_size > 1 and own.model.mtp_num_layers,
        (_PREDICTION_LAYERS,),
        {CONTEXT: 1, _PREDICTION_LAYERS: None},
        "prediction layers need tokens that are on other ranks",
    ),
)
POLICY_RULES: Rules[PolicyConfig] = (
    Rule(
        "requires",
        EXPERT,
        lambda own: own.model.num_moe_experts is None and own.megatron_cfg.expert_model_parallel_size > 1,
        ("model.num_moe_experts",),
        {EXPERT: 1},
    ),
    Rule(
        "incompatible",
        SEQUENCE,
        lambda own: (
            own.model.num_moe_experts is not None
            and own.megatron_cfg.tensor_model_parallel_size > 1
            and not own.megatron_cfg.sequence_parallel
        ),
        (TENSOR, "model.num_moe_experts"),
        {SEQUENCE: True, TENSOR: 1},
    ),
    *(
        Rule[PolicyConfig](
            "incompatible",
            OVERLAP,
            lambda own, wrong=wrong: own.megatron_cfg.overlap_moe_expert_parallel_comm and wrong(own),
            (other,),
            "set overlap_moe_expert_parallel_comm: false, or change the other key",
            why,
        )
        for other, wrong, why in _NO_OVERLAP
    ),
    _nothing_to_share,
    Rule(
        "incompatible",
        CONTEXT,
        lambda own: (
            own.megatron_cfg.context_parallel_size > 1 and own.megatron_cfg.overlap_moe_expert_parallel_comm
        ),
        (OVERLAP,),
        {CONTEXT: 1, OVERLAP: False},
        "not tested with shared sequences",
    ),
    Rule(
        "has-no-effect",
        _COMMUNICATION,
        lambda own: own.megatron_cfg.context_parallel_size == 1 and own.megatron_cfg.cp_comm_type != "p2p",
        (CONTEXT,),
    ),
    Rule(
        "not-divisible",
        _COMMUNICATION,
        lambda own: (
            own.megatron_cfg.context_parallel_size > 1
            and own.megatron_cfg.cp_comm_type == "a2a"
            and own.model.query_groups
            % (own.megatron_cfg.context_parallel_size * own.megatron_cfg.tensor_model_parallel_size)
        ),
        (CONTEXT, TENSOR),
        "set it to p2p or all_gather",
        lambda own: f"each rank has whole heads, and there are {own.model.query_groups} groups of them",
    ),
)
RUN_RULES: Rules[RunConfig] = (
    _layout,
    Rule(
        "requires",
        f"policy.{OVERLAP}",
        lambda run: (
            run.policy.megatron_cfg.overlap_moe_expert_parallel_comm and run.policy.precision == "float32"
        ),
        ("policy.precision",),
        {f"policy.{OVERLAP}": False, "policy.precision": "bfloat16"},
    ),
    Rule(
        "requires",
        "policy.megatron_cfg.transformer_impl",
        lambda run: run.cluster.on_cpu and run.policy.megatron_cfg.transformer_impl == "transformer_engine",
        ("cluster.gpus_per_node",),
        "set transformer_impl: auto or local",
    ),
    Rule(
        "requires",
        f"policy.{CONTEXT}",
        lambda run: (
            run.policy.megatron_cfg.context_parallel_size > 1
            and not run.cluster.on_cpu
            and run.policy.megatron_cfg.transformer_impl == "local"
        ),
        ("policy.megatron_cfg.transformer_impl",),
        "set transformer_impl: auto or transformer_engine, or context_parallel_size: 1",
        "on GPUs only Transformer Engine's attention supports it",
    ),
    Rule(
        "requires",
        f"policy.{_COMMUNICATION}",
        lambda run: (
            run.policy.megatron_cfg.context_parallel_size > 1
            and not run.cluster.on_cpu
            and run.policy.model.softmax_type != "vanilla"
            and run.policy.megatron_cfg.cp_comm_type != "a2a"
        ),
        (f"policy.{CONTEXT}", "policy.model.softmax_type"),
        {f"policy.{_COMMUNICATION}": "a2a", f"policy.{CONTEXT}": 1},
        "on GPUs attention sinks need whole heads on each rank",
    ),
)
