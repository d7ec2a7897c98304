"""Where a recipe's environment runs, and what is refused of it."""

import pytest

from nemo_rl_mcore.config import EnvConfig
from nemo_rl_mcore.config.base import value_at
from nemo_rl_mcore.tools.migrate.migrate import migrate


@pytest.mark.parametrize(
    ("section", "size"),
    [
        ({}, 0),
        ({"math": {}}, 1),
        ({"custom": {"type": "mine:Env"}}, 1),
        ({"math": {}, "pool": {"size": 0}}, 0),
        ({"pool": {"size": 3}}, 3),
    ],
)
def test_what_is_not_ours_to_trust_runs_apart(section, size):
    assert EnvConfig.model_validate(section).pool_size == size


def test_nemo_rl_s_number_of_workers_is_the_size(tmp_path, exemplar):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"defaults: {exemplar}\nenv: {{math: {{num_workers: 8}}}}\n")
    assert value_at(migrate(recipe).draft.tree, "env") == {
        "pool": {"size": 8},
        "math": {"unparsable": "zero"},
    }
