"""What reads prev_logprobs before training, by the recipe; and what `check` says of it."""

import io

import pytest
from rich.console import Console

from nemo_rl_mcore.config.master import reader_of_prev_logprobs, source_of_prev_logprobs
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check import preflight
from nemo_rl_mcore.tools.check.render import render, sections_of

EXAMPLES = "examples/configs"
GRPO, PPO = f"{EXAMPLES}/grpo_copy_cpu.yaml", f"{EXAMPLES}/ppo_cpu.yaml"
ONE_STEP = ["ppo.ppo_epochs=1", "policy.train_global_batch_size=256"]
THRESHOLD = "policy.generation.mismatch_threshold=1.5"


@pytest.mark.parametrize(
    ("recipe", "overrides", "reader"),
    [
        (GRPO, [], None),
        (GRPO, ["policy.recompute_prev_logprobs=always"], "policy.recompute_prev_logprobs: always"),
        (GRPO, ["policy.train_global_batch_size=128"], "2 optimizer steps over each rollout"),
        (GRPO, ["loss_fn.reference_policy_kl_penalty=0.1"], None),
        (
            GRPO,
            [
                "loss_fn.reference_policy_kl_penalty=0.1",
                "loss_fn.use_kl_in_reward=true",
                "grpo.adv_estimator.name=reinforce_plus_plus",
            ],
            "loss_fn.use_kl_in_reward: true",
        ),
        (GRPO, [THRESHOLD], None),
        (
            GRPO,
            [THRESHOLD, "policy.generation.mismatch_action=mask"],
            "policy.generation.mismatch_action: mask",
        ),
        (
            GRPO,
            [THRESHOLD, "policy.generation.mismatch_action=stop"],
            "policy.generation.mismatch_action: stop",
        ),
        (GRPO, ["loss_fn.type=custom_parts:Loss"], "loss_fn.type: custom_parts:Loss"),
        (PPO, [*ONE_STEP, "value_loss_fn.type=custom_parts:Loss"], "value_loss_fn.type: custom_parts:Loss"),
        (f"{EXAMPLES}/grpo_copy_async_cpu.yaml", [], None),
        (PPO, ONE_STEP, None),
        (
            PPO,
            ["ppo.ppo_epochs=2", "policy.train_global_batch_size=256"],
            "2 optimizer steps over each rollout",
        ),
        (
            PPO,
            [*ONE_STEP, "ppo.critic_warmup_steps=3"],
            "ppo.critic_warmup_steps, which train no policy",
        ),
    ],
)
def test_a_recipe_says_whether_a_pass_is_needed(recipe, overrides, reader):
    config = load_config(recipe, overrides)
    assert config.samples_per_step == 256
    assert reader_of_prev_logprobs(config) == reader
    if config.import_paths:
        return
    console = Console(file=io.StringIO(), width=200)
    console.print(render(sections_of(preflight(config, elsewhere=True))))
    said = [line.rstrip() for line in console.file.getvalue().splitlines() if "prev_logprobs" in line]
    assert said[0].endswith(f"for {reader}" if reader else "nothing reads them before")


def test_a_distillation_with_rewards_runs_the_pass():
    config = load_config(
        f"{EXAMPLES}/distillation_cpu.yaml",
        ["loss_fn.rl_weight=0.5", "loss_fn.rl.reference_policy_kl_penalty=0.0"],
    )
    assert source_of_prev_logprobs(config) == "a pass before training, for loss_fn.rl_weight"
