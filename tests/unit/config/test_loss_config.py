import pytest
from pydantic import ValidationError

from nemo_rl_mcore.config import ClippedPGLossConfig, ConfigError, NLLLossConfig, checked

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
    ("given", "keys"),
    [
        (
            {"sequence_level_importance_ratios": True},
            ("sequence_level_importance_ratios", "token_level_loss: false"),
        ),
        ({"use_cispo": True, "disable_ppo_ratio": True}, ("use_cispo", "disable_ppo_ratio: true")),
        ({"use_cispo": True, "force_on_policy_ratio": True}, ("use_cispo", "force_on_policy_ratio: true")),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, ("use_cispo", "ratio_clip_c: 3.0", "ratio_clip_c: null")),
        ({"use_cispo": True, "token_level_loss": False}, ("use_cispo", "token_level_loss: false")),
        (
            {"use_cispo": True, "sequence_level_importance_ratios": True, "token_level_loss": False},
            ("use_cispo", "sequence_level_importance_ratios: true"),
        ),
        (
            {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2},
            ("truncated_importance_sampling_type", "use_importance_sampling_correction: true"),
        ),
        ({"ratio_clip_c": 1.0}, ("ratio_clip_c", "greater than 1")),
        ({"ratio_clip_min": -0.1}, ("ratio_clip_min",)),
        ({"reference_policy_kl_type": "k4"}, ("'k1', 'k2' or 'k3'",)),
    ],
)
def test_forbidden_combinations_name_both_keys(given, keys):
    with pytest.raises((ConfigError, ValidationError)) as caught:
        checked(ClippedPGLossConfig, given)
    assert all(key in str(caught.value) for key in keys)


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
    with pytest.raises(ConfigError) as caught:
        checked(ClippedPGLossConfig, given)
    for suffix in ("ratio", "ratio_min"):
        named = f"{kind} needs truncated_importance_sampling_{suffix}, " in str(caught.value)
        assert named == (suffix in missing)


def test_truncation_bounds_in_the_wrong_order():
    with pytest.raises(
        ValueError, match=r"ratio_min: 3\.0 is above truncated_importance_sampling_ratio: 2\.0"
    ):
        checked(
            ClippedPGLossConfig,
            {"truncated_importance_sampling_ratio": 2.0, "truncated_importance_sampling_ratio_min": 3.0},
        )


def test_two_conflicts_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        checked(
            ClippedPGLossConfig,
            ClippedPGLossConfig(use_cispo=True, disable_ppo_ratio=True, force_on_policy_ratio=True),
        )
    assert "disable_ppo_ratio: true" in str(caught.value)
    assert "force_on_policy_ratio: true" in str(caught.value)


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
