import pytest

from nemo_rl_mcore.config import load_config

GAME = "grpo_guess_number_cpu.yaml"
TOOL = "grpo_calculator_cpu.yaml"


@pytest.mark.parametrize("recipe", [GAME, TOOL])
def test_the_exemplars_load(exemplar, recipe):
    assert load_config(exemplar.with_name(recipe)).max_rollout_turns > 1


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        (
            GAME,
            ["grpo.max_rollout_turns=1"],
            "grpo.max_rollout_turns: 1 ends every episode of env.guess_number with its first answer; raise it",
        ),
        (
            GAME,
            ["env={guess_number: null, arithmetic: {}}"],
            "env.guess_number: missing with data.dataset_name: guess_number; set it to {}, and env.arithmetic to null",
        ),
        (
            TOOL,
            ["env={calculator: null}"],
            "env.calculator: missing with data.dataset_name: calculator; set it to {}",
        ),
        (
            TOOL,
            ["data.dataset_name=copy"],
            "env.calculator: knows the prompts of data.dataset_name: calculator alone, which is copy; set it to null, "
            "or data.dataset_name: calculator",
        ),
        (
            GAME,
            ["data.num_digits=3", "policy.max_total_sequence_length=20"],
            "data.num_digits: 3 is odd, and a prompt of dataset_name: guess_number has two numbers of as many digits; "
            "set it to 4 or 2",
        ),
        (
            "grpo_copy_cpu.yaml",
            ["grpo.max_rollout_turns=2", "policy.max_total_sequence_length=16"],
            "grpo.max_rollout_turns: 2 does nothing with env.arithmetic, which scores the first answer and ends the "
            "episode; set it to 1, or name an environment of several turns",
        ),
        (
            "grpo_copy_cpu.yaml",
            ["grpo.max_rollout_turns=2", "policy.max_total_sequence_length=16", "env={arithmetic: null}"],
            "grpo.max_rollout_turns: 2 does nothing with env.arithmetic",
        ),
        (
            "grpo_copy_cpu.yaml",
            [
                "grpo.max_rollout_turns=2",
                "policy.max_total_sequence_length=16",
                "env={arithmetic: null, math: {}}",
            ],
            "grpo.max_rollout_turns: 2 does nothing with env.math",
        ),
        *(
            (
                f"{algorithm}_cpu.yaml",
                ["data.dataset_name=calculator", "policy.max_total_sequence_length=24"],
                f"data.dataset_name: calculator has several turns, and {algorithm} takes one answer to a prompt; name "
                "another task, or run grpo or ppo",
            )
            for algorithm in ("sft", "dpo", "distillation")
        ),
    ],
)
def test_tasks_and_environments_that_do_not_go_together(refusals, recipe, overrides, message):
    assert any(problem.startswith(message) for problem in refusals(*overrides, recipe=recipe))


def test_a_class_of_ones_own_may_play_the_embedded_games(exemplar):
    own = "env={guess_number: null, custom: {type: 'custom_parts:LengthReward'}}"
    assert load_config(exemplar.with_name(GAME), [own]).env.given == ["custom"]
