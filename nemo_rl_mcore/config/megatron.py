"""Configuration of Megatron-Core: parallel layout, optimizer, scheduler and data-parallel buckets."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator

from nemo_rl_mcore.config.base import (
    FolderPath,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    StrictModel,
    StrTuple,
    Switched,
    SwitchedOn,
    either,
    tuple_from_list,
)

LOGITS_CHUNK_BYTES = 64 * 2**20
"""Maximum bytes of one chunk's logits if fused_linear_logprobs_chunk_size is null."""


@dataclass(frozen=True)
class LogitsCache:
    """A byte budget per microbatch: `limit`, or `bytes_per_logit` times its number of logits if that is less."""

    limit: int
    bytes_per_logit: int | None = None


LOGITS_CACHE = LogitsCache(2**30, 1)
"""One byte per logit of a microbatch, at most 1 GiB: a quarter of the float32 logits, whereas the unfused path holds
all logits, their gradient and copies of both.

The budget depends only on the number of trained tokens and on this rank's rows of the vocabulary, not on free memory,
so that the same panels are kept in every run, on every machine, and in the memory plan. The logits of all tokens and
ids never exist at once: a logit takes at least two bytes, and each panel is kept whole or not at all. The limit bounds
the memory of long microbatches.
"""
RecomputedModules = Annotated[
    tuple[Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"], ...],
    BeforeValidator(tuple_from_list),
]
_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"

_DDP = "distributed_data_parallel_config"


class OptimizerConfig(StrictModel):
    """AdamW; gradient clipping is set by policy.max_grad_norm, number formats by policy.precision."""

    lr: PositiveFloat
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay; applied to norms and biases only with decay_norms_and_biases."""
    decay_norms_and_biases: bool = False
    """Apply weight decay to norms and biases too, as torch's AdamW does by default (ours)."""
    adam_beta1: Fraction = 0.9
    """Decay rate of the gradients' running mean."""
    adam_beta2: Fraction = 0.999
    """Decay rate of the squared gradients' running mean."""
    adam_eps: PositiveFloat = 1e-8
    """Epsilon added to Adam's denominator."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state across data-parallel ranks."""

    rules = (Rule("too-large", "min_lr", lambda own: own.min_lr > own.lr, ("lr",)),)


class SchedulerConfig(StrictModel):
    """Learning-rate schedule, in optimizer steps."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    """Shape of the learning-rate decay after the warm-up."""
    lr_decay_iters: PositiveInt | None = None
    """Optimizer steps until the learning rate reaches min_lr; null only if lr_decay_style is constant."""
    lr_warmup_iters: NonNegativeInt = 0
    """Number of optimizer steps in the linear warm-up."""
    lr_warmup_init: NonNegativeFloat = 0.0
    """Learning rate at the start of the warm-up."""

    rules = (
        Rule(
            "missing",
            "lr_decay_iters",
            lambda own: own.lr_decay_iters is None and own.lr_decay_style != "constant",
            ("lr_decay_style",),
            "set the number of steps, or lr_decay_style: constant",
        ),
        Rule(
            "too-large",
            "lr_warmup_iters",
            lambda own: own.lr_warmup_iters >= (own.lr_decay_iters or math.inf),
            ("lr_decay_iters",),
            "shorten the warm-up",
        ),
    )


class OptimizationConfig(StrictModel):
    """An optimizer and its learning-rate schedule."""

    optimizer: OptimizerConfig
    """The optimizer."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Learning-rate schedule, in optimizer steps."""


class DistributedDataParallelConfig(StrictModel):
    """Data-parallel gradient reduction and its overlap with computation."""

    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in fp32."""
    overlap_grad_reduce: bool = False
    """Reduce each gradient bucket while the last backward pass computes the next; not for steps trained in chunks."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward pass; requires use_distributed_optimizer."""


class MegatronCheckpointConfig(StrictModel):
    """Settings for writing a model's part of a checkpoint."""

    async_save: bool = False
    """Write from a copy in CPU memory while training continues; false makes training wait until the write ends."""


class Fp8Config(Switched):
    """FP8 products in linear layers, by Transformer Engine on GPUs; weights stay bfloat16. Never run so far."""

    fp8: Literal["e4m3", "hybrid"] = "e4m3"
    """Number format; hybrid is e5m2 for the gradients of outputs and e4m3 otherwise."""
    fp8_recipe: Literal["blockwise", "tensorwise", "mxfp8"] = "blockwise"
    """Scales: one per block of 128 numbers, one per tensor, or one per 32 numbers (Blackwell)."""

    read_unless = (("fp8", "enabled", False), ("fp8_recipe", "enabled", False))


AdapterInit = Literal["xavier", "normal", "kaiming", "zero"]


class PeftConfig(Switched):
    """Low-rank adapters (LoRA) on linear layers; all other weights stay frozen."""

    target_modules: StrTuple = ()
    """Linear layers with an adapter, by Megatron's names (wildcard *); [] means all except experts and the output."""
    exclude_modules: StrTuple = ()
    """Linear layers without an adapter, named as in target_modules, over which this key takes precedence."""
    dim: PositiveInt = 8
    """Rank of the adapters."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters: their output is multiplied by alpha / dim."""
    dropout: Fraction = 0.0
    """Dropout probability in adapters."""
    dropout_position: Literal["pre", "post"] = "post"
    """Apply dropout to an adapter's input (pre), as in the peft library, or to its output (post)."""
    lora_A_init_method: AdapterInit = "xavier"
    """Initialization of A: xavier, normal by both sizes; normal, standard deviation 0.2; kaiming, uniform by inputs."""
    lora_B_init_method: AdapterInit = "zero"
    """Initialization of B; with zero, training starts from the unchanged model."""
    lora_dtype: Literal["float32", "bfloat16", "None"] | None = None
    """Number format of adapters, which must equal policy.precision; null, or None as in NeMo RL, means that format."""
    pretrained_adapter: FolderPath | None = None
    """Folder of adapters saved by the peft library to start training from; null starts new adapters (ours)."""

    read_unless = (
        *(
            (key, "enabled", False)
            for key in (
                *("target_modules", "exclude_modules", "dim", "alpha", "dropout"),
                *("lora_A_init_method", "lora_B_init_method", "pretrained_adapter"),
            )
        ),
        ("dropout_position", "dropout", 0.0),
    )
    rules = (
        Rule(
            "no-signal",
            "lora_A_init_method",
            lambda own: own.enabled and own.lora_A_init_method == "zero" == own.lora_B_init_method,
            ("lora_B_init_method",),
            {"lora_A_init_method": "xavier"},
            "B A has no gradient where both are 0",
        ),
    )


class ParallelLayoutConfig(StrictModel):
    """Parallel layout of a model."""

    tensor_model_parallel_size: PositiveInt = 1
    """Number of ranks that share each layer's weights."""
    sequence_parallel: bool = False
    """Shard activations along the sequence between tensor-parallel regions; requires tensor parallelism."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Number of pipeline stages."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """Number of model chunks per pipeline stage (interleaved schedule); null means one."""
    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Number of layers in the first pipeline stage; null means an even share. Middle stages share the rest evenly."""
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Number of layers in the last pipeline stage; null means an even share."""
    context_parallel_size: PositiveInt = 1
    """Number of ranks that share each sequence."""
    expert_model_parallel_size: PositiveInt = 1
    """Number of ranks among which each layer's experts are divided."""
    expert_tensor_parallel_size: PositiveInt = 1
    """Number of ranks that share each expert's weights."""

    @property
    def model_parallel_size(self) -> int:
        """Return the number of ranks that hold one copy of the model."""
        return (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        )

    @property
    def own_stages(self) -> dict[str, int]:
        """Return the explicitly set numbers of layers in the first and last stage, by key."""
        return {key: layers for key in (_FIRST, _LAST) if (layers := getattr(self, key)) is not None}

    def layers_of_chunks(self, num_layers: int) -> list[int]:
        """Return the number of layers in each pipeline chunk, from first to last."""
        own = self.own_stages
        if not own:
            chunks = self.pipeline_model_parallel_size * (self.virtual_pipeline_model_parallel_size or 1)
            return [num_layers // chunks] * chunks
        like = self.pipeline_model_parallel_size - len(own)
        shares = [(num_layers - sum(own.values())) // like] * like if like else []
        first = [own[_FIRST]] if _FIRST in own else []
        last = [own[_LAST]] if _LAST in own else []
        return first + shares + last

    def largest_stage(self, num_layers: int) -> int:
        """Return the number of layers in the largest pipeline stage."""
        chunks, stages = self.layers_of_chunks(num_layers), self.pipeline_model_parallel_size
        return max(0, *(sum(chunks[stage::stages]) for stage in range(stages)))


UNDIVIDED = {name: field.default for name, field in ParallelLayoutConfig.model_fields.items()}
"""The layout in which one rank holds the whole model."""


class MegatronConfig(SwitchedOn, ParallelLayoutConfig, OptimizationConfig):
    """Megatron-Core, which is the policy's only backend and always enabled."""

    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layer implementation; auto selects Transformer Engine if it is installed and there is a GPU, else local."""
    model_class: Literal["auto", "gpt", "hybrid"] = "auto"
    """Megatron's GPTModel or its successor HybridModel; auto uses HybridModel for hybrid models only (ours)."""
    freeze: StrTuple = ()
    """Weights to keep frozen, by their Hugging Face names; * and ? are wildcards."""
    freeze_moe_router: bool = False
    """Freeze the expert routers; a model without experts has none."""
    overlap_moe_expert_parallel_comm: bool = False
    """Send tokens to experts while another microbatch computes; requires expert parallelism and bfloat16."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    recompute_granularity: Literal["full", "selective"] = "full"
    """Activations to recompute: full stores only each layer's input; selective recomputes only recompute_modules."""
    recompute_modules: RecomputedModules | None = None
    """Parts of a layer that selective recomputes; null means [core_attn]."""
    bias_activation_fusion: Literal["auto"] | bool = "auto"
    """Compute SwiGLU and its gradient in one kernel each; auto does so on GPUs."""
    apply_rope_fusion: bool = True
    """Apply rotary positions in one kernel; only with Transformer Engine's layers and without YaRN."""
    moe_permute_fusion: bool = True
    """Sort tokens by expert in one kernel; only with Transformer Engine's layers."""
    use_fused_linear_logprobs: bool = False
    """Compute log-probabilities from hidden states in chunks, without ever holding a whole batch's logits."""
    fused_linear_logprobs_chunk_size: PositiveInt | None = None
    """Tokens per chunk; null means as many as fit into 64 MiB."""
    fused_linear_logprobs_packed: bool = False
    """Allow policy.sequence_packing together with use_fused_linear_logprobs; false refuses the combination."""
    fused_linear_logprobs_context_parallel: bool = False
    """Allow context_parallel_size above 1 together with use_fused_linear_logprobs; false refuses the combination."""
    fp8_cfg: Fp8Config = Fp8Config()
    """FP8 products in linear layers."""
    peft: PeftConfig = PeftConfig()
    """Low-rank adapters."""
    distributed_data_parallel_config: DistributedDataParallelConfig = DistributedDataParallelConfig()
    """Data-parallel gradient reduction and its overlap with computation."""
    checkpoint: MegatronCheckpointConfig = MegatronCheckpointConfig()
    """Settings for writing checkpoints; the section checkpointing sets their interval and folder."""

    read_unless = (
        ("recompute_granularity", "activation_checkpointing", False),
        ("recompute_modules", "activation_checkpointing", False),
        ("recompute_modules", "recompute_granularity", "full"),
    )

    rules = (
        Rule(
            "too-large",
            "scheduler.lr_warmup_init",
            lambda own: own.scheduler.lr_warmup_init > own.optimizer.lr,
            ("optimizer.lr",),
        ),
        Rule(
            "not-supported",
            "enabled",
            lambda own: not own.enabled,
            fix={"enabled": True},
            why="Megatron is the only backend of the policy",
        ),
        either(
            "requires",
            {f"{_DDP}.overlap_param_gather": False, "optimizer.use_distributed_optimizer": True},
        ),
        either(
            "requires",
            {f"{_DDP}.overlap_param_gather": False, f"{_DDP}.overlap_grad_reduce": True},
        ),
    )
