"""Where a run begins and what it leaves, over a policy that writes one file."""

import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import yaml
from chat_tokenizer import save_chat_tokenizer
from refusals import assert_holds, refused
from saved_steps import save

from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.driver.algorithms.run_checkpoints import open_checkpoints
from nemo_rl_mcore.errors import ChangedRunError, RunStoppedError
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check import preflight
from nemo_rl_mcore.tools.check.given_weights import load_recipe_of

RECIPE = Path(__file__).parents[4] / "examples/configs/grpo_copy_cpu.yaml"


class FakePolicy:
    def __init__(self):
        self.loaded = []

    def save_checkpoint(self, folder, *, wait=True):
        Path(folder, "weights").write_text("weights")

    def load_checkpoint(self, folder, *, weights_only=False):
        self.loaded.append(folder)


def configure(root, *overrides):
    given = f"checkpointing.checkpoint_dir={root}", "checkpointing.enabled=true", "grpo.max_num_steps=7"
    return load_config(RECIPE, [*given, *overrides])


def opened(root, *overrides, **how):
    said: list[str] = []
    return open_checkpoints(configure(root, *overrides), said.append, **how), said


def run_to(root, *steps, overrides=(), counters=None):
    checkpoints, _ = opened(root, *overrides)
    for step in steps:
        metrics = {"train/reward": step / 10}
        save(checkpoints, step, {"policy": FakePolicy()}, metrics, counters or {"total": step})


def test_without_checkpointing_nothing_is_found_and_nothing_is_written(tmp_path):
    run_to(tmp_path, 2)
    checkpoints, said = opened(tmp_path, "checkpointing.enabled=false")
    policy = FakePolicy()
    assert checkpoints.restore({"policy": policy}) == {}
    assert (checkpoints.resumed_step, checkpoints.due(7), policy.loaded, said) == (None, False, [], [])


def test_checkpoints_are_due_every_period_and_at_the_end(tmp_path):
    checkpoints, _ = opened(tmp_path, "checkpointing.save_period=3")
    assert [step for step in range(1, 8) if checkpoints.due(step)] == [3, 6, 7]


def test_a_run_goes_on_after_the_latest_with_its_counters(tmp_path):
    run_to(tmp_path, 2, 4)
    checkpoints, said = opened(tmp_path)
    policy = FakePolicy()
    assert checkpoints.resumed_step == 4
    assert checkpoints.restore({"policy": policy}) == {"total": 4}
    assert policy.loaded == [str(tmp_path / "step_4" / "policy")]
    assert said == [f"resuming after step 4 from {tmp_path / 'step_4'}"]


def test_never_and_a_folder_set_later_checkpoints_aside(tmp_path):
    run_to(tmp_path, 2, 4)
    checkpoints, said = opened(tmp_path, f"checkpointing.resume={tmp_path / 'step_2'}")
    assert checkpoints.resumed_step == 2
    (told,) = said[1:]
    assert told.startswith(f"set aside: {tmp_path / 'aside_step_4'} (checkpointing.resume=")
    checkpoints, said = opened(tmp_path, "checkpointing.resume=never")
    assert (checkpoints.resumed_step, said) == (
        None,
        [f"set aside: {tmp_path / 'aside_step_2'} (checkpointing.resume=never begins before it)"],
    )


