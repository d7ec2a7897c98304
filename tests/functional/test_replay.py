"""A replay trains from kept groups to the bit; a log, a group or a log-probability that says otherwise is found out."""

import json
import shutil

import pytest
from commands import run
from grpo_run import RECIPE, Run

from nemo_rl_mcore.driver.rollouts.saved import digest_of_group, load_groups, save_groups, versions_of

STEPS = 8
RECIPE_ASYNC = RECIPE.with_name("grpo_copy_async_cpu.yaml")


def replay(folder, *options):
    status, output, errors = run("replay", folder, *options, folder=folder.parent)
    return status, output.splitlines(), errors


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that was trained with three chunks a step and a checkpoint in the middle."""
    folder = tmp_path_factory.mktemp("run")
    trained = Run(
        folder,
        f"grpo.max_num_steps={STEPS}",
        "grpo.val_at_end=false",
        "grpo.async_grpo.max_trajectory_age_steps=2",
        "grpo.async_grpo.min_groups_for_streaming_train=6",
        "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true",
        "checkpointing.save_period=4",
        recipe=RECIPE_ASYNC,
    )
    output = trained.finish(within_s=240)
    assert "engine and training agree on 4 rows x 32 tokens: " in output
    return folder


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the run, without its checkpoints."""
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy, ignore=shutil.ignore_patterns("checkpoints"))
    return copy


@pytest.mark.exhaustive
def test_every_step_is_equal_and_every_token_as_likely_as_its_weights_say(finished):
    status, lines, errors = replay(finished)
    assert status == 0, errors
    assert len(lines) == STEPS
    for step, line in enumerate(lines, 1):
        assert line.startswith(f"step {step}: weights ")
        assert " equal, 16 groups equal, " in line
        assert " metrics equal, " in line
        assert "not compared" not in line


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("asked", "before", "trained"),
    [(f"4:{STEPS}", 0, [5, 6, 7, 8]), ("1:3", 1, [1, 2, 3]), ("5:6", 1, [5, 6])],
    ids=["from a checkpoint", "from the start", "from an earlier checkpoint"],
)
def test_a_part_of_the_steps(finished, asked, before, trained):
    status, lines, errors = replay(finished, "--steps", asked)
    assert status == 0, errors
    assert [line.partition(":")[0] for line in lines[before:]] == [f"step {step}" for step in trained]


@pytest.mark.exhaustive
def test_episodes_of_several_turns_are_equal_and_no_environment_is_asked(tmp_path):
    recipe = RECIPE.with_name("grpo_guess_number_async_cpu.yaml")
    Run(tmp_path, "grpo.max_num_steps=5", "grpo.val_at_end=false", recipe=recipe).finish(within_s=240)
    status, lines, errors = replay(tmp_path)
    assert (status, len(lines)) == (0, 5), errors
    assert all(" equal, " in line for line in lines)


def changed_log(folder, change):
    log = folder / "groups.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    change(events)
    log.write_text("".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events))


def committed(events, position):
    return next(e for e in events if e["kind"] == "committed" and e["token"]["position"] == position)


def changed_groups(folder, step, change):
    """Write groups of a step again, with sums that are right; and their digests and segments into the log."""
    kept = folder / f"groups/step_{step}"
    groups = load_groups(kept)
    change(groups)
    save_groups(kept, groups)

    def tell(events):
        for position, group in groups.items():
            event = committed(events, position)
            event["digest"] = digest_of_group(group)
            event["segments"] = [vars(segment) for segment in versions_of(group, 0)]

    changed_log(folder, tell)


def another_digest(folder):
    changed_log(folder, lambda events: committed(events, 20).update(digest="0" * 16))


def other_segments(folder):
    changed_log(folder, lambda events: committed(events, 20)["segments"].append({"first": 3, "version": 0}))


def other_weights(folder):
    def change(events):
        next(e for e in events if e["kind"] == "published" and e["version"] == 2)["digest"] = "0" * 16

    changed_log(folder, change)


def another_logprob(folder):
    def change(groups):
        group = groups[20]
        token = int(group["token_mask"][3].argmax())
        group["generation_logprobs"][3, token] -= 0.001

    changed_groups(folder, 2, change)


def another_version(folder):
    """Say of tokens of the start that they were drawn after the first step."""

    def change(groups):
        for group in groups.values():
            group["weight_versions"][group["weight_versions"] == 0] = 1

    changed_groups(folder, 2, change)


def another_metric(folder):
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["train/loss"] += 1e-12
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def gone(folder):
    shutil.rmtree(folder / "groups/step_2")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("change", "told", "steps"),
    [
        (another_digest, ["step 2: groups [20] "], 0),
        (other_segments, ["step 2: groups [20] "], 0),
        (other_weights, ["step 2: "], 1),
        (another_logprob, ["step 2: group 20, row 3, token "], 0),
        (another_version, ["step 2: group ", "version 1 "], 1),
        (another_metric, ["step 2: train/loss "], 1),
        (gone, ["--steps 0:2: ", "2 to 2"], 0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_says_otherwise_is_found_out(copied, change, told, steps):
    change(copied)
    status, lines, errors = replay(copied, "--steps", "0:2")
    assert (status, len(lines)) == (1, steps), errors
    assert all(part in errors for part in told), errors


def test_what_cannot_be_replayed_says_so_at_once(tmp_path):
    status, _, errors = replay(tmp_path / "nowhere")
    assert status == 2
    assert f"RUN_DIR: {tmp_path / 'nowhere'}" in errors
    status, _, errors = replay(tmp_path, "--steps", "all")
    assert status == 2
    assert "'all' is not A:B" in errors
