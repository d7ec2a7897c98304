"""The model of a policy: its Megatron config, kernels, precision, rotary frequencies and data-parallel wrapping."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.distributed import DistributedDataParallelConfig as MegatronDDPConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu  # the one that Megatron's kernels look for
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from nemo_rl_mcore.config import MegatronConfig, PolicyConfig
from nemo_rl_mcore.config.model import RopeScalingConfig
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.models.frozen import frozen_of
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron.hf_weights.load import local_parameters, this_place
from nemo_rl_mcore.rank.megatron.layer_specs import (
    LatentAttention,
    mark_for_tensor_parallel,
    use_transformer_engine,
)
from nemo_rl_mcore.rank.megatron.model_class import LanguageModel, biased_routers, language_model
from nemo_rl_mcore.rank.megatron.value_head import value_head_of
from nemo_rl_mcore.rank.policy_backend import DTYPES
from nemo_rl_mcore.recipe.rules.model import OF_ENGINE

_ACTIVATIONS = {"silu": torch.nn.functional.silu, "quick_gelu": quick_gelu, "squared_relu": squared_relu}
_APEX = "fused_weight_gradient_mlp_cuda"


@dataclass(frozen=True)
class Kernels:
    """Hardware and packages to compute with.

    gpu: a CUDA device. engine: layers are Transformer Engine's. apex: Apex's products that add to a gradient buffer.
    """

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
    if not model.multi_latent_attention:
        described = TransformerConfig(**settings)
        if scaling is not None and scaling.rope_type == "yarn":
            # No field, and read by each attention layer: _yarn_get_concentration_factor_from_config
            cast(Any, described).yarn_rotary_scaling_factor = scaling.factor
        return described
    of_latents = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    settings |= {key: getattr(model, key) for key in of_latents}
    settings |= {"rope_type": "rope", "rotary_base": model.rotary_base}
    if scaling is not None:
        settings |= {"rope_type": "yarn", "rotary_scaling_factor": scaling.factor}
        settings |= {key: value for key, value in scaling.written.items() if key != "factor"}
        settings |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    return MLATransformerConfig(**settings)


def transformer_settings(policy: PolicyConfig, kernels: Kernels) -> dict[str, Any]:
    """Return the fields of a TransformerConfig that are not Megatron's defaults.

    Raises RefusedError where the recipe wants a package that is not there.
    """
    model, config, dtype = policy.model, policy.megatron_cfg, DTYPES[policy.precision]
    settings: dict[str, Any] = {
        "num_layers": policy.parts_of_a_layer * model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn_size,
        "gated_linear_unit": model.gated,
        "activation_func": _ACTIVATIONS[model.activation_func],
        "activation_func_clamp_value": model.activation_func_clamp_value,
        "glu_linear_offset": 1.0 if model.activation_func == "quick_gelu" else 0.0,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.layernorm_epsilon,
        "qk_layernorm": model.qk_layernorm,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "softmax_type": model.softmax_type,
        "init_method_std": model.init_method_std,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        **_layout_settings(config),
        # Microbatches of different shapes: stages tell each other the next one's.
        "variable_seq_lengths": policy.dynamic_batching.enabled,
        "moe_token_dispatcher_type": "alltoall",  # the default one refuses them, in dense models too
        "use_cpu_initialization": not kernels.gpu,
        # What is loaded in full need not be drawn before.
        "perform_initialization": policy.model_name is None,
        # The loss functions return sums, and the train step divides once by the global count.
        "calculate_per_token_loss": True,
        "transformer_impl": "transformer_engine" if kernels.engine else "local",
        "mtp_num_layers": model.mtp_num_layers,
        "mtp_loss_scaling_factor": model.mtp_loss_scaling_factor,
    }
    if policy.model_class == "hybrid":
        settings["is_hybrid_model"] = True  # its pattern has the layers of each stage
    else:
        settings |= {"num_layers": model.num_layers, **config.own_stages}
    if model.sliding_window is not None:
        # Counted in tokens before and behind a query.
        settings["window_size"] = (model.sliding_window - 1, 0)
        layers = model.window_attn_skip_freq
        settings["window_attn_skip_freq"] = None if layers is None else [*layers]
    if model.has_mamba:
        sizes = ("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups")
        settings |= {key: getattr(model, key) for key in sizes}
    if model.num_moe_experts is not None:
        settings |= _expert_settings(policy, kernels)
    scaled = model.multi_latent_attention or (
        model.rope_scaling is not None and model.rope_scaling.rope_type == "yarn"
    )
    settings |= _fused_settings(config, kernels, scaled=scaled, gated=model.gated)
    if config.activation_checkpointing:
        settings |= _recomputed_settings(config, kernels, policy.parts_of_a_layer)
    return settings


def _layout_settings(config: MegatronConfig) -> dict[str, Any]:
    interleaved = config.virtual_pipeline_model_parallel_size is not None
    return {
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "sequence_parallel": config.sequence_parallel,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": config.virtual_pipeline_model_parallel_size,
        # With the default point-to-point settings the interleaved schedule swaps tensors on gloo, silently.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "context_parallel_size": config.context_parallel_size,
        "cp_comm_type": config.cp_comm_type,
    }


def _expert_settings(policy: PolicyConfig, kernels: Kernels) -> dict[str, Any]:
    model, config = policy.model, policy.megatron_cfg
    same = (
        *("num_moe_experts", "moe_router_topk", "moe_shared_expert_intermediate_size"),
        *("moe_router_score_function", "moe_router_pre_softmax", "moe_router_num_groups"),
        *("moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_router_dtype"),
        *("moe_router_load_balancing_type", "moe_aux_loss_coeff"),
        *("moe_router_enable_expert_bias", "moe_router_bias_update_rate"),
    )
    return {
        **{key: getattr(model, key) for key in same},
        "moe_layer_freq": 1 if model.moe_layer_freq is None else [*model.moe_layer_freq],
        "moe_ffn_hidden_size": model.expert_ffn_size,
        **({} if model.moe_latent_size is None else {"moe_latent_size": model.moe_latent_size}),
        "moe_grouped_gemm": kernels.engine,
        "expert_model_parallel_size": config.expert_model_parallel_size,
        "overlap_moe_expert_parallel_comm": config.overlap_moe_expert_parallel_comm,
        "expert_tensor_parallel_size": config.expert_tensor_parallel_size,
    }


def _fused_settings(
    config: MegatronConfig, kernels: Kernels, *, scaled: bool, gated: bool
) -> dict[str, bool]:
    """scaled: rotations are YaRN's, or those of latent attention; gated: of feed-forward layers."""
    activation = config.bias_activation_fusion
    return {
        "bias_activation_fusion": gated and (kernels.gpu if activation == "auto" else activation),
        # The fused kernel of packed rows leaves out what YaRN multiplies cosines and sines by, and that of latent
        # attention is YaRN's alone, and decodes nothing.
        "apply_rope_fusion": config.apply_rope_fusion and kernels.engine and not scaled,
        "gradient_accumulation_fusion": kernels.gpu and kernels.engine and kernels.apex,
        "moe_permute_fusion": config.moe_permute_fusion and kernels.engine,
    }


