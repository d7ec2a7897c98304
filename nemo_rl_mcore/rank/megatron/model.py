"""Build a policy's model: its Megatron config, precision, rotary frequencies and data-parallel wrapping."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.distributed import DistributedDataParallelConfig as MegatronDDPConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu  # Megatron's kernels compare with this function
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.config.model import ROPE_TURNS, ROTATED_SHARE, RopeScalingConfig
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.models.frozen import frozen_of
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron.hf_weights.load import local_parameters
from nemo_rl_mcore.rank.megatron.layer_specs import LatentAttention, use_transformer_engine
from nemo_rl_mcore.rank.megatron.model_class import LanguageModel, ValueHead, language_model, modules_of
from nemo_rl_mcore.rank.policy_backend import DTYPES
from nemo_rl_mcore.recipe.rules.model import OF_ENGINE

_ACTIVATIONS = {"silu": torch.nn.functional.silu, "quick_gelu": quick_gelu, "squared_relu": squared_relu}
_APEX = "fused_weight_gradient_mlp_cuda"
_SINKS = re.compile(r".+\.core_attention\.softmax_offset")
_BIASES = re.compile(r".+\.mlp\.experts\..+\.bias\d*")
# Settings with the same name in the recipe and in Megatron.
_OF_MODEL = (
    *("hidden_size", "num_attention_heads", "activation_func_clamp_value", "layernorm_epsilon"),
    *("qk_layernorm", "add_bias_linear", "add_qkv_bias", "softmax_type", "init_method_std"),
    *("mtp_num_layers", "mtp_loss_scaling_factor"),
)
_OF_EXPERTS = (
    *("num_moe_experts", "moe_router_topk", "moe_shared_expert_intermediate_size"),
    *("moe_router_score_function", "moe_router_pre_softmax", "moe_router_num_groups"),
    *("moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_router_dtype"),
    *("moe_router_load_balancing_type", "moe_aux_loss_coeff"),
    *("moe_router_enable_expert_bias", "moe_router_bias_update_rate"),
)
_OF_MAMBA = ("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups")
_OF_DELTA_NETS = (
    *("linear_attention_freq", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim"),
)
_OF_LATENTS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_OF_LAYOUT = (
    *("tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "context_parallel_size"),
)
_OF_EXPERT_LAYOUT = (
    *("expert_model_parallel_size", "overlap_moe_expert_parallel_comm", "expert_tensor_parallel_size"),
)


def _values(section: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(section, name) for name in names}


@dataclass(frozen=True)
class Kernels:
    """True for available kernels; engine: Transformer Engine's; apex: Apex's products that add to gradient buffers."""

    gpu: bool
    engine: bool
    apex: bool


def transformer_config(policy: PolicyConfig) -> TransformerConfig:
    model, scaling = policy.model, policy.model.rope_scaling
    kernels = Kernels(
        gpu=accelerator.has_cuda(),
        engine=use_transformer_engine(policy.megatron_cfg),
        apex=importlib.util.find_spec(_APEX) is not None,
    )
    settings = transformer_settings(policy, kernels)
    if model.kv_lora_rank is None:
        described = TransformerConfig(**settings)
        if scaling is not None and scaling.rope_type == "yarn":
            # Not a field, but each attention layer reads it: _yarn_get_concentration_factor_from_config
            cast(Any, described).yarn_rotary_scaling_factor = scaling.factor
        return described
    settings |= _values(model, _OF_LATENTS) | {"rope_type": "rope", "rotary_base": model.rotary_base}
    if scaling is not None:
        settings |= {key: value for key, value in scaling.written.items() if key != "factor"}
        settings |= {"rope_type": "yarn", "rotary_scaling_factor": scaling.factor}
        settings |= _values(scaling, ("mscale", "mscale_all_dim"))
    return MLATransformerConfig(**settings)


def transformer_settings(policy: PolicyConfig, kernels: Kernels) -> dict[str, Any]:
    """Return the TransformerConfig's fields that are not Megatron's defaults; RefusedError if a package is missing."""
    model, config, dtype = policy.model, policy.megatron_cfg, DTYPES[policy.precision]
    interleaved = config.virtual_pipeline_model_parallel_size is not None
    fused_activation = config.bias_activation_fusion
    yarn = model.rope_scaling is not None and model.rope_scaling.rope_type == "yarn"
    settings: dict[str, Any] = {
        **_values(model, _OF_MODEL),
        **_values(config, _OF_LAYOUT),
        # Attention sinks need whole heads on each rank.
        "cp_comm_type": "p2p" if model.softmax_type == "vanilla" else "a2a",
        "num_layers": policy.parts_of_a_layer * model.num_layers,
        "num_query_groups": model.shape.query_groups,
        "kv_channels": model.shape.head_dim,
        "ffn_hidden_size": model.shape.ffn_size,
        "gated_linear_unit": model.shape.gated,
        "activation_func": _ACTIVATIONS[model.activation_func],
        "glu_linear_offset": 1.0 if model.activation_func == "quick_gelu" else 0.0,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # With the default point-to-point settings the interleaved schedule silently swaps tensors on gloo.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # Microbatches of different shapes: stages send each other the next one's shape.
        "variable_seq_lengths": policy.dynamic_batching.enabled,
        "moe_token_dispatcher_type": "alltoall",  # the default refuses variable shapes, in dense models too
        "use_cpu_initialization": not kernels.gpu,
        # Weights that are loaded in full need not be drawn first.
        "perform_initialization": policy.model_name is None,
        # The loss functions return sums, and the train step divides once by the global count.
        "calculate_per_token_loss": True,
        "transformer_impl": "transformer_engine" if kernels.engine else "local",
        "bias_activation_fusion": model.shape.gated
        and (kernels.gpu if fused_activation == "auto" else fused_activation),
        # The fused kernel for packed rows omits YaRN's factor on cosines and sines; the kernel for latent attention
        # works only with YaRN, and cannot decode.
        "apply_rope_fusion": config.apply_rope_fusion
        and kernels.engine
        and model.kv_lora_rank is None
        and not yarn,
        "gradient_accumulation_fusion": kernels.gpu and kernels.engine and kernels.apex,
        "moe_permute_fusion": config.moe_permute_fusion and kernels.engine,
    }
    if config.fp8_cfg.enabled:
        if not kernels.engine:
            raise RefusedError(
                "policy.megatron_cfg.fp8_cfg.enabled: true needs a GPU and Transformer Engine's layers, and they are "
                "not here; install it, or set it to false",
                code="missing-package",
            )
        settings |= {"fp8": config.fp8_cfg.fp8, "fp8_recipe": config.fp8_cfg.fp8_recipe}
    if policy.model_class == "hybrid":
        settings["is_hybrid_model"] = True  # the pattern has the stages
    else:
        settings |= {"num_layers": model.num_layers, **config.own_stages}
    return settings | _settings_of_layers(policy, kernels)


def _settings_of_layers(policy: PolicyConfig, kernels: Kernels) -> dict[str, Any]:
    model, config, settings = policy.model, policy.megatron_cfg, dict[str, Any]()
    if model.sliding_window is not None:
        # Numbers of tokens before and after a query.
        settings["window_size"] = (model.sliding_window - 1, 0)
        settings["window_attn_skip_freq"] = [int(layer % 2 == 0) for layer in range(model.num_layers)]
    if model.shape.has_mamba:
        settings |= _values(model, _OF_MAMBA)
    if model.linear_attention_freq is not None:
        settings |= _values(model, _OF_DELTA_NETS) | {"experimental_attention_variant": "gated_delta_net"}
        settings |= {"attention_output_gate": True, "layernorm_zero_centered_gamma": True}
        settings["moe_shared_expert_gate"] = model.moe_shared_expert_intermediate_size is not None
    if model.num_moe_experts is not None:
        settings |= _values(model, _OF_EXPERTS) | _values(config, _OF_EXPERT_LAYOUT)
        settings["moe_layer_freq"] = 1 if model.moe_layer_freq is None else [*model.moe_layer_freq]
        settings["moe_ffn_hidden_size"] = model.shape.expert_ffn_size
        settings["moe_grouped_gemm"] = kernels.engine
        if model.moe_latent_size is not None:
            settings["moe_latent_size"] = model.moe_latent_size
    if not config.activation_checkpointing:
        return settings
    settings["recompute_granularity"] = config.recompute_granularity
    if config.recompute_granularity == "full":
        return settings | {"recompute_method": "uniform", "recompute_num_layers": policy.parts_of_a_layer}
    parts = config.recompute_modules
    for part in parts or ():
        # Megatron discards these parts' outputs with Transformer Engine (tensor_parallel/random.py).
        if part in OF_ENGINE and not kernels.engine:
            raise RefusedError(
                f"policy.megatron_cfg.recompute_modules: {part} needs a GPU and Transformer Engine's layers, and they "
                "are not here; install it, or leave it out",
                code="missing-package",
            )
    return settings | {"recompute_modules": None if parts is None else list(parts)}


def build_model(policy: PolicyConfig) -> tuple[TransformerConfig, list[LanguageModel]]:
    """Return one `LanguageModel` per virtual stage on this rank's device; uninitialised if weights are loaded next."""
    model, config = policy.model, transformer_config(policy)
    tp, stages = config.tensor_model_parallel_size, policy.megatron_cfg.virtual_pipeline_model_parallel_size
    chunks: list[LanguageModel] = []
    for vp_stage in [None] if stages is None else range(stages):
        place = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
        chunk = language_model(
            policy,
            config,
            vocab_size=-(-model.vocab_size // tp) * tp,  # rows of the embedding, a multiple of the ranks
            max_sequence_length=policy.max_total_sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=model.tie_word_embeddings,
            position_embedding_type="rope" if model.hybrid_layer_pattern is None else "none",
            rotary_percent=1.0 if model.linear_attention_freq is None else ROTATED_SHARE,
            rotary_base=model.rotary_base,
            vp_stage=vp_stage,
        )
        for name, parameter in chunk.named_parameters():
            if _SINKS.fullmatch(name) and not hasattr(parameter, "tensor_model_parallel"):
                # Otherwise the gradient norm would include one rank's sinks only (tensor_parallel/layers.py).
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)
            elif _BIASES.fullmatch(name):
                # Because of RowParallelLinear's mark, upstream would sum the gradients of experts' biases over the
                # sequence-parallel ranks, which have other experts, or equal sums.
                parameter.sequence_parallel = False  # type: ignore[attr-defined]
        if model.kv_lora_rank is not None:
            # One shared module replaces upstream's equal ones, each of which has its own tables.
            attentions = modules_of(LatentAttention, [chunk])
            for attention in attentions[1:]:
                attention.rotary_pos_emb = attentions[0].rotary_pos_emb
        elif model.rope_scaling is not None and model.hybrid_layer_pattern is None:
            rotary = cast(RotaryEmbedding, chunk.rotary_pos_emb)
            rotary.inv_freq = stretched_frequencies(rotary.inv_freq, model.rope_scaling, model.rotary_base)
        chunks.append(chunk)
    draws = config.use_cpu_initialization and config.perform_initialization
    if draws and config.expert_model_parallel_size > 1:
        _draw_experts(config, chunks)
    return config, [chunk.to(accelerator.device()) for chunk in chunks]


