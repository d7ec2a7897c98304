"""Configuration of Megatron-Core: parallel layout, optimizer, scheduler, data-parallel buckets."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, cast

from pydantic import BeforeValidator, model_validator

from nemo_rl_mcore.config.base import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    Seconds,
    StrictModel,
    StrTuple,
    tuple_from_list,
)

LOGITS_CHUNK_BYTES = 64 * 2**20
"""Bound on the logits of one chunk if the recipe has no fused_linear_logprobs_chunk_size."""
_AUTO_LIMIT = 2**30
_AUTO_BYTES_PER_LOGIT = 1


@dataclass(frozen=True)
class LogitsCache:
    """A budget of bytes for each microbatch: `limit`, and `bytes_per_logit` of its logits if that is less.

    `auto` is one byte for each logit of a microbatch, at most 1 GiB: a quarter of its logits in float32, while the
    unfused path holds them, their gradient and copies of both. It is made of the tokens that are trained on and of this
    rank's rows of the vocabulary alone, not of the memory that happens to be free, so that the same panels are kept in
    every run, on every machine, and in the memory plan. Never do the logits of all tokens and ids exist at once: a
    logit takes two bytes at least, and panels are kept whole or not at all. The limit keeps the default harmless where
    microbatches are long.
    """

    limit: int
    bytes_per_logit: int | None = None

    @classmethod
    def of(cls, given: int | Literal["auto"]) -> "LogitsCache":
        """Return the budget that a recipe names: `auto`, or a count of bytes."""
        return cls(_AUTO_LIMIT, _AUTO_BYTES_PER_LOGIT) if given == "auto" else cls(given)

    def most(self, logits: int) -> int:
        """Return the bytes that a microbatch of so many logits may keep; more than they take, if the recipe says so."""
        return self.limit if self.bytes_per_logit is None else min(self.limit, logits * self.bytes_per_logit)


PrecisionName = Literal["float32", "bfloat16"]
RecomputedModules = Annotated[
    tuple[Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"], ...],
    BeforeValidator(tuple_from_list),
]
_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
_EMBEDDING, _LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"

_DDP = "distributed_data_parallel_config"


class OptimizerConfig(StrictModel):
    """The optimizer; clipping follows policy.max_grad_norm, and number formats follow policy.precision."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """adam is AdamW: the weight decay is decoupled."""
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
    sgd_momentum: Fraction = 0.9
    """Momentum of sgd."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks."""
    bf16: bool | None = None
    """NeMo RL's other spelling of policy.precision, which it gives where that is left out: true is bfloat16."""
    clip_grad: NonNegativeFloat | None = None
    """NeMo RL's other spelling of policy.max_grad_norm, which it gives where that is left out."""

    rules = (Rule("too-large", "min_lr", lambda own: own.min_lr > own.lr, ("lr",)),)


class SchedulerConfig(StrictModel):
    """Learning rate and weight decay over the optimizer steps."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    """Shape of the learning rate after the warm-up."""
    lr_decay_iters: PositiveInt | None = None
    """Optimizer steps until the learning rate reaches min_lr; needed unless the style is constant."""
    lr_warmup_iters: NonNegativeInt = 0
    """Optimizer steps of the linear warm-up."""
    lr_warmup_init: NonNegativeFloat = 0.0
    """Learning rate at the start of the warm-up."""
    start_weight_decay: NonNegativeFloat = 0.01
    """Weight decay at the first step; left out, it is optimizer.weight_decay."""
    end_weight_decay: NonNegativeFloat = 0.01
    """Weight decay at the last step; left out, it is optimizer.weight_decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape between the two weight decays."""

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
        Rule(
            "contradicts",
            "end_weight_decay",
            lambda own: (
                own.weight_decay_incr_style == "constant" and own.start_weight_decay != own.end_weight_decay
            ),
            ("start_weight_decay", "weight_decay_incr_style"),
            "make them equal, or set weight_decay_incr_style: linear",
        ),
    )


class OptimizationConfig(StrictModel):
    """An optimizer, and what changes over its steps."""

    optimizer: OptimizerConfig
    """The optimizer."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Learning rate and weight decay over the optimizer steps."""

    @model_validator(mode="before")
    @classmethod
    def _fill_weight_decay(cls, given: object) -> object:
        """Give a scheduler that names no weight decay that of the optimizer."""
        if not isinstance(given, Mapping):
            return given
        section = dict(cast("Mapping[str, object]", given))
        optimizer, scheduler = section.get("optimizer"), section.get("scheduler", {})
        if isinstance(optimizer, OptimizerConfig):
            decay: object = optimizer.weight_decay
        elif isinstance(optimizer, Mapping):
            default = OptimizerConfig.model_fields["weight_decay"].default
            decay = cast("Mapping[str, object]", optimizer).get("weight_decay", default)
        else:
            return section
        if isinstance(scheduler, Mapping):
            ends = {"start_weight_decay": decay, "end_weight_decay": decay}
            section["scheduler"] = ends | dict(cast("Mapping[str, object]", scheduler))
        return section


