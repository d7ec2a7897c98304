"""Configuration of Megatron-Core: parallel layout, optimizer, scheduler, data-parallel buckets."""

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
    tuple_from_list,
)

LOGITS_CHUNK_BYTES = 64 * 2**20
"""Bound on the logits of one chunk if the recipe has no fused_linear_logprobs_chunk_size."""


@dataclass(frozen=True)
class LogitsCache:
    """A budget of bytes for each microbatch: `limit`, and `bytes_per_logit` of its logits if that is less."""

    limit: int
    bytes_per_logit: int | None = None

    def most(self, logits: int) -> int:
        """Return the bytes that a microbatch of so many logits may keep; more than they take, if the recipe says so."""
        return self.limit if self.bytes_per_logit is None else min(self.limit, logits * self.bytes_per_logit)


LOGITS_CACHE = LogitsCache(2**30, 1)
"""One byte for each logit of a microbatch, at most 1 GiB: a quarter of its logits in float32, while the unfused path
holds them, their gradient and copies of both.

It is made of the tokens that are trained on and of this rank's rows of the vocabulary alone, not of the memory that
happens to be free, so that the same panels are kept in every run, on every machine, and in the memory plan. Never do
the logits of all tokens and ids exist at once: a logit takes two bytes at least, and panels are kept whole or not at
all. The limit keeps it harmless where microbatches are long.
"""
PrecisionName = Literal["float32", "bfloat16"]
RecomputedModules = Annotated[
    tuple[Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"], ...],
    BeforeValidator(tuple_from_list),
]
_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"

_DDP = "distributed_data_parallel_config"


class OptimizerConfig(StrictModel):
    """AdamW; clipping follows policy.max_grad_norm, and number formats follow policy.precision."""

    lr: PositiveFloat
    """Highest learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of a decay."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay; of norms and biases only with decay_norms_and_biases."""
    decay_norms_and_biases: bool = False
    """Let norms and biases decay as well, as torch's AdamW does unless it is told (ours)."""
    adam_beta1: Fraction = 0.9
    """Decay of the running mean of gradients."""
    adam_beta2: Fraction = 0.999
    """Decay of the running mean of squared gradients."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the denominator of Adam."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks."""

    rules = (Rule("too-large", "min_lr", lambda own: own.min_lr > own.lr, ("lr",)),)


class SchedulerConfig(StrictModel):
    """Learning rate over the optimizer steps."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    """Shape of the learning rate after the warm-up."""
    lr_decay_iters: PositiveInt | None = None
    """Optimizer steps until the learning rate reaches min_lr; needed unless the style is constant."""
    lr_warmup_iters: NonNegativeInt = 0
    """Optimizer steps of the linear warm-up."""
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
    """An optimizer, and what changes over its steps."""

    optimizer: OptimizerConfig
    """The optimizer."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Learning rate over the optimizer steps."""


class DistributedDataParallelConfig(StrictModel):
    """Buckets and overlap of the gradient reduction."""

    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in fp32."""
    overlap_grad_reduce: bool = False
    """Reduce a bucket while the last backward pass still computes the next, unless the step comes in chunks."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward pass; needs the distributed optimizer."""


class MegatronCheckpointConfig(StrictModel):
    """How a model's part of a checkpoint is written."""

    async_save: bool = False
    """Write a copy in the CPU's memory while training goes on; false: the step after it waits until all is written."""


AdapterInit = Literal["xavier", "normal", "kaiming", "zero"]


class PeftConfig(StrictModel):
    """Low-rank adapters (LoRA) beside linear layers: they alone are trained, and all other weights stay."""

    enabled: bool = False
    """Train adapters in place of the model's weights."""
    target_modules: StrTuple = ()
    """Linear layers with an adapter, by Megatron's names, with * for any text; []: all but experts' and the output."""
    exclude_modules: StrTuple = ()
    """Linear layers without one, likewise; they win over target_modules."""
    dim: PositiveInt = 8
    """Rank of an adapter."""
    alpha: PositiveFloat = 32.0
    """An adapter's output is multiplied by alpha / dim."""
    dropout: Fraction = 0.0
    """Probability of dropout in adapters."""
    dropout_position: Literal["pre", "post"] = "post"
    """pre: on the input of an adapter, as in peft; post: on its output."""
    lora_A_init_method: AdapterInit = "xavier"
    """Start of A; xavier: normal over both sizes; normal: a deviation of 0.2; kaiming: uniform over the input's."""
    lora_B_init_method: AdapterInit = "zero"
    """Start of B; zero: training starts at the model itself."""
    a2a_experimental: bool = False
    """NeMo RL's other way to exchange between ranks; here it changes nothing."""
    lora_dtype: PrecisionName | Literal["None"] | None = None
    """Number format of adapters; null, or None as NeMo RL writes it, is policy.precision, the only one."""
    pretrained_adapter: FolderPath | None = None
    """A folder of the library peft, whose adapters training starts from (ours)."""

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
    """Ranks that share the weights of each layer."""
    sequence_parallel: bool = False
    """Shard activations between tensor-parallel regions along the sequence; needs tensor parallelism."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Pipeline stages."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """Model chunks per pipeline stage (interleaved schedule); null is one."""
    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Layers of the first pipeline stage; those in between share the rest evenly. Null is a share like theirs."""
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Layers of the last pipeline stage, likewise."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share each sequence."""
    expert_model_parallel_size: PositiveInt = 1
    """Ranks that share the experts."""
    expert_tensor_parallel_size: PositiveInt = 1
    """Ranks that share the weights of one expert."""

    @property
    def model_parallel_size(self) -> int:
        """Return the number of ranks that hold one copy of the model."""
        return (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        )

    @property
    def layer_divisor(self) -> int:
        """Return the number of chunks that the layers are cut into."""
        return self.pipeline_model_parallel_size * (self.virtual_pipeline_model_parallel_size or 1)

    @property
    def own_stages(self) -> dict[str, int]:
        """Return the stages that have a number of layers of their own: the keys, and the numbers."""
        return {key: layers for key in (_FIRST, _LAST) if (layers := getattr(self, key)) is not None}

    def layers_of_chunks(self, num_layers: int) -> list[int]:
        """Return the layers of each chunk of the pipeline, from the first to the last."""
        own = self.own_stages
        if not own:
            return [num_layers // self.layer_divisor] * self.layer_divisor
        like = self.pipeline_model_parallel_size - len(own)
        shares = [(num_layers - sum(own.values())) // like] * like if like else []
        first = [own[_FIRST]] if _FIRST in own else []
        last = [own[_LAST]] if _LAST in own else []
        return first + shares + last

    def largest_stage(self, num_layers: int) -> int:
        """Return the number of layers of the pipeline stage that has most of them."""
        chunks, stages = self.layers_of_chunks(num_layers), self.pipeline_model_parallel_size
        return max(0, *(sum(chunks[stage::stages]) for stage in range(stages)))


UNDIVIDED = {name: field.default for name, field in ParallelLayoutConfig.model_fields.items()}
"""The layout where one rank holds all of a model."""


class MegatronConfig(ParallelLayoutConfig, OptimizationConfig):
    """Megatron-Core, the policy's backend."""

    enabled: bool = True
    """Always true: Megatron is the only backend."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layer implementation; auto is Transformer Engine where it is installed and a GPU exists, else local."""
    model_class: Literal["auto", "gpt", "hybrid"] = "auto"
    """Megatron's GPTModel, or the HybridModel that is to replace it; auto: that where the model is a hybrid (ours)."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] = "p2p"
    """Exchange of keys and values between context-parallel ranks on GPUs; local attention gathers them."""
    freeze: StrTuple = ()
    """Weights that training leaves as they are, by the names that Hugging Face models give them; * and ? match any."""
    freeze_moe_router: bool = False
    """Leave the routers of experts as they are; nothing in a model without experts."""
    overlap_moe_expert_parallel_comm: bool = False
    """Send tokens to experts while another microbatch computes; needs expert parallelism and bfloat16."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    recompute_granularity: Literal["full", "selective"] = "full"
    """full: of each layer its input alone is kept; selective: all but the insides of recompute_modules are."""
    recompute_modules: RecomputedModules | None = None
    """Parts that selective computes again; null is [core_attn]."""
    bias_activation_fusion: Literal["auto"] | bool = "auto"
    """Compute SwiGLU and its gradient in one kernel each; auto: on GPUs."""
    apply_rope_fusion: bool = True
    """Rotate queries and keys in one kernel, where layers are Transformer Engine's and the model has no YaRN."""
    moe_permute_fusion: bool = True
    """Sort tokens by their experts in one kernel, where layers are Transformer Engine's."""
    use_fused_linear_logprobs: bool = False
    """Compute log-probabilities from the hidden states in chunks; no batch of logits ever exists at once."""
    fused_linear_logprobs_chunk_size: PositiveInt | None = None
    """Token rows per chunk; null: as many as take 64 MiB."""
    fused_linear_logprobs_packed: bool = False
    """Allow policy.sequence_packing with use_fused_linear_logprobs, which is refused otherwise."""
    fused_linear_logprobs_context_parallel: bool = False
    """Allow context_parallel_size above 1 with use_fused_linear_logprobs, which is refused otherwise."""
    peft: PeftConfig = PeftConfig()
    """Low-rank adapters."""
    distributed_data_parallel_config: DistributedDataParallelConfig = DistributedDataParallelConfig()
    """Buckets and overlap of the gradient reduction."""
    checkpoint: MegatronCheckpointConfig = MegatronCheckpointConfig()
    """Writing of checkpoints; `checkpointing` has their time and place."""

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
        Rule(
            "requires",
            f"{_DDP}.overlap_param_gather",
            lambda own: (
                own.distributed_data_parallel_config.overlap_param_gather
                and not own.optimizer.use_distributed_optimizer
            ),
            ("optimizer.use_distributed_optimizer",),
            {f"{_DDP}.overlap_param_gather": False, "optimizer.use_distributed_optimizer": True},
        ),
        Rule(
            "requires",
            f"{_DDP}.overlap_param_gather",
            lambda own: (
                own.distributed_data_parallel_config.overlap_param_gather
                and not own.distributed_data_parallel_config.overlap_grad_reduce
            ),
            (f"{_DDP}.overlap_grad_reduce",),
            {f"{_DDP}.overlap_grad_reduce": True, f"{_DDP}.overlap_param_gather": False},
        ),
    )