def _draw_experts(config: TransformerConfig, chunks: Sequence[LanguageModel]) -> None:
    """Draw each rank's experts anew: _initialize_affine_weight_cpu (tensor_parallel/layers.py) draws equal ones."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(torch.initial_seed() + 1 + parallel_state.get_expert_model_parallel_rank())
        for name, parameter in (named for chunk in chunks for named in chunk.named_parameters()):
            if "local_experts" in name:
                last = "linear_fc2" in name
                draw: Any = config.output_layer_init_method if last else config.init_method
                draw(parameter)


def freeze_weights(policy: PolicyConfig, models: Sequence[LanguageModel]) -> None:
    """Exclude weights from training: they then have no gradient buffer and no optimizer state."""
    frozen = frozen_of(policy)
    routers = {id(router.expert_bias): router for router in modules_of(TopKRouter, models)}
    for weight, parameter in local_parameters(models, policy.model):
        if weight not in frozen:
            continue
        if (router := routers.get(id(parameter))) is None:
            parameter.requires_grad = False
        else:
            router.frozen_expert_bias = True

    def as_if_trained(_module: torch.nn.Module, _inputs: Any, hidden_SBH: torch.Tensor) -> torch.Tensor:
        # Starts a graph at a frozen embedding, since recomputation skips layers whose input needs no gradient.
        return hidden_SBH.requires_grad_() if torch.is_grad_enabled() else hidden_SBH

    for model in models:
        if model.pre_process and not any(part.requires_grad for part in model.embedding.parameters()):
            model.embedding.register_forward_hook(as_if_trained)


def in_precision(config: TransformerConfig, chunks: list[LanguageModel]) -> list[MegatronModule]:
    """Return the chunks in the config's number format; a value head and experts' biases stay fp32."""
    routers = [router for router in modules_of(TopKRouter, chunks) if router.expert_bias is not None]
    biases = [cast(torch.Tensor, router.expert_bias).clone() for router in routers]
    modules: list[MegatronModule] = [
        Float16Module(config, chunk) if config.bf16 else chunk for chunk in chunks
    ]
    for head in modules_of(ValueHead, modules):
        head.float()
    for router, bias in zip(routers, biases, strict=True):
        cast(torch.Tensor, router.expert_bias).data = bias
    return modules


def wrap_data_parallel(
    policy: PolicyConfig, config: TransformerConfig, modules: list[MegatronModule]
) -> list[DistributedDataParallel]:
    """Add Megatron's gradient buckets, and set the functions by which the schedules reduce gradients."""
    ddp_config = MegatronDDPConfig(**bucket_settings(policy))
    wrapped = [DistributedDataParallel(config, ddp_config, module) for module in modules]
    config.finalize_model_grads_func = finalize_model_grads
    # The schedules take one function, or a list of them under virtual pipeline parallelism.
    several = len(wrapped) > 1
    waits: Any = [module.no_sync for module in wrapped]
    config.no_sync_func = waits if several else waits[0]
    if ddp_config.overlap_grad_reduce:
        starts: Any = [module.start_grad_sync for module in wrapped]
        config.grad_sync_func = starts if several else starts[0]
    return wrapped


