"""What the architecture must be for the weights, the tokenizer and the sequences that a model gets."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.models import missing_family
from nemo_rl_mcore.models.frozen import pattern_problems
from nemo_rl_mcore.models.overrides import override_problems
from nemo_rl_mcore.recipe.rules.feature import Rules

CHAR_VOCABULARY = 32
"""Tokens of the embedded character tokenizer."""


def _family(policy: PolicyConfig) -> Iterator[Problem]:
    if policy.model_name is not None and (reason := missing_family(policy.model)):
        yield Problem(
            "not-supported",
            "model_name",
            f"{policy.model_name!r}: {reason}",
            "change policy.model",
            ("model",),
        )


def _vocabulary(policy: PolicyConfig) -> Iterator[Problem]:
    if policy.tokenizer.name != "char" or policy.model.vocab_size >= CHAR_VOCABULARY:
        return
    if policy.weights is not None:
        yield Problem(
            "contradicts",
            "tokenizer.name",
            f"char has {CHAR_VOCABULARY} tokens, and the weights (policy.{policy.weights}) have "
            f"{policy.model.vocab_size}",
            "name the tokenizer of the weights",
            (policy.weights, "model.vocab_size"),
        )
    else:
        yield Problem(
            "too-small",
            "model.vocab_size",
            f"{policy.model.vocab_size} is below the {CHAR_VOCABULARY} tokens of tokenizer.name: char",
            f"set vocab_size: {CHAR_VOCABULARY}",
            ("tokenizer.name",),
        )


def _positions(policy: PolicyConfig) -> Iterator[Problem]:
    longest, positions = policy.max_total_sequence_length, policy.model.longest_sequence
    if longest > positions:
        yield Problem(
            "too-large",
            "max_total_sequence_length",
            f"{longest} is above policy.model.max_position_embeddings: {positions}",
            "lower the one or raise the other"
            if policy.model_name is None
            else f"set it to {positions} at most, or write hf_config_overrides.max_position_embeddings over it",
            ("model.max_position_embeddings",),
        )


def _overrides(policy: PolicyConfig) -> Iterator[Problem]:
    yield from override_problems(policy.hf_config_overrides, named=policy.model_name is not None)


def _frozen(policy: PolicyConfig) -> Iterator[Problem]:
    yield from pattern_problems(policy.model, policy.megatron_cfg.freeze)


RULES = Rules(of_models=(_overrides, _family, _vocabulary, _positions, _frozen))
