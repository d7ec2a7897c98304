"""Which models a run and the commands over a checkpoint start: over a policy that only notes how it was built."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from nemo_rl_mcore.config import Role
from nemo_rl_mcore.driver import policy
from nemo_rl_mcore.driver import run as launch
from nemo_rl_mcore.driver.algorithms.run_checkpoints import RunCheckpoints
from nemo_rl_mcore.driver.observability import RunRecorder
from nemo_rl_mcore.driver.run_folder import recipe_text
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.evaluate import export, generate

EXEMPLARS = Path(__file__).parents[3] / "examples/configs"


class Started:
    """A stand-in for `Policy`."""

    def __init__(self, config, cluster, **options):
        self.config = config
        self.options = options

    def __enter__(self):
        built.append(self)
        return self

    def __exit__(self, *_):
        pass

    def loading_s(self):
        return 0.0

    def export_hf(self, *_, **__):
        pass

    def generate(self, *_, **__):
        raise KeyboardInterrupt  # the model is started, which is all that is asked


built: list[Started] = []


class NoCluster:
    def __init__(self, config):
        self.config = config

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture(autouse=True)
def started(monkeypatch):
    built.clear()
    for module in (launch, policy):
        monkeypatch.setattr(module, "Policy", Started)
    monkeypatch.setattr(launch, "RayCluster", NoCluster)
    for module in (generate, export):
        monkeypatch.setattr(module, "open_place", lambda config: NoCluster(config.cluster))


@pytest.mark.parametrize(
    ("exemplar", "overrides", "models"),
    [
        ("grpo_copy_cpu", [], [(Role.POLICY, True, False)]),
        ("dpo_cpu", [], [(Role.POLICY, True, True)]),
        ("ppo_cpu", [], [(Role.POLICY, True, False), (Role.VALUE, True, False)]),
        (
            "distillation_cpu",
            ["teacher.init_checkpoint=there"],
            [(Role.POLICY, True, False), (Role.POLICY, False, False)],
        ),
    ],
)
def test_a_run_starts_its_models(exemplar, overrides, models, tmp_path, monkeypatch):
    monkeypatch.setattr(launch.TrainingLoop, "steps", lambda _loop: iter(()))
    quiet = [f"logger.log_dir={tmp_path}", "logger.tensorboard_enabled=false"]
    config = load_config(EXEMPLARS / f"{exemplar}.yaml", [*overrides, *quiet])
    recorder = RunRecorder(config.logger, 1)
    with ExitStack() as stack:
        parts = launch.open_parts(config)
        [
            *launch._train(
                parts, NoCluster(config.cluster), RunCheckpoints(), recorder, stack, None, launch.Watch()
            )
        ]
    options = [one.options for one in built]
    assert [(o["role"], o["trained"], o["init_reference_model"]) for o in options] == models
    assert [o["colocated_with"] for o in options] == [None, *[built[0]] * (len(models) - 1)]
    assert [one.config for one in built] == [plan.policy for plan in config.models.values()]


@pytest.mark.parametrize("command", ["generate", "export"])
def test_the_weights_of_a_checkpoint_are_started_frozen(command, tmp_path, monkeypatch):
    folder = tmp_path / "step_1"
    folder.mkdir()
    config = load_config(EXEMPLARS / "grpo_copy_cpu.yaml", [f"+policy.init_checkpoint={folder}"])
    (folder / "config.yaml").write_text(recipe_text(config))
    for module in (export, generate):
        monkeypatch.setattr(module, "require_whole", lambda *_: None)
    if command == "export":
        export.run_export(config, str(tmp_path / "output"))
    else:
        generate.run_generate(config, generate.Asked(["527>"], greedy=True))
    (model,) = built
    assert model.options["trained"] is False
    assert model.config is config.policy