def bucket_settings(policy: PolicyConfig) -> dict[str, Any]:
    ddp = policy.megatron_cfg.distributed_data_parallel_config
    return {
        **_values(ddp, ("grad_reduce_in_fp32", "overlap_grad_reduce", "overlap_param_gather")),
        "use_distributed_optimizer": policy.megatron_cfg.optimizer.use_distributed_optimizer,
        "average_in_collective": False,  # gradients are sums; see calculate_per_token_loss above
        "bucket_size": BUCKET_SIZE,
    }


BUCKET_SIZE: int | None = None
"""Number of parameters in a gradient bucket; None: Megatron's choice."""


def stretched_frequencies(frequencies: torch.Tensor, scaling: RopeScalingConfig, base: float) -> torch.Tensor:
    """Return a model's inverse frequencies [D/2], stretched by `scaling`; base: the model's rotary base.

    RotaryEmbedding._apply_scaling (models/common/embeddings/rotary_pos_embedding.py) also has Llama's formula, but with
    the original context fixed at 8192 tokens.
    Fast rotations are kept, slow ones divided by the factor, and those in between become a mixture of both.
    Sources: https://github.com/meta-llama/llama-models, `apply_scaling`; https://arxiv.org/abs/2309.00071, section 3.2.
    """
    slow, fast = ROPE_TURNS[scaling.rope_type].values()
    context = scaling.original_max_position_embeddings
    if scaling.rope_type == "yarn":
        # The kept share falls with the channel pair's number. The first and last pair are rounded outwards, as in
        # transformers and vLLM, unless `truncate` is false.
        pairs = frequencies.numel()
        first, last = (
            pairs * math.log(context / (turns * 2 * math.pi)) / math.log(base) for turns in (fast, slow)
        )
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        width = last - first or 0.001  # one pair that is both
        numbers = torch.arange(pairs, dtype=frequencies.dtype, device=frequencies.device)
        share_kept = 1 - (numbers - first) / width
    else:
        share_kept = (context * frequencies / (2 * math.pi) - slow) / (fast - slow)
    share_kept = share_kept.clamp(0.0, 1.0)
    return (1 - share_kept) * frequencies / scaling.factor + share_kept * frequencies
