"""Configurations of the loss functions; each can be built alone and refuses its forbidden combinations."""

import math
from typing import Annotated, Literal, get_args

from pydantic import Field

from nemo_rl_mcore.config.base import Float, NonNegativeFloat, PositiveFloat, Rule, StrictModel
from nemo_rl_mcore.config.custom_code import OwnClassConfig

KLType = Literal["k1", "k2", "k3"]
TruncationType = Literal["tis", "icepop", "seq-mask-tis"]
DivergenceType = Literal["forward", "reverse", "mixed", "jsd"]

_TRUNCATION, _UPPER_BOUND = "truncated_importance_sampling_type", "truncated_importance_sampling_ratio"
_LOWER_BOUND = "truncated_importance_sampling_ratio_min"


class CustomLossConfig(OwnClassConfig):
    """A loss whose place a class of one's own can take; `args` come beside its section."""


class NLLLossConfig(CustomLossConfig):
    """The negative log-likelihood loss has nothing to set."""


class DPOLossConfig(StrictModel):
    """Direct preference optimization over (chosen, rejected) pairs."""

    reference_policy_kl_penalty: PositiveFloat = 0.05
    """beta: how strongly the policy is held to the reference policy."""
    preference_loss_weight: NonNegativeFloat = 1.0
    """Weight of the preference loss."""
    sft_loss_weight: NonNegativeFloat = 0.0
    """Weight of the negative log-likelihood of the chosen answers; 0 does not compute it."""
    preference_average_log_probs: bool = False
    """Compare the mean log-probability of an answer's tokens instead of their sum."""
    sft_average_log_probs: bool = False
    """Take the mean over a chosen answer's tokens instead of their sum."""

    read_unless = (("sft_average_log_probs", "sft_loss_weight", 0),)

    rules = (
        Rule(
            "no-signal",
            "preference_loss_weight",
            lambda own: own.preference_loss_weight == 0 and own.sft_loss_weight == 0,
            ("sft_loss_weight",),
            "raise one of the two",
        ),
    )


class MseValueLossConfig(CustomLossConfig):
    """The critic's loss: half the squared error of its values."""

    scale: PositiveFloat = 1.0
    """Factor of the loss."""
    cliprange: PositiveFloat | None = None
    """The loss is also taken with the values held this near to the old ones, and the larger one counts; null is off."""


