"""A recipe of NeMo RL is one problem at load; --migrate takes it as it is."""

import json
from pathlib import Path

import pytest
from refusals import assert_holds

from nemo_rl_mcore.cli import main
from nemo_rl_mcore.config import ConfigError
from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.driver.run_folder import recipe_text
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.recipe.of_nemo_rl import foreign_keys, listed_keys
from nemo_rl_mcore.tools.migrate.draft import KEYS
from nemo_rl_mcore.tools.migrate.migrate import load_migrated

FOLDER = Path(__file__).parents[2] / "fixtures/nemo_rl"
THEIRS = FOLDER / "grpo_math_1B_megatron.yaml"
TINY = FOLDER.with_name("over_nemo_rl.yaml")


def problem_of(path: Path, *overrides: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    (problem,) = caught.value.problems
    return problem


@pytest.fixture
def write(tmp_path):
    def written(text: str) -> Path:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return path

    return written


@pytest.mark.parametrize("recipe", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_of_theirs_is_one_problem_with_the_command(recipe):
    problem = problem_of(recipe)
    assert problem.path == str(recipe)
    assert len(problem.related) > 65
    assert f"{len(problem.related)} of its keys" in problem.what
    assert problem.related[0] in problem.what
    assert f"nemo-rl-mcore migrate {recipe}`" in problem.remedy
    assert "--migrate" in problem.remedy


def test_it_is_that_problem_alone_whatever_else_is_wrong(write):
    mine = write(
        f"defaults: {THEIRS}\ngrpo: {{num_prompts_per_step: '${{gone}}'}}\npolicy: {{precission: 3}}"
    )
    assert problem_of(mine, "policy.train_micro_batch_size=none").path == str(mine)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("policy: {dtensor_cfg: {enabled: false}}", ["policy.dtensor_cfg.enabled"]),
        ("async_rl: {sampler: {new_key: 1}}", ["async_rl.sampler.new_key"]),
        ("value: {precision: float32}", ["value.precision"]),
        ("data: {train: [{data_path: a, seed: 3}]}", ["data.train.0.seed"]),
        ("env: {math: {num_workers: 8}}\nppo: {policy_training_start_step: 1}", 2),
    ],
)
def test_a_few_of_their_keys_in_a_recipe_of_ours_are_named_with_their_line(exemplar, write, text, keys):
    mine = write(f"defaults: {exemplar}\n{text}\n")
    problem = problem_of(mine)
    assert [*problem.related] == keys or len(problem.related) == keys
    assert problem.path == problem.related[0]
    assert problem.where == f"{mine}:2"
    assert problem.remedy.startswith("remove ")
    assert f"migrate {mine}" in problem.remedy


def test_values_below_a_free_section_are_not_looked_at():
    assert not [
        *foreign_keys({"env": {"custom": {"kwargs": {"dtensor_cfg": 1}}}, "grpo": {"async_grpo": None}})
    ]


def test_a_section_that_is_null_asks_for_nothing(load):
    assert not load("+grpo.async_grpo=null").asynchronous


def test_migrated_in_memory_is_what_the_written_file_is(tmp_path, capsys):
    ours = tmp_path / "ours.yaml"
    assert main(["migrate", str(THEIRS), "--output", str(ours)]) == 0
    migrated = load_migrated(THEIRS).config
    assert migrated is not None
    prompts, copied = (
        THEIRS.parent / "examples/prompts",
        tmp_path,
    )  # the file names its own copy of a prompt file
    assert json.dumps(migrated.plain()).replace(str(prompts), str(copied)) == json.dumps(
        load_config(ours).plain()
    )


def test_check_prints_what_changed_and_the_plan(capsys):
    assert main(["check", "--migrate", "--config", str(TINY), "grpo.max_num_steps=7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "migrated from NeMo RL: grpo"
    assert any(line.startswith("  policy.generation.backend: 'megatron' -> 'embedded'") for line in lines)
    assert any("policy.megatron_cfg.optimizer.use_precision_aware_optimizer" in line for line in lines)
    assert any(line.split() == ["steps", "7"] for line in lines)
    assert len(lines) < 80  # keys that changed nothing are counted


def test_the_recipe_that_is_left_loads_without_the_option(tmp_path):
    migrated = load_migrated(TINY).config
    assert migrated is not None
    left = tmp_path / "config.yaml"
    left.write_text(recipe_text(migrated))
    assert load_config(left).plain() == migrated.plain()


def test_a_key_of_ours_alone_stands():
    config = load_migrated(TINY, ["data.overlong=error"]).config
    assert config is not None
    assert (config.data.apply_chat_template, config.data.overlong) == (False, "error")


def test_keys_of_ours_alone_are_none_of_theirs():
    assert not {*KEYS["only_ours"]} & {*listed_keys()}


def test_what_does_not_carry_over_ends_the_command_unless_an_override_settles_it(capsys):
    refused = ["policy.draft.enabled=true", "+policy.new_key=1"]
    with pytest.raises(ConfigError) as caught:
        load_migrated(TINY, refused)
    assert {problem.path for problem in caught.value.problems} == {"policy.draft", "policy.new_key"}
    assert all(problem.remedy for problem in caught.value.problems)
    load_migrated(TINY, [*refused, "~policy.new_key", "policy.draft.enabled=false"])


def test_a_problem_of_a_moved_key_is_told_where_it_is_written(write):
    changes = "async_rl: {sampler: {name: in_order, max_lookahead_versions: -1}}"
    with pytest.raises(ConfigError) as caught:
        load_migrated(write(f"defaults: {TINY}\n{changes}\n"))
    at = {problem.path: problem.where for problem in caught.value.problems}
    assert at["async_rl.sampler.max_lookahead_versions"].endswith("mine.yaml:2")


@pytest.mark.parametrize("command", ["check", "grpo", "ppo", "dpo", "sft", "distillation"])
def test_our_own_recipe_is_not_migrated(command, exemplar, capsys):
    assert main([command, "--migrate", "--config", str(exemplar)]) == 2
    assert_holds(capsys.readouterr().err, exemplar, "--migrate")


def test_the_algorithm_is_compared_after_the_migration(capsys):
    assert main(["sft", "--migrate", "--config", str(TINY)]) == 2
    assert_holds(capsys.readouterr().err, TINY, "grpo", "sft")
