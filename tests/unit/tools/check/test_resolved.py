"""`check --resolved`: every key, its value, and where it comes from."""

import pytest

from nemo_rl_mcore.cli import main
from nemo_rl_mcore.driver.run_folder import leaves
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check.render import resolved_lines


@pytest.fixture
def resolved(tmp_path, exemplar):
    """The lines of a recipe over others, by key."""

    def lines(text: str, *overrides: str, **parents: str) -> dict[str, str]:
        for name, parent in {**parents, "recipe": text}.items():
            (tmp_path / f"{name}.yaml").write_text(parent.format(exemplar=exemplar))
        recipe = tmp_path / "recipe.yaml"
        found = list(resolved_lines(load_config(recipe, overrides), recipe, overrides))
        return {
            line.partition(": ")[0]: line.partition(": ")[2].replace(f"{tmp_path}/", "") for line in found
        }

    return lines


def test_each_key_has_its_value_and_its_origin(resolved, exemplar):
    lines = resolved("defaults: {exemplar}\nseed: 7\n", "grpo.max_num_steps=3")
    assert lines["seed"] == "7  [recipe.yaml:2]"
    assert lines["grpo.max_num_steps"] == "3  [command line]"
    assert lines["grpo.max_rollout_turns"] == "1  [default]"
    assert lines["policy.precision"].startswith(f"float32  [{exemplar}:")
    assert lines["policy.generation.top_k"].startswith(f"null  [{exemplar}:")
    config = load_config(exemplar).model_dump(mode="json", exclude={"environment_values"})
    assert set(lines) == {path for path, _ in leaves(config)}


def test_what_the_parents_of_a_later_file_took_back_is_marked(resolved, exemplar):
    lines = resolved(
        "defaults: [mine.yaml, other.yaml]\nmax_consecutive_skips: 2\n",
        mine="defaults: {exemplar}\nseed: 7\npolicy: {{call_timeout_s: 9.0}}\nmax_consecutive_skips: 1\n",
        other="defaults: {exemplar}\n",
    )
    assert lines["seed"].startswith(f"42  [{exemplar}:")
    assert lines["seed"].endswith(", in place of 7 of mine.yaml:2]")
    assert lines["policy.call_timeout_s"] == "9.0  [mine.yaml:3]"  # which the other one's parent leaves alone
    assert lines["max_consecutive_skips"] == "2  [recipe.yaml:2]"  # over its own parents, as is meant


def test_values_of_the_environment_stay_references(resolved, monkeypatch):
    monkeypatch.setenv("RUN_TOKEN", "hunter2-hunter2")
    lines = resolved("defaults: {exemplar}\nlogger: {{log_dir: '${{oc.env:RUN_TOKEN}}'}}\n")
    assert "hunter2" not in str(lines)
    assert "oc.env:RUN_TOKEN" in lines["logger.log_dir"]


def test_the_command_prints_them(exemplar, capsys):
    assert main(["check", "--resolved", "--config", str(exemplar), "seed=3"]) == 0
    assert "seed: 3  [command line]\n" in capsys.readouterr().out
