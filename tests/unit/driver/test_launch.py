"""How a command ends: its status, its one line, and what does not even begin."""

import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from saved_steps import save

from nemo_rl_mcore.config import Role
from nemo_rl_mcore.driver import policy
from nemo_rl_mcore.driver import run as launch
from nemo_rl_mcore.driver.algorithms.run_checkpoints import RunCheckpoints, open_checkpoints
from nemo_rl_mcore.driver.observability import RunRecorder
from nemo_rl_mcore.driver.run_folder import recipe_text
from nemo_rl_mcore.driver.signals import current_stop_signals, deferred_stop_signals, exit_status
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.evaluate import export, generate

RECIPE = "examples/configs/grpo_copy_cpu.yaml"


def raises(error, *notes):
    def run():
        for note in notes:
            error.add_note(note)
        raise error

    return run


@pytest.mark.usefixtures("heard_hangups")
@pytest.mark.parametrize(
    ("number", "status", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 129, "hung up"),
    ],
)
def test_a_signal_has_its_status_and_one_line(capsys, number, status, word):
    def run():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt as stop:
            stop.add_note("step 3 is saved")
            raise

    assert exit_status(run, lambda: "and this was left") == status
    assert capsys.readouterr() == ("", f"{word}; step 3 is saved; and this was left\n")


def test_the_limit_of_time_is_no_failure(capsys):
    def run():
        current_stop_signals().time_is_up = True
        raises(KeyboardInterrupt(), "step 3 is saved")()

    assert exit_status(run) == 0
    assert capsys.readouterr() == (
        "time is up (checkpointing.checkpoint_must_save_by); step 3 is saved\n",
        "",
    )


@pytest.mark.parametrize(
    ("of_time", "status", "how"),
    [(False, 130, "interrupted"), (True, 1, "time is up (checkpointing.checkpoint_must_save_by)")],
)
def test_a_failure_that_had_to_wait_for_a_stop_is_told_whole(capsys, of_time, status, how):
    def run():
        try:
            with deferred_stop_signals():
                if of_time:
                    current_stop_signals().limit_time(0)
                    time.sleep(0.1)
                else:
                    signal.raise_signal(signal.SIGINT)
                raise RunStoppedError("rank 1 died\nand this is why")
        except KeyboardInterrupt as stop:
            stop.add_note("step 3 is saved")
            raise

    assert exit_status(run) == status
    told = f"{how}; step 3 is saved\nthe run stopped: rank 1 died\nand this is why\n"
    assert capsys.readouterr() == ("", told)


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """A recipe whose run is at its last step; no cluster may be started."""
    monkeypatch.delattr("nemo_rl_mcore.driver.actors.cluster.RayCluster")
    section = [f"logger.log_dir={tmp_path}/log", f"checkpointing.checkpoint_dir={tmp_path}/saved"]
    config = load_config(RECIPE, [*section, "checkpointing.enabled=true", "grpo.max_num_steps=2"])
    save(open_checkpoints(config, print), 2, {}, {}, {})
    return config


def test_a_run_that_is_finished_starts_no_ranks_and_reports_nothing(finished, capsys):
    assert launch.run(finished) == 0
    folder = f"{finished.checkpointing.checkpoint_dir}/step_2"
    told = f"already finished after step 2, saved in {folder} (grpo.max_num_steps)\n"
    assert capsys.readouterr() == (told, "")


@pytest.mark.parametrize(
    ("max_num_steps", "bounds"),
    [
        (9, {"grpo.max_num_epochs"}),
        (2, {"grpo.max_num_steps"}),
        (3, {"grpo.max_num_steps", "grpo.max_num_epochs"}),
    ],
)
def test_a_run_that_is_finished_names_what_ended_it(monkeypatch, tmp_path, capsys, max_num_steps, bounds):
    monkeypatch.delattr("nemo_rl_mcore.driver.actors.cluster.RayCluster")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(f'{{"input": "{number}>", "output": "{number}"}}\n' for number in range(100, 148))
    )
    source = f"{{data_path: {rows}, split_validation_size: 0}}"
    sections = [f"logger.log_dir={tmp_path}/log", f"checkpointing.checkpoint_dir={tmp_path}/saved"]
    data = ["~data.num_digits", "data.dataset_name=files", f"+data.train={source}"]
    loop = [f"grpo.max_num_steps={max_num_steps}", "grpo.num_prompts_per_step=16", "grpo.val_period=0"]
    switches = ["checkpointing.enabled=true", "grpo.val_at_end=false"]
    config = load_config(RECIPE, [*sections, *data, *loop, *switches])
    last = min(max_num_steps, 3)
    save(open_checkpoints(config, print), last, {}, {}, {})
    assert launch.run(config) == 0
    told = capsys.readouterr().out
    assert f"step_{last} " in told
    assert {key for key in ("grpo.max_num_epochs", "grpo.max_num_steps") if key in told} == bounds


