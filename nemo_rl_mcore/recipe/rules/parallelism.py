"""Requirements of the parallel layout on machines and on the model's sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from nemo_rl_mcore.config.base import Rule, Rules, either, value_at
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
_FP8 = "policy.megatron_cfg.fp8_cfg.enabled"
_PREDICTION_LAYERS = "model.mtp_num_layers"


def _tensor_cuts(policy: PolicyConfig) -> Iterator[Rule[PolicyConfig]]:
    """Yield rules for sizes that ranks cannot share evenly; loaded weights fix the sizes, so the layout must change.

    Each expert is whole on its rank, and the layers that produce latents are split by outputs.
    """
    tensor, model = policy.megatron_cfg.tensor_model_parallel_size, policy.model
    keys, groups = ["num_attention_heads"], model.shape.query_groups
    latent = model.kv_lora_rank is not None
    # Ranks beyond the number of query groups share them.
    if latent or tensor % groups or 2 * groups * model.shape.head_dim % tensor:
        keys.append("num_query_groups")
    if latent:
        keys += ["q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim"]
    if model.shape.has_mamba:
        keys += ["mamba_num_heads", "mamba_num_groups"]
    if model.linear_attention_freq is not None:
        keys += ["linear_num_key_heads", "linear_num_value_heads"]
    if model.num_moe_experts is not None:
        keys.append("moe_shared_expert_intermediate_size")
    sizes = {key: getattr(model, key) or 0 for key in keys}
    if model.shape.has_dense_layers:
        sizes["ffn_hidden_size"] = model.shape.ffn_size
    uneven = {key: size for key, size in sizes.items() if size % tensor}
    if uneven and policy.weights:
        yield _too_many_ranks(TENSOR, tensor, uneven, policy.weights, fits=math.gcd(*sizes.values(), groups))
        return
    for key, size in uneven.items():
        fix = f"set it to {-(-size // tensor) * tensor}, or lower tensor_model_parallel_size"
        related = (TENSOR, "model.num_attention_heads", "model.hidden_size")
        yield Rule("not-divisible", f"model.{key}", True, related, fix)


def _too_many_ranks(
    layout: str, ranks: int, uneven: dict[str, int], weights: str, *, fits: int
) -> Rule[PolicyConfig]:
    """Return the rule for a layout that loaded weights do not allow; a valid number of ranks divides `fits`."""
    largest = max(number for number in range(1, ranks) if fits % number == 0)
    sizes = " and ".join(f"{key}: {size}" for key, size in uneven.items())
    return Rule(
        "not-divisible",
        layout,
        True,
        (weights,),
        f"set it to {largest}",
        says=f"{ranks} does not divide the weights' {sizes}",
    )


def _stage_cuts(policy: PolicyConfig) -> Iterator[Rule[PolicyConfig]]:
    """Yield rules for pipeline stages with uneven layers, unless the recipe sets their numbers of layers."""
    model, megatron, weights = policy.model, policy.megatron_cfg, policy.weights
    chunks = megatron.pipeline_model_parallel_size * (megatron.virtual_pipeline_model_parallel_size or 1)
    if megatron.own_stages:
        yield from _own_stages(policy, weights or "model.num_layers")
    elif model.num_layers % chunks and weights:
        says = f"the weights' num_layers: {model.num_layers} cannot be divided among {chunks} stages"
        yield Rule("not-divisible", PIPELINE, True, (VIRTUAL, weights), "use fewer stages", says=says)
    elif model.num_layers % chunks:
        fix = f"set num_layers to a multiple of {chunks}, or use fewer stages"
        yield Rule("not-divisible", "model.num_layers", True, (PIPELINE, VIRTUAL), fix)


def _own_stages(policy: PolicyConfig, source: str) -> Iterator[Rule[PolicyConfig]]:
    """Yield rules for first and last stages that leave uneven shares to the others; source: key of the layers."""
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
        "leave each of the other stages the same number of layers, at least one",
        says=f"{' + '.join(map(str, own.values()))} leaves {rest} of {policy.model.num_layers} layers for {like} "
        "stages",
    )


def _expert_cuts(policy: PolicyConfig) -> Iterator[Rule[PolicyConfig]]:
    experts, ranks = policy.model.num_moe_experts or 0, policy.megatron_cfg.expert_model_parallel_size
    if experts % ranks and policy.weights:
        yield _too_many_ranks(EXPERT, ranks, {"num_moe_experts": experts}, policy.weights, fits=experts)
    elif experts % ranks:
        fix = f"set it to {-(-experts // ranks) * ranks}, or lower expert_model_parallel_size"
        yield Rule("not-divisible", "model.num_moe_experts", True, (EXPERT,), fix)


def _layout(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield rules for ranks that do not form whole copies of the model, or whole groups of experts."""
    megatron, world = config.policy.megatron_cfg, config.cluster.world_size
    needed = megatron.model_parallel_size
    if world % needed:
        yield Rule(
            "not-divisible",
            f"cluster.{'cpu_workers_per_node' if config.cluster.on_cpu else 'gpus_per_node'}",
            True,
            OF_THE_LAYOUT,
            f"make the number of ranks a multiple of {needed}, or lower the parallel sizes",
            says=f"{world} ranks cannot be divided into model copies of {needed} ranks each (tensor * pipeline * "
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
        says=f"expert_model_parallel_size * expert_tensor_parallel_size = {expert} does not divide the number of "
        f"ranks per pipeline stage, {of_a_stage}",
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
    either(
        "not-supported",
        {EXPERT_TENSOR: 1},
        "only whole experts are distributed, by expert_model_parallel_size",
        where=lambda own: own.model.num_moe_experts is not None,
    ),
    either(
        "incompatible",
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
            f"set overlap_moe_expert_parallel_comm: false, or change {other.rpartition('.')[2]}",
            why,
        )
        for other, wrong, why in _NO_OVERLAP
    ),
    either("incompatible", {CONTEXT: 1, OVERLAP: False}, "not tested with shared sequences"),
    Rule(
        "not-divisible",
        CONTEXT,
        lambda own: (
            own.model.linear_attention_freq is not None
            and own.model.linear_num_key_heads
            % (own.megatron_cfg.context_parallel_size * own.megatron_cfg.tensor_model_parallel_size)
            and own.megatron_cfg.context_parallel_size > 1
        ),
        (TENSOR, "model.linear_num_key_heads"),
        "make linear_num_key_heads a multiple of context_parallel_size * tensor_model_parallel_size",
        "gated delta nets divide heads among ranks that share sequences",
    ),
)