def _recomputed_settings(config: MegatronConfig, kernels: Kernels, parts_of_a_layer: int) -> dict[str, Any]:
    """parts_of_a_layer: layers of Megatron that are one of the model's."""
    if config.recompute_granularity == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": parts_of_a_layer,
        }
    parts = config.recompute_modules
    for part in parts or ():
        # Megatron discards their outputs by Transformer Engine (tensor_parallel/random.py).
        if part in OF_ENGINE and not kernels.engine:
            raise _needs(f"recompute_modules: {part}", "Transformer Engine's layers", "leave it out")
    return {
        "recompute_granularity": "selective",
        "recompute_modules": None if parts is None else list(parts),
    }


def _needs(setting: str, what: str, remedy: str) -> RefusedError:
    text = f"policy.megatron_cfg.{setting} needs a GPU and {what}, and they are not here; install it, or {remedy}"
    return RefusedError(text, code="missing-package")


def build_model(policy: PolicyConfig) -> tuple[TransformerConfig, list[LanguageModel]]:
    """Return the model of this rank, one `LanguageModel` per virtual pipeline stage, on the device.

    Its weights are random, or not set at all where `policy.model_name` says that they are loaded next.
    """
    model, config = policy.model, transformer_config(policy)
    tp, stages = config.tensor_model_parallel_size, policy.megatron_cfg.virtual_pipeline_model_parallel_size
    chunks: list[LanguageModel] = []
    for vp_stage in [None] if stages is None else range(stages):
        place = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
        chunk = language_model(
            policy,
            config,
            vocab_size=-(-model.vocab_size // tp) * tp,  # the rows of the embedding: a multiple
            max_sequence_length=policy.max_total_sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=model.tie_word_embeddings,
            position_embedding_type="rope" if model.has_positions else "none",
            rotary_base=model.rotary_base,
            vp_stage=vp_stage,
        )
        mark_for_tensor_parallel(chunk)
        if model.multi_latent_attention:
            # By one module; upstream makes one for each layer, all alike, with its own tables.
            attentions = [part for part in chunk.modules() if isinstance(part, LatentAttention)]
            for attention in attentions[1:]:
                attention.rotary_pos_emb = attentions[0].rotary_pos_emb
        elif model.rope_scaling is not None and model.has_positions:
            rotary = cast(RotaryEmbedding, chunk.rotary_pos_emb)
            rotary.inv_freq = stretched_frequencies(rotary.inv_freq, model.rope_scaling, model.rotary_base)
        chunks.append(chunk)
    draws = config.use_cpu_initialization and config.perform_initialization
    if draws and config.expert_model_parallel_size > 1:
        # Other experts on each rank: _initialize_affine_weight_cpu (tensor_parallel/layers.py) draws the same ones.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(torch.initial_seed() + 1 + parallel_state.get_expert_model_parallel_rank())
            for name, parameter in (named for chunk in chunks for named in chunk.named_parameters()):
                if "local_experts" in name:
                    last = "linear_fc2" in name
                    draw: Any = config.output_layer_init_method if last else config.init_method
                    draw(parameter)
    return config, [chunk.to(accelerator.device()) for chunk in chunks]


def freeze_weights(policy: PolicyConfig, models: Sequence[LanguageModel]) -> None:
    """Take weights out of training: they get neither a buffer for gradients nor optimizer state.

    What is trained below them still has gradients through them.
    """
    frozen = frozen_of(policy)
    routers = {id(bias): router for router, bias in biased_routers(models)}
    for weight, parameter in local_parameters(models, policy.model, this_place()):
        if weight not in frozen:
            continue
        if (router := routers.get(id(parameter))) is None:
            parameter.requires_grad = False
        else:
            router.frozen_expert_bias = True

    def as_if_trained(_module: torch.nn.Module, _inputs: Any, hidden_SBH: torch.Tensor) -> torch.Tensor:
        # A graph begins at a frozen embedding: recomputation would leave out layers whose input needs no gradient.
        return hidden_SBH.requires_grad_() if torch.is_grad_enabled() else hidden_SBH

    for model in models:
        if model.pre_process and not any(part.requires_grad for part in model.embedding.parameters()):
            model.embedding.register_forward_hook(as_if_trained)


def in_precision(config: TransformerConfig, chunks: list[LanguageModel]) -> list[MegatronModule]:
    """Return the chunks as they are run in the config's number format; a value head and experts' biases stay fp32."""
    biases = [bias.clone() for _, bias in biased_routers(chunks)]
    modules: list[MegatronModule] = [
        Float16Module(config, chunk) if config.bf16 else chunk for chunk in chunks
    ]
    for module in modules:
        if (head := value_head_of(module)) is not None:
            head.float()
    for (_, rounded), bias in zip(biased_routers(chunks), biases, strict=True):
        rounded.data = bias
    return modules


def wrap_data_parallel(
    policy: PolicyConfig, config: TransformerConfig, modules: list[MegatronModule]
) -> list[DistributedDataParallel]:
    """Add Megatron's gradient buckets, and tell the schedules how gradients are finalised."""
    ddp_config = MegatronDDPConfig(**bucket_settings(policy))
    wrapped = [DistributedDataParallel(config, ddp_config, module) for module in modules]
    config.finalize_model_grads_func = finalize_model_grads
    # The schedules take one function, or a list of them under virtual pipeline parallelism.
    waits: Any = [module.no_sync for module in wrapped]
    config.no_sync_func = waits if len(wrapped) > 1 else waits[0]
    if ddp_config.overlap_grad_reduce:
        starts: Any = [module.start_grad_sync for module in wrapped]
        config.grad_sync_func = starts if len(wrapped) > 1 else starts[0]
    return wrapped


def bucket_settings(policy: PolicyConfig) -> dict[str, Any]:
    """Return the fields of a DistributedDataParallelConfig that are not Megatron's defaults."""
    ddp = policy.megatron_cfg.distributed_data_parallel_config
    return {
        "use_distributed_optimizer": policy.megatron_cfg.optimizer.use_distributed_optimizer,
        "grad_reduce_in_fp32": ddp.grad_reduce_in_fp32,
        "overlap_grad_reduce": ddp.overlap_grad_reduce,
        "overlap_param_gather": ddp.overlap_param_gather,
        "average_in_collective": False,  # gradients are sums; see calculate_per_token_loss above
        "bucket_size": BUCKET_SIZE,
    }


BUCKET_SIZE: int | None = None
"""Parameters of a bucket of gradients; None lets Megatron choose."""


def stretched_frequencies(frequencies: torch.Tensor, scaling: RopeScalingConfig, base: float) -> torch.Tensor:
    """Return the inverse frequencies [D/2] of a model with that base whose rotations were stretched by `scaling`.

    RotaryEmbedding._apply_scaling (models/common/embeddings/rotary_pos_embedding.py) has the formula of Llama too,
    with the original context fixed at 8192 tokens.
    Fast rotations stay, slow ones are divided by the factor, and those between are a mixture of both.
    Sources: https://github.com/meta-llama/llama-models, `apply_scaling`; https://arxiv.org/abs/2309.00071, section 3.2.
    """
    slow, fast = scaling.slow_and_fast
    context = scaling.original_max_position_embeddings
    if scaling.rope_type == "yarn":
        # What is kept falls with the number of the channel pair. The pairs with so many turns are rounded outwards, as
        # in transformers and vLLM, unless a model says not to.
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
