import pytest

from nemo_rl_mcore.recipe.load import load_config

GAME = "grpo_guess_number_cpu.yaml"
TOOL = "grpo_calculator_cpu.yaml"


@pytest.mark.parametrize("recipe", [GAME, TOOL])
def test_the_exemplars_load(exemplar, recipe):
    assert load_config(exemplar.with_name(recipe)).max_rollout_turns > 1


def test_a_class_of_ones_own_may_play_the_embedded_games(exemplar):
    own = "env={guess_number: null, custom: {type: 'custom_parts:LengthReward'}}"
    assert load_config(exemplar.with_name(GAME), [own]).env.given == ["custom"]
