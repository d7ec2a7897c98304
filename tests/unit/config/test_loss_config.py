from nemo_rl_mcore.config import ClippedPGLossConfig, NLLLossConfig

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
