import json

import pytest
import yaml
from refusals import assert_holds, briefs, wrong_key

from nemo_rl_mcore.config import ConfigError, load_config
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.run_models import TeacherConfig
from nemo_rl_mcore.preflight import preflight
from nemo_rl_mcore.preflight.given_weights import load_recipe_of
from nemo_rl_mcore.preflight.saved_run import cannot_resume, changes_since, read_recipe_of, recipe_text


def saved(folder, config):
    folder.mkdir()
    (folder / "config.yaml").write_text(recipe_text(config))
    return folder


def test_a_saved_recipe_loads_to_the_weights_beside_it(load, tmp_path):
    config = load("policy.megatron_cfg.optimizer.adam_eps=1e-8", "grpo.normalize_rewards=true")
    folder = saved(tmp_path / "step_3", config)
    again = load_recipe_of(folder, ["cluster.cpu_workers_per_node=1"])
    assert again.policy.init_checkpoint == str(folder)
    assert again.cluster.world_size == 1
    policy = again.policy.model_copy(update={"init_checkpoint": None})
    assert again.model_copy(update={"policy": policy, "cluster": config.cluster}) == config


def test_a_start_from_the_same_architecture_is_accepted(load, tmp_path):
    folder = saved(tmp_path / "step_3", load())
    preflight(load(f"+policy.init_checkpoint={folder}", "policy.model.init_method_std=0.5"))


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["policy.model.hidden_size=32"], "policy.init_checkpoint: other-model"),
        (["+policy.model.num_moe_experts=4"], "policy.init_checkpoint: other-model"),
    ],
)
def test_a_start_from_another_architecture_is_refused(load, tmp_path, overrides, complaint):
    folder = saved(tmp_path / "step_3", load())
    with pytest.raises(ConfigError) as refused:
        preflight(load(f"+policy.init_checkpoint={folder}", *overrides))
    assert complaint in briefs(refused.value.problems)


DOUBLED = "a: &a {x: 1}\n" + "".join(
    f"{chr(98 + number)}: &{chr(98 + number)} {{k: *{chr(97 + number)}, l: *{chr(97 + number)}}}\n"
    for number in range(24)
)


@pytest.mark.parametrize(
    "content",
    [
        *(None, b"\xff", b"- a list", b"policy: {model: {num_layers: x}}", b"a: [", b"[" * 3_000),
        *(DOUBLED.encode(), b"defaults: elsewhere.yaml", b"a: !!python/object/apply:os.getcwd []"),
    ],
    ids=["none", "bytes", "list", "model", "cut", "deep", "doubled", "parent", "code"],
)
def test_a_start_from_what_is_no_checkpoint_is_refused(load, tmp_path, content):
    if content is not None:
        (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        preflight(load(f"+policy.init_checkpoint={tmp_path}"))
    (problem,) = refused.value.problems
    assert problem.path == "policy.init_checkpoint"
    assert problem.code in ("not-readable", "other-model")
    assert_holds(problem.remedy, "step_N")


def test_deadlines_change_nothing_of_a_run(load, tmp_path):
    folder = saved(tmp_path / "step_3", load())
    longer = load("++policy.call_timeout_s=3600", "++policy.megatron_cfg.process_group_timeout_s=60")
    assert changes_since(read_recipe_of(folder), longer) == []


HF = {
    "model_type": "qwen2", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, with a Hugging Face folder `hf`."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(HF))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_folders_that_ranks_open_are_absolute(load, here):
    """The ranks of a cluster run in another folder than the driver."""
    policy = load("~policy.model", "~policy.tokenizer", "+policy.model_name=hf").policy
    assert (policy.model_name, policy.tokenizer.name) == (f"{here}/hf", f"{here}/hf")
    of_python = PolicyConfig.model_validate({**policy.model_dump(), "model_name": "hf"})
    assert of_python.model_name == f"{here}/hf"
    assert load("+policy.init_checkpoint=results/step_1").policy.init_checkpoint == f"{here}/results/step_1"
    assert TeacherConfig(model_name="hf").model_name == f"{here}/hf"
    assert TeacherConfig(init_checkpoint="../step_1").init_checkpoint == f"{here}/../step_1"


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "char"])
def test_a_name_stays_one(tree, here, name):
    (here / "char").mkdir()
    policy = PolicyConfig.model_validate({**tree["policy"], "tokenizer": {"name": name}})
    assert policy.tokenizer.name == name


def test_a_folder_that_was_saved_as_it_was_written_is_no_change(load, here):
    config = load("~policy.model", "~policy.tokenizer", "+policy.model_name=hf")
    folder = saved(here / "step_3", config)
    recipe = yaml.safe_load((folder / "config.yaml").read_text())
    recipe["policy"]["tokenizer"]["name"] = "hf"
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "tokenizer").mkdir()
    assert changes_since(read_recipe_of(folder), config) == []
    assert load_recipe_of(folder).policy.tokenizer.name == str(folder / "tokenizer")


FREEZE = "policy.megatron_cfg.freeze"


def test_keys_that_an_earlier_version_had_not_ran_as_their_defaults(load):
    recipe = yaml.safe_load(recipe_text(load()))
    for key in ("freeze", "freeze_moe_router", "model_class", "bias_activation_fusion"):
        del recipe["policy"]["megatron_cfg"][key]
    assert changes_since(recipe, load()) == []
    assert cannot_resume(recipe, load()) is None
    changed = load("policy.megatron_cfg.bias_activation_fusion=false")
    assert [one.path for one in changes_since(recipe, changed)] == [
        "policy.megatron_cfg.bias_activation_fusion"
    ]


@pytest.mark.parametrize("before", ["[]", "['*.mlp.*']"])
def test_a_run_does_not_resume_with_other_frozen_weights(load, before):
    """Its checkpoint has the optimizer's state of the weights that were trained."""
    recipe = yaml.safe_load(recipe_text(load(f"{FREEZE}={before}")))
    assert cannot_resume(recipe, load(f"{FREEZE}={before}")) is None
    refusal = cannot_resume(recipe, load(f"{FREEZE}=['model.norm.weight']"))
    assert refusal is not None
    assert_holds(refusal, FREEZE)


def test_a_recipe_of_an_earlier_version_has_a_key_that_is_gone_and_goes_on(load, tmp_path):
    config = load()
    recipe = yaml.safe_load(recipe_text(config))
    recipe["policy"]["generation"]["journal"] = False
    recipe["grpo"]["async_grpo"].pop("keep_groups_gb")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recipe))
    assert load_config(tmp_path / "config.yaml") == config
    assert changes_since(recipe, config) == []
    with wrong_key("policy.generation.journal: unknown-key"):
        load("+policy.generation.journal=true")