class DistributedDataParallelConfig(StrictModel):
    """Buckets and overlap of the gradient reduction."""

    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in fp32."""
    overlap_grad_reduce: bool = False
    """Reduce a bucket while the last backward pass still computes the next, unless the step comes in chunks."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward pass; needs the distributed optimizer."""
    bucket_size: PositiveInt | None = None
    """Parameters per bucket; null lets Megatron choose."""


class MegatronCheckpointConfig(StrictModel):
    """How a model's part of a checkpoint is written."""

    async_save: bool = False
    """Write a copy in the CPU's memory while training goes on; false: the step after it waits until all is written."""


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
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer of the first pipeline stage, which then has one layer fewer."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer as a layer of the last pipeline stage, likewise."""
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
            ends = self.counted_ends
            chunks = [(num_layers + len(ends)) // self.layer_divisor] * self.layer_divisor
            chunks[0] -= _EMBEDDING in ends
            chunks[-1] -= _LOSS in ends
            return chunks
        like = self.pipeline_model_parallel_size - len(own)
        shares = [(num_layers - sum(own.values())) // like] * like if like else []
        first = [own[_FIRST]] if _FIRST in own else []
        last = [own[_LAST]] if _LAST in own else []
        return first + shares + last

    @property
    def counted_ends(self) -> dict[str, bool]:
        """Return what counts as a layer though it is none: the keys, each true."""
        return {key: True for key in (_EMBEDDING, _LOSS) if getattr(self, key)}

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
    pipeline_dtype: PrecisionName | None = None
    """NeMo RL's other spelling of policy.precision, which it gives where that is left out."""
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
    gradient_accumulation_fusion: Literal["auto"] | bool = "auto"
    """Have matrix products add to the gradient buffer; auto: on GPUs with Transformer Engine and Apex's extension."""
    moe_permute_fusion: bool = True
    """Sort tokens by their experts in one kernel, where layers are Transformer Engine's."""
    use_fused_linear_logprobs: bool = False
    """Compute log-probabilities from the hidden states in chunks; no batch of logits ever exists at once."""
    fused_linear_logprobs_chunk_size: PositiveInt | None = None
    """Token rows per chunk; null: as many as take 64 MiB."""
    fused_linear_logprobs_cache_bytes: Literal["auto"] | NonNegativeInt = "auto"
    """Bytes of logits that the forward pass may keep for the backward pass; auto: 1 for each logit, at most 1 GiB."""
    fused_linear_logprobs_packed: bool = False
    """Allow policy.sequence_packing with use_fused_linear_logprobs, which is refused otherwise."""
    fused_linear_logprobs_context_parallel: bool = False
    """Allow context_parallel_size above 1 with use_fused_linear_logprobs, which is refused otherwise."""
    process_group_timeout_s: Seconds = 600.0
    """Seconds that ranks at work wait for one that is slower, or hangs; late starts, files and engines do not count."""
    distributed_data_parallel_config: DistributedDataParallelConfig = DistributedDataParallelConfig()
    """Buckets and overlap of the gradient reduction."""
    checkpoint: MegatronCheckpointConfig = MegatronCheckpointConfig()
    """Writing of checkpoints; `checkpointing` has their time and place."""

    read_unless = (
        ("fused_linear_logprobs_cache_bytes", "use_fused_linear_logprobs", False),
        ("recompute_granularity", "activation_checkpointing", False),
        ("recompute_modules", "activation_checkpointing", False),
        ("recompute_modules", "recompute_granularity", "full"),
    )

    rules = (
        Rule(
            "contradicts",
            "scheduler.start_weight_decay",
            lambda own: (
                own.scheduler.weight_decay_incr_style == "constant"
                and own.scheduler.start_weight_decay != own.optimizer.weight_decay
            ),
            ("optimizer.weight_decay", "scheduler.weight_decay_incr_style"),
            "remove it, or make them equal",
        ),
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
            ("optimizer.use_distributed_optimizer", "optimizer.optimizer"),
            # The sharded state of sgd cannot be saved.
            lambda own: {
                f"{_DDP}.overlap_param_gather": False,
                **({} if own.optimizer.optimizer == "sgd" else {"optimizer.use_distributed_optimizer": True}),
            },
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
