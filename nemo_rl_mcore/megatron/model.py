"""The GPT model of a policy: its Megatron config, its layer spec, precision and data-parallel wrapping."""

from __future__ import annotations

import importlib.util
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.distributed import DistributedDataParallelConfig as MegatronDDPConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from nemo_rl_mcore import accelerator
from nemo_rl_mcore.config import MegatronConfig, PolicyConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm for the local layer spec, also under sequence parallelism.

    Megatron's stock torch norm asserts against sequence parallelism; all that is missing there is the mark on the
    weight that tells `finalize_model_grads` to sum its gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=accelerator.device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; shape and dtype stay."""
        return torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


def use_transformer_engine(config: MegatronConfig) -> bool:
    """Whether the layers are Transformer Engine's: as asked for, or under `auto` where CUDA and the package exist."""
    if config.transformer_impl == "auto":
        return accelerator.has_cuda() and importlib.util.find_spec("transformer_engine") is not None
    return config.transformer_impl == "transformer_engine"


def padded_vocab_size(policy: PolicyConfig) -> int:
    """The rows of the embedding: the vocabulary, rounded up to a multiple of the tensor-parallel size."""
    tp = policy.megatron_cfg.tensor_model_parallel_size
    return -(-policy.model.vocab_size // tp) * tp


def transformer_config(policy: PolicyConfig) -> TransformerConfig:
    """Megatron's description of the model and of how it is run."""
    model, config, dtype = policy.model, policy.megatron_cfg, DTYPES[policy.precision]
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=model.layernorm_epsilon,
        qk_layernorm=model.qk_layernorm,
        add_bias_linear=False,
        add_qkv_bias=model.add_qkv_bias,
        init_method_std=model.init_method_std,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        sequence_parallel=config.sequence_parallel,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        # With the default point-to-point settings the interleaved schedule swaps tensors on gloo, silently.
        overlap_p2p_comm=config.virtual_pipeline_model_parallel_size is not None,
        batch_p2p_comm=config.virtual_pipeline_model_parallel_size is None,
        context_parallel_size=config.context_parallel_size,
        use_cpu_initialization=not accelerator.has_cuda(),
        # The loss functions return sums, and the train step divides once by the global count.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        recompute_granularity="full" if config.activation_checkpointing else None,
        recompute_method="uniform" if config.activation_checkpointing else None,
        recompute_num_layers=1 if config.activation_checkpointing else None,
        apply_rope_fusion=config.apply_rope_fusion and use_transformer_engine(config),
    )


def build_model(policy: PolicyConfig) -> tuple[TransformerConfig, list[GPTModel]]:
    """The randomly initialised model of this rank: one GPTModel per virtual pipeline stage, on the device."""
    config = transformer_config(policy)
    stages = range(policy.megatron_cfg.virtual_pipeline_model_parallel_size or 1)
    interleaved = policy.megatron_cfg.virtual_pipeline_model_parallel_size is not None
    chunks = [_build_stage(policy, config, stage if interleaved else None) for stage in stages]
    return config, [chunk.to(accelerator.device()) for chunk in chunks]


def _build_stage(policy: PolicyConfig, config: TransformerConfig, vp_stage: int | None) -> GPTModel:
    stage = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
    return GPTModel(
        config,
        _layer_spec(policy.megatron_cfg, config, vp_stage),
        vocab_size=padded_vocab_size(policy),
        max_sequence_length=policy.max_total_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        share_embeddings_and_output_weights=policy.model.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=policy.model.rotary_base,  # type: ignore[arg-type]  # its annotation says int; any number works,
        vp_stage=vp_stage,
    )


def _layer_spec(config: MegatronConfig, transformer: TransformerConfig, vp_stage: int | None) -> Any:
    """A layer's ModuleSpec, or the block's submodules; GPTModel takes both, though its annotation names the first."""
    if use_transformer_engine(config):
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=transformer.qk_layernorm)
    submodules = get_gpt_layer_local_submodules(
        normalization="RMSNorm", qk_layernorm=transformer.qk_layernorm, moe_grouped_gemm=False
    )
    submodules.input_layernorm = submodules.pre_mlp_layernorm = RMSNorm
    if transformer.qk_layernorm:
        attention: Any = cast(ModuleSpec, submodules.self_attention).submodules
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    # The block form also names the final norm; a bare layer spec would still build the stock one there.
    layer = ModuleSpec(module=TransformerLayer, submodules=submodules)
    layers = [layer] * get_num_layers_to_build(transformer, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def wrap_data_parallel(
    policy: PolicyConfig, config: TransformerConfig, chunks: list[GPTModel]
) -> list[DistributedDataParallel]:
    """Add mixed precision and Megatron's gradient buckets, and tell the schedules how gradients are finalised."""
    modules = [Float16Module(config, chunk) for chunk in chunks] if config.bf16 else chunks
    ddp = policy.megatron_cfg.distributed_data_parallel_config
    ddp_config = MegatronDDPConfig(
        use_distributed_optimizer=policy.megatron_cfg.optimizer.use_distributed_optimizer,
        grad_reduce_in_fp32=ddp.grad_reduce_in_fp32,
        overlap_grad_reduce=ddp.overlap_grad_reduce,
        overlap_param_gather=ddp.overlap_param_gather,
        average_in_collective=False,  # gradients are sums; see calculate_per_token_loss above
        bucket_size=ddp.bucket_size,
    )
    wrapped = [DistributedDataParallel(config, ddp_config, module) for module in modules]
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = _one_or_all([module.no_sync for module in wrapped])
    if ddp.overlap_grad_reduce:
        config.grad_sync_func = _one_or_all([module.start_grad_sync for module in wrapped])
    return wrapped


def _one_or_all(functions: list[Any]) -> Any:
    """The schedules take one function, or a list of them under virtual pipeline parallelism."""
    return functions[0] if len(functions) == 1 else functions
