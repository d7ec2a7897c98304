"""The folders of a run: held by one run at a time, and found wrong before ranks start."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_mcore.config import ConfigError
from nemo_rl_mcore.driver.observability.sinks import JsonlSink, complete_rows
from nemo_rl_mcore.driver.rollouts.events import BEGINNING, EventLog, set_aside_after
from nemo_rl_mcore.driver.run_folder import held_folders, leave_recipe, next_free, replacing, run_folders
from nemo_rl_mcore.errors import FolderError, RunStoppedError
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check import preflight
from nemo_rl_mcore.tools.evaluate.samples import SampleFile, write_json

RECIPE = Path(__file__).parents[3] / "examples/configs/grpo_copy_cpu.yaml"


def config(log_dir, checkpoint_dir, *overrides):
    folders = [f"logger.log_dir={log_dir}", f"checkpointing.checkpoint_dir={checkpoint_dir}"]
    return load_config(RECIPE, [*folders, "checkpointing.enabled=true", *overrides])


def refused(wanted):
    with pytest.raises(RunStoppedError) as caught, run_folders(wanted):
        pass
    return str(caught.value)


HOLDER = """
import subprocess, sys, time
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.driver.run_folder import held_folders, leave_recipe, run_folders
with run_folders(load_config(sys.argv[1], sys.argv[2:])):
    child = subprocess.Popen(["sleep", "60"], close_fds=False)  # as a rank that outlives its driver
    print(child.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A run that holds `log` and `saved`, with a child that lives on; its process and the child's."""
    folders = [f"logger.log_dir={tmp_path}/log", f"checkpointing.checkpoint_dir={tmp_path}/saved"]
    command = [sys.executable, "-c", HOLDER, str(RECIPE), *folders, "checkpointing.enabled=true"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        yield process, child
        process.kill()
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("log", "saved", "key", "taken"),
    [
        ("log", "other", "logger.log_dir", "log"),
        ("other", "saved", "checkpointing.checkpoint_dir", "saved"),
        ("saved", "other", "logger.log_dir", "saved"),
    ],
)
def test_a_second_run_is_told_who_has_the_folder_and_touches_nothing(
    tmp_path, holder, log, saved, key, taken
):
    process, _ = holder
    leftover = tmp_path / "saved" / "tmp_step_3"
    leftover.mkdir()
    before = sorted(tmp_path.glob("log/*")) + sorted(tmp_path.glob("saved/*"))
    text = refused(config(tmp_path / log, tmp_path / saved))
    assert text.startswith(f"{key}: {tmp_path / taken} is in use by another run (host ")
    assert f", pid {process.pid}, since 20" in text
    assert "\n" not in text
    assert sorted(tmp_path.glob("log/*")) + sorted(tmp_path.glob("saved/*")) == before


def test_the_lock_of_a_killed_run_is_free_while_a_child_of_it_lives(tmp_path, holder):
    process, child = holder
    process.kill()
    process.wait()
    os.kill(child, 0)
    with run_folders(config(tmp_path / "log", tmp_path / "saved")):
        assert f"pid {os.getpid()}, " in (tmp_path / "log" / ".lock").read_text()


def test_one_folder_for_both_and_for_a_recipe_that_is_run_first_is_one_lock(tmp_path):
    both = config(tmp_path, tmp_path)
    with run_folders(both), run_folders(both):
        pass
    with run_folders(both):
        pass


def test_a_run_without_checkpoints_needs_one_folder(tmp_path):
    with run_folders(config(tmp_path / "log", tmp_path / "saved", "checkpointing.enabled=false")):
        assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("key", "folder", "why"),
    [
        ("logger.log_dir", "{}/file/log", "Not a directory"),
        ("logger.log_dir", "/proc/nope", "No such file or directory"),
        ("checkpointing.checkpoint_dir", "{}/file", "Not a directory|File exists"),
        ("checkpointing.checkpoint_dir", "/proc/nope", "No such file or directory"),
    ],
)
def test_a_folder_that_takes_nothing_is_found_on_paper_and_again_before_the_ranks(tmp_path, key, folder, why):
    (tmp_path / "file").touch()
    wanted = config(tmp_path / "log", tmp_path / "saved", f"{key}={folder.format(tmp_path)}")
    told = rf"^{key}: .* cannot be written to: .*({why}); name another folder"
    with pytest.raises(ConfigError, match=told):
        preflight(wanted)
    (noted,) = preflight(wanted, elsewhere=True).missing  # the machine of `check` need not be that of the run
    assert re.match(told, str(noted))
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left of the trial"
    assert refused(wanted).startswith(f"{key}: {folder.format(tmp_path)} cannot be written to: ")


SIZES = ("num_layers=2000", "hidden_size=131072", "num_attention_heads=1024", "ffn_hidden_size=524288")
LARGE = [f"policy.model.{size}" for size in SIZES]