def test_a_run_that_was_killed_behind_its_last_checkpoint_is_brought_to_its_end(finished, capsys):
    log, saved = Path(finished.logger.log_dir), Path(finished.checkpointing.checkpoint_dir)
    (saved / "tmp_deleted_step_1").mkdir()
    (saved / "tmp_step_3").mkdir()
    log.mkdir()
    (log / "metrics.jsonl").write_text('{"step": 1, "train/reward": 0.5}\n{"step": 2, "train/reward": 0.5}\n')
    assert launch.run(finished) == 0
    assert {path.name for path in saved.iterdir()} == {"step_2", ".lock"}
    assert {path.name for path in log.iterdir()} == {"metrics.jsonl", ".lock"}
    capsys.readouterr()
    assert launch.run(finished) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1, "there is nothing left to do"


def test_what_ends_before_a_step_says_so(finished, monkeypatch, capsys):
    class NoCluster:
        def __init__(self, _config):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("nemo_rl_mcore.driver.actors.cluster.RayCluster", NoCluster, raising=False)
    loop = finished.grpo.model_copy(update={"max_num_steps": 9})
    assert launch.run(finished.model_copy(update={"grpo": loop})) == 143
    folder = f"{finished.checkpointing.checkpoint_dir}/step_2"
    assert capsys.readouterr().err == (
        f"terminated; no step was finished; step 2 is saved in {folder}, and the same command goes on from there\n"
    )


@pytest.mark.parametrize("case", ["written", "not written", "there before"])
def test_an_export_that_is_interrupted_tells_what_is_there(tmp_path, monkeypatch, capsys, case):
    folder = tmp_path if case == "there before" else tmp_path / "hf"

    def write(*_, **_options):
        if case == "written":
            folder.mkdir()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(export, "export", write)
    assert export.run_export(None, str(folder)) == 130
    left = f"the weights are in {folder}" if case == "written" else f"'{folder}' was not written"
    assert capsys.readouterr().err == f"interrupted; {left}\n"


# Which models a run and the commands over a checkpoint start


EXEMPLARS = Path(__file__).parents[3] / "examples/configs"


class Started(ExitStack):
    """A stand-in for `Policy`."""

    def __init__(self, config, cluster, **options):
        super().__init__()
        self.config, self.options = config, options
        built.append(self)

    def loading_s(self):
        return 0.0

    def export_hf(self, *_, **__): ...

    def generate(self, *_, **__):
        raise KeyboardInterrupt  # the model is started, which is all that is asked


built: list[Started] = []


class NoCluster(ExitStack):
    def __init__(self, config):
        super().__init__()
        self.config = config


@pytest.fixture
def started(monkeypatch):
    built.clear()
    for module in (launch, policy):
        monkeypatch.setattr(module, "Policy", Started)
    monkeypatch.setattr("nemo_rl_mcore.driver.actors.cluster.RayCluster", NoCluster)
    for module in (generate, export):
        monkeypatch.setattr(module, "open_place", lambda config: NoCluster(config.cluster))


@pytest.mark.usefixtures("started")
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
        given = NoCluster(config.cluster), RunCheckpoints(), recorder, stack, None, launch.Watch()
        assert [*launch._train(parts, *given)] == []
    options = [one.options for one in built]
    assert [(o["role"], o["trained"], o["init_reference_model"]) for o in options] == models
    assert [o["colocated_with"] for o in options] == [None, *[built[0]] * (len(models) - 1)]
    assert [one.config for one in built] == [plan.policy for plan in config.models.values()]


@pytest.mark.usefixtures("started")
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