def _samples(run: RunConfig) -> bool:
    """Return True if a run over given rows samples answers in its validations."""
    return bool(value_at(run, "loop.validates") and value_at(run, "loop.max_val_samples") != 0)


RUN_RULES: Rules[RunConfig] = (
    _layout,
    either("requires", {f"policy.{OVERLAP}": False, "policy.precision": "bfloat16"}),
    either("requires", {_FP8: False, "policy.precision": "bfloat16"}),
    either(
        "requires",
        {_FP8: False, "policy.megatron_cfg.transformer_impl": "auto"},
        where=lambda run: run.policy.megatron_cfg.transformer_impl == "local",
    ),
    either(
        "not-supported",
        {_FP8: False, "policy.generation.backend": "vllm"},
        "decoding multiplies single tokens, and FP8 products need several at a time",
        where=lambda run: not run.cluster.on_cpu and (run.algorithm not in ("sft", "dpo") or _samples(run)),
    ),
    Rule(
        "requires",
        _FP8,
        lambda run: run.cluster.on_cpu and run.policy.megatron_cfg.fp8_cfg.enabled,
        ("cluster.gpus_per_node",),
        {_FP8: False},
        "FP8 products are Transformer Engine's, on GPUs",
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
        "not-divisible",
        f"policy.{CONTEXT}",
        lambda run: (
            not run.cluster.on_cpu
            and run.policy.megatron_cfg.context_parallel_size > 1
            and run.policy.model.softmax_type != "vanilla"
            and run.policy.model.shape.query_groups
            % (
                run.policy.megatron_cfg.context_parallel_size
                * run.policy.megatron_cfg.tensor_model_parallel_size
            )
        ),
        (f"policy.{TENSOR}", "policy.model.num_query_groups"),
        "make the number of query groups a multiple of context_parallel_size * tensor_model_parallel_size",
        "on GPUs attention sinks need whole heads on each rank",
    ),
)
