"""A replay of an asynchronous run gives its weights and tokens to the bit; a log that says otherwise is found out."""

import json
import shutil
import subprocess
import sys

import pytest
from grpo_run import RECIPE, Run

STEPS = 8
ASYNC = (
    "policy.generation.colocated.enabled=false",
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.max_trajectory_age_steps=2",
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_type=tis",
    "loss_fn.truncated_importance_sampling_ratio=2.0",
    f"grpo.max_num_steps={STEPS}",
    "grpo.val_at_end=false",
    "cluster.cpu_workers_per_node=1",
)


def replay(folder, *options):
    command = "import sys; from nemo_rl_mcore.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", command, "replay", str(folder), *options],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that was trained with three chunks a step and a checkpoint in the middle."""
    folder = tmp_path_factory.mktemp("run")
    run = Run(
        folder,
        *ASYNC,
        "grpo.async_grpo.min_groups_for_streaming_train=6",
        "grpo.async_grpo.keep_groups=true",
        "checkpointing.enabled=true",
        "checkpointing.save_period=4",
        f"checkpointing.checkpoint_dir={folder}/saved",
    )
    status, output, errors = run.end(within_s=240)
    assert status == 0, output + errors
    assert "engine and training agree on 4 rows x 32 tokens: " in output
    return folder


@pytest.fixture
def without_groups(finished, tmp_path):
    """A copy of the run whose log alone says what was trained on."""
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy, ignore=shutil.ignore_patterns("groups", "saved"))
    return copy


@pytest.mark.exhaustive
def test_every_step_is_equal_drawn_again_from_the_log_alone(without_groups):
    status, lines, errors = replay(without_groups)
    assert status == 0, errors
    assert len(lines) == STEPS
    for step, line in enumerate(lines, 1):
        assert line.startswith(f"step {step}: weights ")
        assert line.endswith(" equal, 16 groups equal")


@pytest.mark.exhaustive
def test_steps_behind_a_checkpoint_are_trained_on_the_groups_that_were_kept(finished, without_groups):
    status, lines, errors = replay(finished, "--steps", f"4:{STEPS}")
    assert status == 0, errors
    assert [line.partition(":")[0] for line in lines] == [f"step {step}" for step in range(5, STEPS + 1)]
    changed(without_groups, begin_the_last_before_the_checkpoint)
    status, lines, errors = replay(without_groups, "--steps", f"4:{STEPS}")
    assert (status, lines) == (1, [])
    assert "before step 4, " in errors


@pytest.mark.exhaustive
def test_episodes_of_several_turns_are_equal_and_no_environment_is_asked(tmp_path):
    recipe = RECIPE.with_name("grpo_guess_number_async_cpu.yaml")
    run = Run(tmp_path, "grpo.max_num_steps=5", "grpo.val_at_end=false", recipe=recipe)
    status, output, errors = run.end(within_s=240)
    assert status == 0, output + errors
    log = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    turns = [event["turns"] for event in map(json.loads, log) if event["kind"] == "committed"]
    assert max(map(len, turns)) > 1  # how many exactly depends on which weights drew them
    status, lines, errors = replay(tmp_path)
    assert (status, len(lines)) == (0, 5), errors
    assert all(" equal, " in line for line in lines)

    def other_observations(events):
        for event in events:
            if event["kind"] == "committed" and event["token"]["position"] < 16:
                for said in event["turns"][0]["replies"]:
                    if "observation" in said:
                        said["observation"] = [["user", "0>"]]

    # It is the log that speaks: with other observations the answers are others, of some samples at least.
    changed(tmp_path, other_observations)
    status, _, errors = replay(tmp_path, "--steps", "0:1")
    assert status == 1
    assert " of the log" in errors


def changed(folder, change):
    log = folder / "rollouts.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    change(events)
    log.write_text("".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events))


def begin_the_last_before_the_checkpoint(events):
    """Say so of the last group: which groups are under way while a checkpoint is written is up to the machine."""
    event = next(e for e in events if e["kind"] == "committed" and e["token"]["position"] == STEPS * 16 - 1)
    event["turns"][0]["segments"][0] = event["segments"][0] = {"first": 0, "version": 2}


def shift_a_segment(events):
    """Say of a group of the second step that its last tokens were drawn one version later, or one token later."""
    event = next(e for e in events if e["kind"] == "committed" and e["token"]["position"] == 20)
    segments = event["turns"][0]["segments"]
    if len(segments) > 1:
        segments[1]["first"] += 1
    else:
        segments.append({"first": 1, "version": segments[0]["version"] + 1})


def other_weights(events):
    next(e for e in events if e["kind"] == "published" and e["version"] == 2)["digest"] = "0" * 16


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shift_a_segment, "groups [20] are not those of the log"),
        (other_weights, "step 2: the weights are "),
    ],
)
def test_a_log_that_says_otherwise_is_found_out(without_groups, change, message):
    changed(without_groups, change)
    status, lines, errors = replay(without_groups, "--steps", "0:2")
    assert (status, len(lines)) == (1, 1), errors
    assert message in errors


def test_what_cannot_be_replayed_says_so_at_once(tmp_path):
    status, _, errors = replay(tmp_path / "nowhere")
    assert status == 2
    assert f"RUN_DIR: {tmp_path / 'nowhere'}" in errors
    status, _, errors = replay(tmp_path, "--steps", "all")
    assert status == 2
    assert "'all' is not A:B" in errors
