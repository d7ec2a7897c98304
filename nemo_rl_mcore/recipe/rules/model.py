"""Rules for model classes and kernels, for the fit of weights, and for keys that are set twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl_mcore.config.base import Rule, Rules, either, value_at
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.models import missing_family
from nemo_rl_mcore.models.adapters import adapter_problems
from nemo_rl_mcore.models.frozen import pattern_problems
from nemo_rl_mcore.models.pretrained import override_problems
from nemo_rl_mcore.recipe.rules.parallelism import CONTEXT, OVERLAP

if TYPE_CHECKING:
    from nemo_rl_mcore.config.run_config import RunConfig

CHAR_VOCABULARY = 32
"""Vocabulary size of the embedded character tokenizer."""
OF_ENGINE = frozenset(("layernorm", "moe_act"))
"""Parts of a layer that can be recomputed only with Transformer Engine."""
FUSED = "megatron_cfg.use_fused_linear_logprobs"
_FUSED_PACKED = "megatron_cfg.fused_linear_logprobs_packed"
_FUSED_SHARED = "megatron_cfg.fused_linear_logprobs_context_parallel"
_GATHER = "megatron_cfg.distributed_data_parallel_config.overlap_param_gather"
_CLASS, _PATTERN = "megatron_cfg.model_class", "model.hybrid_layer_pattern"
_PEFT = "megatron_cfg.peft.enabled"
_PARTS = "megatron_cfg.recompute_modules"


def _parts(policy: PolicyConfig) -> tuple[str, ...]:
    """Return the parts of a layer that are recomputed."""
    megatron = policy.megatron_cfg
    selective = megatron.activation_checkpointing and megatron.recompute_granularity == "selective"
    return megatron.recompute_modules or () if selective else ()


def _allows_nothing(policy: PolicyConfig) -> Iterator[Rule[PolicyConfig]]:
    """Yield a rule for a key that allows a combination which the recipe does not use."""
    fused, shared = (
        policy.megatron_cfg.use_fused_linear_logprobs,
        policy.megatron_cfg.context_parallel_size > 1,
    )
    for key, other, used in (
        (_FUSED_PACKED, "sequence_packing.enabled", policy.sequence_packing.enabled),
        (_FUSED_SHARED, CONTEXT, shared),
    ):
        off = tuple(name for name, on in ((other, used), (FUSED, fused)) if not on)
        yield Rule("has-no-effect", key, bool(off) and value_at(policy, key) is True, off)


def _lacks_tokens(policy: PolicyConfig) -> bool:
    return policy.tokenizer.name == "char" and policy.model.vocab_size < CHAR_VOCABULARY


FUSED_RULES: tuple[Rule[PolicyConfig], ...] = (
    either("incompatible", {FUSED: False, "megatron_cfg.enabled": True}, "it uses a hook of Megatron"),
    *(
        either(
            "incompatible",
            {FUSED: False, key: neutral},
            "filtering needs all logits of a token at once",
        )
        for key, neutral in (("generation.top_k", None), ("generation.top_p", 1.0))
    ),
    either(
        "incompatible",
        {FUSED: False, _GATHER: False},
        "the output weight would be read while its gather is in flight",
    ),
    either(
        "incompatible",
        {FUSED: False, CONTEXT: 1, _FUSED_SHARED: True},
        "shared sequences must be allowed explicitly",
    ),
    either(
        "incompatible",
        {FUSED: False, "sequence_packing.enabled": False, _FUSED_PACKED: True},
        "packed rows must be allowed explicitly",
    ),
)
"""Settings that fused log-probabilities cannot support; `check` prints the state of each."""

_REPLAY = "router_replay.enabled"

MODEL_RULES: Rules[PolicyConfig] = (
    Rule(
        "has-no-effect",
        _REPLAY,
        lambda own: own.router_replay.enabled and own.model.num_moe_experts is None,
        ("model.num_moe_experts",),
        {_REPLAY: False},
        "a dense model has no routes",
    ),
    # Megatron's schedule that overlaps them runs two microbatches' layers in turn, and recomputes none.
    either("incompatible", {_REPLAY: False, OVERLAP: False}, "a router serves one microbatch at a time"),
    Rule(
        "incompatible",
        _CLASS,
        lambda own: own.model_class == "hybrid" and own.model.mtp_num_layers,
        ("model.mtp_num_layers",),
        {"model.mtp_num_layers": None},
        "prediction layers of a HybridModel exist only for Transformer Engine",
    ),
    lambda own: override_problems(own.hf_config_overrides, named=own.model_name is not None),
    lambda own: pattern_problems(own.model, own.megatron_cfg.freeze),
    adapter_problems,
    either(
        "not-supported",
        {_PEFT: False, "model.mtp_num_layers": None},
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
        "remove it; only adapters are trained",
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
            "set it to the weights' tokenizer",
            f"the built-in tokenizer has {CHAR_VOCABULARY} tokens",
        )
        for weights in ("model_name", "init_checkpoint")
    ),
    Rule(
        "too-small",
        "model.vocab_size",
        lambda own: own.weights is None and _lacks_tokens(own),
        ("tokenizer.name",),
        {"model.vocab_size": CHAR_VOCABULARY},
        f"the built-in tokenizer has {CHAR_VOCABULARY} tokens",
    ),
    Rule(
        "too-large",
        "max_total_sequence_length",
        lambda own: own.max_total_sequence_length > own.model.shape.longest_sequence,
        ("model.max_position_embeddings",),
        lambda own: (
            "lower one or raise the other"
            if own.model_name is None
            else f"set it to {own.model.shape.longest_sequence} at most, or write "
            "hf_config_overrides.max_position_embeddings over it"
        ),
    ),
    *(
        Rule[PolicyConfig](
            "has-no-effect",
            _PARTS,
            lambda own, part=part, needed=needed: part in _parts(own) and not getattr(own.model, needed),
            (f"model.{needed}",),
            says=f"{part} has no effect, because the model has no {'shared ' * (part == 'shared_experts')}experts",
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
    _allows_nothing,
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
        lambda own: own.megatron_cfg.bias_activation_fusion is True and not own.model.shape.gated,
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
            ("linear_attention_freq", None, "its layers are not tested with gated delta nets"),
            ("softmax_type", "vanilla", "not tested in a HybridModel"),
            ("sliding_window", None, "not tested in a HybridModel"),
            ("add_bias_linear", False, "not tested in a HybridModel"),
            ("moe_layer_freq", None, "a HybridModel of this kind has experts in every layer"),
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
            f"remove {part}, or set recompute_granularity: full",
            f"{part} can only be recomputed on GPUs",
        )
        for part in sorted(OF_ENGINE)
    ),
)
