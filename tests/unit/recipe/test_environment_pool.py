"""Where a recipe's environment runs, and what is refused of it."""

import pytest

from nemo_rl_mcore.config import EnvConfig
from nemo_rl_mcore.config.base import value_at
from nemo_rl_mcore.tools.migrate.migrate import migrate

CUSTOM = ("env.arithmetic=null", "+env.custom.type=mine:Env")
MATH = ("env.arithmetic=null", "+env.math={}")
ASYNCHRONOUS = (
    "+grpo.async_grpo.enabled=true",
    "policy.generation.colocated.enabled=false",
    "loss_fn.use_importance_sampling_correction=true",
)


@pytest.mark.parametrize(
    ("section", "size"),
    [
        ({}, 0),
        ({"arithmetic": {}}, 0),
        ({"math": {}}, 1),
        ({"custom": {"type": "mine:Env"}}, 1),
        ({"math": {}, "pool": {"size": 0}}, 0),
        ({"pool": {"size": 3}}, 3),
    ],
)
def test_what_is_not_ours_to_trust_runs_apart(section, size):
    assert EnvConfig.model_validate(section).pool_size == size


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((*CUSTOM, "+env.pool.num_gpus=1"), "env.pool.num_gpus: requires (gpus_per_node)"),
        ((*CUSTOM, "cluster.gpus_per_node=2", "+env.pool.num_gpus=1.5"), "env.pool.num_gpus: not-allowed"),
    ],
)
def test_what_does_not_go_together_is_named(refusals, overrides, message):
    assert any(message in refusal for refusal in refusals(*overrides)), refusals(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        (*ASYNCHRONOUS, "+env.pool.size=0"),
        (*CUSTOM, *ASYNCHRONOUS),
        (*CUSTOM, "+env.pool.size=0"),
        (*CUSTOM, "+env.reward_weights={form: 0.5}", "+env.pool.max_drop_rate=0.1"),
        (*MATH, "+env.pool.timeout_s=15.5"),
        (*MATH, "+env.pool.size=0"),
        (*CUSTOM, *ASYNCHRONOUS, "+grpo.async_grpo.stall_timeout_s=361"),
    ],
)
def test_what_goes_together_loads(load, overrides):
    load(*overrides)


def test_nemo_rl_s_number_of_workers_is_the_size(tmp_path, exemplar):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"defaults: {exemplar}\nenv: {{arithmetic: null, math: {{num_workers: 8}}}}\n")
    assert value_at(migrate(recipe).draft.tree, "env") == {
        "pool": {"size": 8},
        "math": {"unparsable": "zero"},
        "arithmetic": None,
    }