class ClippedPGLossConfig(CustomLossConfig):
    """The clipped policy-gradient loss: PPO, GRPO, GSPO, CISPO, dual clip, REINFORCE, corrections."""

    reference_policy_kl_penalty: NonNegativeFloat = 0.01
    """Coefficient of the KL penalty against the reference policy; 0 needs no reference policy."""
    reference_policy_kl_type: KLType = "k3"
    """Estimator of that KL: k1 (plain difference), k2 (half square) or k3 (non-negative and unbiased)."""
    kl_input_clamp_value: PositiveFloat | None = 20.0
    """Bound on the absolute log-ratio before the KL estimate; null turns it off."""
    kl_output_clamp_value: PositiveFloat | None = 10.0
    """Bound on the absolute KL estimate of a token; null turns it off."""
    ratio_clip_min: NonNegativeFloat = 0.2
    """The probability ratio is clipped below at 1 minus this."""
    ratio_clip_max: NonNegativeFloat = 0.2
    """The probability ratio is clipped above at 1 plus this."""
    ratio_clip_c: Annotated[Float, Field(gt=1)] | None = None
    """Dual clip: bound, in units of the advantage, on the loss of negative advantages; null turns it off."""
    use_on_policy_kl_approximation: bool = False
    """Weight the KL estimate by the ratio of the current to the generating policy."""
    use_importance_sampling_correction: bool = False
    """Weight tokens by the ratio of the previous policy to the one that generated them."""
    truncated_importance_sampling_type: TruncationType | None = None
    """How those weights are bounded: clamp (tis), drop tokens (icepop), drop rows (seq-mask-tis), or null."""
    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """Upper bound of the weights."""
    truncated_importance_sampling_ratio_min: NonNegativeFloat | None = None
    """Lower bound of the weights; null is 0 for tis."""
    sequence_level_importance_ratios: bool = False
    """One probability ratio per row (GSPO) instead of one per token."""
    token_level_loss: bool = True
    """Divide by the valid tokens of the global batch; false averages each row, then divides by the rows."""
    force_on_policy_ratio: bool = False
    """Treat the current policy as the previous one, so that the ratio is 1 and carries only the gradient."""
    use_kl_in_reward: bool = False
    """Take the KL penalty off the reward in the advantage estimator; the loss then has none."""
    use_cispo: bool = False
    """CISPO: the clipped ratio is a detached weight of the log-probability."""
    disable_ppo_ratio: bool = False
    """REINFORCE and RLOO: the log-probability takes the place of the ratio."""
    entropy_coef: Float = 0.0
    """Coefficient of the entropy bonus, which is subtracted from the loss."""

    rules = (
        Rule(
            "incompatible",
            "sequence_level_importance_ratios",
            lambda own: own.sequence_level_importance_ratios and own.token_level_loss,
            ("token_level_loss",),
            {"token_level_loss": False, "sequence_level_importance_ratios": False},
            "a ratio per row needs a loss per row",
        ),
        *(
            Rule(
                "incompatible",
                "use_cispo",
                lambda own, key=key, neutral=neutral: own.use_cispo and getattr(own, key) != neutral,
                (key,),
                {key: neutral, "use_cispo": False},
            )
            for key, neutral in (
                ("disable_ppo_ratio", False),
                ("force_on_policy_ratio", False),
                ("sequence_level_importance_ratios", False),
                ("ratio_clip_c", None),
                ("token_level_loss", True),
            )
        ),
        Rule(
            "too-large",
            _LOWER_BOUND,
            lambda own: (
                (own.truncated_importance_sampling_ratio_min or 0)
                > (own.truncated_importance_sampling_ratio or math.inf)
            ),
            (_UPPER_BOUND,),
        ),
        Rule(
            "requires",
            _TRUNCATION,
            lambda own: own.truncated_importance_sampling_type and not own.use_importance_sampling_correction,
            ("use_importance_sampling_correction",),
            "set use_importance_sampling_correction: true, or truncated_importance_sampling_type: null and no bounds",
        ),
        *(
            Rule(
                "requires",
                _TRUNCATION,
                lambda own, key=key, kinds=kinds: (
                    own.truncated_importance_sampling_type in kinds and getattr(own, key) is None
                ),
                (key,),
                f"set {key}, or {_TRUNCATION}: null",
            )
            for key, kinds in (
                (_UPPER_BOUND, get_args(TruncationType)),
                (_LOWER_BOUND, ("icepop", "seq-mask-tis")),
            )
        ),
    )


class DistillationLossConfig(CustomLossConfig):
    """A divergence of the student from its teacher, alone or beside the policy gradient."""

    kl_type: DivergenceType = "forward"
    """forward is KL(teacher || student), reverse the other way round, mixed a weighted sum of both, jsd in between."""
    mixed_kl_weight: Annotated[Float, Field(ge=0, le=1)] = 0.5
    """Of `mixed`: the weight of forward; reverse has the rest."""
    jsd_beta: Float = 0.5
    """Of `jsd`: the teacher's share of the mixture that both are compared with, above 0 and below 1."""
    tail_mass: bool = True
    """Count everything outside the teacher's top-k as one more outcome; without it the value can be negative."""
    rl_weight: NonNegativeFloat = 0.0
    """Weight of the policy-gradient loss on the same batch; 0 turns it off."""
    rl: ClippedPGLossConfig = ClippedPGLossConfig()
    """That policy-gradient loss."""

    read_unless = (*CustomLossConfig.read_unless, ("rl", "rl_weight", 0))

    rules = (
        Rule(
            "incompatible",
            "rl.type",
            lambda own: own.rl.type is not None,
            ("type",),
            "remove it, or set type to the import path of a loss that holds both",
            "a class of one's own has no place beside the divergence",
        ),
        Rule(
            "no-signal",
            "jsd_beta",
            lambda own: own.kl_type == "jsd" and not 0 < own.jsd_beta < 1,
            ("kl_type",),
            "set it above 0 and below 1, or kl_type: forward or reverse, the limits after division by the weight",
            "the mixture is equal to one side, so that the divergence is always 0",
        ),
        Rule(
            "incompatible",
            "rl.token_level_loss",
            lambda own: own.rl_weight > 0 and not own.rl.token_level_loss,
            ("rl_weight",),
            {"rl.token_level_loss": True, "rl_weight": 0},
            "the divergence is a mean over tokens",
        ),
    )
