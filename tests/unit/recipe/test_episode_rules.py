import pytest

from nemo_rl_mcore.recipe.load import load_config

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
            "grpo.max_rollout_turns: too-small (guess_number)",
        ),
        (
            GAME,
            ["env={guess_number: null, arithmetic: {}}"],
            "env.guess_number: missing (dataset_name)",
        ),
        (
            TOOL,
            ["env={calculator: null}"],
            "env.calculator: missing (dataset_name)",
        ),
        (
            TOOL,
            ["data.dataset_name=copy"],
            "env.calculator: incompatible (dataset_name)",
        ),
        (
            GAME,
            ["data.num_digits=3", "policy.max_total_sequence_length=20"],
            "data.num_digits: not-divisible (dataset_name)",
        ),
        *(
            (
                f"{algorithm}_cpu.yaml",
                ["data.dataset_name=calculator", "policy.max_total_sequence_length=24"],
                "data.dataset_name: incompatible",
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
