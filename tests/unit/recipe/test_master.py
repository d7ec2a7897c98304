"""Recipes of every algorithm: which class reads them, what they hold and refuse, and what they run first."""

from pathlib import Path

import pytest
from refusals import briefs

from nemo_rl_mcore import cli
from nemo_rl_mcore.cli import commands
from nemo_rl_mcore.config import ConfigError
from nemo_rl_mcore.config.master import RUN_CONFIGS, GRPOMasterConfig, kind_of
from nemo_rl_mcore.driver.run_folder import recipe_text
from nemo_rl_mcore.models.memory import reference_place
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check import preflight
from nemo_rl_mcore.tools.check.given_weights import load_recipe_of

EXEMPLARS = Path(__file__).parents[3] / "examples/configs"
NAMES = {"grpo": "grpo_copy"}
EXEMPLAR_OF = {name: EXEMPLARS / f"{NAMES.get(name, name)}_cpu.yaml" for name in RUN_CONFIGS}


def refused(path, *overrides):
    """The problems of a recipe, without where they stand."""
    with pytest.raises(ConfigError) as caught:
        preflight(load_config(path, overrides))
    return briefs(caught.value.problems)


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


# --- which algorithm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "rows"), [("grpo", 256), ("ppo", 256), ("dpo", 64), ("sft", 64), ("distillation", 256)]
)
def test_the_section_of_the_algorithm_says_which_class_reads_the_recipe(algorithm, rows):
    config = load_config(EXEMPLAR_OF[algorithm])
    assert type(config) is RUN_CONFIGS[algorithm]
    assert config.algorithm == algorithm
    assert config.loop is getattr(config, algorithm)
    plan = preflight(config, elsewhere=True)
    assert plan.steps == config.loop.max_num_steps
    assert config.samples_per_step == plan.batch.samples == rows


@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        ({"dpo": {}}, RUN_CONFIGS["dpo"]),
        ({"grpo": None, "sft": {}}, RUN_CONFIGS["sft"]),
        ({}, GRPOMasterConfig),
        ({"policy": {}}, GRPOMasterConfig),
    ],
)
def test_a_section_that_is_null_is_none(tree, kind):
    assert kind_of(tree) is kind


def test_null_drops_a_section_of_the_parent(tmp_path):
    text = (
        f"defaults: {EXEMPLAR_OF['grpo']}\n"
        "grpo: null\nloss_fn: null\nsft:\n  max_num_steps: 5\n"
        "policy: {train_global_batch_size: 64, train_micro_batch_size: 32}\n"
    )
    config = load_config(write(tmp_path, "child.yaml", text))
    assert (config.algorithm, config.sft.max_num_steps) == ("sft", 5)
    # Without it, the keys of GRPO's loss are unknown to that of SFT.
    kept = write(tmp_path, "kept.yaml", text.replace("loss_fn: null\n", ""))
    assert any("loss_fn.ratio_clip_min: unknown-key" in problem for problem in refused(kept))


def test_a_grandchild_may_write_the_section_anew(tmp_path):
    write(tmp_path, "child.yaml", f"defaults: {EXEMPLAR_OF['grpo']}\nlogger: null\n")
    text = "defaults: child.yaml\nlogger: {log_dir: results/grandchild}\n"
    config = load_config(write(tmp_path, "grandchild.yaml", text))
    parents = load_config(EXEMPLAR_OF["grpo"]).logger
    assert config.logger.log_dir == "results/grandchild"
    assert config.logger.num_val_samples_to_print != parents.num_val_samples_to_print, (
        "it starts from the defaults"
    )


@pytest.mark.parametrize("algorithm", RUN_CONFIGS)
def test_the_command_of_another_algorithm_is_refused_by_name(algorithm, capsys):
    other = "sft" if algorithm != "sft" else "grpo"
    assert cli.main([other, "--config", str(EXEMPLAR_OF[algorithm])]) == commands.EXIT_CONFIG_ERROR
    said = capsys.readouterr().err
    assert (
        f"this is a recipe of {algorithm}, and the command is {other}; call nemo-rl-mcore {algorithm}" in said
    )


