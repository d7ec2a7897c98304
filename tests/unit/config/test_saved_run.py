import pytest

from nemo_rl_mcore.config import ConfigError
from nemo_rl_mcore.preflight import preflight
from nemo_rl_mcore.preflight.given_weights import load_recipe_of
from nemo_rl_mcore.preflight.saved_run import changes_since, read_recipe_of, recipe_text


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
        (["policy.model.hidden_size=32"], "holds another model: policy.model.hidden_size: 32 (was 64)"),
        (["+policy.model.num_moe_experts=4"], "policy.model.num_moe_experts: 4 (was null)"),
    ],
)
def test_a_start_from_another_architecture_is_refused(load, tmp_path, overrides, complaint):
    folder = saved(tmp_path / "step_3", load())
    with pytest.raises(ConfigError) as refused:
        preflight(load(f"+policy.init_checkpoint={folder}", *overrides))
    assert complaint in str(refused.value)


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
    with pytest.raises(
        ConfigError, match=r"^policy\.init_checkpoint: .*; name a folder step_N of a run with this"
    ):
        preflight(load(f"+policy.init_checkpoint={tmp_path}"))


def test_deadlines_change_nothing_of_a_run(load, tmp_path):
    folder = saved(tmp_path / "step_3", load())
    longer = load("++policy.call_timeout_s=3600", "++policy.megatron_cfg.process_group_timeout_s=60")
    assert changes_since(read_recipe_of(folder), longer) == []
