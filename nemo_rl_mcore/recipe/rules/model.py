"""What the model's class and kernels cannot do, what its weights must fit, and keys that are written twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl_mcore.config.base import Problem, Rule, Rules
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.models import missing_family
from nemo_rl_mcore.models.adapters import adapter_problems
from nemo_rl_mcore.models.frozen import pattern_problems
from nemo_rl_mcore.models.pretrained import override_problems
from nemo_rl_mcore.recipe.rules.parallelism import CONTEXT, OVERLAP

if TYPE_CHECKING:
    from nemo_rl_mcore.config.run_config import RunConfig

CHAR_VOCABULARY = 32
"""Tokens of the embedded character tokenizer."""
OF_ENGINE = frozenset(("layernorm", "moe_act"))
"""Parts that are computed again with Transformer Engine alone."""
FUSED = "megatron_cfg.use_fused_linear_logprobs"
_FUSED_PACKED = "megatron_cfg.fused_linear_logprobs_packed"
_FUSED_SHARED = "megatron_cfg.fused_linear_logprobs_context_parallel"
_GATHER = "megatron_cfg.distributed_data_parallel_config.overlap_param_gather"
_CLASS, _PATTERN = "megatron_cfg.model_class", "model.hybrid_layer_pattern"
_PEFT = "megatron_cfg.peft.enabled"
_PARTS = "megatron_cfg.recompute_modules"


def _parts(policy: PolicyConfig) -> tuple[str, ...]:
    """Return the parts of layers that are computed again."""
    megatron = policy.megatron_cfg
    selective = megatron.activation_checkpointing and megatron.recompute_granularity == "selective"
    return megatron.recompute_modules or () if selective else ()


def _of_weights(policy: PolicyConfig) -> Iterator[Problem]:
    yield from override_problems(policy.hf_config_overrides, named=policy.model_name is not None)
    yield from pattern_problems(policy.model, policy.megatron_cfg.freeze)
    yield from adapter_problems(policy)


def _lacks_tokens(policy: PolicyConfig) -> bool:
    return policy.tokenizer.name == "char" and policy.model.vocab_size < CHAR_VOCABULARY


FUSED_RULES: tuple[Rule[PolicyConfig], ...] = (
    Rule(
        "incompatible",
        FUSED,
        lambda own: own.megatron_cfg.use_fused_linear_logprobs and not own.megatron_cfg.enabled,
        ("megatron_cfg.enabled",),
        {"megatron_cfg.enabled": True, FUSED: False},
        "it uses a hook of Megatron",
    ),
    Rule(
        "incompatible",
        FUSED,
        lambda own: own.megatron_cfg.use_fused_linear_logprobs and own.generation.top_k is not None,
        ("generation.top_k",),
        {"generation.top_k": None, FUSED: False},
        "filtering needs all logits of a token at once",
    ),
    Rule(
        "incompatible",
        FUSED,
        lambda own: own.megatron_cfg.use_fused_linear_logprobs and own.generation.top_p != 1,
        ("generation.top_p",),
        {"generation.top_p": 1.0, FUSED: False},
        "filtering needs all logits of a token at once",
    ),
    Rule(
        "incompatible",
        FUSED,
        lambda own: (
            own.megatron_cfg.use_fused_linear_logprobs
            and own.megatron_cfg.distributed_data_parallel_config.overlap_param_gather
        ),
        (_GATHER,),
        {_GATHER: False, FUSED: False},
        "the output weight would be read while its gather is in flight",
    ),
    Rule(
        "incompatible",
        FUSED,
        lambda own: (
            own.megatron_cfg.use_fused_linear_logprobs
            and own.megatron_cfg.context_parallel_size > 1
            and not own.megatron_cfg.fused_linear_logprobs_context_parallel
        ),
        (CONTEXT, _FUSED_SHARED),
        {_FUSED_SHARED: True, CONTEXT: 1, FUSED: False},
        "shared sequences must be allowed explicitly",
    ),
    Rule(
        "incompatible",
        FUSED,
        lambda own: (
            own.megatron_cfg.use_fused_linear_logprobs
            and own.sequence_packing.enabled
            and not own.megatron_cfg.fused_linear_logprobs_packed
        ),
        ("sequence_packing.enabled", _FUSED_PACKED),
        {_FUSED_PACKED: True, "sequence_packing.enabled": False, FUSED: False},
        "packed rows must be allowed explicitly",
    ),
)
"""What the fused log-probabilities cannot honour; `check` prints how each of them stands."""

MODEL_RULES: Rules[PolicyConfig] = (
    Rule(
        "incompatible",
        _CLASS,
        lambda own: own.model_class == "hybrid" and own.model.mtp_num_layers,
        ("model.mtp_num_layers",),
        {"model.mtp_num_layers": None},
        "prediction layers of a HybridModel exist only for Transformer Engine",
    ),
    _of_weights,
    Rule(
        "not-supported",
        _PEFT,
        lambda own: own.megatron_cfg.peft.enabled and own.model.mtp_num_layers,
        ("model.mtp_num_layers",),
        {"model.mtp_num_layers": None, _PEFT: False},
        "prediction layers have no adapters",
    ),
    Rule(
        "not-supported",
        "megatron_cfg.peft.lora_dtype",
        lambda own: (
            own.megatron_cfg.peft.enabled
            and own.megatron_cfg.peft.lora_dtype not in (None, "None", own.precision)
        ),
        ("precision",),
        {"megatron_cfg.peft.lora_dtype": None},
    ),
    Rule(
        "has-no-effect",
        "megatron_cfg.freeze",
        lambda own: own.megatron_cfg.peft.enabled and own.megatron_cfg.freeze,
        (_PEFT,),
        "remove it; adapters alone are trained",
    ),
    Rule(
        "not-supported",
        "model_name",
        lambda own: own.model_name is not None and missing_family(own.model),
        ("model",),
        "change policy.model",
        lambda own: missing_family(own.model),
    ),
    *(
        Rule[PolicyConfig](
            "contradicts",
            "tokenizer.name",
            lambda own, weights=weights: own.weights == weights and _lacks_tokens(own),
            (weights, "model.vocab_size"),
            "name the tokenizer of the weights",
            f"that tokenizer has {CHAR_VOCABULARY} tokens",
        )
        for weights in ("model_name", "init_checkpoint")
    ),
    Rule(
        "too-small",
        "model.vocab_size",
        lambda own: own.weights is None and _lacks_tokens(own),
        ("tokenizer.name",),
        {"model.vocab_size": CHAR_VOCABULARY},
        f"that tokenizer has {CHAR_VOCABULARY} tokens",
    ),
    Rule(
        "too-large",
        "max_total_sequence_length",
        lambda own: own.max_total_sequence_length > own.model.longest_sequence,
        ("model.max_position_embeddings",),
        lambda own: (
            "lower one or raise the other"
            if own.model_name is None
            else f"set it to {own.model.longest_sequence} at most, or write "
            "hf_config_overrides.max_position_embeddings over it"
        ),
    ),
    *(
        Rule[PolicyConfig](
            "has-no-effect",
            _PARTS,
            lambda own, part=part, needed=needed: part in _parts(own) and not getattr(own.model, needed),
            (f"model.{needed}",),
            says=f"{part} has no effect in a model without such parts",
        )
        for part, needed in (
            ("moe", "num_moe_experts"),
            ("moe_act", "num_moe_experts"),
            ("shared_experts", "moe_shared_expert_intermediate_size"),
        )
    ),
)
POLICY_RULES: Rules[PolicyConfig] = (
    *FUSED_RULES,
    Rule(
        "too-large",
        "generation.stop_token_ids",
        lambda own: any(not 0 <= stop < own.model.vocab_size for stop in own.generation.stop_token_ids or ()),
        ("model.vocab_size",),
        lambda own: (
            f"give ids from 0 to {own.model.vocab_size - 1}{'' if own.weights else ', or raise vocab_size'}"
        ),
    ),
    Rule(
        "incompatible",
        _CLASS,
        lambda own: own.model_class == "hybrid" and own.megatron_cfg.overlap_moe_expert_parallel_comm,
        (OVERLAP,),
        {OVERLAP: False},
        "its schedule does not support a HybridModel",
    ),
    Rule(
        "incompatible",
        _CLASS,
        lambda own: own.model_class == "gpt" and own.model.hybrid_layer_pattern is not None,
        (_PATTERN,),
        {_CLASS: "auto"},
        "a GPTModel has attention in each layer",
    ),
    Rule(
        "incompatible",
        "megatron_cfg.bias_activation_fusion",
        lambda own: own.megatron_cfg.bias_activation_fusion is True and not own.model.gated,
        ("model.activation_func",),
        "set it to auto or false",
        "only gated activations have a fusion",
    ),
    *(
        Rule[PolicyConfig](
            "incompatible",
            _CLASS,
            lambda own, key=key, plain=plain: (
                own.model_class == "hybrid" and getattr(own.model, key) != plain
            ),
            (f"model.{key}",),
            {f"model.{key}": plain},
            why,
        )
        for key, plain, why in (
            ("kv_lora_rank", None, "a HybridModel has no layer for latent attention"),
            *(
                (
                    key,
                    plain,
                    "not tested in a HybridModel",
                )
                for key, plain in (
                    ("softmax_type", "vanilla"),
                    ("sliding_window", None),
                    ("add_bias_linear", False),
                )
            ),
        )
    ),
)
RUN_RULES: Rules[RunConfig] = (
    *(
        Rule["RunConfig"](
            "requires",
            f"policy.{_PARTS}",
            lambda run, part=part: run.cluster.on_cpu and part in _parts(run.policy),
            ("cluster.gpus_per_node",),
            f"leave {part} out, or set recompute_granularity: full",
            f"{part} is computed again on GPUs alone",
        )
        for part in sorted(OF_ENGINE)
    ),
)