def test_a_disk_without_room_for_a_checkpoint_is_found_before_the_ranks(tmp_path):
    wanted = config(tmp_path / "log", tmp_path / "saved", *LARGE)
    told = r"^checkpointing\.checkpoint_dir: '.*' has .* GB free, and a checkpoint takes about .*e\+06 GB; make room"
    with pytest.raises(ConfigError, match=told):
        preflight(wanted)
    with pytest.raises(RunStoppedError, match=told), run_folders(wanted):
        pass
    (noted,) = preflight(wanted, elsewhere=True).missing
    assert "and a checkpoint takes about" in str(noted)
    assert preflight(config(tmp_path / "log", tmp_path / "saved", *LARGE, "checkpointing.enabled=false"))


def test_the_recipe_is_left_in_the_folder_and_another_one_is_put_aside(tmp_path):
    first, second = (config(tmp_path, tmp_path / "saved", f"seed={seed}") for seed in (1, 2))
    leave_recipe(first)
    leave_recipe(first)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    leave_recipe(second)
    seeds = {path.name: load_config(path).seed for path in tmp_path.iterdir()}
    assert seeds == {"config.yaml": 2, "config.1.yaml": 1}
    (tmp_path / "config.yaml").write_bytes(b"\xff: of another program")
    leave_recipe(second)
    assert (tmp_path / "config.2.yaml").read_bytes() == b"\xff: of another program"
    with pytest.raises(FolderError, match=r"logger.log_dir"):
        leave_recipe(config(tmp_path / "gone", tmp_path / "saved"))


# What somebody else has put into a folder of a run is neither followed nor destroyed


@pytest.fixture
def victim(tmp_path):
    """A file that is in no folder of the run; it has to stay as it is."""
    path = tmp_path / "victim"
    path.write_text("theirs, without an end of its line")
    yield path
    assert path.read_text() == "theirs, without an end of its line"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize("make", [Path.symlink_to, Path.hardlink_to, lambda lock, _: os.mkfifo(lock)])
def test_a_lock_that_is_no_file_of_the_folder_is_refused(folder, victim, make):
    make(folder / ".lock", victim)
    with (
        pytest.raises(RunStoppedError, match=r"^logger\.log_dir: "),
        held_folders({"logger.log_dir": folder}),
    ):
        pass


@pytest.mark.parametrize("name", ["page.html", "page.html.tmp"])
def test_a_link_is_replaced_and_not_written_through(name, folder, victim):
    (folder / name).symlink_to(victim)
    with replacing(folder / "page.html") as file:
        file.write(b"ours")
    assert (folder / "page.html").read_text() == "ours"
    assert not (folder / "page.html").is_symlink()


def test_the_old_file_stays_where_the_new_one_fails(folder):
    (folder / "page.html").write_text("old")

    def fail():
        with replacing(folder / "page.html") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [path.name for path in folder.iterdir()] == ["page.html"]
    assert (folder / "page.html").read_text() == "old"


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("metrics.jsonl", lambda folder: complete_rows(folder, [{"step": 1}])),
        ("groups.jsonl", lambda folder: EventLog(folder / "groups.jsonl")),
        ("groups.jsonl", lambda folder: set_aside_after(folder / "groups.jsonl", BEGINNING)),
        ("samples.jsonl", lambda folder: SampleFile(folder / "samples.jsonl", (), ()).go_on()),
        ("samples.jsonl", lambda folder: SampleFile(folder / "samples.jsonl", (), ()).append([])),
    ],
)
def test_a_run_goes_on_with_no_file_of_somebody_else(name, write, folder, victim):
    (folder / name).symlink_to(victim)
    with pytest.raises(OSError, match=name):
        write(folder)


def test_a_pipe_is_not_waited_for(folder):
    os.mkfifo(folder / "metrics.jsonl")
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        JsonlSink(folder)


def test_rows_of_somebody_else_are_put_aside(folder, victim):
    (folder / "metrics.jsonl").symlink_to(victim)
    JsonlSink(folder, resumed_step=1).close()
    assert not (folder / "metrics.jsonl").is_symlink()


def test_rows_are_put_aside_under_names_that_nothing_has(folder, victim):
    (folder / "metrics.1.jsonl").symlink_to(folder / "nowhere")
    (folder / "metrics.jsonl.tmp").symlink_to(victim)
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))
    JsonlSink(folder, resumed_step=1).close()
    assert [json.loads(line) for line in (folder / "metrics.2.jsonl").read_text().splitlines()] == [
        {"step": 2},
        {"step": 3},
    ]
    assert next_free(folder / "metrics.jsonl").name == "metrics.3.jsonl"


def test_results_are_not_written_through_a_link(folder, victim):
    (folder / "results.json.tmp").symlink_to(victim)
    write_json(folder / "results.json", {"a": 1})
    assert json.loads((folder / "results.json").read_text()) == {"a": 1}
