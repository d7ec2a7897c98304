"""The list of NeMo RL's keys, that each of them has been judged, and those that have another name here."""

from itertools import accumulate

import pytest
from known_keys import known_keys_text
from migrations import FOLDER
from refusals import briefs

from nemo_rl_mcore.config.base import join_path
from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.recipe.of_nemo_rl import LIST, is_foreign, listed_keys, listed_origin, twin_in_policy
from nemo_rl_mcore.recipe.schema import fields, is_known
from nemo_rl_mcore.tools.migrate.judgements import BUFFER, JUDGEMENTS, RENAMED
from nemo_rl_mcore.tools.migrate.migrate import migrate

RECIPES = sorted(FOLDER.glob("*.yaml"))


def test_the_list_is_that_of_the_recipes():
    assert known_keys_text(RECIPES) == LIST.read_text()
    assert listed_origin() == "7ea279abf (2026-08-22)"
    assert len(listed_keys()) > 450


@pytest.mark.parametrize("key", sorted(listed_keys()))
def test_every_key_is_judged(key):
    """A key that fails here needs a field, another name in judgements.py, or a row in judgements.yaml."""
    section = key.rpartition(".")[0]
    if section == "policy.generation.vllm_kwargs":
        return  # whatever vLLM takes, see config/generation.py
    judged = {*JUDGEMENTS, *RENAMED, BUFFER}
    around = (one for path in (key, twin_in_policy(key)) for one in accumulate(path.split("."), join_path))
    assert any(is_known(key, kind) for kind in RUN_CONFIGS.values()) or judged.intersection(around)


@pytest.mark.parametrize(
    "key", ["policy.megatron_cfg.cuda_graph_impll", "grpo.new_key", "value.new", "teacher.x.y"]
)
def test_a_new_key_would_be_seen(key):
    assert not any(is_known(key, kind) for kind in RUN_CONFIGS.values())
    assert not is_foreign(key)


def test_every_renamed_key_has_one_of_ours():
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