# --- what each one holds ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "overrides", "needed"),
    [
        ("grpo", [], False),
        ("grpo", ["loss_fn.reference_policy_kl_penalty=0.1"], True),
        ("ppo", [], False),
        ("ppo", ["loss_fn.reference_policy_kl_penalty=0.1"], True),
        ("dpo", [], True),
        ("sft", [], False),
        ("distillation", [], False),
        ("distillation", ["loss_fn={rl_weight: 1.0, rl: {reference_policy_kl_penalty: 0.0}}"], False),
        ("distillation", ["loss_fn={rl_weight: 1.0}"], True),
    ],
)
def test_who_needs_the_reference(algorithm, overrides, needed):
    config = load_config(EXEMPLAR_OF[algorithm], overrides)
    assert config.models["policy"].reference is bool(reference_place(config)) is needed


def test_the_critic_is_the_policy_with_its_own_optimizer():
    config = load_config(EXEMPLAR_OF["ppo"], ["+value.train_micro_batch_size=32", "+value.max_grad_norm=0.5"])
    critic = config.models["value"].policy
    assert critic.model == config.policy.model
    assert (critic.train_micro_batch_size, critic.max_grad_norm) == (32, 0.5)
    assert (critic.megatron_cfg.optimizer.lr, config.policy.megatron_cfg.optimizer.lr) == (2e-3, 5e-4)
    plain = load_config(EXEMPLAR_OF["ppo"])
    assert plain.models["value"].policy.max_grad_norm == plain.policy.max_grad_norm


def test_the_teacher_has_its_own_weights_and_maybe_architecture():
    config = load_config(EXEMPLAR_OF["distillation"])
    teacher = config.teacher.model_copy(update={"init_checkpoint": "there"}).plan(config.policy).policy
    assert teacher.init_checkpoint == "there"
    assert config.policy.init_checkpoint is None
    assert teacher.model == config.policy.model
    larger = config.policy.model.model_copy(update={"num_layers": 4})
    assert config.teacher.model_copy(update={"model": larger}).plan(config.policy).policy.model == larger


# --- what each one refuses ----------------------------------------------------------------------------------


def test_microbatches_of_policy_and_critic_need_not_divide_a_step():
    config = load_config(
        EXEMPLAR_OF["ppo"], ["policy.train_micro_batch_size=48", "+value.train_micro_batch_size=40"]
    )
    assert preflight(config).batch.microbatches_per_optimizer_step == 2  # 64 samples of a rank: 48 and 16


@pytest.mark.parametrize(
    ("keys", "samples"),
    [
        ([], 40),
        (["+sft.val_global_batch_size=7"], 7),
        (["+sft.val_global_batch_size=7", "sft.val_batches=3"], 21),
        (["sft.val_batches=3"], 90),
        (["sft.val_batches=-1", "sft.val_period=0", "sft.val_at_end=false"], None),
    ],
)
def test_a_validation_takes_the_loss_of_its_batches_or_of_all_there_are(keys, samples):
    sizes = ["policy.train_global_batch_size=40", "data.num_digits=3", "sft.max_val_samples=90"]
    config = load_config(EXEMPLAR_OF["sft"], [*sizes, *keys])
    assert config.data.task.validation_prompts == 90
    assert config.val_loss_samples == samples


def test_no_held_out_pairs_are_taken_where_the_policy_makes_them():
    assert load_config(EXEMPLAR_OF["dpo"], ["+dpo.val_batches=-1"]).val_loss_samples == 0  # online


# --- weights that a run begins with ---------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", RUN_CONFIGS)
def test_the_recipe_in_a_checkpoint_begins_with_its_weights(algorithm, tmp_path):
    config = load_config(EXEMPLAR_OF[algorithm])
    write(tmp_path, "config.yaml", recipe_text(config))
    loaded = load_recipe_of(tmp_path)
    assert loaded.policy.init_checkpoint == str(tmp_path)
    assert loaded.policy.model == config.policy.model