@pytest.mark.parametrize("key", ["checkpointing.resume", "policy.init_checkpoint"])
def test_a_folder_that_is_no_checkpoint_stops_the_run(tmp_path, key):
    with refused("unreadable-file", f"{key}: ", tmp_path, by=RunStoppedError):
        opened(tmp_path, f"++{key}={tmp_path}")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("policy.megatron_cfg.optimizer.lr=0.5", "policy.megatron_cfg.optimizer.lr: 0.5 (was 0.001)"),
        ("cluster.cpu_workers_per_node=1", "cluster.cpu_workers_per_node: 1 (was 2)"),
        ("policy.model.init_method_std=0.3", "policy.model.init_method_std: 0.3 (was 0.05)"),
        ("+policy.model.num_query_groups=4", "policy.model.num_query_groups: 4 (was null)"),
        ("logger.log_dir=elsewhere", ""),
        ("checkpointing.save_period=3", ""),
    ],
)
def test_a_change_that_may_change_results_is_told_in_one_line(tmp_path, override, told):
    run_to(tmp_path, 1)
    _, said = opened(tmp_path, override)
    assert said == [f"resuming after step 1 from {tmp_path / 'step_1'}{told and f', with changes: {told}'}"]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["policy.model.num_layers=3"], "policy.model.num_layers: 3 (was 2)"),
        (["policy.model.tie_word_embeddings=true"], "policy.model.tie_word_embeddings: true (was false)"),
        (["policy.precision=bfloat16"], "policy.precision: bfloat16 (was float32)"),
    ],
)
def test_another_policy_stops_the_run_and_leaves_the_checkpoints(tmp_path, overrides, told):
    run_to(tmp_path, 1)
    with refused("other-run", "checkpointing.resume: ", tmp_path / "step_1", told, by=RunStoppedError):
        opened(tmp_path, *overrides)
    assert opened(tmp_path)[0].resumed_step == 1


PPO = RECIPE.with_name("ppo_cpu.yaml")


@pytest.mark.parametrize("resume", ["auto", "{}/step_1"])
def test_a_checkpoint_of_another_algorithm_stops_the_run(tmp_path, resume):
    """Its weights would fit; its optimizer, schedule and steps are another run's."""
    sft = RECIPE.with_name("sft_cpu.yaml")
    given = [f"checkpointing.checkpoint_dir={tmp_path}", "checkpointing.enabled=true"]
    before = open_checkpoints(load_config(sft, given), lambda line: None)
    save(before, 1, {"policy": FakePolicy()}, {}, {})
    model = ["policy.model.hidden_size=64", f"checkpointing.resume={resume.format(tmp_path)}"]
    keys = "checkpointing.resume: ", "checkpointing.checkpoint_dir", "policy.init_checkpoint"
    with refused("other-run", tmp_path / "step_1", "sft", "ppo", *keys, by=RunStoppedError):
        open_checkpoints(load_config(PPO, [*given, *model]), lambda line: None)
    assert open_checkpoints(load_config(sft, given), lambda line: None).resumed_step == 1


def test_a_teacher_that_is_no_checkpoint_stops_the_run(tmp_path):
    distillation = RECIPE.with_name("distillation_cpu.yaml")
    given = [f"teacher.init_checkpoint={tmp_path}"]
    with refused("unreadable-file", "teacher.init_checkpoint: ", tmp_path, by=RunStoppedError):
        open_checkpoints(load_config(distillation, given), lambda line: None)


def test_a_recipe_that_cannot_be_read_stops_the_run(tmp_path):
    run_to(tmp_path, 1)
    recipe, sums = tmp_path / "step_1/config.yaml", tmp_path / "step_1/SHA256SUMS"
    before = sha256(recipe.read_bytes()).hexdigest()
    recipe.write_bytes(b"\xff" * recipe.stat().st_size)
    sums.write_text(sums.read_text().replace(before, sha256(recipe.read_bytes()).hexdigest()))
    with pytest.raises(RunStoppedError, match=r"config\.yaml"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "counters", [{"total": "1"}, {"total": -1}, {"unknown": 1}, {"last_reason": 5}, {"total": 1.5}]
)
def test_counters_that_are_none_of_a_run_are_not_gone_on_from(tmp_path, counters):
    run_to(tmp_path, 1, counters={"total": 1, "last_reason": "x"})
    checkpoints, _ = opened(tmp_path)
    save(checkpoints, 2, {"policy": FakePolicy()}, {}, counters)
    assert opened(tmp_path, f"checkpointing.checkpoint_dir={tmp_path}")[0].resumed_step == 1
    with refused("broken-counters", "checkpointing.resume: ", "aside_step_2/training_info.json"):
        opened(tmp_path, f"checkpointing.resume={tmp_path}/aside_step_2")


