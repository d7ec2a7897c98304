"""Configurations of the loss functions; each can be built on its own and rejects invalid combinations."""

import math
from typing import Annotated, Literal, get_args

from pydantic import Field

from nemo_rl_mcore.config.base import Float, NonNegativeFloat, PositiveFloat, Rule, StrictModel, either
from nemo_rl_mcore.config.custom_code import OwnClassConfig

KLType = Literal["k1", "k2", "k3"]
TruncationType = Literal["tis", "icepop", "seq-mask-tis"]
DivergenceType = Literal["forward", "reverse", "mixed", "jsd"]

_TRUNCATION, _UPPER_BOUND = "truncated_importance_sampling_type", "truncated_importance_sampling_ratio"
_LOWER_BOUND = "truncated_importance_sampling_ratio_min"


class CustomLossConfig(OwnClassConfig):
    """A loss that a user-defined class can replace."""


class NLLLossConfig(CustomLossConfig):
    """The negative log-likelihood loss, which has no settings of its own."""


class DPOLossConfig(StrictModel):
    """The direct preference optimization loss over (chosen, rejected) pairs."""

    reference_policy_kl_penalty: PositiveFloat = 0.05
    """DPO's beta: the strength of the pull towards the reference policy."""
    preference_loss_weight: NonNegativeFloat = 1.0
    """Weight of the preference loss."""
    sft_loss_weight: NonNegativeFloat = 0.0
    """Weight of the chosen answers' negative log-likelihood; 0 skips its computation."""
    preference_average_log_probs: bool = False
    """Preference loss: average log-probabilities over an answer's tokens; false sums them."""
    sft_average_log_probs: bool = False
    """Negative log-likelihood: average over a chosen answer's tokens; false sums over them."""

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
    """Maximum change from the old value; the larger of clipped and unclipped loss is used. Null disables clipping."""


class ClippedPGLossConfig(CustomLossConfig):
    """The clipped policy-gradient loss: PPO, GRPO, GSPO, CISPO, dual clip, REINFORCE, corrections."""

    reference_policy_kl_penalty: NonNegativeFloat = 0.01
    """Coefficient of the KL penalty against the reference policy; 0 needs no reference policy."""
    reference_policy_kl_type: KLType = "k3"
    """Estimator of the KL penalty: k1 (log-ratio), k2 (half its square) or k3 (non-negative and unbiased)."""
    kl_input_clamp_value: PositiveFloat | None = 20.0
    """Bound on the absolute log-ratio before the KL estimate; null means no bound."""
    kl_output_clamp_value: PositiveFloat | None = 10.0
    """Bound on a token's absolute KL estimate; null means no bound."""
    ratio_clip_min: NonNegativeFloat = 0.2
    """Lower clipping range: the probability ratio is clipped below at 1 minus this value."""
    ratio_clip_max: NonNegativeFloat = 0.2
    """Upper clipping range: the probability ratio is clipped above at 1 plus this value."""
    ratio_clip_c: Annotated[Float, Field(gt=1)] | None = None
    """Dual clip: bound on the loss for negative advantages, in units of the advantage; null means no bound."""
    use_on_policy_kl_approximation: bool = False
    """Weight the KL estimate by the probability ratio of the current to the generating policy."""
    use_importance_sampling_correction: bool = False
    """Weight tokens by the probability ratio of the previous to the generating policy."""
    truncated_importance_sampling_type: TruncationType | None = None
    """Truncation of importance weights: clamp (tis), drop tokens (icepop) or drop rows (seq-mask-tis); null: none."""
    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """Upper bound on importance weights."""
    truncated_importance_sampling_ratio_min: NonNegativeFloat | None = None
    """Lower bound on importance weights; null means 0 with tis."""
    sequence_level_importance_ratios: bool = False
    """Compute one probability ratio per row (GSPO) instead of one per token."""
    token_level_loss: bool = True
    """Average over all valid tokens of the global batch; false averages within each row, then over rows."""
    force_on_policy_ratio: bool = False
    """Use the current policy as the previous one, so that the ratio is 1 and only its gradient matters."""
    use_kl_in_reward: bool = False
    """Subtract the KL penalty from the reward in the advantage estimator, instead of adding it to the loss."""
    use_cispo: bool = False
    """CISPO: weight the log-probability by the clipped ratio, through which no gradient flows."""
    disable_ppo_ratio: bool = False
    """REINFORCE and RLOO: use the log-probability in place of the ratio."""
    entropy_coef: Float = 0.0
    """Coefficient of the entropy bonus, which is subtracted from the loss."""

    rules = (
        either(
            "incompatible",
            {"sequence_level_importance_ratios": False, "token_level_loss": False},
            "a ratio per row needs a loss per row",
        ),
        *(
            either("incompatible", {"use_cispo": False, key: neutral})
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
    """The student's divergence from its teacher, alone or combined with a policy-gradient loss."""

    kl_type: DivergenceType = "forward"
    """Divergence: forward, KL(teacher || student); reverse, KL(student || teacher); mixed, their sum; jsd, between."""
    mixed_kl_weight: Annotated[Float, Field(ge=0, le=1)] = 0.5
    """mixed: weight of the forward divergence; the reverse divergence has 1 minus this weight."""
    jsd_beta: Float = 0.5
    """jsd: the teacher's share of the mixture, above 0 and below 1."""
    tail_mass: bool = True
    """Treat the probability outside the teacher's top-k as one more outcome; with false the loss can be negative."""
    rl_weight: NonNegativeFloat = 0.0
    """Weight of an added policy-gradient loss on the same batch; 0 turns it off."""
    rl: ClippedPGLossConfig = ClippedPGLossConfig()
    """The policy-gradient loss that is added to the divergence."""

    read_unless = (*CustomLossConfig.read_unless, ("rl", "rl_weight", 0))

    rules = (
        Rule(
            "incompatible",
            "rl.type",
            lambda own: own.rl.type is not None,
            ("type",),
            "remove it, or set loss_fn.type to a class that computes both",
            "a custom class cannot be added to the divergence",
        ),
        Rule(
            "no-signal",
            "jsd_beta",
            lambda own: own.kl_type == "jsd" and not 0 < own.jsd_beta < 1,
            ("kl_type",),
            "set it above 0 and below 1, or use kl_type: forward or reverse, which are the limits at 0 and 1",
            "the mixture equals one side, so the divergence is always 0",
        ),
        either(
            "incompatible",
            {"rl.token_level_loss": True, "rl_weight": 0},
            "the divergence is a mean over tokens",
        ),
    )
