"""Keys of NeMo RL that have another name here."""

import pytest
from refusals import briefs

from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.recipe.of_nemo_rl import is_foreign
from nemo_rl_mcore.recipe.schema import fields
from nemo_rl_mcore.tools.migrate.judgements import RENAMED
from nemo_rl_mcore.tools.migrate.migrate import migrate


def test_every_key_has_one_of_ours():
    assert set(RENAMED.values()) <= {path for kind in RUN_CONFIGS.values() for path in fields(kind)}
    assert all(is_foreign(foreign) for foreign in RENAMED)


def test_the_line_of_a_foreign_key_is_found(exemplar, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"defaults: {exemplar}\nloss_fn:\n  use_importance_sampling_correction: true\n"
        "data: {apply_chat_template: false, special_tokens_in_content: text}\n"
        "async_rl:\n  max_inflight_prompts: 3\npolicy:\n  generation:\n    colocated:\n      enabled: false\n"
    )
    (problem,) = migrate(recipe).problems
    assert problem.path == "async_rl.max_inflight_prompts"
    assert problem.where.endswith("recipe.yaml:6")


@pytest.mark.parametrize("algorithm", ["ppo", "dpo", "sft", "distillation"])
def test_a_section_of_grpo_alone(exemplar, algorithm):
    as_text = ("data.apply_chat_template=false", "data.special_tokens_in_content=text")
    recipe = exemplar.with_name(f"{algorithm}_cpu.yaml")
    found = migrate(recipe, (*as_text, "+async_rl.sampler.name=in_order"))
    assert briefs(found.problems) == ["async_rl: not-supported"]
