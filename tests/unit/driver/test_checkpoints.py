import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_writer import write
from refusals import refused

from nemo_rl_mcore.driver.checkpoints import (
    CheckpointStore,
    NotACheckpointError,
    Retention,
    read_checkpoint,
    require_checkpoint,
)
from nemo_rl_mcore.rank.checkpoints import read_sums, sha256, write_sums

WRITER = Path(__file__).with_name("checkpoint_writer.py")


def names(root):
    return sorted(path.name for path in root.iterdir())


def steps(root):
    return [checkpoint.step for checkpoint in CheckpointStore(root).checkpoints()]


def filled(root, *rewards, retention=None):
    store = CheckpointStore(root, retention or Retention())
    for step, reward in enumerate(rewards, start=1):
        write(store, step, reward)
    return store


def test_a_checkpoint_holds_what_it_says(tmp_path):
    store = filled(tmp_path / "new" / "folder", 0.5, float("nan"))
    first, latest = store.checkpoints()
    assert next(store.newest_first(), None) == latest
    assert (first.step, first.metrics, first.counters) == (1, {"train/reward": 0.5}, {"total": 1})
    assert latest.metrics == {"train/reward": None}, "JSON knows no NaN"
    info = json.loads((latest.folder / "training_info.json").read_text())
    assert info["files"] == {"config.yaml": 8, "policy/weights/0.distcp": 100}
    assert names(store.root) == ["step_1", "step_2"]


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[content.index(at) + len(at) - 1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "training_info.json").unlink(),
        lambda folder: (folder / "training_info.json").write_text('{"step": 2'),
        lambda folder: (folder / "policy/weights/0.distcp").write_bytes(b"short"),
        lambda folder: (folder / "config.yaml").unlink(),
        lambda folder: folder.rename(folder.with_name("step_7")),
        lambda folder: (folder / "config.yaml").write_text("step: 3\n"),
        lambda folder: flip(folder / "training_info.json", b'"total": 2'),
        lambda folder: flip(folder / "SHA256SUMS", b"config"),
        lambda folder: (folder / "SHA256SUMS").unlink(),
    ],
    ids=["no info", "cut info", "short file", "missing file", "other step", "changed file", "flipped counter",
         "flipped name", "no sums"],
)  # fmt: skip
def test_the_latest_is_the_latest_whole_one(tmp_path, damage):
    store = filled(tmp_path, 0.0, 0.0)
    damage(tmp_path / "step_2")
    assert next(store.newest_first()).step == 1
    aside = store.begin_after(1)
    assert len(aside) == 1
    assert names(tmp_path) == [aside[0].name, "step_1"]


def test_what_is_not_committed_leaves_the_others_and_the_next_run_cleans_up(tmp_path):
    store = filled(tmp_path, 0.0)
    (store.begin(2) / "half").write_text("")
    assert steps(tmp_path) == [1]
    assert names(tmp_path) == ["step_1", "tmp_step_2"]
    (tmp_path / "tmp_deleted_step_0").mkdir()
    (tmp_path / "tmp_of_somebody").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert store.begin_after(1) == []
    assert names(tmp_path) == ["notes.txt", "step_1", "tmp_of_somebody"]


def test_later_steps_are_set_aside_under_names_of_their_own(tmp_path):
    store = filled(tmp_path, 0.0, 0.0, 0.0)
    for _ in range(2):
        store.begin_after(1)
        write(store, 2, 0.0)
    store.begin_after(0)
    assert names(tmp_path) == [f"aside_step_{step}" for step in ("1", "2", "2.1", "2.2", "3")]


@pytest.mark.parametrize(
    ("retention", "rewards", "kept"),
    [
        (Retention(), (1, 2, 3), [1, 2, 3]),
        (Retention(keep=2), (1, 2, 3), [2, 3]),
        (Retention(keep=2, metric="train/reward"), (9, 2, 3, 4), [1, 4]),
        (Retention(keep=1, metric="train/reward"), (1, 9, 3, 4), [2, 4]),
        (Retention(keep=1, metric="train/reward", higher_is_better=False), (5, 1, 3, 4), [2, 4]),
        (Retention(keep=1, metric="train/reward"), (1, 5, 5, 4), [3, 4]),
        (Retention(keep=2, metric="train/reward"), (float("nan"), 1, float("inf"), 0), [2, 4]),
        (Retention(keep=2, metric="no such metric"), (4, 3, 2, 1), [3, 4]),
    ],
)  # fmt: skip
def test_the_best_and_the_newest_stay(tmp_path, retention, rewards, kept):
    filled(tmp_path, *rewards, retention=retention)
    assert steps(tmp_path) == kept
    assert names(tmp_path) == [f"step_{step}" for step in kept]


