"""The model of a policy: its Megatron config, precision, stretched rotary frequencies and data-parallel wrapping."""

from __future__ import annotations

import math
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

from nemo_rl_mcore.config import ModelConfig, PolicyConfig
from nemo_rl_mcore.config.model import RopeScalingConfig
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron.biases import mark_for_tensor_parallel
from nemo_rl_mcore.rank.megatron.fusions import Kernels, fused_settings, recomputed_settings
from nemo_rl_mcore.rank.megatron.latent_layers import share_rotations
from nemo_rl_mcore.rank.megatron.model_class import LanguageModel, biased_routers, language_model
from nemo_rl_mcore.rank.megatron.value_head import value_head_of
from nemo_rl_mcore.rank.policy_backend import DTYPES


def padded_vocab_size(policy: PolicyConfig) -> int:
    """Return the rows of the embedding: the vocabulary, rounded up to a multiple of the tensor-parallel size."""
    tp = policy.megatron_cfg.tensor_model_parallel_size
    return -(-policy.model.vocab_size // tp) * tp


def transformer_config(policy: PolicyConfig) -> TransformerConfig:
    """Megatron's description of the model and of how it is run."""
    settings = transformer_settings(policy, Kernels.here(policy.megatron_cfg))
    if policy.model.multi_latent_attention:
        return MLATransformerConfig(**settings, **_latent_settings(policy.model))
    described = TransformerConfig(**settings)
    if (yarn := _yarn(policy)) is not None:
        # No field, and read by each attention layer: _yarn_get_concentration_factor_from_config
        setattr(described, _YARN_FACTOR, yarn.factor)
    return described


_YARN_FACTOR = "yarn_rotary_scaling_factor"


def _yarn(policy: PolicyConfig) -> RopeScalingConfig | None:
    scaling = policy.model.rope_scaling
    return scaling if scaling and scaling.rope_type == "yarn" else None


def transformer_settings(policy: PolicyConfig, kernels: Kernels) -> dict[str, Any]:
    """Return the fields of a TransformerConfig that are not Megatron's defaults, for a model with such kernels."""
    model, config, dtype = policy.model, policy.megatron_cfg, DTYPES[policy.precision]
    return dict(
        **_layers(policy),
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn_size,
        gated_linear_unit=model.gated,
        activation_func=_ACTIVATIONS[model.activation_func],
        activation_func_clamp_value=model.activation_func_clamp_value,
        glu_linear_offset=model.glu_linear_offset,
        normalization="RMSNorm",
        layernorm_epsilon=model.layernorm_epsilon,
        qk_layernorm=model.qk_layernorm,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        softmax_type=model.softmax_type,
        **_window_settings(model),
        init_method_std=model.init_method_std,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        sequence_parallel=config.sequence_parallel,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        # Microbatches of different shapes: stages tell each other the next one's.
        variable_seq_lengths=policy.dynamic_batching.enabled,
        moe_token_dispatcher_type="alltoall",  # the default one refuses them, in dense models too
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        # With the default point-to-point settings the interleaved schedule swaps tensors on gloo, silently.
        overlap_p2p_comm=config.virtual_pipeline_model_parallel_size is not None,
        batch_p2p_comm=config.virtual_pipeline_model_parallel_size is None,
        context_parallel_size=config.context_parallel_size,
        cp_comm_type=config.cp_comm_type,
        use_cpu_initialization=not kernels.gpu,
        # What is loaded in full need not be drawn before.
        perform_initialization=policy.model_name is None,
        # The loss functions return sums, and the train step divides once by the global count.
        calculate_per_token_loss=True,
        transformer_impl="transformer_engine" if kernels.engine else "local",
        mtp_num_layers=model.mtp_num_layers,
        mtp_loss_scaling_factor=model.mtp_loss_scaling_factor,
        **fused_settings(
            config,
            kernels,
            scaled=_yarn(policy) is not None or model.multi_latent_attention,
            gated=model.gated,
        ),
        **recomputed_settings(config, kernels, parts_of_a_layer=policy.parts_of_a_layer),
        **_expert_settings(policy, kernels),
        **_mamba_settings(model),
    )


_ACTIVATIONS = {"silu": torch.nn.functional.silu, "quick_gelu": quick_gelu, "squared_relu": squared_relu}


def _window_settings(model: ModelConfig) -> dict[str, Any]:
    """Return what a TransformerConfig says of windows, which it counts in tokens before and behind a query."""
    if model.sliding_window is None:
        return {}
    layers = model.window_attn_skip_freq
    return {
        "window_size": (model.sliding_window - 1, 0),
        "window_attn_skip_freq": None if layers is None else [*layers],
    }


def _layers(policy: PolicyConfig) -> dict[str, Any]:
    """Return what a TransformerConfig says of the number of layers; a HybridModel's pattern has their stages."""
    layers, config = policy.model.num_layers, policy.megatron_cfg
    if policy.model_class == "hybrid":
        return {"num_layers": policy.parts_of_a_layer * layers, "is_hybrid_model": True}
    return {"num_layers": layers, **config.own_stages, **config.counted_ends}


def _latent_settings(model: ModelConfig) -> dict[str, Any]:
    """Return what an MLATransformerConfig says beside a TransformerConfig: latents, heads and their rotations."""
    settings: dict[str, Any] = {
        **{key: getattr(model, key) for key in ("q_lora_rank", "kv_lora_rank")},
        **{key: getattr(model, key) for key in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")},
        "rope_type": "rope",
        "rotary_base": model.rotary_base,
    }
    if (yarn := model.rope_scaling) is not None:
        settings |= {"rope_type": "yarn", "rotary_scaling_factor": yarn.factor}
        settings |= {key: getattr(yarn, key) for key in yarn.keys if key != "factor"}
        settings |= {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    return settings


def _mamba_settings(model: ModelConfig) -> dict[str, Any]:
    """Return what a TransformerConfig says of Mamba layers; nothing for a model without."""
    if not model.has_mamba:
        return {}
    return {
        "mamba_num_heads": model.mamba_num_heads,
        "mamba_head_dim": model.mamba_head_dim,
        "mamba_state_dim": model.mamba_state_dim,
        "mamba_num_groups": model.mamba_num_groups,
    }


def _expert_settings(policy: PolicyConfig, kernels: Kernels) -> dict[str, Any]:
    """Return what a TransformerConfig says of experts; nothing for a dense model."""
    model, config = policy.model, policy.megatron_cfg
    if model.num_moe_experts is None:
        return {}
    return {
        "num_moe_experts": model.num_moe_experts,
        "moe_layer_freq": 1 if model.moe_layer_freq is None else [*model.moe_layer_freq],
        "moe_router_topk": model.moe_router_topk,
        "moe_ffn_hidden_size": model.expert_ffn_size,
        **({} if model.moe_latent_size is None else {"moe_latent_size": model.moe_latent_size}),
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "moe_router_score_function": model.moe_router_score_function,
        "moe_router_pre_softmax": model.moe_router_pre_softmax,
        "moe_router_num_groups": model.moe_router_num_groups,
        "moe_router_group_topk": model.moe_router_group_topk,
        "moe_router_topk_scaling_factor": model.moe_router_topk_scaling_factor,
        "moe_router_dtype": model.moe_router_dtype,
        "moe_router_load_balancing_type": model.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        "moe_router_enable_expert_bias": model.moe_router_enable_expert_bias,
        "moe_router_bias_update_rate": model.moe_router_bias_update_rate,
        "moe_grouped_gemm": kernels.engine,
        "expert_model_parallel_size": config.expert_model_parallel_size,
        "overlap_moe_expert_parallel_comm": config.overlap_moe_expert_parallel_comm,
        "expert_tensor_parallel_size": config.expert_tensor_parallel_size,
    }


def build_model(policy: PolicyConfig) -> tuple[TransformerConfig, list[LanguageModel]]:
    """Return the model of this rank, one `LanguageModel` per virtual pipeline stage, on the device.

    Its weights are random, or not set at all where `policy.model_name` says that they are loaded next.
    """
    config = transformer_config(policy)
    stages = range(policy.megatron_cfg.virtual_pipeline_model_parallel_size or 1)
    interleaved = policy.megatron_cfg.virtual_pipeline_model_parallel_size is not None
    chunks = [_build_stage(policy, config, stage if interleaved else None) for stage in stages]
    draws = config.use_cpu_initialization and config.perform_initialization
    if draws and config.expert_model_parallel_size > 1:
        _draw_experts_of_this_rank(config, chunks)
    return config, [chunk.to(accelerator.device()) for chunk in chunks]


def _draw_experts_of_this_rank(config: TransformerConfig, chunks: list[LanguageModel]) -> None:
    """Draw other experts on each rank that holds some.

    _initialize_affine_weight_cpu (tensor_parallel/layers.py) draws the same ones on all.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(torch.initial_seed() + 1 + parallel_state.get_expert_model_parallel_rank())
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if "local_experts" in name:
                    last = "linear_fc2" in name
                    draw: Any = config.output_layer_init_method if last else config.init_method
                    draw(parameter)


def _build_stage(policy: PolicyConfig, config: TransformerConfig, vp_stage: int | None) -> LanguageModel:
    stage = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
    chunk = language_model(
        policy,
        config,
        vocab_size=padded_vocab_size(policy),
        max_sequence_length=policy.max_total_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        share_embeddings_and_output_weights=policy.model.tie_word_embeddings,
        position_embedding_type=policy.model.position_embedding_type,
        rotary_base=policy.model.rotary_base,
        vp_stage=vp_stage,
    )
    mark_for_tensor_parallel(chunk)
    if policy.model.multi_latent_attention:
        share_rotations(chunk)
    elif policy.model.rope_scaling is not None and policy.model.position_embedding_type == "rope":
        rotary = cast(RotaryEmbedding, chunk.rotary_pos_emb)
        rotary.inv_freq = stretched_frequencies(
            rotary.inv_freq, policy.model.rope_scaling, policy.model.rotary_base
        )
    return chunk


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


def freeze(modules: list[MegatronModule]) -> list[MegatronModule]:
    """Return the chunks that are never trained: in evaluation mode, without buffers for gradients.

    `requires_grad` stays: every pass over them is one without gradients, and Megatron's linear layers take another way
    for weights without it, linear_with_frozen_weight (tensor_parallel/layers.py), which rounds otherwise.
    """
    return [module.eval() for module in modules]


def wrap_data_parallel(
    policy: PolicyConfig, config: TransformerConfig, modules: list[MegatronModule]
) -> list[DistributedDataParallel]:
    """Add Megatron's gradient buckets, and tell the schedules how gradients are finalised."""
    ddp_config = MegatronDDPConfig(**bucket_settings(policy))
    wrapped = [DistributedDataParallel(config, ddp_config, module) for module in modules]
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = _one_or_all([module.no_sync for module in wrapped])
    if ddp_config.overlap_grad_reduce:
        config.grad_sync_func = _one_or_all([module.start_grad_sync for module in wrapped])
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
        "bucket_size": ddp.bucket_size,
    }


def _one_or_all(functions: list[Any]) -> Any:
    """Return the schedules take one function, or a list of them under virtual pipeline parallelism."""
    return functions[0] if len(functions) == 1 else functions


def stretched_frequencies(frequencies: torch.Tensor, scaling: RopeScalingConfig, base: float) -> torch.Tensor:
    """Return the inverse frequencies [D/2] of a model with that base whose rotations were stretched by `scaling`.

    RotaryEmbedding._apply_scaling (models/common/embeddings/rotary_pos_embedding.py) has the formula of Llama too,
    with the original context fixed at 8192 tokens.
    Fast rotations stay, slow ones are divided by the factor, and those between are a mixture of both.
    Sources: https://github.com/meta-llama/llama-models, `apply_scaling`; https://arxiv.org/abs/2309.00071, section 3.2.
    """
    slow, fast = scaling.slow_and_fast
    if scaling.rope_type == "yarn":
        share_kept = _kept_by_yarn(frequencies, scaling, base)
    else:
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        share_kept = (turns - slow) / (fast - slow)
    share_kept = share_kept.clamp(0.0, 1.0)
    return (1 - share_kept) * frequencies / scaling.factor + share_kept * frequencies


def _kept_by_yarn(frequencies: torch.Tensor, scaling: RopeScalingConfig, base: float) -> torch.Tensor:
    """Return what is kept of each frequency [D/2], before clamping: it falls with the number of the channel pair.

    The pairs with so many turns are rounded outwards, as in transformers and vLLM, unless a model says not to.
    """
    pairs = frequencies.numel()

    def pair_with(turns: float) -> float:
        return (
            pairs
            * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi))
            / math.log(base)
        )

    slow, fast = scaling.slow_and_fast
    first, last = pair_with(fast), pair_with(slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first or 0.001  # one pair that is both
    numbers = torch.arange(pairs, dtype=frequencies.dtype, device=frequencies.device)
    return 1 - (numbers - first) / width
