import pytest
from refusals import refusals_of, wrong_key

from nemo_rl_mcore.config import ClippedPGLossConfig, NLLLossConfig, checked

# What every loss has beside the keys of the conventions: the place for a class of the user's own.
OWN = {"type": None, "args": None}


def test_defaults_are_those_of_the_conventions():
    assert (
        ClippedPGLossConfig().model_dump()
        == {
            "reference_policy_kl_penalty": 0.01,
            "reference_policy_kl_type": "k3",
            "kl_input_clamp_value": 20.0,
            "kl_output_clamp_value": 10.0,
            "ratio_clip_min": 0.2,
            "ratio_clip_max": 0.2,
            "ratio_clip_c": None,
            "use_on_policy_kl_approximation": False,
            "use_importance_sampling_correction": False,
            "truncated_importance_sampling_type": None,
            "truncated_importance_sampling_ratio": None,
            "truncated_importance_sampling_ratio_min": None,
            "sequence_level_importance_ratios": False,
            "token_level_loss": True,
            "force_on_policy_ratio": False,
            "use_kl_in_reward": False,
            "use_cispo": False,
            "disable_ppo_ratio": False,
            "entropy_coef": 0.0,
        }
        | OWN
    )
    assert NLLLossConfig().model_dump() == OWN


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"sequence_level_importance_ratios": True},
            "sequence_level_importance_ratios: incompatible (token_level_loss)",
        ),
        ({"use_cispo": True, "disable_ppo_ratio": True}, "use_cispo: incompatible (disable_ppo_ratio)"),
        (
            {"use_cispo": True, "force_on_policy_ratio": True},
            "use_cispo: incompatible (force_on_policy_ratio)",
        ),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "use_cispo: incompatible (ratio_clip_c)"),
        ({"use_cispo": True, "token_level_loss": False}, "use_cispo: incompatible (token_level_loss)"),
        (
            {"use_cispo": True, "sequence_level_importance_ratios": True, "token_level_loss": False},
            "use_cispo: incompatible (sequence_level_importance_ratios)",
        ),
        (
            {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2},
            "truncated_importance_sampling_type: requires (use_importance_sampling_correction)",
        ),
        ({"ratio_clip_c": 1.0}, "ratio_clip_c: not-allowed"),
        ({"ratio_clip_min": -0.1}, "ratio_clip_min: not-allowed"),
        ({"reference_policy_kl_type": "k4"}, "reference_policy_kl_type: not-allowed"),
    ],
)
def test_forbidden_combinations_name_both_keys(given, expected):
    assert expected in refusals_of(lambda: checked(ClippedPGLossConfig, given))


@pytest.mark.parametrize(
    ("kind", "bounds", "missing"),
    [
        ("tis", {}, ["ratio"]),
        ("icepop", {}, ["ratio", "ratio_min"]),
        ("icepop", {"truncated_importance_sampling_ratio": 2.0}, ["ratio_min"]),
        ("seq-mask-tis", {"truncated_importance_sampling_ratio_min": 0.5}, ["ratio"]),
    ],
)
def test_truncation_needs_its_bounds(kind, bounds, missing):
    given = {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": kind, **bounds}
    assert refusals_of(lambda: checked(ClippedPGLossConfig, given)) == [
        f"truncated_importance_sampling_type: requires (truncated_importance_sampling_{name})"
        for name in missing
    ]


def test_truncation_bounds_in_the_wrong_order():
    with wrong_key(
        "truncated_importance_sampling_ratio_min: too-large (truncated_importance_sampling_ratio)"
    ):
        checked(
            ClippedPGLossConfig,
            {"truncated_importance_sampling_ratio": 2.0, "truncated_importance_sampling_ratio_min": 3.0},
        )


def test_two_conflicts_are_reported_together():
    given = ClippedPGLossConfig(use_cispo=True, disable_ppo_ratio=True, force_on_policy_ratio=True)
    assert refusals_of(lambda: checked(ClippedPGLossConfig, given)) == [
        "use_cispo: incompatible (disable_ppo_ratio)",
        "use_cispo: incompatible (force_on_policy_ratio)",
    ]


@pytest.mark.parametrize(
    "given",
    [
        {"sequence_level_importance_ratios": True, "token_level_loss": False},
        {"use_cispo": True},
        {"ratio_clip_c": 3},
        {"disable_ppo_ratio": True, "force_on_policy_ratio": True},
        {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "seq-mask-tis",
            "truncated_importance_sampling_ratio": 1.002,
            "truncated_importance_sampling_ratio_min": 0.999,
        },
    ],
)
def test_allowed_combinations(given):
    config = ClippedPGLossConfig.model_validate(given)
    assert given.items() <= config.model_dump().items()