def test_a_folder_that_is_none_is_refused_with_the_way_out(tmp_path):
    filled(tmp_path, 0.0, 0.0)
    assert require_checkpoint(tmp_path / "step_1", "key") == read_checkpoint(tmp_path / "step_1")
    with refused("unreadable-file", "key: ", "step_1, step_2", by=NotACheckpointError):
        require_checkpoint(tmp_path, "key")
    with refused("unreadable-file", "key: ", "step_N", by=NotACheckpointError):
        require_checkpoint(tmp_path / "step_3", "key")


def test_all_is_on_disk_before_the_name_says_so(tmp_path, monkeypatch):
    synced: set[int] = set()
    plain_sync, plain_rename = os.fsync, Path.rename

    def sync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        plain_sync(descriptor)

    def rename(path, target):
        inodes = {part.stat().st_ino for part in (path, *path.rglob("*"))}
        assert len(inodes) == 7
        assert inodes <= synced
        synced.clear()
        return plain_rename(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    filled(tmp_path, 0.0)
    assert synced == {tmp_path.stat().st_ino}, "the new name itself"


def run_writer(root, call):
    return subprocess.run(
        [sys.executable, WRITER, root, str(call)], capture_output=True, text=True, check=False
    )


def before_death(root):
    """What the writer finds: steps 1 and 2, the first the better one, and what an earlier death left."""
    filled(root, 9.0, 2.0)
    (root / "tmp_step_3" / "policy").mkdir(parents=True)
    (root / "tmp_step_3" / "policy" / "half").write_bytes(b"half")


@pytest.mark.exhaustive
def test_a_death_at_any_call_to_the_filesystem_leaves_the_newest_checkpoint_whole(tmp_path):
    before_death(tmp_path / "undisturbed")
    calls = int(run_writer(tmp_path / "undisturbed", 0).stdout)
    assert calls > 25
    assert names(tmp_path / "undisturbed") == ["step_1", "step_4"]
    newest = []
    for call in range(1, calls + 1):
        root = tmp_path / str(call)
        before_death(root)
        assert run_writer(root, call).returncode == 137
        latest = next(CheckpointStore(root).newest_first(), None)
        newest.append(latest.step)
        assert (latest.folder / "policy/weights/0.distcp").read_bytes() == bytes([latest.step]) * 100
        assert 1 in steps(root), "the best one"
        # The next run goes on from there, and in the end nothing but the checkpoints is left.
        CheckpointStore(root).begin_after(latest.step)
        assert not [name for name in names(root) if not name.startswith("step_")]
    assert newest == sorted(newest)
    assert set(newest) == {2, 3, 4}


def test_leftovers_that_are_no_folders_are_removed_and_what_they_point_to_stays(tmp_path):
    store = filled(tmp_path, 0.0)
    (tmp_path / "kept").mkdir()
    (tmp_path / "tmp_step_2").write_text("a file")
    (tmp_path / "tmp_step_3").symlink_to("kept")
    (tmp_path / "tmp_deleted_step_4").symlink_to("gone")
    assert store.begin_after(1) == []
    assert names(tmp_path) == ["kept", "step_1"]


def test_checksums_are_compared_unless_that_is_turned_off(tmp_path):
    filled(tmp_path, 0.0)
    (tmp_path / "step_1" / "config.yaml").write_text("step: 9\n")
    with refused("checksum-differs", "key: ", "config.yaml", by=NotACheckpointError):
        require_checkpoint(tmp_path / "step_1", "key")
    assert require_checkpoint(tmp_path / "step_1", "key", verify_checksums=False).step == 1
    assert [one.step for one in CheckpointStore(tmp_path).checkpoints()] == [1]


def test_a_list_inside_vouches_for_its_own_files(tmp_path):
    store = CheckpointStore(tmp_path)
    policy = store.begin(1) / "policy"
    policy.mkdir()
    (policy / "state.json").write_text("{}")
    write_sums(policy, {"state.json": sha256(policy / "state.json")})
    store.commit(1, {}, {})
    assert sorted(read_sums(tmp_path / "step_1")) == ["policy/SHA256SUMS", "training_info.json"]
    flip(tmp_path / "step_1" / "policy" / "SHA256SUMS", b"state")
    with refused("checksum-differs", "policy/SHA256SUMS", by=NotACheckpointError):
        read_checkpoint(tmp_path / "step_1")
