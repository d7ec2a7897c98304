import copy
from typing import Literal, get_args, get_origin

import pytest
from refusals import briefs

from nemo_rl_mcore.config.base import StrictModel
from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.recipe.schema import field_at
from nemo_rl_mcore.recipe.validate import validate


def texts(tree):
    validated = validate(tree)
    assert (validated.config is None) == bool(validated.problems)
    return briefs(validated.problems)


def test_a_missing_section_comes_with_its_own_mandatory_keys(tree):
    del tree["policy"]["megatron_cfg"], tree["policy"]["generation"], tree["grpo"]
    kept = {"log_dir": tree["logger"]["log_dir"]}
    problems = {text.removesuffix(": missing") for text in texts({**tree, "logger": kept})}
    assert {
        "policy.megatron_cfg.optimizer",
        "policy.megatron_cfg.optimizer.lr",
        "policy.generation.max_new_tokens",
        "grpo.num_prompts_per_step",
    } < problems


def placeholder(field):
    """The simplest value that a required field takes."""
    kind = field.annotation
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    if get_origin(kind) is dict or issubclass(kind, StrictModel):
        return {}
    return "char" if kind is str else 1


@pytest.mark.parametrize("algorithm", [*RUN_CONFIGS])
def test_a_new_recipe_is_told_all_that_it_lacks_at_once(algorithm):
    """What is then set to the simplest value may be refused for that value, and for nothing that is missing."""
    tree = {algorithm: {}}
    for problem in validate(tree).problems:
        assert problem.code == "missing"
        section, *_, key = tree, *problem.path.split(".")
        for name in problem.path.split(".")[:-1]:
            section = section.setdefault(name, {})
        section.setdefault(key, placeholder(field_at(problem.path, RUN_CONFIGS[algorithm])))
    assert [one.path for one in validate(tree).problems if one.what == "missing"] == []


def test_what_goes_together_is_told_at_once_when_all_fields_are_right(tree):
    fields = {"sed": 1, "logger": {**tree["logger"], "log_dir": 3}}
    tree["policy"]["train_global_batch_size"] = 100
    tree["policy"]["generation"]["top_k"] = 4
    tree["loss_fn"]["use_cispo"] = True
    tree["loss_fn"]["disable_ppo_ratio"] = True
    assert sorted(texts({**tree, **fields})) == ["logger.log_dir: not-allowed", "sed: unknown-key"]
    paths = [text.partition(":")[0] for text in texts(tree)]
    assert sorted(paths) == [
        "loss_fn.use_cispo",
        "policy.megatron_cfg.use_fused_linear_logprobs",
        "policy.train_global_batch_size",
    ]


@pytest.mark.parametrize(
    "nonsense", [{}, {"policy": 3, "grpo": None}, {"policy": {"model": []}, "data": "x"}]
)
def test_nonsense_is_refused_in_words(nonsense):
    given = copy.deepcopy(nonsense)
    assert texts(nonsense)
    assert nonsense == given
