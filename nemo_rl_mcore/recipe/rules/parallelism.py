"""What the parallel layout asks of the machines and of the model's sizes."""

import math
from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.megatron import MegatronConfig
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.recipe.rules.feature import Rules

TENSOR = "megatron_cfg.tensor_model_parallel_size"
PIPELINE = "megatron_cfg.pipeline_model_parallel_size"
VIRTUAL = "megatron_cfg.virtual_pipeline_model_parallel_size"
EXPERT = "megatron_cfg.expert_model_parallel_size"
EXPERT_TENSOR = "megatron_cfg.expert_tensor_parallel_size"
SEQUENCE = "megatron_cfg.sequence_parallel"
OVERLAP = "megatron_cfg.overlap_moe_expert_parallel_comm"
OF_THE_LAYOUT = (
    "cluster.num_nodes",
    "cluster.gpus_per_node",
    "cluster.cpu_workers_per_node",
    "policy.megatron_cfg.tensor_model_parallel_size",
    "policy.megatron_cfg.pipeline_model_parallel_size",
    "policy.megatron_cfg.context_parallel_size",
)


def _even_cuts(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield what the layout cannot cut evenly; of loaded weights the sizes are given, and the layout must change."""
    for cut in (_tensor_problems, _pipeline_problems, _expert_problems):
        yield from cut(policy.model, policy.megatron_cfg, policy.weights)


def _training(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield layouts under which a model is not trained, or that say nothing of it."""
    model, megatron = policy.model, policy.megatron_cfg
    if model.num_moe_experts is None and megatron.expert_model_parallel_size > 1:
        yield Problem(
            "requires",
            EXPERT,
            f"{megatron.expert_model_parallel_size} needs a model with experts, and policy.model.num_moe_experts "
            "is null",
            "set expert_model_parallel_size: 1",
            ("model.num_moe_experts",),
        )
    split = megatron.tensor_model_parallel_size > 1 and not megatron.sequence_parallel
    if model.num_moe_experts is not None and split:
        yield Problem(
            "incompatible",
            SEQUENCE,
            f"false does not go with experts and policy.{TENSOR}: {megatron.tensor_model_parallel_size}",
            "set sequence_parallel: true, or tensor_model_parallel_size: 1",
            (TENSOR, "model.num_moe_experts"),
        )
    if megatron.overlap_moe_expert_parallel_comm:
        yield from _overlap_problems(model, megatron)


def _tensor_problems(model: ModelConfig, megatron: MegatronConfig, weights: str | None) -> Iterator[Problem]:
    tensor = megatron.tensor_model_parallel_size
    if megatron.sequence_parallel and tensor == 1:
        yield Problem(
            "requires",
            SEQUENCE,
            "true needs tensor_model_parallel_size above 1, and it is 1",
            "set sequence_parallel: false, or raise tensor_model_parallel_size",
            (TENSOR,),
        )
    sizes = dict(_tensor_parallel_sizes(model))
    uneven = {key: size for key, size in sizes.items() if size % tensor}
    if uneven and weights:
        yield _too_many_ranks(TENSOR, tensor, uneven, weights, fits=math.gcd(*sizes.values()))
        return
    for key, size in uneven.items():
        yield Problem(
            "not-divisible",
            f"model.{key}",
            f"{size} is not divisible by policy.{TENSOR}: {tensor}",
            f"set it to {-(-size // tensor) * tensor}, or lower tensor_model_parallel_size",
            (TENSOR, "model.num_attention_heads", "model.hidden_size"),
        )


def _too_many_ranks(layout: str, ranks: int, uneven: dict[str, int], weights: str, *, fits: int) -> Problem:
    """Return a layout that loaded weights do not allow; it has to divide `fits`."""
    sizes = " and ".join(f"{key}: {size}" for key, size in uneven.items())
    largest = max(number for number in range(1, ranks) if fits % number == 0)
    what = f"{ranks} does not divide the {sizes} of the weights (policy.{weights})"
    return Problem("not-divisible", layout, what, f"set it to {largest}", (weights,))


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


def _pipeline_problems(
    model: ModelConfig, megatron: MegatronConfig, weights: str | None
) -> Iterator[Problem]:
    stages, chunks = megatron.pipeline_model_parallel_size, megatron.virtual_pipeline_model_parallel_size
    virtual = f" times policy.{VIRTUAL}: {chunks}" if chunks else ""
    if megatron.own_stages:
        yield from _own_stage_problems(model, megatron, weights or "model.num_layers")
    elif megatron.counted_ends:
        yield from _counted_end_problems(model, megatron, weights or "model.num_layers")
    elif model.num_layers % megatron.layer_divisor and weights:
        yield Problem(
            "not-divisible",
            PIPELINE,
            f"{stages}{virtual} does not divide the num_layers: {model.num_layers} of the weights (policy.{weights})",
            "use fewer stages",
            (VIRTUAL, weights),
        )
    elif model.num_layers % megatron.layer_divisor:
        yield Problem(
            "not-divisible",
            "model.num_layers",
            f"{model.num_layers} is not divisible by policy.{PIPELINE}: {stages}{virtual}",
            f"set num_layers to a multiple of {megatron.layer_divisor}, or use fewer stages",
            (PIPELINE, VIRTUAL),
        )
    if chunks is None:
        return
    if stages == 1:
        yield Problem(
            "requires",
            VIRTUAL,
            f"{chunks} needs pipeline_model_parallel_size above 1, and it is 1",
            "set virtual_pipeline_model_parallel_size: null",
            (PIPELINE,),
        )


def _counted_end_problems(model: ModelConfig, megatron: MegatronConfig, source: str) -> Iterator[Problem]:
    """Yield stages that are not even although embedding or output layer count, or that have nothing else."""
    first, *others = megatron.counted_ends
    if megatron.pipeline_model_parallel_size == 1:
        what = "true needs pipeline_model_parallel_size above 1, and it is 1"
        yield Problem("requires", f"megatron_cfg.{first}", what, "remove it", (PIPELINE,))
        return
    places, chunks = model.num_layers + 1 + len(others), megatron.layer_divisor
    if places % chunks or places // chunks < 2:
        what = f"true makes {places} places for {model.num_layers} layers, for {chunks} chunks of the model"
        related = (*(f"megatron_cfg.{key}" for key in others), PIPELINE, VIRTUAL, source)
        remedy = "have the places be a multiple of the chunks, at least two each, or remove it"
        yield Problem("not-divisible", f"megatron_cfg.{first}", what, remedy, related)


def _own_stage_problems(model: ModelConfig, megatron: MegatronConfig, source: str) -> Iterator[Problem]:
    """Yield first and last stages that leave no even shares to those in between; source: what says the layers."""
    own, stages = megatron.own_stages, megatron.pipeline_model_parallel_size
    first, *others = own
    if stages == 1:
        what = f"{own[first]} needs pipeline_model_parallel_size above 1, and it is 1"
        yield Problem("requires", f"megatron_cfg.{first}", what, "remove it", (PIPELINE,))
        return
    for key in megatron.counted_ends:
        what = f"{own[first]} does not go with policy.megatron_cfg.{key}: true"
        yield Problem(
            "incompatible", f"megatron_cfg.{first}", what, "remove one of the two", (f"megatron_cfg.{key}",)
        )
    if megatron.virtual_pipeline_model_parallel_size is not None:
        what = (
            f"{own[first]} does not go with policy.{VIRTUAL}: {megatron.virtual_pipeline_model_parallel_size}"
        )
        yield Problem("incompatible", f"megatron_cfg.{first}", what, "set one of the two to null", (VIRTUAL,))
    like, rest = stages - len(own), model.num_layers - sum(own.values())
    if (rest < like or rest % like) if like else rest:
        what = f"{own[first]} leaves {rest} of {model.num_layers} layers to {like} stages, with all keys of its kind"
        related = (*(f"megatron_cfg.{key}" for key in others), PIPELINE, source)
        remedy = "leave the same number of layers to each of the other stages, and at least one"
        yield Problem("not-divisible", f"megatron_cfg.{first}", what, remedy, related)


def _expert_problems(model: ModelConfig, megatron: MegatronConfig, weights: str | None) -> Iterator[Problem]:
    experts, ranks = model.num_moe_experts, megatron.expert_model_parallel_size
    if experts is None:
        return
    if experts % ranks and weights:
        yield _too_many_ranks(EXPERT, ranks, {"num_moe_experts": experts}, weights, fits=experts)
    elif experts % ranks:
        yield Problem(
            "not-divisible",
            "model.num_moe_experts",
            f"{experts} is not divisible by policy.{EXPERT}: {ranks}",
            f"set it to {-(-experts // ranks) * ranks}, or lower expert_model_parallel_size",
            (EXPERT,),
        )
    if megatron.expert_tensor_parallel_size > 1:
        yield Problem(
            "not-supported",
            EXPERT_TENSOR,
            f"{megatron.expert_tensor_parallel_size}: an expert that several ranks share is not supported yet",
            "set expert_tensor_parallel_size: 1; expert_model_parallel_size spreads whole experts",
        )


def _overlap_problems(model: ModelConfig, megatron: MegatronConfig) -> Iterator[Problem]:
    """Yield what the schedule that overlaps expert communication cannot run; its precision is the run's to judge."""
    if model.num_moe_experts is None:
        # Megatron's plan of a dense model leaves out the final norm.
        yield _no_overlap("needs a model with experts", "model.num_moe_experts", "null")
    elif megatron.expert_model_parallel_size == 1:
        yield _no_overlap("needs experts on several ranks", EXPERT, "1")
    if megatron.activation_checkpointing:
        yield _no_overlap("keeps activations", "megatron_cfg.activation_checkpointing", "true")
    if megatron.pipeline_model_parallel_size > 1 and megatron.virtual_pipeline_model_parallel_size is None:
        yield _no_overlap("needs an interleaved pipeline", VIRTUAL, "null")
    if model.load_balancing_loss:
        coefficient = str(model.moe_aux_loss_coeff)
        yield _no_overlap("does not tell routers what is padding", "model.moe_aux_loss_coeff", coefficient)
    if model.mtp_num_layers:
        layers = str(model.mtp_num_layers)
        yield _no_overlap("is not proven with prediction layers", "model.mtp_num_layers", layers)


def _no_overlap(reason: str, other: str, value: str) -> Problem:
    return Problem(
        "incompatible",
        OVERLAP,
        f"true does not go with policy.{other}: {value} (the schedule {reason})",
        "set overlap_moe_expert_parallel_comm: false, or change the other key",
        (other,),
    )


def _layout(config: RunConfig) -> Iterator[Problem]:
    world, needed = config.cluster.world_size, config.policy.megatron_cfg.model_parallel_size
    ranks = "cpu_workers_per_node" if config.cluster.on_cpu else "gpus_per_node"
    if world % needed:
        yield Problem(
            "not-divisible",
            f"cluster.{ranks}",
            f"num_nodes * {ranks} = {world} ranks do not divide into copies of the model of {needed} ranks "
            f"(policy.megatron_cfg: tensor * pipeline * context parallel size)",
            f"make the number of ranks a multiple of {needed}, or lower the parallel sizes",
            OF_THE_LAYOUT,
        )
        return
    stages = config.policy.megatron_cfg.pipeline_model_parallel_size
    expert = config.policy.megatron_cfg.expert_model_parallel_size
    expert *= config.policy.megatron_cfg.expert_tensor_parallel_size
    if (world // stages) % expert:
        yield Problem(
            "not-divisible",
            "policy.megatron_cfg.expert_model_parallel_size",
            f"expert model * expert tensor parallel size = {expert} does not divide the "
            f"{world // stages} ranks of a pipeline stage",
            "lower it",
            (*OF_THE_LAYOUT, "policy.megatron_cfg.expert_tensor_parallel_size"),
        )


def _overlap_in_fp32(config: RunConfig) -> Iterator[Problem]:
    if config.policy.megatron_cfg.overlap_moe_expert_parallel_comm and config.policy.precision == "float32":
        yield Problem(
            "requires",
            f"policy.{OVERLAP}",
            "true needs policy.precision: bfloat16, and it is float32",
            "set overlap_moe_expert_parallel_comm: false, or policy.precision: bfloat16",
            ("policy.precision",),
        )


def _layers_on_cpu(config: RunConfig) -> Iterator[Problem]:
    if config.cluster.on_cpu and config.policy.megatron_cfg.transformer_impl == "transformer_engine":
        yield Problem(
            "requires",
            "policy.megatron_cfg.transformer_impl",
            "transformer_engine needs GPUs, and cluster.gpus_per_node is 0",
            "set transformer_impl: auto or local",
            ("cluster.gpus_per_node",),
        )


RULES = Rules(
    of_models=(_even_cuts,),
    of_policies=(_training,),
    of_runs=(_layout, _overlap_in_fp32, _layers_on_cpu),
)
