"""What a run has run first: once, again for another seed, and where its weights then are."""

from pathlib import Path

import pytest
from saved_steps import save

from nemo_rl_mcore.driver import run as launch
from nemo_rl_mcore.driver.algorithms.run_start import open_checkpoints
from nemo_rl_mcore.driver.signals import current_stop_signals, stop_signals
from nemo_rl_mcore.recipe.load import load_config

SESSION = object()
RECIPE = Path(__file__).parents[3] / "examples/configs/grpo_reverse_cpu.yaml"


@pytest.fixture
def ran(monkeypatch):
    """The recipes that were run; each leaves the checkpoint of its last step, without weights."""
    configs = []

    def run(parts, cluster):
        assert cluster is SESSION
        configs.append(parts.config)
        current_stop_signals().limit_time(None)  # as a run does at its end
        checkpoints = open_checkpoints(parts.config, notify=lambda line: None)
        save(checkpoints, parts.config.loop.max_num_steps, {}, {}, {})
        return ()

    monkeypatch.setattr(launch, "_run", run)
    return configs


def weights_of(folder, *overrides):
    config = load_config(RECIPE, [f"logger.log_dir={folder}", *overrides])
    return launch._weights_of(config.warm_start, config, "warm_start", SESSION)


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


@pytest.mark.usefixtures("ran")
def test_the_limit_of_time_holds_on_after_the_run_for_the_weights(tmp_path):
    with stop_signals() as signals:
        weights_of(
            tmp_path, "checkpointing.enabled=true", "++checkpointing.checkpoint_must_save_by='00:00:10:00'"
        )
        assert signals._timer.is_alive()
        assert 500 < signals._timer.interval <= 600
        signals.limit_time(None)


def test_the_session_of_a_command_serves_all_its_runs(tmp_path, monkeypatch):
    """What watches and ends ranks knows the processes of the session that it has started, and no others."""
    opened, ran = [], []

    class Session:
        def __init__(self, config, fewer, more_cpus=0.0):
            self.config = config

        def __enter__(self):
            opened.append(self.config)
            return self

        def __exit__(self, *_error):
            pass

        def shared_with(self, config, fewer):
            return Session(config, fewer)

    def train(parts, cluster, checkpoints, *_others):
        ran.append((parts.config.algorithm, cluster.config))
        save(checkpoints, parts.config.loop.max_num_steps, {}, {}, {})
        return ()

    monkeypatch.setattr(launch, "RayCluster", Session)
    monkeypatch.setattr(launch, "_train", train)
    folders = [f"logger.log_dir={tmp_path}", f"checkpointing.checkpoint_dir={tmp_path}/saved"]
    config = load_config(RECIPE, [*folders, "checkpointing.enabled=true"])
    assert launch.run(config) == 0
    assert [name for name, _ in ran] == ["sft", "grpo"]
    assert opened == [config.cluster]