def test_a_checkpoint_holds_the_tokenizer_unless_it_is_the_one_built_in(tmp_path):
    tokenizer = load_tokenizer(save_chat_tokenizer(tmp_path / "tiny"))
    for name in ("char", str(tmp_path / "tiny")):
        config = configure(tmp_path / "run", f"policy.tokenizer.name={name}", "policy.model.vocab_size=128")
        checkpoints = open_checkpoints(config, lambda line: None, tokenizer)
        save(checkpoints, 1 if name == "char" else 2, {"policy": FakePolicy()}, {}, {})
    assert not (tmp_path / "run/step_1/tokenizer").exists()
    assert load_recipe_of(tmp_path / "run/step_1").policy.tokenizer.name == "char"
    shutil.rmtree(tmp_path / "tiny")
    config = load_recipe_of(tmp_path / "run/step_2")
    preflight(config, of_a_run=False)
    own = load_tokenizer(config.policy.tokenizer.name)
    text = "What is 1 + 1?"
    assert own.encode(text) == tokenizer.encode(text)
    other = load_recipe_of(tmp_path / "run/step_2", ["policy.tokenizer.name=char"])
    assert other.policy.tokenizer.name == "char"


def test_the_best_by_the_metric_stay(tmp_path):
    overrides = ("checkpointing.metric_name=train:reward", "checkpointing.keep_top_k=1")
    checkpoints, _ = opened(tmp_path, *overrides)
    for step, reward in ((1, 0.9), (2, 0.5), (3, 0.7)):
        save(checkpoints, step, {"policy": FakePolicy()}, {"train/reward": reward}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_3"]
    assert yaml.safe_load((tmp_path / "step_1/config.yaml").read_text())["checkpointing"]["keep_top_k"] == 1


@pytest.mark.parametrize("resume", ["auto", "{}/step_7"])
@pytest.mark.parametrize("last_step", [7, 5])
def test_a_run_that_is_at_its_last_step_says_so_and_removes_only_what_is_unfinished(
    tmp_path, resume, last_step
):
    run_to(tmp_path, 3, 7, overrides=("grpo.max_num_steps=7",))
    (tmp_path / "tmp_step_8").mkdir()
    keys = (f"grpo.max_num_steps={last_step}", f"checkpointing.resume={resume.format(tmp_path)}")
    checkpoints, said = opened(tmp_path, *keys)
    assert checkpoints.nothing_left
    assert said == [
        f"already finished after step 7, saved in {tmp_path / 'step_7'} (grpo.max_num_steps)",
        f"removed: {tmp_path / 'tmp_step_8'}, which was not finished",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3", "step_7"]


LR = "policy.megatron_cfg.optimizer.lr"


def test_a_finished_run_names_what_has_changed(tmp_path):
    run_to(tmp_path, 7)
    (told,) = opened(tmp_path, f"{LR}=0.5")[1]
    assert_holds(told, tmp_path / "step_7", f"{LR}: 0.5 (was 0.001)")


@pytest.mark.parametrize("last", [3, 7], ids=["unfinished", "finished"])
@pytest.mark.parametrize("resume", ["auto", "must", "never", "{}"])
def test_a_changed_run_goes_on_only_where_that_is_asked_for(tmp_path, last, resume):
    """Where changes are refused, as from Python."""
    run_to(tmp_path, last)
    given = [f"{LR}=0.5", "seed=7", f"checkpointing.resume={resume.format(tmp_path / f'step_{last}')}"]
    if resume == "auto":
        with refused(
            "changed-run", tmp_path / f"step_{last}", f"{LR}: 0.5 (was 0.001)", by=ChangedRunError
        ) as why:
            opened(tmp_path, *given, refuse_changes=True)
        assert set(why.value.keys) == {LR, "seed"}
        assert [one.name for one in tmp_path.iterdir()] == [f"step_{last}"]
        return
    checkpoints, _ = opened(tmp_path, *given, refuse_changes=True)
    assert checkpoints.resumed_step == (None if resume == "never" else last)


@pytest.mark.parametrize(
    "bound", ["grpo.max_num_steps=9", "grpo.max_num_epochs=3", "checkpointing.save_period=2"]
)
def test_bounds_and_what_is_saved_may_change(tmp_path, bound):
    run_to(tmp_path, 3)
    assert opened(tmp_path, bound, refuse_changes=True)[0].resumed_step == 3


def test_a_run_that_must_resume_does_not_begin_anew(tmp_path):
    with refused("nothing-to-resume", "checkpointing.resume: ", tmp_path, by=RunStoppedError):
        opened(tmp_path, "checkpointing.resume=must")
