"""What a run has run first: once, again for another seed, and where its weights then are."""

from pathlib import Path

import pytest

from nemo_rl_mcore import launch
from nemo_rl_mcore.algorithms.run_checkpoints import open_checkpoints
from nemo_rl_mcore.config import load_config

RECIPE = Path(__file__).parents[2] / "examples/configs/grpo_reverse_cpu.yaml"


@pytest.fixture
def ran(monkeypatch):
    """The recipes that were run; each leaves the checkpoint of its last step, without weights."""
    configs = []

    def run(parts):
        configs.append(parts.config)
        checkpoints = open_checkpoints(parts.config, say=lambda line: None)
        checkpoints.save(parts.config.loop.max_num_steps, {}, {}, {})

    monkeypatch.setattr(launch, "_run", run)
    return configs


def weights_of(folder, *overrides):
    config = load_config(RECIPE, [f"logger.log_dir={folder}", *overrides])
    return launch._weights_of(config.warm_start, config, "warm_start")


def test_a_recipe_is_run_first_with_the_seed_of_the_run_and_not_twice(ran, tmp_path):
    weights = weights_of(tmp_path, "seed=3")
    assert weights == str(tmp_path / "warm_start/checkpoints/step_80")
    assert weights_of(tmp_path, "seed=3") == weights
    assert [(config.algorithm, config.seed) for config in ran] == [("sft", 3)]


def test_weights_of_another_seed_are_set_aside(ran, tmp_path):
    weights_of(tmp_path, "seed=3")
    weights_of(tmp_path, "seed=4")
    assert [config.seed for config in ran] == [3, 4]
    assert (tmp_path / "warm_start/checkpoints/aside_step_80").is_dir()


def test_another_number_of_steps_of_the_run_itself_changes_nothing(ran, tmp_path):
    weights_of(tmp_path)
    weights_of(tmp_path, "grpo.max_num_steps=7")
    assert len(ran) == 1
